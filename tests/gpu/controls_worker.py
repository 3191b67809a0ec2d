"""One rank of test_controls.py: runs a GEMM and a collective under every control and writes down what really ran.

Started by path with RANK, WORLD_SIZE and the arguments: a folder for the rendezvous, the file for rank 0's answer.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from counterpoint.collectives.host.group import torch_function
from counterpoint.controls import gemm_sms
from counterpoint.controls.control import Control, Lanes
from counterpoint.controls.nccl import NcclWindows
from counterpoint.controls.observe import see, verified
from counterpoint.controls.parse import parse_mechanism
from counterpoint.errors import CounterpointError, NoEffect
from counterpoint.records.measurement import Observation

SIZE = 8192  # of the square GEMM
SHARD = 64 << 20  # bf16 elements of one rank: 128 MiB


def quietly(launch: Callable[[], object]) -> Callable[[], None]:
    def launched() -> None:
        launch()

    return launched


class Rig:
    def __init__(self, rank: int) -> None:
        self.rank, self.device = rank, torch.device("cuda", rank)
        self.x, self.w, self.y = (torch.randn(SIZE, SIZE, device=self.device, dtype=torch.bfloat16) for _ in range(3))
        self.bias = self.x[0].clone()
        self.small = torch.randn(2048, 2048, device=self.device)
        self.leaf = self.x[:4096].clone().requires_grad_()
        self.fp8 = (self.x.to(torch.float8_e4m3fn), self.w.t().contiguous().t().to(torch.float8_e4m3fn))
        self.one = torch.ones((), device=self.device)
        self.plain = self.buffers(None, dist.group.WORLD)
        self.computes: dict[str, Callable[[], object]] = {
            "mm": lambda: torch.mm(self.x, self.w, out=self.y),
            "linear with bias": lambda: torch.nn.functional.linear(self.x, self.w, self.bias),
            "fp8 mm": lambda: torch._scaled_mm(*self.fp8, scale_a=self.one, scale_b=self.one, out_dtype=torch.bfloat16),
            "backward": lambda: torch.autograd.grad((self.leaf @ self.w).sum(), self.leaf),
            "fp32 mm": lambda: torch.mm(self.small, self.small),
        }

    def buffers(self, windows: NcclWindows | None, group: object, only_send: bool = False) -> list[torch.Tensor]:
        """Send and receive buffers, registered with `group` if `windows` is given."""
        sizes, result = (SHARD, 2 * SHARD), []
        for index, numel in enumerate(sizes):
            if windows is None or (only_send and index == 1):
                result.append(torch.empty(numel, dtype=torch.bfloat16, device=self.device))
            else:
                result.append(windows.empty(numel, dtype=torch.bfloat16, device=self.device, group=group))
        result[0].fill_(self.rank + 1)
        return result

    def lanes(self, compute: str, collective: str, group: object, buffers: list[torch.Tensor]) -> Lanes:
        send, recv = buffers
        comms: dict[str, Callable[[], object]] = {
            "all_gather": lambda: torch_function("all_gather")(recv, send, group=group),
            "all_to_all": lambda: dist.all_to_all_single(recv[:SHARD], send, group=group),
        }
        return Lanes(
            compute_stream=torch.cuda.Stream(self.device),
            comm_stream=torch.cuda.Stream(self.device),
            compute=quietly(self.computes[compute]),
            comm=quietly(comms[collective]),
        )

    def watch(
        self,
        mechanism: str,
        *,
        compute: str = "mm",
        collective: str = "all_gather",
        apply: bool = True,
        only_send: bool = False,
        instead: Callable[[Lanes], object] | None = None,
    ) -> Observation:
        """The pair under `mechanism` and without it. `apply=False`, `only_send` and `instead` are sabotage."""
        _, controls = parse_mechanism(mechanism)
        for control in controls:
            reason = control.available()
            if reason is not None:
                raise RuntimeError(f"{control.name}: {reason}")
        windows = next((control for control in controls if isinstance(control, NcclWindows)), None)
        group = self.group(controls)
        buffers = self.buffers(windows, group, only_send)
        without = self.lanes(compute, collective, dist.group.WORLD, self.plain)
        with ExitStack() as stack:
            lanes = self.lanes(compute, collective, group, buffers)
            for control in controls if apply else ():
                lanes = stack.enter_context(control.apply(lanes))
            if instead is not None:
                lanes = stack.enter_context(instead(lanes))  # type: ignore[arg-type]
            buffers[1].zero_()
            seen = see(lanes, without=without, device=self.device, clusters="cga_cluster" in mechanism)
            if collective == "all_gather":
                wanted = torch.tensor([1.0, 2.0], device=self.device, dtype=torch.bfloat16)
                if not torch.equal(buffers[1][::SHARD].float(), wanted.float()):
                    raise RuntimeError(f"{mechanism}: wrong data {buffers[1][::SHARD]}")
        if windows is not None:
            windows.release()
        return seen

    def prove(self, mechanism: str, compute: str) -> str:
        """What the one call says that applies controls and looks: "applied", or the text of NoEffect."""
        _, controls = parse_mechanism(mechanism)
        lanes = self.lanes(compute, "all_gather", dist.group.WORLD, self.plain)
        try:
            with verified(controls, lanes, device=self.device, group=dist.group.WORLD):
                return "applied"
        except NoEffect as error:
            return str(error)

    def group(self, controls: tuple[Control, ...]) -> object:
        options = dist.ProcessGroupNCCL.Options()
        for control in controls:
            control.configure(options)
        return dist.new_group(backend="nccl", pg_options=options)


@contextmanager
def carveout_only(lanes: Lanes) -> Iterator[Lanes]:
    """The knob that plain torch.mm does not listen to on torch 2.11."""
    with gemm_sms._carveout(108):
        yield lanes


@contextmanager
def handle_only(lanes: Lanes) -> Iterator[Lanes]:
    """The knob that cuBLASLt does not listen to."""
    with gemm_sms._handle_target(torch.cuda.current_blas_handle(), 108):
        yield lanes


SCENARIOS: dict[str, Callable[[Rig], Observation]] = {
    "priority=high": lambda rig: rig.watch("nccl+priority=high"),
    "priority=low": lambda rig: rig.watch("nccl+priority=low"),
    "priority=-2": lambda rig: rig.watch("nccl+priority=-2"),
    "priority=high, not applied": lambda rig: rig.watch("nccl+priority=high", apply=False),
    "max_ctas=4": lambda rig: rig.watch("nccl+max_ctas=4"),
    "min_ctas=32": lambda rig: rig.watch("nccl+min_ctas=32"),
    "max_ctas=6, all_to_all": lambda rig: rig.watch("nccl+max_ctas=6", collective="all_to_all"),
    "max_ctas=64": lambda rig: rig.watch("nccl+max_ctas=64"),
    "cga_cluster=2": lambda rig: rig.watch("nccl+cga_cluster=2"),
    "cga_cluster=0": lambda rig: rig.watch("nccl+cga_cluster=0"),
    "cga_cluster=2, max_ctas=3": lambda rig: rig.watch("nccl+max_ctas=3+cga_cluster=2"),
    "cta_policy=zero+windows": lambda rig: rig.watch("nccl+cta_policy=zero+windows"),
    "cta_policy=zero+windows, all_to_all": lambda rig: rig.watch(
        "nccl+cta_policy=zero+windows", collective="all_to_all"
    ),
    "cta_policy=zero, no windows": lambda rig: rig.watch("nccl+cta_policy=zero"),
    "cta_policy=zero, one window": lambda rig: rig.watch("nccl+cta_policy=zero+windows", only_send=True),
    "cta_policy=efficiency": lambda rig: rig.watch("nccl+cta_policy=efficiency"),
    "windows": lambda rig: rig.watch("nccl+windows"),
    "windows, one window": lambda rig: rig.watch("nccl+windows", only_send=True),
    "gemm_sms=108": lambda rig: rig.watch("nccl+gemm_sms=108"),
    "gemm_sms=108, linear with bias": lambda rig: rig.watch("nccl+gemm_sms=108", compute="linear with bias"),
    "gemm_sms=108, backward": lambda rig: rig.watch("nccl+gemm_sms=108", compute="backward"),
    "gemm_sms=108, fp8 mm": lambda rig: rig.watch("nccl+gemm_sms=108", compute="fp8 mm"),
    "gemm_sms=108, fp32 mm": lambda rig: rig.watch("nccl+gemm_sms=108", compute="fp32 mm"),
    "gemm_sms=108, mm by the carve-out only": lambda rig: rig.watch("nccl", instead=carveout_only),
    "gemm_sms=108, linear by the handle only": lambda rig: rig.watch(
        "nccl", compute="linear with bias", instead=handle_only
    ),
    "gemm_sms=108, backward by the handle only": lambda rig: rig.watch("nccl", compute="backward", instead=handle_only),
    "gemm_sms=108, after": lambda rig: rig.watch("nccl"),
    "green=108": lambda rig: rig.watch("nccl+green=108"),
    "green=112": lambda rig: rig.watch("nccl+green=112"),
    "green=108+gemm_sms=108": lambda rig: rig.watch("nccl+green=108+gemm_sms=108"),
    "green=108+priority=high": lambda rig: rig.watch("nccl+green=108+priority=high"),
    "green=108, not applied": lambda rig: rig.watch("nccl+green=108", apply=False),
    **{f"order=comm_resident, {number}": lambda rig: rig.watch("nccl+order=comm_resident") for number in range(1, 6)},
    "order=comm_resident, not applied": lambda rig: rig.watch("nccl+order=comm_resident", apply=False),
}


PROOFS = (("nccl+gemm_sms=108", "mm"), ("nccl+gemm_sms=108", "fp32 mm"))


def main(folder: Path, answer: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=40), device_id=torch.device("cuda", rank),
    )  # fmt: skip
    rig = Rig(rank)
    seen: dict[str, Observation] = {}
    failed: dict[str, str] = {}
    for name, scenario in SCENARIOS.items():
        try:
            seen[name] = scenario(rig)
        except (RuntimeError, CounterpointError) as error:  # the others may still work
            failed[name] = f"{type(error).__name__}: {error}"
        dist.barrier(device_ids=[rank])
    said = {compute: rig.prove(mechanism, compute) for mechanism, compute in PROOFS}
    if rank == 0:
        answer.write_bytes(msgspec.json.encode({"seen": seen, "failed": failed, "said": said}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
