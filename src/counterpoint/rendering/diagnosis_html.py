"""Write a diagnosis as one self-contained page, which loads nothing and never interprets text of a trace as code.

Three locks keep a hostile name inert: the template escapes everything, the data for the timeline is JSON without `<`,
and the page's own Content-Security-Policy lets run only the scripts whose SHA-256 it names and forbids every request.
The spans of the timeline are packed: sorted, quantised, base64, so that a number takes four bytes.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from counterpoint.records.diagnosis import Diagnosis, Finding, TimelineLane, by_remedy
from counterpoint.rendering import formatting as say
from counterpoint.rendering.diagnosis_tables import (
    budget,
    budget_table,
    collectives_table,
    idle_table,
    kernels_table,
    kinds_table,
    replay_table,
    steps_in,
    stragglers_table,
)
from counterpoint.rendering.nccl_tables import nccl_remarks_table, nccl_tables
from counterpoint.rendering.operator_tables import ON_PAGE, operators_table
from counterpoint.rendering.safe_html import Page, clean, write_page
from counterpoint.rendering.table import Cell, Column, Table, row

MAX_RANKS = 32  # of the timeline
MAX_SPANS = 40_000  # 0.6 MB of the page
MAX_LABEL = 200  # characters
MAX_ROWS = 512  # ranks with a bar
MAX_FILES = 200
MAP_FROM = 32  # ranks: a job with more of them has a map of all ranks
MAX_MAP = 1024  # ranks on the map; late ranks beyond are drawn, too
NODE = 8  # ranks in a row of the map: those of one node on most machines
F64 = npt.NDArray[np.float64]


def write_html(path: Path, diagnosis: Diagnosis, lanes: Sequence[TimelineLane]) -> None:
    """Write a diagnosis as a page; `path` appears complete or not at all.

    Raises:
        OSError: the folder is missing or may not be written to.
    """
    packed = pack_timeline(diagnosis, lanes)
    write_page(
        path,
        _page(diagnosis),
        name="diagnosis",
        data=_data(diagnosis, packed),
        plot=bool(packed.drawn),
        cost=say.tenth_milliseconds,
        remedies=_remedies(diagnosis),
        above=(budget_table(diagnosis, MAX_ROWS), _map_table(diagnosis), idle_table(diagnosis)),
        timeline=packed,
        lanes=_lanes_table(packed),
        kinds=_kinds(packed),
    )


def _remedies(diagnosis: Diagnosis) -> list[list[tuple[int, Finding]]]:
    """Return the findings of each remedy, with the number by which the timeline marks each finding."""
    number = {id(finding): place for place, finding in enumerate(diagnosis.findings, start=1)}
    return [[(number[id(finding)], finding) for finding in group] for group in by_remedy(diagnosis.findings)]


def _page(diagnosis: Diagnosis) -> Page:
    totals, steps, ranks = diagnosis.totals, len(diagnosis.steps), len(diagnosis.ranks)
    mean = steps_in(diagnosis)
    scope = [
        f"{ranks} of {diagnosis.world_size} rank{'s' * (diagnosis.world_size != 1)}",
        f"{steps} step{'s' * (steps != 1)}" if steps else "no steps found",
        *([diagnosis.gpu] if diagnosis.gpu else []),
    ]
    last = ("communication / compute", say.factor(totals.comm_to_compute), "")
    if totals.mfu is not None:
        last = ("model FLOPs utilisation", say.percent(totals.mfu), "")
    made = (
        operators_table(diagnosis, ON_PAGE),
        stragglers_table(diagnosis),
        replay_table(diagnosis),
        kernels_table(diagnosis),
        kinds_table(diagnosis),
        collectives_table(diagnosis),
        nccl_remarks_table(diagnosis.nccl),
        *nccl_tables(diagnosis.nccl),
    )
    return Page(
        title="why the step waits",
        kind="diagnosis",
        scope=" · ".join(scope),
        headline=diagnosis.verdict,
        figures=[
            ("step" if diagnosis.has_steps else "whole trace", say.milliseconds(totals.duration_us / mean, 1), "ms"),
            ("communication hidden", say.percent(totals.hidden), ""),
            ("exposed communication", say.milliseconds(totals.exposed_comm_us / mean, 1), "ms"),
            ("of it waiting", say.milliseconds(budget(totals)["wait"] / mean, 1), "ms"),
            last,
        ],
        tables=[
            *(table for table in made if table is not None),
            Table(title="Notes", notes=diagnosis.notes),
            *_provenance(diagnosis),
        ],
    )


def _provenance(diagnosis: Diagnosis) -> tuple[Table, Table]:
    """Return tables of the files that were read, and of each rank's clock offset from the lowest rank's clock."""
    files = diagnosis.source.files
    more = [f"and {len(files) - MAX_FILES} more"] * (len(files) > MAX_FILES)
    read = Table(
        title="What was read",
        unit=f"{diagnosis.source.events:,} events, {diagnosis.source.format}; as {diagnosis.schema}",
        notes=[*files[:MAX_FILES], *more],
        folded=True,
    )
    clocks = Table(
        title="Clock of each rank against that of the lowest",
        columns=(
            Column("rank"),
            Column("offset, µs", say.decimal),
            Column("uncertainty, ± µs", say.decimal),
            Column("drift, ppm", say.decimal),
        ),
        rows=[
            row(rank, us, diagnosis.clock_uncertainty_us.get(rank), diagnosis.clock_drift_ppm.get(rank))
            for rank, us in diagnosis.clock_offsets_us.items()
        ],
        folded=True,
    )
    return read, clocks


def _lanes_table(packed: PackedTimeline) -> Table:
    return Table(
        title="Lanes of the timeline",
        unit="all steps together",
        columns=(
            Column("rank", say.count, lambda lane: lane.rank),
            Column("lane", of=lambda lane: lane.name, limit=40),
            Column("spans", say.count, lambda lane: lane.spans),
            Column("sum, ms", say.milliseconds, lambda lane: lane.total_us),
            Column("longest, ms", say.fine_milliseconds, lambda lane: lane.longest_us),
        ),
        rows=packed.drawn,
        folded=True,
    )


def _map_table(diagnosis: Diagnosis) -> Table | None:
    """Return a table of the time that each rank of a large job waits, `NODE` ranks per row; None for a small job."""
    if len(diagnosis.per_rank) <= MAP_FROM:
        return None
    steps = steps_in(diagnosis)
    waits = {a.rank: budget(a)["wait"] / steps for a in diagnosis.per_rank}
    late = {rank: s.delay_us / steps for s in diagnosis.stragglers for rank in s.ranks}
    longest = max(waits.values()) or 1.0
    every = sorted({*waits, *late})
    shown = {*every[:MAX_MAP], *late}

    def cell(rank: int) -> Cell | str:
        note = f"{rank}: {say.tenth_milliseconds(late[rank])} late" if rank in late else ""
        return Cell(value=waits.get(rank), note=note, heat=waits.get(rank, 0.0) / longest) if rank in shown else ""

    nodes = sorted({rank // NODE for rank in shown})
    ranks_of = {node: range(NODE * node, NODE * (node + 1)) for node in nodes}
    left_out = [f"The first {MAX_MAP} ranks and those that are late."] if len(shown) < len(every) else []
    return Table(
        title="Every rank",
        unit="ms a step that it waits for others, the darker the longer; late: how long the others wait for it",
        columns=(Column(""), *(Column("", say.tenth_milliseconds) for _ in range(NODE))),
        rows=[row(f"{ranks[0]}–{ranks[-1]}", *map(cell, ranks)) for ranks in ranks_of.values()],
        notes=left_out,
    )


def _kinds(packed: PackedTimeline) -> list[tuple[str, str, str]]:
    """Return the timeline's legend as (lane, colour, name); lanes of other names share the entry `host`."""
    kinds = [
        ("compute", "compute", "compute"),
        ("communication", "transfer", "communication"),
        ("wait", "wait", "of it waiting"),
        ("memcpy", "memcpy", "copies"),
    ]
    names = {lane.name for lane in packed.drawn}
    shown = [kind for kind in kinds if kind[0] in names]
    return shown + [("host", "host", "host")] * bool(names - {kind[0] for kind in kinds})


def _data(diagnosis: Diagnosis, packed: PackedTimeline) -> dict[str, Any]:
    marks = [
        {"number": number, "title": clean(f.title), "rank": f.rank, "start": f.start_us, "end": f.end_us}
        for number, f in enumerate(diagnosis.findings, start=1)
        if f.start_us is not None and f.end_us is not None
    ]
    steps = [{"name": clean(step.name, 40), "start": step.start_us} for step in diagnosis.steps]
    labels = [clean(label) for label in packed.data["labels"]]
    return {**packed.data, "labels": labels, "marks": marks, "steps": steps}


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneTotal:
    """Holds the number and total times of one lane's spans, for the table below the timeline."""

    rank: int
    name: str
    spans: int
    total_us: float
    longest_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedTimeline:
    """Holds the timeline as `data` for the page's script; `notes` say which ranks and spans are left out."""

    data: dict[str, Any]
    drawn: tuple[LaneTotal, ...]
    notes: tuple[str, ...]


def pack_timeline(diagnosis: Diagnosis, lanes: Sequence[TimelineLane]) -> PackedTimeline:
    """Return the lanes' spans as uint32 ticks since the first start, sorted by start; labels become indices.

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
        length = end - start
        longest_us = float(length.max(initial=0.0))
        drawn.append(
            LaneTotal(
                rank=lane.rank, name=lane.name, spans=len(length), total_us=float(length.sum()), longest_us=longest_us
            )
        )
        keep = length >= shortest
        names = [lane.labels[i][:MAX_LABEL] for i in index[keep].tolist()]
        numbers = np.fromiter((labels.setdefault(name, len(labels)) for name in names), np.uint32, len(names))
        times = (((edge[keep] - origin) / tick).astype(np.uint32) for edge in (start, end))
        columns = [base64.b64encode(column.astype("<u4").tobytes()).decode() for column in (*times, numbers)]
        packed.append({"rank": lane.rank, "name": lane.name, "spans": columns})
        shown += len(names)
    notes = _left_out(len(ranks), len({lane.rank for lane in lanes}), shown, total)
    data = {"origin": origin, "tick": tick, "lanes": packed, "labels": list(labels), "ranks": sorted(ranks)}
    return PackedTimeline(data=data, drawn=tuple(drawn), notes=notes)


def _finite(lane: TimelineLane) -> tuple[F64, F64, npt.NDArray[np.int64]]:
    """Return the starts, ends and indices of a lane's spans, sorted by start, without spans of infinite times."""
    start = np.asarray(lane.start_us, np.float64)
    end = start + np.asarray(lane.duration_us, np.float64)
    kept = np.flatnonzero(np.isfinite(start) & np.isfinite(end) & (end >= start))
    kept = kept[np.argsort(start[kept], kind="stable")]
    return start[kept], end[kept], kept


def _window(diagnosis: Diagnosis, spans: Sequence[tuple[F64, F64]]) -> tuple[float, float]:
    """Return the timeline's start and the length of a tick, both in µs, so that all spans and steps fit in uint32."""
    begins = [float(start.min()) for start, _ in spans if len(start)] + [step.start_us for step in diagnosis.steps]
    ends = [float(end.max()) for _, end in spans if len(end)]
    ends += [step.start_us + step.duration_us for step in diagnosis.steps]
    origin = min(begins, default=0.0)
    return origin, max(max(ends, default=origin) - origin, 1e-3) / (2**32 - 1)


def _ranks(diagnosis: Diagnosis, lanes: Sequence[TimelineLane]) -> set[int]:
    exposed = {account.rank: account.exposed_comm_us for account in diagnosis.per_rank}
    worst = [straggler.rank for straggler in diagnosis.stragglers]
    order = sorted({lane.rank for lane in lanes}, key=lambda rank: (rank not in worst, -exposed.get(rank, 0.0), rank))
    return set(order[:MAX_RANKS])


def _cut(durations: Sequence[F64], total: int) -> float:
    """Return the duration below which spans are left out, so that at most `MAX_SPANS` stay (ties may add a few)."""
    if total <= MAX_SPANS:
        return 0.0
    return float(np.partition(np.concatenate(durations), total - MAX_SPANS)[total - MAX_SPANS])


def _left_out(ranks: int, all_ranks: int, spans: int, all_spans: int) -> tuple[str, ...]:
    notes = []
    if ranks < all_ranks:
        notes.append(f"{ranks} of {all_ranks} ranks are drawn: stragglers, then the most exposed communication.")
    if spans < all_spans:
        notes.append(f"{spans:,} of {all_spans:,} spans are drawn: the longest.")
    return tuple(notes)
