"""Claim: matmuls in pieces take what the clock predicts. Arrivals of 2, 4 and 8 ranks, replayed on one GPU.

    python benchmarks/arrivals_replayed.py --out results/arrivals-replayed-h100.json     # one GPU, two minutes

The matmuls, their pieces, waits and sums are those of tensor parallelism (`RowGather`, `RowScatter`). The peers are
played: copies from pinned memory take the time that the clock gives to each chunk, need no SM, and are followed by the
word that says that the chunk has arrived. Links are not loaded, and no other rank disturbs. What the clock predicts
for each execution stands beside what the replay took.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any, cast

import torch
from kernel_efficiency import queued_us
from provenance import gpu_provenance, write_result
from tables import print_table
from tensor_clock import DTYPE, Layer, layers

from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.cuda.call import CudaWork
from counterpoint.collectives.cuda.driver import Executor
from counterpoint.collectives.program.steps import BlockPartition
from counterpoint.machine.profile import Profile, shipped_profile
from counterpoint.pair.arrivals import Segment, ShardedMatmul, ShardedRows
from counterpoint.pair.curves import RowCurve
from counterpoint.pair.matmul_choice import MatmulMechanism, Piece, RowAxis, choose_matmul, with_best_chunks
from counterpoint.parallel.tensor.overlapped import RowGather, RowScatter, Steps, Weight

PLAYED: tuple[MatmulMechanism, ...] = ("serial", "cuts")
COLUMNS = (
    "matmul", "collective", "rows", "n", "k", "ranks", "alone µs",
    *(f"{name} {what}" for name in PLAYED for what in ("µs", "predicted")),
)  # fmt: skip
POINTS, TILE = 64, 128
SPIN_CYCLES = 8_000_000  # longer than the host needs for all launches of a call
GREATER_OR_EQUAL = 0  # of CUstreamWaitValue_flags
WORDS = 4096
WARM = 3  # rounds that do not count


class Player:
    """Plays peers: its stream makes copies that take given times, and sets words that streams wait for."""

    def __init__(self) -> None:
        self.words = torch.zeros(WORDS, dtype=torch.int32, device="cuda")
        self.executor, self.stream = Executor(), torch.cuda.Stream(priority=-1)
        self._host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
        self._here = torch.empty_like(self._host, device="cuda", pin_memory=False)
        small, large = (self._copies_us(size) for size in (1 << 16, 1 << 26))
        self._bytes_per_us = ((1 << 26) - (1 << 16)) / (large - small)
        self._start_us = small - (1 << 16) / self._bytes_per_us

    def _copies_us(self, num_bytes: int, count: int = 20) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            for _ in range(2):  # the first is to warm up
                torch.cuda._sleep(SPIN_CYCLES)
                begin.record()
                for word in range(count):
                    self._here[:num_bytes].copy_(self._host[:num_bytes], non_blocking=True)
                    self.write(word)
                end.record()
                end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / count

    def play(self, us: float, word: int) -> None:
        """Make a copy that takes this long, or as long as the shortest, and set the word behind it."""
        size = min(max(int((us - self._start_us) * self._bytes_per_us), 256), self._host.numel())
        with torch.cuda.stream(self.stream):
            self._here[:size].copy_(self._host[:size], non_blocking=True)
        self.write(word)

    def write(self, word: int) -> None:
        self._call("cuStreamWriteValue32", self.stream, word)

    def wait(self, stream: torch.cuda.Stream, word: int) -> None:
        """Hold a stream until a word is set."""
        self._call("cuStreamWaitValue32", stream, word)

    def _call(self, name: str, stream: torch.cuda.Stream, word: int) -> None:
        driver = self.executor.driver
        where = driver.CUdeviceptr(self.words.data_ptr() + 4 * word)
        self.executor.call(name, driver.CUstream(stream.cuda_stream), where, 1, GREATER_OR_EQUAL)


class PlayedWork(CudaWork):
    """Stands in for a collective in partitions, whose peers a `Player` plays in the clock's order and times."""

    def __init__(self, player: Player, layout: ShardedRows, us: Sequence[float], *, is_scatter: bool) -> None:
        self._player, self._layout, self._us, self._left = player, layout, us, 0
        n = layout.world_size
        turns = [(turn, chunk) for turn in range(1, n) for chunk in range(len(layout.chunks(0)))]
        self._out = tuple(BlockPartition(turn, chunk) for turn, chunk in turns)  # this is rank 0
        self._in = tuple(BlockPartition(n - turn, chunk) for turn, chunk in turns)
        self._begin()  # the words are 0 from here on
        if not is_scatter:
            for _ in self._in:
                self._next()

    @property
    def sent(self) -> tuple[BlockPartition, ...]:
        return self._out

    @property
    def received(self) -> tuple[BlockPartition, ...]:
        return self._in

    def _word(self, one: BlockPartition) -> int:
        return one.chunk * self._layout.world_size + one.peer

    def _begin(self) -> None:
        self._player.stream.wait_stream(torch.cuda.current_stream())

    def _next(self) -> None:
        """Let the next partition leave, and its like arrive: ranks are taken to be alike."""
        one = self._in[self._left]
        self._player.play(self._us[self._left], self._word(one))
        self._left += 1

    def ready(self, count: int) -> None:
        if count > self._left:
            self._begin()
        while self._left < count:
            self._next()

    def arrived(self, count: int) -> None:
        for one in self._in[:count]:
            self._player.wait(torch.cuda.current_stream(), self._word(one))

    def finish(self) -> None:
        self.arrived(len(self._in))


def durations(segments: Sequence[Segment], *, is_scatter: bool) -> list[float]:
    """The µs of each chunk on the wire: the first from the begin on, each other behind the one before."""
    times = [segment.us for segment in segments]
    if is_scatter:  # `us` is what is left until the end
        return [max(before - after, 1.0) for before, after in pairwise(times)]
    return [after - before for before, after in pairwise(times)]


def curve_of(n: int, k: int, most: int) -> RowCurve:
    """The µs of a matmul by its rows, measured now."""
    step = max(TILE, -(-most // POINTS // TILE) * TILE)
    counts = [*range(step, most, step), most]
    x, w, out = (torch.randn(*size, device="cuda", dtype=torch.bfloat16) for size in ((most, k), (n, k), (most, n)))
    times: list[list[float]] = [[] for _ in counts]
    for turn in range(4):
        order = random.Random(turn).sample(range(len(counts)), len(counts))
        found = queued_us([partial(torch.mm, x[: counts[at]], w.t(), out=out[: counts[at]]) for at in order])
        for at, us in zip(order, found, strict=True):
            if turn:
                times[at].append(us)
    return RowCurve(n=n, k=k, dtype=DTYPE, points=tuple((at, median(us)) for at, us in zip(counts, times, strict=True)))


def calls_of(
    layer: Layer, pieces: dict[str, tuple[Piece, ...]], segments: Sequence[Segment], chunk_rows: int, player: Player
) -> dict[str, Callable[[], object]]:
    """What runs of each execution on rank 0, and the matmul alone."""
    layout = ShardedRows(rows=(layer.rows // layer.ranks,) * layer.ranks, chunk_rows=chunk_rows)
    is_scatter, shard = layer.operation == "matmul_reduce_scatter", layer.rows // layer.ranks
    a = torch.randn(layer.rows, layer.k, device="cuda", dtype=torch.bfloat16)
    weight = Weight(matrix=torch.randn(layer.n, layer.k, device="cuda", dtype=torch.bfloat16).t())
    out = torch.empty(layer.rows, layer.n, device="cuda", dtype=torch.bfloat16)
    us = durations(segments, is_scatter=is_scatter)
    work = partial(PlayedWork, player, layout, us, is_scatter=is_scatter)
    stand_in = cast("Communicator", SimpleNamespace(
        partitioned_all_gather=lambda *_, **__: work(), partitioned_all_to_all=lambda *_, **__: work(),
    ))  # fmt: skip
    staging = torch.zeros(layer.ranks, 1, shard, layer.n, device="cuda", dtype=torch.bfloat16) if is_scatter else None

    def gather(name: str) -> None:
        with RowGather(stand_in, a[None, :shard], a[None], layout) as rows:
            rows.multiply(steps[name], lambda at, part: weight.multiply(part, out[at]))

    def scatter(name: str) -> None:
        assert staging is not None
        with RowScatter(stand_in, staging, out[None, :shard], layout, "sum") as rows:
            rows.multiply(steps[name], lambda at, where: weight.multiply(a[at], where))

    steps = {name: Steps.of(some, layout) for name, some in pieces.items()}
    found: dict[str, Callable[[], object]] = {name: partial(scatter if is_scatter else gather, name) for name in PLAYED}
    return {"alone": lambda: weight.multiply(a, out), **found}


def timed_us(call: Callable[[], object], player: Player) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SPIN_CYCLES)
    player.words.zero_()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def measured(layer: Layer, curve: RowCurve, profile: Profile, player: Player, rounds: int) -> dict[str, Any]:
    """The median µs of each execution, beside the clock's."""
    shards = (layer.rows // layer.ranks,) * layer.ranks
    task = with_best_chunks(ShardedMatmul(operation=layer.operation, curves=(curve,), shard_rows=shards), profile)
    plan = choose_matmul(task, 0, profile)
    axis = RowAxis(task, 0, profile)
    pieces = {"serial": axis.pieces(axis.serial_bounds), "cuts": axis.cuts.pieces}
    calls = calls_of(layer, pieces, axis.segments, task.chunk_rows or shards[0], player)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + WARM):
        for name in random.Random(turn).sample(sorted(calls), len(calls)):
            us = timed_us(calls[name], player)
            if turn >= WARM:
                times[name].append(us)
    predicted = {name: plan.predicted_us[name] for name in PLAYED}
    return {"us": {name: median(some) for name, some in times.items()}, "predicted": predicted}


def line_of(layer: Layer, found: dict[str, Any]) -> list[str]:
    us, predicted = found["us"], found["predicted"]
    collective = "all_gather" if layer.operation == "all_gather_matmul" else "reduce_scatter"
    pairs = [f"{each[name]:,.0f}" for name in PLAYED for each in (us, predicted)]
    sizes = [str(each) for each in (layer.rows, layer.n, layer.k, layer.ranks)]
    return [layer.name, collective, *sizes, f"{us['alone']:,.0f}", *pairs]


def summary(found: Sequence[tuple[Layer, dict[str, Any]]]) -> list[str]:
    """Sentences: how far off the clock is."""
    report = []
    for ranks in sorted({layer.ranks for layer, _ in found}):
        some = [each for layer, each in found if layer.ranks == ranks]
        for name in PLAYED:
            off = [abs(each["predicted"][name] / each["us"][name] - 1) for each in some]
            report.append(f"{ranks} ranks: {name} is predicted {mean(off):.1%} off in the mean, {max(off):.0%} at most")
    return report


def about_us(layer: Layer) -> float:
    """The µs of the layer's matmul at 700 TFLOP/s."""
    return 2 * layer.rows * layer.n * layer.k / 700e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="H200", help="whose profile gives the links' rates")
    parser.add_argument("--ranks", type=int, nargs="+", default=(8, 4, 2))
    parser.add_argument("--rows", type=int, nargs="+", default=(2048, 4096, 8192, 16384))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--most-us", type=float, default=6000.0, help="longer matmuls are left out")
    parser.add_argument("--seconds", type=float, default=300.0, help="after which no further layer begins")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began, profile, player = time.monotonic(), shipped_profile(args.gpu), Player()
    curves: dict[tuple[int, int, int], RowCurve] = {}
    found, lines = [], []
    for layer in [one for ranks in args.ranks for one in layers((ranks,), args.rows)]:
        key = layer.n, layer.k, max(POINTS * TILE, layer.rows)
        if about_us(layer) > args.most_us or time.monotonic() - began > args.seconds:
            continue
        if key not in curves:
            curves[key] = curve_of(*key)
        found.append((layer, measured(layer, curves[key], profile, player, args.rounds)))
        lines.append(line_of(*found[-1]))
        print(" ".join(lines[-1]), flush=True)
    print_table(COLUMNS, lines, title="a matmul with its collective, replayed", width=190)
    report = summary(found)
    print("\n".join(report))
    if args.out:
        facts = gpu_provenance(["torch", "triton", "cuda-bindings"], world_size=1)
        write_result(args.out, {"provenance": facts, "report": report}, COLUMNS, lines)


if __name__ == "__main__":
    main()
