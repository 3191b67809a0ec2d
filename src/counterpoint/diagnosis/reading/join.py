"""Match the collectives of all ranks: find the rows of different ranks that belong to one collective.

Rows are matched by group and `Comms Id` or `Seq` where the profiler printed them, else by group and order. In the
latter case operations, sizes and the times between ends are aligned, so that a collective missing in one trace does not
shift the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from counterpoint.diagnosis.reading.comm_rows import CommRows
from counterpoint.trace.timeline import F64, I32, I64

# operations that one rank may end long before or after the others do
LOOSE_ENDS = ("broadcast", "reduce", "gather", "scatter", "send_recv", "all_to_all", "peer_copy", "notify")

_Key = tuple[str, tuple[int, ...] | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """Holds the matched collectives of a job: one collective per row, one rank per column; sorted by first start.

    `row` is the index into the rank's `CommRows`, -1 where it took no part (or its trace lacks it). start and end are
    on each rank's own clock, µs since the job's base; NaN where absent.
    """

    op: tuple[str, ...]
    group: tuple[str, ...]
    index: I64  # number of the collective within its group
    by: tuple[str, ...]  # how it was matched: comms_id | seq | order | none
    expected: I32  # number of ranks of the group whose traces were read
    row: I32  # [J, R]
    start: F64  # [J, R]
    end: F64  # [J, R]
    mismatched: int  # collectives matched by id whose operations or sizes disagree

    def __len__(self) -> int:
        return len(self.op)


def join(ranks: tuple[int, ...], rows: list[CommRows], base_us: list[float]) -> Joined:
    """Return the matched collectives of all `ranks` (ascending); `base_us` is added to each rank's times."""
    groups: dict[_Key, dict[int, I64]] = {}
    for column, table in enumerate(rows):
        for key, members in by_group(table).items():
            groups.setdefault(key, {})[column] = members
    found: list[tuple[_Key, str, dict[int, int]]] = []
    for key, columns in groups.items():
        found += _join_group(key, columns, rows, base_us)
    return _table(ranks, rows, base_us, found)


def by_group(table: CommRows) -> dict[_Key, I64]:
    """Return the rows of each process group in launch order, which is the same on every rank."""
    members: dict[_Key, list[int]] = {}
    when = np.where(np.isfinite(table.launch), table.launch, table.start)
    for row in np.argsort(when, kind="stable").tolist() if len(table) else []:
        peer = "peer copies" if table.op[row] == "peer_copy" else table.group[row]
        members.setdefault((peer, table.group_ranks[row]), []).append(row)
    return {key: np.array(value, np.int64) for key, value in members.items()}


def _join_group(
    key: _Key, columns: dict[int, I64], rows: list[CommRows], base_us: list[float]
) -> list[tuple[_Key, str, dict[int, int]]]:
    for by in ("comms_id", "seq"):
        keyed = {c: ids_of(rows[c], members, by) for c, members in columns.items()}
        if all(ids is not None for ids in keyed.values()):
            together: dict[Hashable, dict[int, int]] = {}
            for column, ids in keyed.items():
                for ident, row in zip(ids or (), columns[column].tolist(), strict=True):
                    together.setdefault(ident, {})[column] = row
            return [(key, by, members) for members in together.values()]
    return [(key, "order", members) for members in _by_order(columns, rows, base_us)]


def ids_of(table: CommRows, members: I64, by: str) -> list[Hashable] | None:
    """Return a key per row: id, operation, and the count of earlier rows with both; None if any row lacks an id.

    Return None, too, if all rows have one id, which is then the communicator's, not the collective's.
    """
    values: list[Hashable] = [
        table.comms_id[row] if by == "comms_id" else (int(table.seq[row]) if table.seq[row] >= 0 else None)
        for row in members.tolist()
    ]
    if any(value is None for value in values) or (len(values) > 2 and len(set(values)) == 1):
        return None
    seen: Counter[Hashable] = Counter()
    ids: list[Hashable] = []
    for value, row in zip(values, members.tolist(), strict=True):
        ident = (value, table.op[row])
        ids.append((*ident, seen[ident]))
        seen[ident] += 1
    return ids


def _by_order(columns: dict[int, I64], rows: list[CommRows], base_us: list[float]) -> list[dict[int, int]]:
    """Align every rank's collectives with the longest sequence, and insert collectives that this sequence lacks."""
    reference = max(columns, key=lambda c: (len(columns[c]), -c))
    together = [{reference: row} for row in columns[reference].tolist()]
    token = _tokens(rows[reference], columns[reference])
    end = rows[reference].end[columns[reference]] + base_us[reference]
    for column, members in columns.items():
        if column == reference:
            continue
        own_token, own_end = _tokens(rows[column], members), rows[column].end[members] + base_us[column]
        partner = align(token, end, own_token, own_end)
        lag = float(np.median(own_end[partner >= 0] - end[partner[partner >= 0]])) if (partner >= 0).any() else 0.0
        shift = 0  # elements inserted so far
        for i, (row, at) in enumerate(zip(members.tolist(), partner.tolist(), strict=True)):
            if at >= 0:
                together[at + shift][column] = row
                continue
            before = partner[:i][partner[:i] >= 0]
            place = (int(before[-1]) + 1 if len(before) else 0) + shift
            together.insert(place, {column: row})
            token.insert(place, own_token[i])
            end = np.insert(end, place, own_end[i] - lag)
            shift += 1
    return together


def _tokens(table: CommRows, members: I64) -> list[tuple[str, int]]:
    """Return, per row, facts that are equal on all ranks: operation, and bytes (-1 if ranks' bytes may differ)."""
    uneven = ("all_to_all", "send_recv", "unknown", "nccl")
    return [(table.op[r], -1 if table.op[r] in uneven else int(table.bytes[r])) for r in members.tolist()]


def align(reference: list[tuple[str, int]], reference_end: F64, other: list[tuple[str, int]], other_end: F64) -> I64:
    """Return the index of the element of `reference` that each element of `other` matches; -1: none.

    A dynamic programme runs over k = partner - own index in a band: matched elements must have equal tokens, and the
    difference of their ends should equal that of the match before, since clocks may differ, but not the times between
    ends (the cost of a deviation is bounded, so that a delay on a busy machine costs less than leaving an element out).
    To leave out an element of the reference costs one penalty, one of `other` two penalties, at any place. Where these
    times do not decide, as with even spacing, the alignment with the smaller difference of clocks wins.
    """
    n, m = len(reference), len(other)
    if not n or not m:
        return np.full(m, -1, np.int64)
    spacing = float(np.median(np.abs(np.diff(reference_end)))) if n > 1 else 1.0
    penalty = 0.25 * spacing + 1.0
    if reference == other and _same_rhythm(reference, other_end - reference_end, penalty):
        return np.arange(m, dtype=np.int64)
    low, high = -8, n - m + 8
    band = np.arange(low, high + 1)
    far = 1e15
    table = {t: i for i, t in enumerate(dict.fromkeys([*reference, *other]))}
    ref_token = np.array([table[t] for t in reference])
    cost = np.full((m, len(band)), far)
    back = np.full((m, len(band), 2), -1, np.int64)
    skip = np.maximum(band[:, None] - band[None, :], 0) * penalty
    skip[band[:, None] < band[None, :]] = far
    lag = np.full((m, len(band)), np.nan)
    for i in range(m):
        j = i + band
        valid = (j >= 0) & (j < n)
        valid[valid] = ref_token[j[valid]] == table[other[i]]
        lag[i, valid] = other_end[i] - reference_end[j[valid]]
        apart = 0.1 * penalty * np.minimum(np.abs(lag[i]) / max(spacing, 1.0), 1.0)
        start = np.where(valid, np.abs(j) * penalty + 2 * i * penalty + apart, far)
        best, source = start, np.full((len(band), 2), -1, np.int64)
        for before, moves in ((1, skip), (2, None)):
            if i < before:
                continue
            rhythm = np.minimum(np.abs(lag[i][:, None] - lag[i - before][None, :]), 1.5 * penalty)
            if moves is None:  # element i - 1 of `other` has no partner
                moves = np.where(band[:, None] + 1 == band[None, :], 2 * penalty, far)
            step = np.where(np.isfinite(rhythm), rhythm, far) + moves + cost[i - before][None, :]
            pick = step.argmin(axis=1)
            value = step[np.arange(len(band)), pick]
            better = valid & (value < best)
            best = np.where(better, value, best)
            source[better] = np.stack([np.full(better.sum(), i - before), pick[better]], axis=1)
        cost[i], back[i] = np.where(valid, best, far), source
    partner = np.full(m, -1, np.int64)
    own = np.arange(m)[:, None]
    tail = cost + 2 * (m - 1 - own) * penalty + np.maximum(n - 1 - own - band[None, :], 0) * penalty
    i, at = (int(v) for v in np.unravel_index(int(tail.argmin()), tail.shape))
    if tail[i, at] >= far:
        return partner
    while i >= 0:
        partner[i] = i + band[at]
        i, at = int(back[i, at, 0]), int(back[i, at, 1])
    return partner


def _same_rhythm(tokens: list[tuple[str, int]], lag: F64, penalty: float) -> bool:
    """Return whether equal sequences match one to one: differences of ends show that no rank lacks a collective.

    The differences of ends decide, except for operations that ranks need not end together (`LOOSE_ENDS`).
    """
    loose = any(op in LOOSE_ENDS for op, _ in tokens)
    return loose or bool((np.abs(np.diff(lag)) < penalty).all())


def _table(
    ranks: tuple[int, ...], rows: list[CommRows], base_us: list[float], found: list[tuple[_Key, str, dict[int, int]]]
) -> Joined:
    count, width = len(found), len(ranks)
    row = np.full((count, width), -1, np.int32)
    start, end = np.full((count, width), np.nan), np.full((count, width), np.nan)
    op, group, by, expected, mismatched = [], [], [], np.zeros(count, np.int32), 0
    index = np.zeros(count, np.int64)
    group_members: dict[_Key, set[int]] = {}
    for key, _, members in found:
        group_members.setdefault(key, set()).update(members)
    tokens = [_tokens(table, np.arange(len(table))) for table in rows]
    in_group: Counter[_Key] = Counter()
    for at, (key, how, members) in enumerate(found):
        for column, r in members.items():
            row[at, column] = r
            start[at, column] = rows[column].start[r] + base_us[column]
            end[at, column] = rows[column].end[r] + base_us[column]
        facts = {tokens[c][r] for c, r in members.items()}
        mismatched += len(facts) > 1
        first = next(iter(members.items()))
        op.append(rows[first[0]].op[first[1]])
        group.append(key[0])
        by.append(how if len(members) > 1 else "none")
        stated = key[1]
        expected[at] = len(group_members[key]) if stated is None else sum(r in stated for r in ranks)
        index[at] = in_group[key]
        in_group[key] += 1
    return Joined(op=tuple(op), group=tuple(group), index=index, by=tuple(by), expected=expected,
                  row=row, start=start, end=end, mismatched=mismatched)  # fmt: skip
