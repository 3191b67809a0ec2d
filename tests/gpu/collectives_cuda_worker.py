"""One rank of test_collectives_cuda.py: runs every scenario on real GPUs and writes down what came out.

Started by path with RANK, WORLD_SIZE and an argument: a folder for the rendezvous and the answers.
"""

import os
import random
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from collectives_rig import MAX_SKEW, Rig

from counterpoint.collectives.cpu.call import reference
from counterpoint.collectives.host.group import torch_function
from counterpoint.collectives.program import operations
from counterpoint.collectives.program.calls import Call
from counterpoint.collectives.program.reductions import Reduction
from counterpoint.collectives.program.steps import Tuning

LARGEST = 256 << 20  # bytes of output and of staging
BUDGET_S = float(os.environ.get("COUNTERPOINT_RANDOM_S", "15"))  # for the random calls
DTYPES = ("bfloat16", "float16", "float32", "float64", "int32", "uint8", "int64")


class World:
    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", torch.cuda.current_device())
        group = dist.group.WORLD
        self.rig = Rig(group, self.device.index, output_bytes=LARGEST, staging_bytes=LARGEST)

    def data(self, seed: int, rank: int, num_bytes: int, dtype: str) -> torch.Tensor:
        """What `rank` gives in the case `seed`, as a tensor of `dtype`: the same wherever it is made."""
        generator = torch.Generator(device=self.device).manual_seed(1000 * seed + rank)
        kind: torch.dtype = getattr(torch, dtype)
        numel = num_bytes // kind.itemsize
        if kind.is_floating_point:
            return torch.randn(numel, device=self.device, generator=generator).to(kind)
        return torch.randint(0, 100, (numel,), device=self.device, generator=generator).to(kind)

    def place(self, data: torch.Tensor, skew: int) -> torch.Tensor:
        room = torch.empty(data.nbytes + MAX_SKEW, dtype=torch.uint8, device=self.device)
        room[skew : skew + data.nbytes] = data.view(torch.uint8)
        return room[skew : skew + data.nbytes]

    def run(
        self, call: Call, dtype: str, seed: int, *, tuning: Tuning, graph: bool = False, skew: int = 0, op: Any = "sum",
        sms: int | None = None, times: int = 1, delay: int = 0,
    ) -> str:  # fmt: skip
        """Do `call` `times` times back to back; `equal`, or what is wrong with the output."""
        size, inputs = getattr(torch, dtype).itemsize, call.input_bytes(self.rank)
        mine = self.data(seed, self.rank, inputs, dtype)
        out = self.rig.out(call.output_bytes(self.rank), skew=skew * size)
        own = call.source_span(self.rank, self.rank)
        source = self.place(mine, skew * size)
        out.zero_()
        if own.buffer == "output" and (call.operation != "broadcast" or self.rank == call.root):
            start = 0 if call.operation in ("all_reduce", "broadcast") else own.offset
            out[start : start + source.numel()] = source
        lowered = self.rig.lowered(call, tuning, input=source, skew=skew * size)
        how = Reduction(op=op, dtype=dtype, num_sms=sms, factor=0.3 if op == "premul_sum" else 1.0)
        launch = self.rig.launcher(lowered, graph=graph, reduction=how if call.reduces else None)
        if delay:
            torch.cuda._sleep(delay)
        for _ in range(1 if call.operation == "all_reduce" and call.own == "in_place" else times):
            launch()
        torch.cuda.current_stream().synchronize()
        wanted = self.wanted(call, dtype, seed, how)
        return "equal" if torch.equal(out, wanted) else _difference(out, wanted)

    def wanted(self, call: Call, dtype: str, seed: int, how: Reduction) -> torch.Tensor:
        """The output of this rank, as bytes, from the inputs alone."""
        rows = [self.data(seed, rank, call.input_bytes(rank), dtype) for rank in range(self.size)]
        if call.reduces:
            whole: torch.Tensor = reference(rows, how).view(torch.uint8)
            low = 0 if call.operation == "all_reduce" else sum(call.sizes[self.rank][: self.rank])
            return whole[low : low + call.output_bytes(self.rank)]
        parts = []
        for rank, row in enumerate(rows):
            from_start = call.operation in ("all_gather", "gather", "broadcast")
            low = 0 if from_start else sum(call.sizes[rank][: self.rank])
            parts.append(row.view(torch.uint8)[low : low + call.sizes[rank][self.rank]])
        return torch.cat(parts)


def _difference(out: torch.Tensor, wanted: torch.Tensor) -> str:
    different = (out != wanted).nonzero()
    first = int(different[0])
    pair = f"{int(out[first])}, not {int(wanted[first])}"
    return f"{len(different)} of {len(wanted)} bytes differ, the first at {first}: {pair}"


def some_calls(world: int, unit: int) -> dict[str, Call]:
    """Every operation, with `unit` bytes to a shard."""
    uneven = [[unit * ((s + 2 * t) % 3) for t in range(world)] for s in range(world)]
    return {
        "all_gather": operations.all_gather(world, unit),
        "all_gather, uneven, out of place": operations.all_gather(
            world, [unit * (r % 3) for r in range(world)], own="copy"
        ),
        "all_to_all": operations.all_to_all([[unit] * world] * world),
        "all_to_all, uneven": operations.all_to_all(uneven),
        "broadcast": operations.broadcast(world, unit, root=world - 1),
        "scatter": operations.scatter(world, unit, root=0),
        "gather": operations.gather(world, unit, root=world - 1),
        "reduce_scatter": operations.reduce_scatter(world, unit),
        "all_reduce": operations.all_reduce(world, unit * world, own="copy"),
        "all_reduce, in place": operations.all_reduce(world, unit * world),
        "barrier": operations.barrier(world),
    }


def every_operation(world: World) -> dict[str, str]:
    """Each operation, eagerly and as a graph, plain, in chunks, and in chunks that are pushed in turns."""
    tunings = {
        "whole": Tuning(),
        "chunks": Tuning(chunk_bytes=1 << 16),
        "turns": Tuning(chunk_bytes=1 << 16, turn_bytes=1),
    }
    found = {}
    for graph in (False, True):
        for how, tuning in tunings.items():
            for index, (name, call) in enumerate(some_calls(world.size, 200_000 * 4).items()):
                label = f"{name}, {'graph' if graph else 'eager'}, {how}"
                found[label] = world.run(call, "bfloat16", index, tuning=tuning, graph=graph, times=3)
    return found


def every_reduction(world: World) -> dict[str, str]:
    """Ops and dtypes on the whole GPU and on 8 SMs: the bits of plain torch, which knows no order but the ranks'."""
    found = {}
    for index, (op, dtype) in enumerate(
        [*(("sum", dtype) for dtype in DTYPES), *((op, "bfloat16") for op in ("avg", "max", "min", "premul_sum"))]
    ):
        for sms in (None, 8):
            call = operations.reduce_scatter(world.size, 3_000_016)
            found[f"{op} of {dtype}, {sms or 'all'} SMs"] = world.run(
                call, dtype, 500 + index, tuning=Tuning(chunk_bytes=1 << 20), op=op, sms=sms
            )
    return found


def all_of(mine: bool, device: torch.device) -> bool:
    """Whether it is so on every rank: all of them stop at the same call."""
    flag = torch.tensor([int(mine)], device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def random_calls(world: World) -> dict[str, str]:
    """Any operation, size, dtype, alignment, stream, delay, graph or not, until the time is up."""
    dice, found, count, deadline = random.Random(7), "equal", 0, time.monotonic() + BUDGET_S
    while all_of(found == "equal" and time.monotonic() < deadline, world.device):
        dtype = dice.choice(DTYPES)
        size = getattr(torch, dtype).itemsize
        unit = size * dice.choice([0, 1, 3, 17, 1000, 4099, 100_003, (1 << dice.randrange(10, 20)) + 1])
        name, call = dice.choice(list(some_calls(world.size, unit).items()))
        if call.reduces and dtype not in ("bfloat16", "float32"):
            continue  # another dtype is another kernel to compile: every_reduction has them all
        count += 1
        chunk = dice.choice([None, None, 16 * max(1, unit // 64)])
        skew, graph, late = dice.randrange(16), dice.random() < 0.3, dice.randrange(world.size)
        tuning, times = Tuning(chunk_bytes=chunk), dice.randrange(1, 4)
        how: dict[str, Any] = {"graph": graph, "skew": skew, "times": times}
        how["delay"] = 2_000_000 if late == world.rank else 0
        with torch.cuda.stream(torch.cuda.Stream() if dice.random() < 0.5 else torch.cuda.current_stream()):
            torch.cuda.synchronize()
            found = world.run(call, dtype, count, tuning=tuning, **how)
        if found != "equal":
            found = f"call {count}: {name} of {unit} bytes of {dtype}, chunk {chunk}, {how}: {found}"
    return {"random": found, "random count": str(count)}


def like_nccl(world: World) -> dict[str, str]:
    """Movement gives NCCL's bits; a bfloat16 sum is nearer to float64 than NCCL's."""
    found, unit = {}, 4 << 20
    call = operations.all_gather(world.size, unit)
    found["all_gather"] = world.run(call, "bfloat16", 900, tuning=Tuning())
    mine = world.data(900, world.rank, unit, "bfloat16")
    theirs = torch.empty(mine.numel() * world.size, dtype=mine.dtype, device=world.device)
    torch_function("all_gather")(theirs, mine)
    same = torch.equal(theirs.view(torch.uint8), world.rig.out(unit * world.size))
    found["all_gather like NCCL"] = "equal" if same else "not NCCL's bits"
    call = operations.reduce_scatter(world.size, unit)
    rows = [world.data(901, rank, unit * world.size, "bfloat16").double() for rank in range(world.size)]
    exact = torch.stack(rows).sum(0).chunk(world.size)[world.rank]
    found["reduce_scatter"] = world.run(call, "bfloat16", 901, tuning=Tuning())
    ours = world.rig.out(unit).view(torch.bfloat16).double()
    theirs = torch.empty(unit // 2, dtype=torch.bfloat16, device=world.device)
    torch_function("reduce_scatter")(theirs, world.data(901, world.rank, unit * world.size, "bfloat16"))
    errors = [float((value.double() - exact).norm() / exact.norm()) for value in (ours, theirs)]
    found["reduce_scatter error"] = "smaller" if errors[0] <= errors[1] else "larger"
    return found | {"reduce_scatter errors, ours and NCCL's": f"{errors[0]:.2e} {errors[1]:.2e}"}


def beside_a_gemm(world: World) -> dict[str, str]:
    """The claim: a GEMM that came first holds every SM, and the all_gather still ends before it does."""
    x, w = (torch.randn(8192, 8192, device=world.device, dtype=torch.bfloat16) for _ in range(2))
    y, unit, found = torch.empty_like(x), (96 << 20) // world.size, {}
    comm, compute = torch.cuda.Stream(), torch.cuda.Stream()
    for name, graph in (("eager", False), ("graph", True)):
        with torch.cuda.stream(comm):
            lowered = world.rig.lowered(operations.all_gather(world.size, unit), Tuning())
            launch = world.rig.launcher(lowered, graph=graph, reduction=None)
        margins = []
        for _ in range(6):
            torch.cuda.synchronize()
            dist.barrier(device_ids=[world.device.index])
            torch.cuda.synchronize()
            first, ends = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begins = torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(compute):
                torch.cuda._sleep(400_000)  # everything is queued before the GEMM begins
                begins.record()
                torch.mm(x, w, out=y)
                first.record()
            comm.wait_event(begins)
            with torch.cuda.stream(comm):
                launch()
                ends.record()
            torch.cuda.synchronize()
            margins.append(ends.elapsed_time(first))
        found[f"beside a GEMM, {name}"] = "before" if sorted(margins)[2] > 0 else "after"
        found[f"beside a GEMM, {name}, ms before its end"] = f"{sorted(margins)[3]:.2f}"
    return found


def no_kernel(world: World) -> dict[str, str]:
    """What the profiler saw of an all_gather in place: copies between GPUs and nothing else."""
    from torch.profiler import ProfilerActivity, profile

    lowered = world.rig.lowered(operations.all_gather(world.size, 1 << 20), Tuning())
    launch = world.rig.launcher(lowered, graph=False, reduction=None)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        launch()
        torch.cuda.synchronize()
    names = {event.name.partition("(")[0].strip() for event in seen.events() if event.device_type.name == "CUDA"}
    return {"seen": ", ".join(sorted(names)) or "nothing"}


def captured_by_the_caller(world: World) -> dict[str, str]:
    """Inside the caller's graph, between kernels that make the input and read the output; replayed three times."""
    unit, out = 1 << 20, world.rig.out((1 << 20) * world.size)
    total = torch.zeros((), dtype=torch.int64, device=world.device)
    lowered = world.rig.lowered(operations.all_gather(world.size, unit), Tuning())
    mine, graph = out[world.rank * unit : (world.rank + 1) * unit], torch.cuda.CUDAGraph()
    mine.fill_(world.rank)
    torch.cuda.synchronize()
    dist.barrier(device_ids=[world.device.index])
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        mine.add_(1)
        world.rig.bound(lowered, torch.cuda.current_stream().cuda_stream)()
        total += out.sum()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    wanted = sum((rank + step) * unit for rank in range(world.size) for step in (1, 2, 3))
    return {"captured": "equal" if int(total) == wanted else f"{int(total)} instead of {wanted}"}


SCENARIOS: tuple[Callable[[World], dict[str, str]], ...] = (
    every_operation, every_reduction, like_nccl, captured_by_the_caller, beside_a_gemm, no_kernel,
    random_calls,
)  # fmt: skip


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=40), device_id=device,
    )  # fmt: skip
    world = World()
    mine: dict[str, dict[str, str]] = {}
    for scenario in SCENARIOS:
        started = time.monotonic()
        mine[scenario.__name__] = scenario(world)
        if rank == 0:
            print(f"{scenario.__name__}: {time.monotonic() - started:.1f} s", flush=True)
    (folder / f"found{rank}.json").write_bytes(msgspec.json.encode(mine))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
