"""Occupancy shaping beside NCCL: time hidden and total time against the shared memory per block of the compute kernel.

The sensitivity study for the method of arXiv 2606.09200. A plain bf16 GEMM (one block per 64 x 64 tile, not persistent)
runs beside an all-reduce or an all-to-all, with each number of its blocks per SM, with and without priority for the
collective, in two orders. `--workload` takes other kernels, shaped by interposing their launches.

    torchrun --nproc-per-node 4 benchmarks/occupancy_study.py --out results/occupancy-study.json
    torchrun --nproc-per-node 4 benchmarks/occupancy_study.py --out ... --quick --nccl-threads 256  # these three add
    torchrun --nproc-per-node 4 benchmarks/occupancy_study.py --out ... --workload others
    torchrun --nproc-per-node 4 benchmarks/occupancy_study.py --out ... --workload evidence

Every trial is queued behind a spin kernel, the ranks are aligned by a tiny all-reduce right before it, and all trials
of one pair are interleaved in rounds. Times are medians per rank, maximum over ranks; the first rounds are dropped.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from occupancy_workloads import Workload, collective, cublas_fp64, elementwise, gemm
from provenance import gpu_provenance, read_result, write_result
from step_rig import NO_MULTICAST

from counterpoint.controls.observe import observe
from counterpoint.controls.occupancy import OccupancyShaping
from counterpoint.records.measurement import Observation

SPIN_CYCLES = 2_500_000  # about 1.3 ms: longer than the host needs to queue one trial
SPIN_CYCLES_INTERPOSED = 10_000_000  # and to subscribe to CUPTI
HEAD_START_US = 100.0
DROPPED = 2


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One way to run a pair. `blocks_per_sm` None: the kernel as it is. `order` None: one side alone."""

    side: str  # compute | comm | both
    blocks_per_sm: int | None = None
    priority: bool = False
    order: str | None = None


class Delay:
    """Holds a stream for about 100 µs without an SM: a copy to pinned host memory."""

    def __init__(self) -> None:
        source = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
        target = torch.empty(8 << 20, dtype=torch.uint8, pin_memory=True)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        target.copy_(source, non_blocking=True)
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        torch.cuda.synchronize()
        length = min(8 << 20, int((8 << 20) * HEAD_START_US / (begin.elapsed_time(end) * 1e3)))
        self.source, self.target = source[:length], target[:length]

    def __call__(self) -> None:
        self.target.copy_(self.source, non_blocking=True)


class Bench:
    """Streams and the way to run one trial."""

    def __init__(self) -> None:
        self.compute = torch.cuda.Stream()
        self.comm = {False: torch.cuda.Stream(), True: torch.cuda.Stream(priority=-1)}
        self.delay, self.flag = Delay(), torch.ones(1, device="cuda")

    def run(self, trial: Trial, work: Workload, comm: Callable[[], object]) -> tuple[float, float, float, float]:
        """(total, compute, comm, head start) of one trial in µs; 0 for a side that did not run."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        torch.cuda._sleep(SPIN_CYCLES_INTERPOSED if work.interpose else SPIN_CYCLES)
        dist.all_reduce(self.flag, op=dist.ReduceOp.MAX)
        ready = torch.cuda.Event()
        ready.record()
        sides = []
        if trial.side != "comm":
            shaping = shaping_of(work, trial.blocks_per_sm)
            sides.append((self.compute, work.queue, events[:2], shaping.launches() if shaping else nullcontext()))
        if trial.side != "compute":
            sides.append((self.comm[trial.priority], comm, events[2:], nullcontext()))
        for stream, launch, (begin, end), context in sides:
            with torch.cuda.stream(stream), context:
                stream.wait_event(ready)
                if stream is not self.compute and trial.order == "compute_first":
                    self.delay()
                begin.record()
                launch()
                end.record()
        torch.cuda.synchronize()
        return spans(events, trial)


def spans(events: list[Any], trial: Trial) -> tuple[float, float, float, float]:
    compute = 0.0 if trial.side == "comm" else events[0].elapsed_time(events[1]) * 1e3
    comm = 0.0 if trial.side == "compute" else events[2].elapsed_time(events[3]) * 1e3
    head = events[0].elapsed_time(events[2]) * 1e3 if trial.side == "both" else 0.0
    begin, end = min(0.0, head), max(compute, head + comm) if trial.side == "both" else compute + comm
    return end - begin, compute, comm, head


def shaping_of(work: Workload, blocks_per_sm: int | None) -> OccupancyShaping | None:
    if blocks_per_sm is None:
        return None
    return OccupancyShaping(blocks_per_sm=blocks_per_sm, kernels=work.kernels, interpose=work.interpose)


def shapes(work: Workload) -> dict[int | None, tuple[int, int]]:
    """(blocks per SM, bytes per block) for every setting that changes something, and for the kernel as it is (None)."""
    found: dict[int | None, tuple[int, int]] = {}
    for wanted in work.settings:
        shaping = shaping_of(work, wanted)
        assert shaping is not None
        with shaping.launches() as shaper:
            work.queue()
        torch.cuda.synchronize()
        (one,) = shaper.shapes
        found[None] = (one.blocks_before, one.kernel.footprint.smem_bytes)
        if one.refused is None:
            found[wanted] = (one.blocks_after, one.dynamic_smem_bytes + one.kernel.static_smem_bytes)
        elif dist.get_rank() == 0:
            print(f"{work.name}, {wanted} blocks per SM: {one.kernel.name}: {one.refused}", flush=True)
    return found


def trials(settings: list[int | None]) -> Iterator[Trial]:
    yield from (Trial(side="comm", priority=priority) for priority in (False, True))
    for setting in settings:
        yield Trial(side="compute", blocks_per_sm=setting)
        for priority in (False, True):
            for order in ("together", "compute_first"):
                yield Trial(side="both", blocks_per_sm=setting, priority=priority, order=order)


def measure(bench: Bench, work: Workload, name: str, mebibytes: int, rounds: int) -> list[dict[str, Any]]:
    """All trials of one pair in interleaved rounds; one row for every trial of both sides. All ranks call it."""
    comm, restore = collective(name, mebibytes)
    known = shapes(work)
    plan = list(trials(sorted(known, key=lambda each: -known[each][0])))
    times: dict[Trial, list[tuple[float, ...]]] = {trial: [] for trial in plan}
    for index in range(rounds + DROPPED):
        for trial in plan:
            restore()
            found = bench.run(trial, work, comm)
            if index >= DROPPED:
                times[trial].append(found)
    mine = {trial: tuple(median(each) for each in zip(*found, strict=True)) for trial, found in times.items()}
    spread = {trial: sorted(each[0] for each in found) for trial, found in times.items()}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (mine, spread))
    slowest = {trial: tuple(max(each[0][trial][part] for each in ranks) for part in range(4)) for trial in plan}
    alone = {side: min(slowest[t][0] for t in plan if t.side == side and t.blocks_per_sm is None) for side in SIDES}
    return [
        row(trial, slowest, alone, work, known)
        | {"collective": name, "mebibytes": mebibytes, "p10_us": ends[0], "p90_us": ends[1]}
        for trial in plan
        if trial.side == "both"
        for ends in [extremes([each[1][trial] for each in ranks])]
    ]


SIDES = ("compute", "comm")


def extremes(per_rank: list[list[float]]) -> tuple[float, float]:
    """10th and 90th percentile of the rank with the largest median."""
    worst = max(per_rank, key=median)
    return round(worst[len(worst) // 10], 1), round(worst[-1 - len(worst) // 10], 1)


def row(
    trial: Trial,
    slowest: dict[Trial, tuple[float, ...]],
    alone: dict[str, float],
    work: Workload,
    known: dict[int | None, tuple[int, int]],
) -> dict[str, Any]:
    """The metrics of one trial; the head start counts for the side that waits (DESIGN: Metrics)."""
    total, compute, comm, head = slowest[trial]
    head = head if trial.order == "compute_first" else 0.0
    stock = slowest[replace(trial, blocks_per_sm=None, priority=False)][0]
    shaped_alone = slowest[Trial(side="compute", blocks_per_sm=trial.blocks_per_sm)][0]
    blocks, smem = known[trial.blocks_per_sm]
    return asdict(trial) | {
        "workload": work.name,
        "blocks": blocks,
        "smem_bytes": smem,
        "compute_alone_us": round(alone["compute"], 1),
        "compute_alone_shaped_us": round(shaped_alone, 1),
        "comm_alone_us": round(alone["comm"], 1),
        "total_us": round(total, 1),
        "compute_us": round(compute, 1),
        "comm_us": round(comm, 1),
        "head_start_us": round(head, 1),
        "hidden": round((sum(alone.values()) + head - total) / min(alone["compute"], alone["comm"] + head), 3),
        "total_against_stock": round(total / stock - 1, 3),
        "total_against_serial": round(total / (sum(alone.values()) + head) - 1, 3),
        "tflops_alone_shaped": round(work.flops / shaped_alone / 1e6, 1),
    }


def nccl_kernel(name: str) -> dict[str, Any]:
    """What NCCL launched for 128 MiB, as the profiler saw it. All ranks call it."""
    comm, _ = collective(name, 128)
    seen = observe(lambda: (comm(), None)[1], device=torch.device("cuda", torch.cuda.current_device()))
    kernel = max((one for one in seen if "nccl" in one.name), key=lambda one: one.duration_us)
    return {key: getattr(kernel, key) for key in ("name", "num_blocks", "block", "regs_per_thread", "smem_bytes")}


def proofs(work: Workload) -> dict[str, str]:
    """What the profiler says of every setting; raises if one did nothing."""
    device = torch.device("cuda", torch.cuda.current_device())
    without = observe(lambda: (work.queue(), None)[1], device=device)
    found = {}
    for setting in shapes(work):
        shaping = shaping_of(work, setting)
        if shaping is not None:
            with shaping.launches():
                seen = Observation(
                    compute=observe(lambda: (work.queue(), None)[1], device=device), compute_without=without
                )
            evidence = shaping.verify(seen)
            assert evidence.took_effect, f"{evidence.control} had no effect: {evidence.seen}"
            found[evidence.control] = evidence.seen
    return found


def pairs(args: argparse.Namespace) -> Iterator[tuple[Callable[[], Workload], list[tuple[str, int]]]]:
    """Every workload, and the collectives to run beside it."""
    names, sizes = ("all_reduce", "all_to_all"), (128, 512, 896)
    if args.workload == "others":
        yield elementwise, [("all_reduce", 512)]
        yield cublas_fp64, [("all_reduce", 512)]
        return
    for size in ("8192",) if args.quick else ("4096", "8192", "57344"):
        for block_k in (32, 64):
            beside = [(name, each) for name in names for each in ((512,) if args.quick else sizes)]
            if size == "57344":
                beside = [(name, 896) for name in names]
            yield partial(gemm, size, block_k), beside


def main() -> None:
    """Parse, join the other ranks, measure, and let rank 0 write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON; rows are added if it is there already")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="8192 only, 512 MiB")
    parser.add_argument("--nccl-threads", type=int, default=512, help="NCCL_NTHREADS; NCCL adds one warp")
    parser.add_argument("--workload", choices=("gemm", "others", "evidence"), default="gemm")
    args = parser.parse_args()
    os.environ.update(NO_MULTICAST, NCCL_NTHREADS=str(args.nccl_threads))
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    try:
        rows, evidence = study(args)
        if dist.get_rank() == 0:
            write(args, rows, evidence)
    finally:
        dist.destroy_process_group()


def study(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of the chosen workload, or what the profiler says of all that was compared. All ranks call it."""
    if args.workload == "evidence":
        seen: dict[str, Any] = {f"gemm 64x64x{block_k}": proofs(gemm("4096", block_k)) for block_k in (32, 64)}
        kernels = {name: nccl_kernel(name) for name in ("all_reduce", "all_to_all")}
        return [], seen | {f"NCCL_NTHREADS={args.nccl_threads}": kernels}
    bench = Bench()
    rows: list[dict[str, Any]] = []
    for make, beside in pairs(args):
        work = make()
        for name, mebibytes in beside:
            found = measure(bench, work, name, mebibytes, args.rounds)
            rows += [each | {"nccl_threads": args.nccl_threads} for each in found]
            if dist.get_rank() == 0:
                print(f"{work.name} beside {name} {mebibytes} MiB: {len(rows)} rows", flush=True)
    return rows, {}


def write(args: argparse.Namespace, rows: list[dict[str, Any]], evidence: dict[str, Any]) -> None:
    """One JSON for all runs, and beside it a table of the best setting of each pair."""
    facts = gpu_provenance(["triton", "cuda-bindings"], world_size=dist.get_world_size())
    record = {"provenance": facts, "rounds": args.rounds, "evidence": evidence, "rows": rows}
    if args.out.exists():
        old = json.loads(read_result(args.out))
        old["rows"] += rows
        old["evidence"] |= evidence
        record = old | {"also": [*old.get("also", []), facts]}
    columns = ("workload", "beside", "order", "priority", "NCCL threads", "as it is", "best", "total")
    write_result(args.out, record, columns, [*table(record["rows"])])


def table(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    """One line for every pair, order and priority: as it is, and the number of blocks per SM with the least total."""
    keys = ("workload", "collective", "mebibytes", "order", "priority", "nccl_threads")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for each in rows:
        groups.setdefault(tuple(each[key] for key in keys), []).append(each)
    for (workload, name, mebibytes, order, priority, threads), found in groups.items():
        stock = next(each for each in found if each["blocks_per_sm"] is None)
        best = min(found, key=lambda each: each["total_us"])
        yield [
            workload,
            f"{name} {mebibytes} MiB",
            order,
            "high" if priority else "0",
            str(threads),
            *(
                f"{each['blocks']} a SM: {each['total_us'] / 1e3:.2f} ms, hidden {each['hidden']:.2f}"
                for each in (stock, best)
            ),
            f"{(best['total_us'] / stock['total_us'] - 1) * 100:+.1f} %",
        ]


if __name__ == "__main__":
    main()
