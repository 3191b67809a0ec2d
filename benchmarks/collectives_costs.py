"""What single steps of a program cost: the rates of the clock (`simulate.Rates`), measured one by one.

    torchrun --nproc-per-node=8 benchmarks/collectives_costs.py

Prints, per step, how much longer 28 of them take than 7 (median of each, slowest rank): copies to one peer after the
other by their bytes, on one stream and on two, and round trips of a signal in batches. Eagerly, queued behind a spin,
and as a CUDA graph. If two streams take half as long for small copies, programs of more lanes would be worth having.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from collectives_alone import Bench
from step_rig import start

from counterpoint.collectives.cuda.lower import lower
from counterpoint.collectives.program.calls import Span
from counterpoint.collectives.program.direct import rotation
from counterpoint.collectives.program.operations import all_gather
from counterpoint.collectives.program.steps import (
    COPY,
    REDUCE,
    AwaitEvent,
    Batch,
    Copy,
    Flag,
    Program,
    RecordEvent,
    Signal,
    Step,
    Tuning,
    Wait,
)

COUNTS = (7, 28)
Make: TypeAlias = Callable[[int, int], tuple[Step, ...]]
SIZES = (4 << 10, 128 << 10, 1 << 20)


def copies(rank: int, count: int, *, world_size: int, num_bytes: int, lanes: int) -> tuple[Step, ...]:
    """`count` copies to the other ranks in turn, on one lane or on two that begin and end together."""
    peers, span = rotation(rank, world_size), Span("output", rank * num_bytes, num_bytes)
    steps: list[Step] = [RecordEvent(0, COPY), AwaitEvent(0, REDUCE)] if lanes == 2 else []
    steps += [Copy(peers[index % len(peers)], span, span, index % lanes) for index in range(count)]
    return (*steps, *((RecordEvent(1, REDUCE), AwaitEvent(1, COPY)) if lanes == 2 else ()))


def signals(rank: int, count: int, *, world_size: int) -> tuple[Step, ...]:
    """`count` times: tell the next rank, and wait until the one before has told this one."""
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    tell, hear = Signal(after, Flag("output", "arrived", rank)), Wait(Flag("output", "arrived", before))
    # the answer of the next rank keeps a fast one from telling it twice
    answer, heard = Signal(before, Flag("output", "ready", rank)), Wait(Flag("output", "ready", after))
    return tuple(Batch(operations) for _ in range(count) for operations in ((tell, hear), (answer, heard)))


def cases(world_size: int) -> Iterator[tuple[str, int, Make]]:
    """What it is, how many bytes a block of output needs, and (rank, count) to steps."""
    for num_bytes in SIZES:
        for lanes in (1, 2):
            name = f"copy of {num_bytes >> 10} KiB, {lanes} stream{'s' if lanes == 2 else ''}"
            yield name, num_bytes, partial(copies, world_size=world_size, num_bytes=num_bytes, lanes=lanes)
    yield "signal there and back, 2 batches", 16, partial(signals, world_size=world_size)


def cost_us(bench: Bench, make: Make, num_bytes: int, graph: bool, rounds: int) -> float:
    """µs for each step, on the slowest rank."""
    call, times = all_gather(bench.size, num_bytes), []
    for count in COUNTS:
        steps = make(bench.rank, count)
        # the steps as they are: a cycle would make one batch of neighbours
        program = Program(call=call, tuning=Tuning(), rank=bench.rank, steps=steps)
        launch = bench.rig.launcher(lower(program, bench.rig.addresses(), steps), graph=graph, reduction=None)
        times.append(median(bench.trial(launch)[0] for _ in range(rounds)))
    found: list[Any] = [None] * bench.size
    dist.all_gather_object(found, (times[1] - times[0]) / (COUNTS[1] - COUNTS[0]))
    return float(max(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    start("cuda")
    rank = dist.get_rank()
    with torch.cuda.stream(torch.cuda.Stream()):
        bench = Bench(16 << 20)
        for name, num_bytes, make in cases(bench.size):
            eager, graph = (cost_us(bench, make, num_bytes, graph, options.rounds) for graph in (False, True))
            if rank == 0:
                print(f"{name:36} {eager:8.2f} µs eager {graph:8.2f} µs graph", flush=True)
    torch.cuda.synchronize()
    bench.windows.release()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
