"""Zero-SM collectives alone: time, bus bandwidth and host time by size, beside NCCL and NCCL zero-CTA in the same run.

    torchrun --nproc-per-node=8 benchmarks/collectives_alone.py --json results/collectives-alone.json

Every trial is queued behind a spin that begins after a tiny all_reduce: neither the host's launch time nor a late rank
is measured. Mechanisms are interleaved in rounds; median per rank, maximum over ranks. Also the reduction kernel alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from collectives_rig import Rig
from provenance import gpu_provenance, write_table
from step_rig import start

from counterpoint.collectives.cuda.lower import ReduceLaunch
from counterpoint.collectives.cuda.sum_launch import bind
from counterpoint.collectives.host.group import torch_function
from counterpoint.collectives.program import operations
from counterpoint.collectives.program.calls import Call
from counterpoint.collectives.program.reductions import Reduction
from counterpoint.collectives.program.steps import Tuning
from counterpoint.collectives.program.tuning import best_tuning, candidates, with_link_turns
from counterpoint.controls.nccl import NcclWindows
from counterpoint.controls.parse import parse_mechanism

SIZES = tuple(1 << power for power in (16, 20, 22, 24, 25, 26, 27, 28, 30))  # bytes of the full array
OPERATIONS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
SPIN_CYCLES = 500_000  # longer than the host needs to queue a trial
SUM = Reduction(op="sum", dtype="bfloat16")
FEW_SMS = 32  # enough for sums to keep up with the links, and they leave memory to the copies
COLUMNS = ("operation", "size", "mechanism", "time µs", "bus GB/s", "host µs")
Launch = Callable[[], object]


class Bench:
    """This rank with every buffer at its largest."""

    def __init__(self, largest: int, *, every_tuning: bool = False) -> None:
        self.every_tuning = every_tuning
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", self.rank)
        self.rig = Rig(dist.group.WORLD, self.rank, output_bytes=largest, staging_bytes=largest)
        self.send, self.recv = (
            self._random(torch.empty(largest // 2, dtype=torch.bfloat16, device=self.device)) for _ in range(2)
        )
        self._random(self.rig.out(largest).view(torch.bfloat16))
        options = dist.ProcessGroupNCCL.Options()
        self.windows = NcclWindows()
        for control in parse_mechanism("nccl+cta_policy=zero+windows")[1]:
            control.configure(options)
        self.zero = dist.new_group(backend="nccl", pg_options=options)
        self.zero_send, self.zero_recv = (
            self._random(self.windows.empty(largest // 2, dtype=torch.bfloat16, device=self.device, group=self.zero))
            for _ in range(2)
        )
        self.one = torch.ones(1, device=self.device)

    @staticmethod
    def _random(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.normal_()

    def align(self) -> None:
        """All ranks at one moment, and long enough that the host is ahead."""
        dist.all_reduce(self.one)
        torch.cuda._sleep(SPIN_CYCLES)

    def trial(self, launch: Launch) -> tuple[float, float]:
        """µs on the GPU and on the host."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.align()
        begin.record()
        started = time.perf_counter()
        launch()
        host_us = (time.perf_counter() - started) * 1e6
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3, host_us

    def mechanisms(self, operation: str, num_bytes: int) -> Iterator[tuple[str, Launch]]:
        """Everything that can do `operation`."""
        yield "nccl", self.nccl(operation, num_bytes, None, self.send, self.recv)
        if operation in ("all_gather", "all_to_all"):
            yield "nccl zero-CTA", self.nccl(operation, num_bytes, self.zero, self.zero_send, self.zero_recv)
        call = self.call(operation, num_bytes)
        for name, tuning, graph in self.tunings(call):
            lowered = self.rig.lowered(call, tuning, input=self.send)
            yield name, self.rig.launcher(lowered, graph=graph, reduction=SUM if call.reduces else None)
            if self.every_tuning and call.reduces and tuning.last_bytes is not None:
                few = replace(SUM, num_sms=FEW_SMS)
                yield f"{name}, {FEW_SMS} SMs", self.rig.launcher(lowered, graph=graph, reduction=few)

    def call(self, operation: str, num_bytes: int) -> Call:
        shard = num_bytes // self.size
        match operation:
            case "all_gather":
                return operations.all_gather(self.size, shard)
            case "all_to_all":
                return operations.all_to_all([[shard] * self.size] * self.size, own="consumer")
            case "reduce_scatter":
                return operations.reduce_scatter(self.size, shard)
        return operations.all_reduce(self.size, num_bytes)

    def tunings(self, call: Call) -> Iterator[tuple[str, Tuning, bool]]:
        """How to do it: eagerly, as a graph, with one arrival for all; reductions in 1, 4 and 8 chunks;
        and what the clock takes for the best."""
        yield "own, graph, best by the clock", best_tuning(call), True
        yield "own, eager", Tuning(), False
        yield "own, graph", Tuning(), True
        if not call.reduces:
            yield "own, graph, one arrival", Tuning(arrivals="together"), True
            return
        if self.every_tuning:
            for tuning in candidates(call):
                yield f"own, graph, {_cut(call, tuning)}", tuning, True
                yield f"own, graph, {_cut(call, tuning)}, turns", with_link_turns(tuning), True
        for chunks in (4, 8):
            chunk_bytes = max(call.sizes[0]) // chunks // 16 * 16
            if chunk_bytes >= 1 << 18:
                yield f"own, graph, {chunks} chunks", Tuning(chunk_bytes=chunk_bytes), True

    def nccl(self, operation: str, num_bytes: int, group: Any, send: torch.Tensor, recv: torch.Tensor) -> Launch:
        """The same by NCCL, in place where it can be."""
        whole, shard = num_bytes // 2, num_bytes // 2 // self.size
        match operation:
            case "all_gather":
                mine = recv[self.rank * shard :][:shard] if group is None else send[:shard]
                return partial(torch_function("all_gather"), recv[:whole], mine, group=group)
            case "all_to_all":
                return lambda: dist.all_to_all_single(recv[:whole], send[:whole], group=group)
            case "reduce_scatter":
                return partial(torch_function("reduce_scatter"), recv[:shard], send[:whole], group=group)
        return lambda: dist.all_reduce(recv[:whole], group=group)


def _cut(call: Call, tuning: Tuning) -> str:
    """How a shard is cut: so many chunks, and a last one of a part of it."""
    shard, last = max(call.sizes[0]), tuning.last_bytes
    if last is None:
        return "whole"
    return f"{-(-(shard - last) // (tuning.chunk_bytes or shard))} + 1/{round(shard / last)}"


def measured(bench: Bench, operation: str, num_bytes: int, rounds: int) -> list[tuple[str, float, float, float]]:
    """(mechanism, µs, bus GB/s, host µs) of all that can do it; the first two rounds are not counted."""
    launches = dict(bench.mechanisms(operation, num_bytes))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in launches}
    for index in range(rounds + 2):
        for name, launch in launches.items():
            found = bench.trial(launch)
            if index >= 2:
                times[name].append(found)
    mine = {name: [median(column) for column in zip(*found, strict=True)] for name, found in times.items()}
    ranks: list[Any] = [None] * bench.size
    dist.all_gather_object(ranks, mine)
    factor = (2 if operation == "all_reduce" else 1) * (bench.size - 1) / bench.size
    rows = []
    for name in launches:
        time_us, host_us = (max(rank[name][part] for rank in ranks) for part in range(2))
        rows.append((name, time_us, factor * num_bytes / time_us / 1e3, host_us))
    return rows


def reduction_alone(bench: Bench, num_bytes: int, rounds: int) -> list[tuple[str, float, float, float]]:
    """The kernel on one shard from every rank, by how many SMs: µs and GB/s of device memory, read and written."""
    shard, rows = num_bytes // bench.size, []
    base = bench.send.data_ptr()
    sources = tuple(base + index * shard for index in range(bench.size))
    for sms in (None, 8, 16, 32):
        how = Reduction(op="sum", dtype="bfloat16", num_sms=sms)
        call = ReduceLaunch(sources, bench.recv.data_ptr(), shard, 0)
        stream = torch.cuda.current_stream().cuda_stream
        launch = bind(call, how, stream=stream, device_sms=bench.rig.sms)
        found = [bench.trial(launch) for _ in range(rounds + 2)][2:]
        time_us, host_us = (median(column) for column in zip(*found, strict=True))
        rows.append((f"{sms or 'all'} SMs", time_us, (bench.size + 1) * shard / time_us / 1e3, host_us))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to keep the result")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes of the full array")
    parser.add_argument("--operations", nargs="*", default=list(OPERATIONS))
    parser.add_argument("--sizes", nargs="*", type=int, default=list(SIZES), help="bytes of the full array")
    parser.add_argument("--every-tuning", action="store_true", help="of reductions all that the clock chooses from")
    options = parser.parse_args()
    start("cuda")
    rank = dist.get_rank()
    rows: list[tuple[str, ...]] = []
    with torch.cuda.stream(torch.cuda.Stream()):
        bench = Bench(options.largest, every_tuning=options.every_tuning)
        for operation in options.operations:
            for num_bytes in (size for size in options.sizes if size <= options.largest):
                for name, *numbers in measured(bench, operation, num_bytes, options.rounds):
                    rows.append(show(rank, operation, num_bytes, name, numbers))
        for name, *numbers in reduction_alone(bench, options.largest, options.rounds):
            rows.append(show(rank, "reduction kernel (memory GB/s)", options.largest, name, numbers))
    if rank == 0 and options.json is not None:
        facts = gpu_provenance(["torch", "triton", "cuda-bindings", "nvidia-nccl-cu13"], world_size=bench.size)
        write_table(options.json, COLUMNS, rows, provenance=facts)
    torch.cuda.synchronize()
    bench.windows.release()
    dist.destroy_process_group()


def show(rank: int, operation: str, num_bytes: int, name: str, numbers: list[float]) -> tuple[str, ...]:
    """One row, printed by rank 0 as soon as it is there."""
    size = f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"
    row = (operation, size, name, *(f"{number:.1f}" for number in numbers))
    if rank == 0:
        print(f"{row[0]:32} {row[1]:>9} {row[2]:28} {row[3]:>9} {row[4]:>8} {row[5]:>8}", flush=True)
    return row


if __name__ == "__main__":
    main()
