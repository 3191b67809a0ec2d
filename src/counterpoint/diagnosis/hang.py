"""Find which ranks have not entered a collective that hangs, from dumps of NCCL's flight recorder.

In each process group the collectives of all ranks have the same sequence numbers. A group is stuck in the first one
that not all of its ranks have completed: ranks that have entered it wait for the others. A rank that is missing in one
group may be waiting in another group, which then explains the hang.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal

from counterpoint.errors import BadTrace
from counterpoint.records.diagnosis import ranks_in_words
from counterpoint.records.hang import CallState, CollectiveCall, GroupState, Hang, Mismatch, RankState
from counterpoint.trace.flight_recorder import FlightDump, FlightEntry, read_dump

_ORDER: tuple[CallState, ...] = ("scheduled", "started", "completed")
_SAME_SIZE = re.compile(r"_?(all_?reduce|broadcast|reduce|all_?gather|reduce_scatter)(?!_v)|barrier")  # on all ranks
_PENDING_SHOWN = 16
_ONE_ORDER = (
    "Let kernels of all groups start in one order: NCCL_LAUNCH_ORDER_IMPLICIT=1 (NCCL 2.26 or newer), or one "
    "collective after the other; or give each fewer CTAs (max_ctas), so that all fit"
)


def diagnose_hang(paths: Sequence[Path]) -> Hang:
    """Read a job's dumps and find which ranks have not entered a collective; raise `BadTrace` for a bad dump."""
    return find_hang([read_dump(path) for path in paths])


def find_hang(dumps: Sequence[FlightDump]) -> Hang:
    """Find which ranks have not entered a collective; raise `BadTrace` for no dump, or two dumps of one rank."""
    if not dumps:
        raise BadTrace("no flight-recorder dump")
    by_rank: dict[int, FlightDump] = {}
    for dump in sorted(dumps, key=lambda d: d.rank):
        if dump.rank in by_rank:
            raise BadTrace(f"rank {dump.rank} again, as in {by_rank[dump.rank].path}", path=dump.path)
        by_rank[dump.rank] = dump
    groups = [_group(name, ranks, by_rank) for name, ranks in _groups(by_rank)]
    waiting = {rank for group in groups for rank in group.waiting}
    groups.sort(key=lambda group: _guilt(group, waiting))
    known = {rank for group in groups for rank in group.ranks}
    pending = _pending(by_rank)
    versions = sorted({d.version for d in by_rank.values() if d.version is not None})
    notes = list(pending)
    if len(versions) > 1:
        notes.append(f"dumps of different versions: {', '.join(versions)}")
    if cut := [d.rank for d in by_rank.values() if not d.whole]:
        notes.append(
            f"older entries were overwritten on {ranks_in_words(cut)}: TORCH_FR_BUFFER_SIZE was too small for all"
        )
    return Hang(
        files=tuple(d.path for d in by_rank.values()),
        version=versions[0] if versions else None,
        ranks=tuple(by_rank),
        missing_dumps=tuple(sorted(known - by_rank.keys())),
        verdict=_verdict(groups, waiting, pending),
        groups=tuple(groups),
        notes=tuple(notes),
    )


def _groups(by_rank: dict[int, FlightDump]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the name and the ranks of every process group.

    Groups with one name and different ranks are distinct, as after a split. A group whose ranks no dump states has the
    ranks that recorded calls in it.
    """
    found: dict[tuple[str, tuple[int, ...]], None] = {}
    for dump in by_rank.values():
        for name, (_, ranks) in dump.groups.items():
            found[name, tuple(sorted(ranks))] = None
    named = {name for name, _ in found}
    unnamed: dict[str, list[int]] = defaultdict(list)
    for dump in by_rank.values():
        for name in {e.group for e in dump.entries} - named:
            unnamed[name].append(dump.rank)
    return [*found, *((name, tuple(ranks)) for name, ranks in unnamed.items())]


@dataclass(frozen=True, slots=True)
class _Progress:
    """Holds how far one rank has got in the collectives of one process group.

    `calls` and `state` map a sequence number to its entries, and to the state of the least advanced one.
    `scheduled`, `started` and `completed` are the last numbers in that state; None: unknown, or none yet. `whole`: the
    recorder overwrote no entry.
    """

    calls: dict[int, list[FlightEntry]]
    state: dict[int, CallState]
    scheduled: int | None
    started: int | None
    completed: int | None
    whole: bool

    def entries(self) -> Iterator[FlightEntry]:
        """Return an iterator over the entries of all calls."""
        return (entry for entries in self.calls.values() for entry in entries)


def _progress(dump: FlightDump, group: str) -> _Progress:
    calls: dict[int, list[FlightEntry]] = defaultdict(list)
    for entry in dump.entries:
        if entry.group == group and not entry.is_p2p:
            calls[entry.seq].append(entry)
    state = {seq: _ORDER[min(_ORDER.index(e.state) for e in entries)] for seq, entries in calls.items()}
    enqueued, started, completed = dump.last.get(group, (None, None, None))
    return _Progress(
        calls=dict(calls),
        state=state,
        scheduled=_latest(enqueued, state),
        started=_latest(started, [seq for seq, s in state.items() if s != "scheduled"]),
        completed=_latest(completed, [seq for seq, s in state.items() if s == "completed"]),
        whole=dump.whole,
    )


def _latest(stated: int | None, seen: Sequence[int] | dict[int, CallState]) -> int | None:
    return max([*seen, *([] if stated is None else [stated])], default=None)


def _group(name: str, ranks: tuple[int, ...], by_rank: dict[int, FlightDump]) -> GroupState:
    progress = {rank: _progress(by_rank[rank], name) for rank in ranks if rank in by_rank}
    seq = _stuck(progress)
    waiting: list[int] = []
    missing: list[int] = []
    if seq is not None:
        waiting = [r for r, p in progress.items() if p.state.get(seq, "completed") != "completed"]
        missing = [r for r, p in progress.items() if _never_entered(p, seq)]
    stated = (d.groups[name][0] for d in by_rank.values() if name in d.groups)
    described = next(stated, None) or next((e.description for p in progress.values() for e in p.entries()), "")
    return GroupState(
        name=name,
        description="" if described == "undefined" else described,
        ranks=ranks,
        unrecorded=tuple(r for r in ranks if r not in by_rank),
        stuck=None if seq is None else _call(next(p.calls[seq][-1] for p in progress.values() if seq in p.calls)),
        waiting=tuple(waiting),
        missing=tuple(missing),
        states=tuple(_rank_state(r, p) for r, p in progress.items()),
        mismatches=_mismatches(progress, seq),
    )


def _stuck(progress: dict[int, _Progress]) -> int | None:
    """Return the sequence number of the first collective that some rank has entered but not all have completed.

    None if every collective that a rank has entered was completed by all.
    """
    unfinished = [seq for p in progress.values() for seq, state in p.state.items() if state != "completed"]
    recorded = sorted({seq for p in progress.values() for seq in p.calls})
    behind = [bisect_right(recorded, p.scheduled) for p in progress.values() if p.scheduled is not None]
    if any(p.scheduled is None and p.whole for p in progress.values()):
        behind.append(0)
    return min([*unfinished, *(recorded[i] for i in behind if i < len(recorded))], default=None)


def _never_entered(p: _Progress, seq: int) -> bool:
    """Return whether a rank has surely not entered collective `seq`; False if overwritten entries leave that open."""
    return p.scheduled < seq if p.scheduled is not None else p.whole


def _rank_state(rank: int, p: _Progress) -> RankState:
    last = max(p.calls, default=None)
    return RankState(
        rank=rank,
        scheduled=p.scheduled,
        started=p.started,
        completed=p.completed,
        last_operation=None if last is None else p.calls[last][-1].operation,
        last_state=None if last is None else p.state[last],
        last_frame=None if last is None else p.calls[last][-1].frame,
    )


def _call(entry: FlightEntry) -> CollectiveCall:
    return CollectiveCall(
        seq=entry.seq,
        operation=entry.operation,
        input_sizes=entry.input_sizes,
        output_sizes=entry.output_sizes,
        dtypes=tuple(dict.fromkeys((*entry.input_dtypes, *entry.output_dtypes))),
        frame=entry.frame,
    )


def _mismatches(progress: dict[int, _Progress], stuck: int | None) -> tuple[Mismatch, ...]:
    """Return how ranks' calls differ in the first collective, from number `stuck` on, that ranks call differently.

    Later collectives are not compared: after one extra or missing call, all later calls differ.
    """
    if stuck is None:
        return ()
    for seq in sorted({s for p in progress.values() for s in p.calls if s >= stuck}):
        called = {r: p.calls[seq] for r, p in progress.items() if seq in p.calls}
        found = _compared(seq, called)
        if found:
            return tuple(found)
    return ()


def _compared(seq: int, called: dict[int, list[FlightEntry]]) -> list[Mismatch]:
    kinds: tuple[Literal["operation", "size", "dtype"], ...] = ("operation", "size", "dtype")
    for what in kinds:
        signature = {r: tuple(_signature(e, what) for e in entries) for r, entries in called.items()}
        count = Counter(signature.values())
        if len(count) < 2:
            continue
        usual = count.most_common(1)[0][0]
        example = next(r for r in called if signature[r] == usual)
        odd: dict[object, list[int]] = defaultdict(list)
        for rank, own in signature.items():
            if own != usual:
                odd[own].append(rank)
        return [
            Mismatch(
                seq=seq,
                what=what,
                ranks=tuple(ranks),
                theirs=_call(called[ranks[0]][-1]),
                others=_call(called[example][-1]),
            )
            for ranks in odd.values()
        ]
    return []


def _signature(entry: FlightEntry, what: str) -> object:
    """Return a call's operation, sizes or dtypes (`what`), in a form that must be equal on all ranks."""
    if what == "operation":
        return entry.operation
    if not _SAME_SIZE.match(entry.operation):
        return None
    if what == "size":
        return tuple(sum(math.prod(s) for s in sizes) for sizes in (entry.input_sizes, entry.output_sizes))
    return frozenset(entry.input_dtypes), frozenset(entry.output_dtypes)


def _pending(by_rank: dict[int, FlightDump]) -> list[str]:
    """Return a line of text on each unfinished send and receive, at most `_PENDING_SHOWN` lines."""
    said = []
    for dump in by_rank.values():
        for entry in dump.entries:
            if entry.is_p2p and entry.state != "completed" and entry.operation.startswith(("send", "recv")):
                where = f" in {entry.frame}" if entry.frame else ""
                said.append(f"rank {dump.rank}: {entry.operation} (ranks of group {entry.group}) has not ended{where}")
    return said[:_PENDING_SHOWN]


def _guilt(group: GroupState, waiting: set[int]) -> tuple[int, int]:
    """Return a sort key by which process groups that explain the hang better come first; of equal ones, larger ones."""
    if group.stuck is None:
        return 9, 0
    if group.mismatches:
        place = 0
    elif set(group.missing) - waiting:
        place = 1
    elif not group.missing and group.unrecorded:
        place = 2
    elif not group.missing:
        place = 3
    else:
        place = 4  # the missing ranks of this group wait in another group
    return place, -len(group.ranks)


def _verdict(groups: list[GroupState], waiting: set[int], pending: list[str]) -> str:
    if not groups or groups[0].stuck is None:
        if pending:
            return f"No collective hangs; {len(pending)} sends or receives have not ended: {pending[0]}."
        return "Nothing hangs: every recorded rank has completed all collectives that any of them has entered."
    group = groups[0]
    stuck = group.stuck
    assert stuck is not None
    where = f"{stuck.operation} #{stuck.seq} of {_name(group)}"
    if group.mismatches:
        m = group.mismatches[0]
        return f"The ranks disagree at #{m.seq} of {_name(group)}: {_disagreement(m)}."
    guilty = sorted(set(group.missing) - waiting)
    if guilty:
        has = "has" if len(guilty) == 1 else "have"
        left = [s for s in group.states if s.rank in guilty and s.scheduled is not None]
        after = f" after {left[0].last_operation} #{left[0].scheduled}" if left and left[0].last_operation else ""
        at = f" (called in {left[0].last_frame})" if left and left[0].last_frame else ""
        others = ranks_in_words(group.waiting) if group.waiting else "the others"
        wait = "waits" if len(group.waiting) == 1 else "wait"
        return f"{ranks_in_words(guilty).capitalize()} {has} not entered {where}{after}{at}; {others} {wait} for it."
    if group.missing:
        return _cycle(groups)
    if group.unrecorded:
        return (
            f"All recorded ranks have entered {where} and wait; {ranks_in_words(group.unrecorded)} left no dump: it "
            "has ended, or hangs without a watchdog."
        )
    if text := _held_up_by_each_other(groups):
        return text
    return (
        f"All {len(group.ranks)} ranks have entered {where} alike, and {ranks_in_words(group.waiting)} have not "
        "completed it: a link, a GPU, or a kernel before it on the same stream."
    )


def _held_up_by_each_other(groups: list[GroupState]) -> str | None:
    """Return the verdict on groups whose collectives all ranks have entered, but that do not start on all; else None.

    The kernels of one group hold SMs (or a hardware queue) for which the kernels of another group wait, on one rank in
    one order, on another rank in the other.
    """
    stuck = [(g, g.stuck) for g in groups if g.stuck and not (g.missing or g.unrecorded or g.mismatches)]
    started = {g.name: {s.rank for s in g.states if (s.started or 0) >= call.seq} for g, call in stuck}
    for (g, one), (h, other) in combinations(stuck, 2):
        both = set(g.waiting) & set(h.waiting)
        first, second = (sorted(both & (started[a.name] - started[b.name])) for a, b in ((g, h), (h, g)))
        if first and second:
            return (
                f"Two groups hold each other up on the GPUs: {one.operation} #{one.seq} of {_name(g)} runs on "
                f"{ranks_in_words(first)}, {other.operation} #{other.seq} of {_name(h)} on {ranks_in_words(second)}, "
                f"and neither starts on the others: SMs or hardware queues run out. {_ONE_ORDER}."
            )
    if len({g.ranks for g, _ in stuck}) < 2 or not any(set(stuck[0][0].waiting) & set(h.waiting) for h, _ in stuck[1:]):
        return None
    if all(set(g.waiting) <= started[g.name] for g, _ in stuck):
        return None  # all kernels run
    parts = "; ".join(f"{call.operation} #{call.seq} of {_name(g)}" for g, call in stuck[:4])
    return (
        f"All ranks have entered the collectives of {len(stuck)} groups alike, and none ends: {parts}. Their kernels "
        f"may hold each other up, since SMs or hardware queues run out. {_ONE_ORDER}. TORCH_NCCL_ENABLE_TIMING=1 "
        "records which have started."
    )


def _cycle(groups: list[GroupState]) -> str:
    """Return the verdict on a deadlock across groups: ranks that one group waits for wait in another group."""
    stuck = [(g, g.stuck) for g in groups if g.stuck is not None and g.missing]
    parts = [
        f"{ranks_in_words(g.waiting)} in {call.operation} #{call.seq} of {_name(g)} for {ranks_in_words(g.missing)}"
        for g, call in stuck[:4]
    ]
    return f"Ranks wait for each other, in different groups: {'; '.join(parts)}."


def _disagreement(m: Mismatch) -> str:
    def said(call: CollectiveCall) -> str:
        if m.what == "operation":
            return call.operation
        if m.what == "dtype":
            return f"{call.operation} of {', '.join(call.dtypes)}"
        return f"{call.operation} from {_shapes(call.input_sizes)} to {_shapes(call.output_sizes)}"

    where = f" ({m.theirs.frame})" if m.theirs.frame else ""
    return f"{ranks_in_words(m.ranks)} called {said(m.theirs)}{where}, others {said(m.others)}"


def _shapes(sizes: tuple[tuple[int, ...], ...]) -> str:
    shown = ", ".join(str(list(size)) for size in sizes[:3])
    return shown + (f" and {len(sizes) - 3} more" if len(sizes) > 3 else "")


def _name(group: GroupState) -> str:
    return f"group {group.name}" + (f" ({group.description})" if group.description else "")
