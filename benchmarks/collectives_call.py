"""Host time of a call of the communicator on real GPUs, that comes again and is replayed, beside NCCL in the same run.

    torchrun --nproc-per-node=4 benchmarks/collectives_call.py --json results/collectives-call-4xh200.json

Batches of calls after a barrier, the GPU idle, far fewer than any queue holds: what is measured is what the caller's
thread needs until it may go on. All ways are interleaved in rounds; median per rank, slowest rank. The driver's part
alone (two event records and one graph launch) stands beside it: the rest is Python. `collectives_host.py` measures that
part without a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import step_rig
import torch
import torch.distributed as dist
from provenance import gpu_provenance, write_table

from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.host.group import torch_function
from counterpoint.collectives.options import CommunicatorOptions

Action: TypeAlias = Callable[[], object]
CALLS = 40  # of a batch: the GPU is behind after the first, and a rank may be 64 calls ahead of another
LOOK_S = 0.12  # until the watch has seen what has ended, and its events are used again
COLUMNS = ("call", "way", "host µs", "lowest", "highest")


def waited(start: Callable[[], Any]) -> Action:
    """Starts the call with `async_op` and lets the current stream wait for it."""
    return lambda: start().wait()


class Tensors:
    """Of all calls, `numel` elements a rank: `own` ones in symmetric memory, the others in torch's."""

    def __init__(self, communicator: Communicator, numel: int) -> None:
        n, device = communicator.world_size, communicator.device
        self.rank, self.dtype = communicator.rank, torch.bfloat16
        self.own = communicator.empty(n, numel, dtype=self.dtype).zero_()
        self.own_too = communicator.empty(n, numel, dtype=self.dtype).zero_()
        self.plain, self.plain_too = (torch.zeros(n, numel, dtype=self.dtype, device=device) for _ in range(2))
        self.shard = torch.zeros(numel, dtype=self.dtype, device=device)
        self.own_shard, self.plain_shard = self.own[self.rank], self.plain[self.rank]


def ours(comm: Communicator, on: Tensors) -> Iterator[tuple[str, str, Action]]:
    """(call, way, what makes it once)."""
    rank, gather = on.rank, comm.all_gather
    yield "all_gather", "ours", lambda: gather(on.own, on.own_shard)
    yield "all_gather", "ours, view made anew", lambda: gather(on.own, on.own[rank])
    yield "all_gather", "the view alone", lambda: on.own[rank]
    yield "all_gather", "ours, async, wait", waited(lambda: gather(on.own, on.own_shard, async_op=True))
    scatter = comm.reduce_scatter
    yield "reduce_scatter", "ours", lambda: scatter(on.shard, on.plain)
    yield "reduce_scatter", "ours, async, wait", waited(lambda: scatter(on.shard, on.plain, async_op=True))
    yield "all_reduce", "ours", lambda: comm.all_reduce(on.own)
    yield "all_reduce", "ours, async, wait", waited(lambda: comm.all_reduce(on.own, async_op=True))
    exchange = comm.all_to_all
    yield "all_to_all", "ours", lambda: exchange(on.own, on.own_too)
    yield "all_to_all", "ours, async, wait", waited(lambda: exchange(on.own, on.own_too, async_op=True))
    yield "broadcast", "ours", lambda: comm.broadcast(on.own)
    yield "broadcast", "ours, async, wait", waited(lambda: comm.broadcast(on.own, async_op=True))


def eager(comm: Communicator, on: Tensors) -> Iterator[tuple[str, str, Action]]:
    """Of a communicator without graphs: every driver call is issued each time."""
    for call, way, action in ours(comm, on):
        if way == "ours":
            yield call, "ours, not replayed", action


def nccls(on: Tensors) -> Iterator[tuple[str, str, Action]]:
    """The same by torch.distributed."""
    plain, plain_too, shard = on.plain.view(-1), on.plain_too.view(-1), on.plain_shard
    gather, scatter = torch_function("all_gather"), torch_function("reduce_scatter")
    started: dict[str, Callable[[bool], Any]] = {
        "all_gather": lambda later: gather(plain, shard, async_op=later),
        "reduce_scatter": lambda later: scatter(on.shard, plain, async_op=later),
        "all_reduce": lambda later: dist.all_reduce(plain, async_op=later),
        "all_to_all": lambda later: dist.all_to_all_single(plain, plain_too, async_op=later),
        "broadcast": lambda later: dist.broadcast(plain, 0, async_op=later),
    }
    for call, start in started.items():
        yield call, "nccl", lambda start=start: start(False)  # type: ignore[misc]
        yield call, "nccl, async, wait", waited(lambda start=start: start(True))  # type: ignore[misc]


def drivers(comm: Communicator) -> Iterator[tuple[str, str, Action]]:
    """What the driver alone needs of one all_gather that is replayed: its first known call is the one."""
    transport: Any = comm._transport
    cache = transport.channels[0]._cache
    prepared = next(each for each in cache._kept.values() if each.program.call.operation == "all_gather")
    driver, handle = (
        transport.context.gpu.driver,
        transport.context.events.handle(transport.context.gpu.current_stream()),
    )
    event = transport.context.events.record(transport.context.gpu.current_stream()).event
    launch, record = prepared._graph.launch, driver.cuEventRecord
    yield "driver", "event record", lambda: record(event, handle)
    yield "driver", "stream in a capture?", lambda: driver.cuStreamIsCapturing(handle)
    yield "driver", "graph launch, all_gather", lambda: launch(handle)


def batch_us(action: Action) -> float:
    """Host µs of one call."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(CALLS):
        action()
    took_us = (time.perf_counter() - started) / CALLS * 1e6
    torch.cuda.synchronize()
    return took_us


def measured(comm: Communicator, ways: list[tuple[str, str, Action]], rounds: int) -> list[tuple[str, ...]]:
    """Rows of the table; the first two rounds make graphs and events, and are not counted."""
    times: list[list[float]] = [[] for _ in ways]
    for index in range(rounds + 2):
        for found, (_, _, action) in zip(times, ways, strict=True):
            took_us = batch_us(action)
            time.sleep(LOOK_S)
            if index >= 2:
                found.append(took_us)
        comm.check()
    mine = [(median(found), min(found), max(found)) for found in times]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    slowest = [max((rank[number] for rank in ranks), key=lambda found: found[0]) for number in range(len(ways))]
    return [(call, way, *(f"{us:.1f}" for us in found)) for (call, way, _), found in zip(ways, slowest, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to keep the result")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--numel", type=int, default=1 << 15, help="bfloat16 elements a rank")
    options = parser.parse_args()
    step_rig.start("cuda")
    rank = dist.get_rank()
    with (
        Communicator() as comm,
        Communicator(options=CommunicatorOptions(graphs=False)) as other,
        torch.cuda.stream(torch.cuda.Stream()),
    ):
        on = Tensors(comm, options.numel)
        ways = [*ours(comm, on), *eager(other, Tensors(other, options.numel)), *nccls(on)]
        for _ in range(3):
            comm.all_gather(on.own, on.own_shard)  # of which `drivers` takes the graph
        rows = measured(comm, ways, options.rounds)
        rows += measured(comm, list(drivers(comm)), options.rounds)
        torch.cuda.synchronize()
    if rank == 0:
        for row in rows:
            print(f"{row[0]:16} {row[1]:26} {row[2]:>7} µs ({row[3]} to {row[4]})", flush=True)
    if rank == 0 and options.json is not None:
        facts = gpu_provenance(
            ["torch", "triton", "cuda-bindings", "nvidia-nccl-cu13"], world_size=dist.get_world_size()
        )
        write_table(options.json, COLUMNS, rows, provenance=facts)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
