"""The spans of the timeline picture, packed: sorted, quantised, base64 - four bytes a number, not one object a span."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from counterpoint.records import Diagnosis, Lane

__all__ = ["Drawn", "Packed", "pack"]

MAX_RANKS = 32
MAX_SPANS = 200_000
MAX_LABEL = 200  # characters
F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """What one lane holds, for the table that says the same as the picture."""

    rank: int
    name: str
    spans: int
    total_us: float
    longest_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """`data` goes to the page as JSON; `notes` say what the caps left out."""

    data: dict[str, Any]
    drawn: tuple[Drawn, ...]
    notes: tuple[str, ...]


def pack(diagnosis: Diagnosis, lanes: Sequence[Lane]) -> Packed:
    """Spans as uint32 ticks since the first start, labels as indices into one table; sorted by start in each lane.

    A tick is 1 / (2^32 - 1) of the whole window: 2.3 ns in 10 s. Above `MAX_RANKS` ranks those with the most exposed
    communication stay; above `MAX_SPANS` spans the longest stay.
    """
    ranks = _ranks(diagnosis, lanes)
    arrays = [(lane, *_finite(lane)) for lane in lanes if lane.rank in ranks]
    total = sum(len(kept) for *_, kept in arrays)
    shortest = _cut([end - start for _, start, end, _ in arrays], total)
    origin, tick = _window(diagnosis, [(start, end) for _, start, end, _ in arrays])
    labels: dict[str, int] = {}
    packed, drawn, shown = [], [], 0
    for lane, start, end, index in arrays:
        drawn.append(_drawn(lane, start, end))
        keep = end - start >= shortest
        names = [lane.labels[i][:MAX_LABEL] for i in index[keep].tolist()]
        numbers = np.fromiter((labels.setdefault(name, len(labels)) for name in names), np.uint32, len(names))
        times = (((edge[keep] - origin) / tick).astype(np.uint32) for edge in (start, end))
        packed.append({"rank": lane.rank, "name": lane.name, "spans": [_text(column) for column in (*times, numbers)]})
        shown += len(names)
    notes = _notes(len(ranks), len({lane.rank for lane in lanes}), shown, total)
    data = {"origin": origin, "tick": tick, "lanes": packed, "labels": list(labels), "ranks": sorted(ranks)}
    return Packed(data=data, drawn=tuple(drawn), notes=notes)


def _finite(lane: Lane) -> tuple[F64, F64, npt.NDArray[np.int64]]:
    """Starts and ends in order of start, and where they stood in the lane; spans without finite times are left out."""
    start = np.asarray(lane.start_us, np.float64)
    end = start + np.asarray(lane.duration_us, np.float64)
    kept = np.flatnonzero(np.isfinite(start) & np.isfinite(end) & (end >= start))
    kept = kept[np.argsort(start[kept], kind="stable")]
    return start[kept], end[kept], kept


def _window(diagnosis: Diagnosis, spans: Sequence[tuple[F64, F64]]) -> tuple[float, float]:
    """Where the picture begins and the length of a tick, µs, so that all spans and steps lie in it."""
    begins = [float(start.min()) for start, _ in spans if len(start)] + [step.start_us for step in diagnosis.steps]
    ends = [float(end.max()) for _, end in spans if len(end)]
    ends += [step.start_us + step.duration_us for step in diagnosis.steps]
    origin = min(begins, default=0.0)
    return origin, max(max(ends, default=origin) - origin, 1e-3) / (2**32 - 1)


def _ranks(diagnosis: Diagnosis, lanes: Sequence[Lane]) -> set[int]:
    exposed = {account.rank: account.exposed_comm_us for account in diagnosis.per_rank}
    worst = [straggler.rank for straggler in diagnosis.stragglers]
    order = sorted({lane.rank for lane in lanes}, key=lambda rank: (rank not in worst, -exposed.get(rank, 0.0), rank))
    return set(order[:MAX_RANKS])


def _cut(durations: Sequence[F64], total: int) -> float:
    """The duration below which spans are left out, so that no more than `MAX_SPANS` stay (ties: a few more)."""
    if total <= MAX_SPANS:
        return 0.0
    return float(np.partition(np.concatenate(durations), total - MAX_SPANS)[total - MAX_SPANS])


def _drawn(lane: Lane, start: F64, end: F64) -> Drawn:
    length = end - start
    longest = float(length.max()) if len(length) else 0.0
    return Drawn(rank=lane.rank, name=lane.name, spans=len(length), total_us=float(length.sum()), longest_us=longest)


def _text(column: npt.NDArray[np.uint32]) -> str:
    return base64.b64encode(column.astype("<u4").tobytes()).decode()


def _notes(ranks: int, all_ranks: int, spans: int, all_spans: int) -> tuple[str, ...]:
    notes = []
    if ranks < all_ranks:
        notes.append(f"{ranks} of {all_ranks} ranks are drawn: stragglers, then the most exposed communication.")
    if spans < all_spans:
        notes.append(f"{spans:,} of {all_spans:,} spans are drawn: the longest.")
    return tuple(notes)
