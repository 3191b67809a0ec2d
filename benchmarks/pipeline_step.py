"""One training step of a pipeline (1F1B), its messages by NCCL and by mailboxes, which need no SM on the sender.

    torchrun --nproc-per-node 2 benchmarks/pipeline_step.py --out results/pipeline-step.json
    torchrun --nproc-per-node 2 benchmarks/pipeline_step.py --device cpu --activations 0.02 --hidden 32 --rounds 2

Each rank is a stage of `--layers` matmuls of `--hidden` squared in bfloat16, each followed by a GELU; a microbatch has
as many tokens as an activation of that size holds. Variants have equal weights and are interleaved in rounds of
`--steps` steps; median of a rank, maximum over ranks; the first round is dropped. `times` is NCCL's time over the
variant's. `alone`: a step of this rank's stage without messages or bubbles, all microbatches forward and backward.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from provenance import gpu_provenance, provenance, write_result
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import counterpoint.torch_backend as backend

COLUMNS = ("activation MiB", "variant", "ms", "times", "host ms", "loss")
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
STOCK, OURS, ALONE = "stock", "counterpoint", "alone"
Step = Callable[[], Any]


class Bench:
    """This rank: a stage for each variant, and how to time them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rank, self.size = args, dist.get_rank(), dist.get_world_size()
        on_gpu = args.device == "cuda"
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        self.ours = dist.new_group(backend="counterpoint")
        self.groups: dict[str, Any] = {STOCK: dist.group.WORLD, OURS: self.ours}

    def stage(self) -> nn.Module:
        """This rank's layers, with equal weights in all variants."""
        torch.manual_seed(self.rank)
        layers: list[nn.Module] = []
        for _ in range(self.args.layers):
            layers += [nn.Linear(self.args.hidden, self.args.hidden, bias=False), nn.GELU()]
        return nn.Sequential(*layers).to(self.device, self.dtype)

    def tokens(self, mib: float) -> int:
        """Tokens of a microbatch whose activation has so many MiB."""
        num_bytes = round(mib * (1 << 20))
        return max(1, num_bytes // (int(self.args.hidden) * self.dtype.itemsize))

    def batch(self, tokens: int) -> torch.Tensor:
        """All microbatches, equal on all ranks."""
        numbers = torch.Generator().manual_seed(1)
        made = torch.randn(tokens * self.args.microbatches, self.args.hidden, generator=numbers)
        return made.to(self.device, self.dtype)

    def steps(self, mib: float) -> dict[str, Step]:
        """A training step of each variant; the last rank's returns the loss."""
        batch = self.batch(self.tokens(mib))
        found = {name: self.pipelined(group, batch) for name, group in self.groups.items()}
        alone, parts = self.stage(), batch.detach().chunk(self.args.microbatches)

        def step() -> None:
            for part in parts:
                alone(part).square().mean().backward()
            alone.zero_grad(set_to_none=False)

        return {**found, ALONE: step}

    def pipelined(self, group: Any, batch: torch.Tensor) -> Step:
        """A step of the schedule over this group."""
        model = self.stage()
        stage = PipelineStage(model, self.rank, self.size, self.device, group=group)
        schedule = Schedule1F1B(stage, self.args.microbatches, loss_fn=nn.functional.mse_loss)
        is_last = self.rank == self.size - 1

        def step() -> torch.Tensor | None:
            losses: list[torch.Tensor] = []
            if self.rank == 0:
                schedule.step(batch)
            else:
                schedule.step(target=batch if is_last else None, losses=losses)
            model.zero_grad(set_to_none=False)
            return torch.stack(losses).detach().mean() if losses else None

        return step

    def synchronize(self) -> None:
        """All ranks, GPUs included, at one moment."""
        dist.barrier()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def block(self, step: Step) -> tuple[float, float]:
        """ms of a step within several, and of the host for the first of them."""
        step()
        self.synchronize()
        started = time.perf_counter()
        step()
        host_ms = (time.perf_counter() - started) * 1e3
        for _ in range(self.args.steps - 1):
            step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return (time.perf_counter() - started) * 1e3 / self.args.steps, host_ms

    def timed(self, mib: float) -> list[dict[str, Any]]:
        """A row for each variant."""
        steps = self.steps(mib)
        losses = {name: step() for name, step in steps.items()}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        for index in range(self.args.rounds + 1):
            for name, step in steps.items():
                seen = self.block(step)
                if index:
                    found[name].append(seen)
        mine = {
            name: (*(median(column) for column in zip(*times, strict=True)), _number(losses[name]))
            for name, times in found.items()
        }
        ranks: list[Any] = [None] * self.size
        dist.all_gather_object(ranks, mine)
        times = {name: tuple(max(rank[name][i] for rank in ranks) for i in (0, 1)) for name in mine}
        return [
            {"activation_mib": mib, "variant": name, "ms": ms, "host_ms": host_ms}
            | {"times": times[STOCK][0] / ms if name != ALONE else None, "loss": ranks[-1][name][2]}
            for name, (ms, host_ms) in times.items()
        ]


def _number(loss: Any) -> float | None:
    return None if loss is None else float(loss)


def cells(row: dict[str, Any]) -> list[str]:
    """As printed, in the order of `COLUMNS`."""
    formats = {"activation_mib": "g", "variant": "", "ms": ".2f", "times": ".3f", "host_ms": ".1f", "loss": ".6f"}
    return ["" if row.get(name) is None else format(row[name], how) for name, how in formats.items()]


def show(table: list[list[str]]) -> None:
    """Print a table in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)), flush=True)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--activations", type=float, nargs="*", default=[4.0, 16.0, 64.0, 128.0], help="MiB")
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=4, help="of a stage")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="of a round")
    parser.add_argument("--out", type=Path, help="where to keep the result")
    return parser.parse_args()


def main() -> None:
    """Measure, print and keep."""
    args = parsed()
    os.environ.update(NO_MULTICAST)
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    bench = Bench(args)
    rows: list[dict[str, Any]] = []
    for mib in args.activations:
        new = bench.timed(mib)
        rows += new
        if bench.rank == 0:
            show([list(COLUMNS), *map(cells, new)])
    said = str(backend.report(bench.ours)).splitlines()
    if bench.rank == 0:
        print("\n".join(said), flush=True)
        if args.out is not None:
            write(args.out, rows, said, bench)
    bench.synchronize()
    dist.destroy_process_group()


def write(path: Path, rows: list[dict[str, Any]], said: list[str], bench: Bench) -> None:
    """JSON with where it came from, and the table beside it."""
    packages, world_size = ["torch", "triton", "cuda-bindings", "nvidia-nccl-cu13"], dist.get_world_size()
    on_gpus = bench.device.type == "cuda"
    facts = gpu_provenance(packages, world_size=world_size) if on_gpus else provenance(packages)
    facts |= {"torch": torch.__version__, "world_size": world_size, "environment": NO_MULTICAST}
    options = {name: value for name, value in vars(bench.args).items() if name != "out"}
    record = {"provenance": facts, "options": options, "rows": rows, "report": said}
    write_result(path, record, COLUMNS, [cells(row) for row in rows])


if __name__ == "__main__":
    main()
