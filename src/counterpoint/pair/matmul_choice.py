"""Choose how a matmul that depends on communication runs, by each execution's predicted time. No torch.

    torch    NCCL and the matmul, one after the other
    serial   copy engines, then the matmul; or the matmul of the peers' rows, then copy engines beside own rows' matmul
    cuts     the pieces of `cut`, multiplied by cuBLAS beside copy engines

A piece is multiplied as soon as its rows have come (all_gather), or sent as soon as it is computed (reduce_scatter).
The cuts with the least predicted time are found by dynamic programming over the µs of rows (`RowCurve`) and the
times of arrival (`arrivals.py`).

One axis of rows serves both: own rows, then rows of rank - 1, rank - 2, ... An all_gather goes along it. A
reduce_scatter comes back along it, so it is the same in reversed time: an arrival, after the begin, becomes what is
left to do until the end. docs/design/tensor.md has the equations and what they leave out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Literal

from counterpoint.machine.profile import Profile, default_profile
from counterpoint.pair.arrivals import (
    COPY_ENGINES,
    Hiding,
    Segment,
    ShardedMatmul,
    Slab,
    Slabs,
    hiding_of,
    merged,
    nccl_us,
    segments_of,
)
from counterpoint.pair.together import disturbance

MatmulMechanism = Literal["torch", "serial", "cuts"]
MATMUL_MECHANISMS: tuple[MatmulMechanism, ...] = ("torch", "serial", "cuts")  # the simplest first
MARGIN = 0.03  # predicted times that differ by a smaller share count as equal
MAX_CELLS = 64  # most cells into which rows are cut; with more rows, cells are larger
MAX_SLABS = 128  # with more slabs, as large batches have, segments are not cut
WORTH = 0.005  # share of a call's time that a cut has to save: curves are not measured more exactly
_SAME = 1e-9  # relative difference below which two times are equal


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Holds the rows that are multiplied in one step, by one matmul for each slab.

    `segment` is an index of `segments_of`. Of an all_gather: the last segment that must have arrived before this piece
    is multiplied, which is also the number of partitions to wait for. Of a reduce_scatter: the last segment that is
    complete once this piece is multiplied, and may be sent; -1: none yet.
    """

    segment: int
    slabs: Slabs

    @property
    def rows(self) -> int:
        """Return the number of rows in this piece."""
        return sum(slab.rows for slab in self.slabs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cuts:
    """Holds the pieces in the order in which they are multiplied, and the predicted µs of the call."""

    pieces: tuple[Piece, ...]
    us: float


def cut(task: ShardedMatmul, rank: int, profile: Profile | None = None) -> Cuts:
    """Return the cuts of a rank's rows with the least predicted time; drop cuts that save a fraction below `WORTH`.

    Pieces begin and end at borders of tiles or the end of a slab; with over `MAX_CELLS` tiles, at some borders only.
    """
    return RowAxis(task, rank, profile or default_profile()).cuts


class RowAxis:
    """Holds one rank's rows of a task in the order of this module's axis, as cells (consecutive rows) never cut.

    Attributes:
        segments: of the rank, in the order of `segments_of`.
        along: the segments in the order of the axis.
        cells: the slabs of each cell, and `of_cell`: the index in `along` of its segment.
        kept: the speed that matmuls keep during the communication, over their speed alone.
        busy_us: when the communication has ended; in reversed time, when it began.
    """

    def __init__(self, task: ShardedMatmul, rank: int, profile: Profile) -> None:
        self.task, self.segments = task, segments_of(task, rank, profile)
        self.along = self.segments[::-1] if task.is_scatter else self.segments
        tile = profile.chip.matmul_tile[0]
        step = tile * max(1, math.ceil(task.rows / (tile * MAX_CELLS)))
        whole = sum(len(segment.slabs) for segment in self.segments) > MAX_SLABS
        cells = [
            (index, cell)
            for index, segment in enumerate(self.along)
            for cell in ([segment.slabs] if whole and segment.slabs else _cells(segment.slabs, step))
        ]
        self.cells: tuple[Slabs, ...] = tuple(cell for _, cell in cells)
        self.of_cell = tuple(index for index, _ in cells)
        self.kept = disturbance(COPY_ENGINES, profile).compute_kept
        self.busy_us = max(segment.us for segment in self.segments)
        self._launch_us = profile.efficiency.launch_us
        self._known_us = {0: 0.0}  # results of `cost_us`, by rows

    @property
    def serial_bounds(self) -> tuple[int, ...]:
        """Return the piece bounds, in cells, of an uncut call; for a reduce_scatter, own rows are their own piece."""
        own = self.of_cell.count(0) if self.task.is_scatter else 0
        return tuple(sorted({0, own, len(self.cells)}))

    def cost_us(self, rows: int) -> float:
        """Return the µs of the matmuls of `rows` consecutive rows without communication, launches included."""
        if rows not in self._known_us:
            self._known_us[rows] = sum(curve.us(rows) + self._launch_us for curve in self.task.curves)
        return self._known_us[rows]

    def after(self, start_us: float, work_us: float) -> float:
        """Return when work of `work_us` that begins at `start_us` ends; communication slows it until `busy_us`."""
        beside_us = max(0.0, self.busy_us - start_us) * self.kept
        if work_us <= beside_us:
            return start_us + work_us / self.kept
        return max(start_us, self.busy_us) + work_us - beside_us

    def ends(self, start: int) -> Iterator[tuple[int, float]]:
        """Yield each possible end of a piece that begins at cell `start`, with the µs of the piece's matmuls."""
        below: dict[int, int] = {}  # rows of a merged slab by its end, and by its start
        above: dict[int, int] = {}
        total = 0.0
        for index in range(start, len(self.cells)):
            for first, rows in self.cells[index]:
                left, right = below.pop(first, 0), above.pop(first + rows, 0)
                merged = left + rows + right
                total += self.cost_us(merged) - self.cost_us(left) - self.cost_us(right)
                above[first - left] = below[first + rows + right] = merged
            yield index + 1, total

    @cached_property
    def cuts(self) -> Cuts:
        """Return the cuts with which the call ends earliest, found by dynamic programming.

        end(j) = min over i < j of after(max(end(i), us of the segment of cell j - 1), us of cells i to j - 1)
        """
        size = len(self.cells)
        best, since = [0.0, *[math.inf] * size], [0] * (size + 1)
        for start in range(size):
            for end, work_us in self.ends(start):
                us = self.after(max(best[start], self.along[self.of_cell[end - 1]].us), work_us)
                if us < best[end] * (1 - _SAME):
                    best[end], since[end] = us, start
        bounds = [size]
        while bounds[0]:
            bounds.insert(0, since[bounds[0]])
        bounds = self._fewer(bounds, best[size])
        return Cuts(pieces=self.pieces(bounds), us=self.end_us(bounds))

    def end_us(self, bounds: Sequence[int]) -> float:
        """Return the µs at which a call ends that is cut into pieces at these bounds (indices of cells)."""
        now = 0.0
        for start, end in pairwise(bounds):
            work_us = next(us for at, us in self.ends(start) if at == end)
            now = self.after(max(now, self.along[self.of_cell[end - 1]].us), work_us)
        return now

    def pieces(self, bounds: Sequence[int]) -> tuple[Piece, ...]:
        """Return the pieces between these bounds (indices of cells), in the order in which they are multiplied."""
        found = [
            Piece(segment=self._segment(start, end), slabs=merged(chain.from_iterable(self.cells[start:end])))
            for start, end in pairwise(bounds)
        ]
        return tuple(found[::-1] if self.task.is_scatter else found)

    def _segment(self, start: int, end: int) -> int:
        if not self.task.is_scatter:
            return self.of_cell[end - 1]
        index = len(self.segments) - 1 - self.of_cell[start]
        complete = start == 0 or self.of_cell[start - 1] != self.of_cell[start]
        return index if complete else index - 1

    def _fewer(self, bounds: list[int], us: float) -> list[int]:
        """Return the bounds less each bound that saves under `WORTH` of `us`, the least time."""
        for bound in bounds[1:-1]:
            without = [each for each in bounds if each != bound]
            if self.end_us(without) <= us * (1 + WORTH):
                bounds = without
        return bounds


def _cells(slabs: Sequence[Slab], step: int) -> Iterator[tuple[Slab]]:
    """Yield the slabs cut at multiples of `step`, the last rows of each slab first, as the axis needs them."""
    for first, rows in slabs:
        for start in reversed(range(0, rows, step)):
            yield (Slab(first + start, min(step, rows - start)),)


@dataclass(frozen=True, kw_only=True)
class MatmulPlan:
    """Holds how a matmul that depends on communication runs, and the predicted µs by which that was chosen."""

    mechanism: MatmulMechanism
    pieces: tuple[Piece, ...]  # this rank's pieces; uncut unless the mechanism is cuts
    segments: tuple[Segment, ...]  # this rank's rows in the order of arrival or sending
    predicted_us: Mapping[MatmulMechanism, float]  # µs on rank 0, so that all ranks choose alike
    alone_us: float  # µs of the matmul alone
    comm_us: float  # µs of the collective by NCCL alone
    hiding: Hiding
    estimated: bool  # a curve was not measured
    why: str  # one sentence


def choose_matmul(
    task: ShardedMatmul,
    rank: int,
    profile: Profile | None = None,
    *,
    host_us: Mapping[MatmulMechanism, float] | None = None,
) -> MatmulPlan:
    """Return the simplest execution predicted to take within `MARGIN` of the best time; torch's is the simplest.

    Rank 0's predictions decide the mechanism, and the pieces are for `rank`: ranks that are given the same
    curves and figures choose alike, which they must.

    Args:
        task: the matmul.
        rank: this rank.
        profile: of the machine; None: the default one, H200.
        host_us: µs of the host to issue a call by each mechanism, a lower limit of the predicted time; None: none.

    Raises:
        Misconfigured: the profile has no `nccl_rates` of the collective.
    """
    profile = profile or default_profile()
    first, comm_us = RowAxis(task, 0, profile), nccl_us(task, profile)
    one_us = first.cost_us(task.rows)
    predicted: dict[MatmulMechanism, float] = {
        "torch": comm_us + one_us,
        "serial": first.end_us(first.serial_bounds),
        "cuts": first.cuts.us,
    }
    by_gpu = predicted
    predicted = {name: max(us, (host_us or {}).get(name, 0.0)) for name, us in by_gpu.items()}
    best_us = min(predicted.values())
    chosen = next(name for name in MATMUL_MECHANISMS if (1 - MARGIN) * predicted.get(name, math.inf) <= best_us)
    axis = first if rank == 0 else RowAxis(task, rank, profile)
    known = hiding_of(task, profile)
    times = ", ".join(f"{name} {us:,.0f}" for name, us in predicted.items())
    host = "" if predicted == by_gpu else ", as long as the host needs or longer"
    return MatmulPlan(
        mechanism=chosen, pieces=axis.cuts.pieces if chosen == "cuts" else axis.pieces(axis.serial_bounds),
        segments=axis.segments, predicted_us=predicted, alone_us=task.alone_us, comm_us=comm_us, hiding=known,
        estimated=any(curve.estimated for curve in task.curves),
        why=f"{chosen} is the simplest within {MARGIN:.0%} of the best of {times} µs{host}; {known.why}",
    )  # fmt: skip


def with_best_chunks(task: ShardedMatmul, profile: Profile | None = None) -> ShardedMatmul:
    """Return the task with the largest chunks whose predicted time, on rank 0, is within `MARGIN` of the least.

    Compares one, two and four chunks of the largest shard.
    """
    block = task.batch * max(task.shard_rows)
    found = [replace(task, chunk_rows=-(-block // chunks)) for chunks in (1, 2, 4)]
    times = [cut(each, 0, profile).us for each in found]
    return next(each for each, us in zip(found, times, strict=True) if (1 - MARGIN) * us <= min(times))
