"""Join the summaries of thousands of ranks: every rank's account with its waits, and the ranks to look at closely.

`TracedJob` has a column for each rank and a row for each collective, so its size grows with the ranks times the groups.
Here one row is one rank's part in one collective, and memory grows with the number of these parts. What needs every
operation of a rank (kernels, idle time, replay, findings) is then found from the digests of `detailed` ranks only: the
ranks for which others wait longest, the ranks of their small groups, and ranks at equal distances.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from counterpoint.diagnosis.reading.digest import RankSummary
from counterpoint.diagnosis.reading.intervals import Intervals
from counterpoint.diagnosis.reading.join import LOOSE_ENDS
from counterpoint.diagnosis.reading.traced_job import missing_ranks, numbered, world_size_of
from counterpoint.diagnosis.summary import read_summary
from counterpoint.records.diagnosis import RankAccount
from counterpoint.trace.clocks import RESOLUTION_US, one_per_host
from counterpoint.trace.source import Limits, TraceFile
from counterpoint.trace.timeline import F64, I64, Bools, Intern

MOST_DETAILED = 256  # ranks whose whole digests are joined
_LATE_SEEDS = 32  # ranks for which others wait longest, which are looked at with the ranks of their groups
_SMALL_GROUP = 16  # ranks of a group that is looked at as a whole
_STRUCTURAL = ("send_recv",)  # pipeline stages wait for one another by design


@dataclass(frozen=True, kw_only=True, slots=True)
class ManyRanks:
    """Holds what the summaries of all ranks of a job tell; columns have one element for each of `ranks`, ascending."""

    ranks: tuple[int, ...]
    paths: tuple[str, ...]
    world_size: int
    missing: tuple[int, ...]
    events: int
    accounts: tuple[RankAccount, ...]
    offset_us: F64  # of each rank's clock against the first rank's; NaN: no collective joins the two
    late_us: F64  # for how long others waited, with no compute beside, in collectives that the rank entered last
    detailed: tuple[int, ...]  # columns of the ranks to look at closely
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """Holds each rank's part in each collective, one row each, sorted by collective and rank; µs on a common base."""

    rank: I64  # column of the rank
    group: I64
    call: I64  # number of the collective
    first: I64  # of each collective: its first row
    count: I64  # of each collective: its number of rows
    start: F64
    end: F64
    tight: Bools  # ranks end the operation together, ...
    structural: Bools  # ... or wait in it by design


def read_many(
    files: Sequence[TraceFile], limits: Limits, progress: Callable[[int, int, str], None] | None = None
) -> ManyRanks:
    """Return what the digests of all ranks of a job tell together, from their summaries.

    Raises:
        BadTrace: a file is damaged, or ranks are of different jobs.
    """
    shared: dict[tuple[int, ...], tuple[int, ...]] = {}
    found = []
    for done, file in enumerate(files):
        found.append(read_summary(file, limits, shared))
        if progress is not None and done % 64 == 0:
            progress(done, len(files), "summaries read")
    return join_many(found)


def join_many(found: Sequence[RankSummary]) -> ManyRanks:
    """Return what the summaries of all ranks of a job tell together; raise `BadTrace` for ranks of different jobs."""
    notes: list[str] = []
    summaries = numbered(found, notes)
    world = world_size_of(summaries)
    parts = _parts(summaries, notes)
    offset = _offsets(parts, len(summaries))
    unknown = int((~np.isfinite(offset)).sum())
    if unknown:
        notes.append(f"no collective joins {unknown} ranks to rank {summaries[0].rank}: their clocks stay as they are")
    known = np.nan_to_num(offset)
    parts.start[:] -= known[parts.rank]
    parts.end[:] -= known[parts.rank]
    accounts, late_us = _accounts(summaries, parts, known)
    if len({s.steps.names for s in summaries}) > 1:
        notes.append("ranks recorded different steps: each account is over the rank's own")
    ranks = tuple(s.rank for s in summaries)
    detailed = _detailed(parts, late_us)
    notes.append(
        f"accounts and waits are of all {len(ranks)} ranks; findings, kernels, idle time, collectives and the replay "
        f"of {len(detailed)}: those for which others wait longest, ranks of their groups, and ranks at equal distances"
    )
    return ManyRanks(
        ranks=ranks,
        paths=tuple(s.path for s in summaries),
        world_size=world,
        missing=missing_ranks(summaries, world),
        events=sum(s.events for s in summaries),
        accounts=accounts,
        offset_us=offset,
        late_us=late_us,
        detailed=detailed,
        notes=tuple(notes),
    )


def _parts(summaries: Sequence[RankSummary], notes: list[str]) -> _Parts:
    """Return every rank's part in every collective; the ranks of a group that number nothing are matched by order."""
    groups = Intern[tuple[str, tuple[int, ...] | None]]()
    group, ident, tight, structural, start, end = (list[np.ndarray]() for _ in range(6))
    for s in summaries:
        base = (s.origin_ns - summaries[0].origin_ns) / 1000.0
        own = np.array([groups[k.group, k.ranks] for k in s.kinds], np.int64)[s.kind]
        group.append(own)
        ident.append(_by_order(own, s.ident))
        tight.append(np.array([k.op not in LOOSE_ENDS for k in s.kinds], bool)[s.kind])
        structural.append(np.array([k.op in _STRUCTURAL for k in s.kinds], bool)[s.kind])
        start.append(s.start + base)
        end.append(s.end + base)
    rank = np.repeat(np.arange(len(summaries)), [len(s.kind) for s in summaries])
    columns = {"group": np.concatenate(group), "ident": np.concatenate(ident), "rank": rank}
    _refuse_order(columns, len(groups), notes)
    order = np.lexsort((rank, columns["ident"], columns["group"]))
    key = [columns[name][order] for name in ("group", "ident")]
    new = np.concatenate(([True], (np.diff(key[0]) != 0) | (np.diff(key[1]) != 0))) if len(order) else np.zeros(0, bool)
    first = np.flatnonzero(new)
    return _Parts(
        rank=rank[order],
        group=key[0],
        call=np.cumsum(new) - 1,
        first=first,
        count=np.diff(np.append(first, len(order))),
        start=np.concatenate(start)[order],
        end=np.concatenate(end)[order],
        tight=np.concatenate(tight)[order],
        structural=np.concatenate(structural)[order],
    )


def _by_order(group: I64, ident: I64) -> I64:
    """Return `ident` with the place within the rank's own group, as a negative number, where it is not stated."""
    found = ident.copy()
    for each in np.unique(group[ident == -1]).tolist():
        rows = np.flatnonzero((group == each) & (ident == -1))
        found[rows] = -2 - np.arange(len(rows))
    return found


def _refuse_order(columns: dict[str, I64], groups: int, notes: list[str]) -> None:
    """Take apart, in `columns["ident"]`, collectives matched by order where ranks of a group have unequally many."""
    rows = np.flatnonzero(columns["ident"] < 0)
    if not len(rows):
        return
    pair, count = np.unique(columns["group"][rows] * (1 << 32) + columns["rank"][rows], return_counts=True)
    most, least = np.zeros(groups, np.int64), np.full(groups, np.iinfo(np.int64).max)
    np.maximum.at(most, pair >> 32, count)
    np.minimum.at(least, pair >> 32, count)
    uneven = (most > 0) & (most != least)
    apart = rows[uneven[columns["group"][rows]]]
    columns["ident"][apart] = -(1 << 40) - apart
    if len(apart):
        notes.append(
            f"collectives of {int(uneven.sum())} groups are not numbered, and ranks have unequally many: who waits in "
            "them is not known"
        )


def _offsets(parts: _Parts, ranks: int) -> F64:
    """Return the offset of each rank's clock in µs, from the ends of the collectives that ranks share.

    In each group, ends are compared with the ends of the group's first rank; groups that share ranks are chained.
    """
    lead = parts.first[parts.call]  # row of the first rank in the same collective
    alike = parts.tight & (parts.count[parts.call] >= 2)
    lowest = np.full(int(parts.group.max(initial=-1)) + 1, ranks)
    np.minimum.at(lowest, parts.group, parts.rank)
    rows = np.flatnonzero(alike & (parts.rank[lead] == lowest[parts.group]))
    apart = parts.end[rows] - parts.end[lead[rows]]
    pair = parts.group[rows] * ranks + parts.rank[rows]
    order = np.lexsort((apart, pair))
    pair, first, count = np.unique(pair[order], return_index=True, return_counts=True)
    median = (apart[order][first + (count - 1) // 2] + apart[order][first + count // 2]) / 2
    members: dict[int, list[tuple[int, float]]] = defaultdict(list)
    groups_of: dict[int, list[int]] = defaultdict(list)
    for which, us in zip(pair.tolist(), median.tolist(), strict=True):
        group, rank = divmod(which, ranks)
        members[group].append((rank, us))
        groups_of[rank].append(group)
    offset, queue, used = np.full(ranks, np.nan), deque([0]), set[int]()
    offset[0] = 0.0
    while queue:
        rank = queue.popleft()
        for group in sorted(set(groups_of[rank]) - used, key=lambda g: -len(members[g])):
            used.add(group)
            own = dict(members[group])[rank]
            for other, us in members[group]:
                if np.isnan(offset[other]):
                    offset[other] = offset[rank] + us - own
                    queue.append(other)
    known = np.flatnonzero(np.isfinite(offset))
    offset[known] = one_per_host(offset[known], np.zeros(len(known)), np.full(len(known), RESOLUTION_US))
    return offset


def _accounts(summaries: Sequence[RankSummary], parts: _Parts, offset: F64) -> tuple[tuple[RankAccount, ...], F64]:
    """Return each rank's account with its waits, and for how many µs other ranks waited for it."""
    if not len(parts.first):
        return tuple(msgspec.structs.replace(s.account, rank=s.rank) for s in summaries), np.zeros(len(summaries))
    last = np.maximum.reduceat(parts.start, parts.first)[parts.call]
    wait = np.minimum(last, parts.end) - parts.start
    transfer = np.maximum(parts.end - np.maximum(last, parts.start), 0.0)
    told = parts.count[parts.call] >= 2
    exposed, inside, accounts = np.zeros(len(wait)), np.zeros(len(wait), bool), []
    rows_of = np.split(np.argsort(parts.rank, kind="stable"), np.cumsum([len(s.kind) for s in summaries])[:-1])
    for column, (s, rows) in enumerate(zip(summaries, rows_of, strict=True)):
        shift = (s.origin_ns - summaries[0].origin_ns) / 1000.0 - offset[column]
        low, high = s.steps.start + shift, s.steps.end + shift
        inside[rows] = Intervals.union(low, high).covers(last[rows])
        rows = rows[inside[rows] & told[rows]]
        came, us = parts.start[rows], wait[rows]
        hidden = Intervals(s.hidden_start + shift, s.hidden_end + shift)
        exposed[rows] = np.maximum(us - hidden.within(came, came + us), 0.0)
        waiting = Intervals.union(came, came + us)
        moving = Intervals.union(parts.end[rows] - transfer[rows], parts.end[rows])
        moved = float(moving.within(low, high).sum())
        accounts.append(
            msgspec.structs.replace(
                s.account,
                rank=s.rank,
                wait_us=float((waiting | moving).within(low, high).sum()) - moved,
                transfer_us=moved,
                exposed_wait_us=min(float(exposed[rows].sum()), s.account.exposed_comm_us),
            )
            if len(rows)
            else msgspec.structs.replace(s.account, rank=s.rank)
        )
    return tuple(accounts), _late_us(parts, last, np.where(inside & told & ~parts.structural, exposed, 0.0))


def _late_us(parts: _Parts, last: F64, exposed: F64) -> F64:
    """Return for each rank the sum, over collectives that it entered last, of the other ranks' median exposed wait."""
    came_last = np.full(len(parts.first), -1, np.int64)
    rows = np.flatnonzero(parts.start == last)
    came_last[parts.call[rows]] = parts.rank[rows]
    ordered = exposed[np.lexsort((exposed, parts.call))]  # the last rank itself waits least
    others = parts.count - 1
    low, high = (parts.first + np.minimum(1 + middle // 2, others) for middle in (np.maximum(others - 1, 0), others))
    felt = (ordered[low] + ordered[high]) / 2
    return np.bincount(came_last, felt, int(parts.rank.max()) + 1).astype(np.float64)


def _detailed(parts: _Parts, late_us: F64) -> tuple[int, ...]:
    """Return the columns of the ranks to look at closely, ascending; at most `MOST_DETAILED`."""
    ranks = len(late_us)
    if ranks <= MOST_DETAILED:
        return tuple(range(ranks))
    size = np.zeros(int(parts.group.max(initial=-1)) + 1, np.int64)
    pair = np.unique(parts.group * ranks + parts.rank)
    np.add.at(size, pair // ranks, 1)
    members: dict[int, list[int]] = defaultdict(list)
    small: dict[int, list[int]] = defaultdict(list)
    for group, rank in zip((pair // ranks).tolist(), (pair % ranks).tolist(), strict=True):
        if size[group] <= _SMALL_GROUP:
            members[group].append(rank)
            small[rank].append(group)
    late = np.argsort(-late_us, kind="stable")[:_LATE_SEEDS]
    evenly = np.linspace(0, ranks - 1, MOST_DETAILED).astype(np.int64)
    chosen = set(late[:MOST_DETAILED].tolist())
    for seed in [*late.tolist(), *evenly[np.argsort(np.arange(len(evenly)) % 16, kind="stable")].tolist()]:
        near = {seed, *(rank for group in small[seed] for rank in members[group])}
        if len(chosen | near) <= MOST_DETAILED:
            chosen |= near
    return tuple(sorted(chosen))
