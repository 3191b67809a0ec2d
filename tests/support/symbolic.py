"""Model consecutive calls as single actions on symbolic memory, which records the origin of every byte.

A `CallSequence` splits the programs of all ranks into actions, and adds the caller's own reads and writes. `performed`
applies an action to the memory: a byte's value is the round, the rank and the input offset from which it came.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from counterpoint.collectives.program.calls import Buffer, Call, Span
from counterpoint.collectives.program.steps import (
    COPY,
    AwaitEvent,
    Batch,
    Copy,
    Flag,
    LocalCopy,
    Program,
    RecordEvent,
    Reduce,
    Signal,
    Step,
    Symmetric,
    Wait,
)
from counterpoint.errors import Misconfigured

Lane = tuple[int, int]  # rank, lane
Word = tuple[int, Flag]  # owner, flag
Value = tuple[tuple[int, int, int], ...] | None
"""Types a byte's content: (round, rank, offset in that rank's input), several if combined; None: not written."""
Memory = dict[tuple[int, Buffer], tuple[Value, ...]]


@dataclass(frozen=True, slots=True)
class Fill:
    """Marks that the caller writes the input of a round."""


@dataclass(frozen=True, slots=True)
class Consume:
    """Marks that the caller reads the output of a round."""


What: TypeAlias = Step | Signal | Wait | Fill | Consume


@dataclass(frozen=True, slots=True)
class Action:
    round: int
    program: Program
    what: What

    @property
    def rank(self) -> int:
        return self.program.rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    kind: str  # deadlock | race | lost_signal | content | bounds | not_at_rest | malformed
    rank: int
    lane: int
    round: int
    step: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kind}: rank {self.rank}, lane {self.lane}, round {self.round}, {self.step}: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProofReport:
    """Records the violations found. `visited` counts actions of the run of `check`, or states of a full search."""

    visited: int
    violations: tuple[Violation, ...]

    @property
    def ok(self) -> bool:
        return not self.violations


class CallSequence:
    """Holds the actions of every lane of every rank; the caller reads and writes on lane `COPY`."""

    def __init__(self, rounds: Sequence[Sequence[Program]], *, early_release: bool) -> None:
        if not rounds or not rounds[0] or len({len(programs) for programs in rounds}) != 1:
            raise Misconfigured("nothing to check: give at least one round, and in every round a program for each rank")
        self.programs = [tuple(programs) for programs in rounds]
        self.world_size = len(rounds[0])
        self.lanes: dict[Lane, list[Action]] = {}
        for index, programs in enumerate(self.programs):
            for program in programs:
                for lane, what in _actions(program, early_release):
                    self.lanes.setdefault((program.rank, lane), []).append(Action(index, program, what))
        buffers: tuple[Symmetric, ...] = ("staging", "output") if early_release else ("staging",)
        ranks = range(self.world_size)
        self.at_rest: frozenset[Word] = frozenset(
            (rank, Flag(buffer, "ready", peer)) for buffer in buffers for rank in ranks for peer in ranks
        ) | frozenset(
            (program.rank, flag)
            for programs in rounds
            for program in programs
            for flag in program.awaits_ready
            if flag.buffer == "mailbox"
        )
        self.recorded: dict[tuple[int, int, int], tuple[Lane, int]] = {
            (action.rank, action.round, action.what.event): (lane, index)
            for lane, queue in self.lanes.items()
            for index, action in enumerate(queue)
            if isinstance(action.what, RecordEvent)
        }

    def violation(self, lane: Lane, action: Action, kind: str, reason: str) -> Violation:
        rank, number = lane
        return Violation(
            kind=kind, rank=rank, lane=number, round=action.round, step=describe(action.what), reason=reason
        )

    def malformed(self) -> list[Violation]:
        """Return the violations by steps that are invalid whatever the other ranks do."""
        found = []
        for index, programs in enumerate(self.programs):
            for program in programs:
                recorded: set[int] = set()
                for step in program.cycle():
                    recorded |= {step.event} if isinstance(step, RecordEvent) else set()
                    reason = _nonsense(step, program, recorded)
                    if reason:
                        action, lane = Action(index, program, step), (program.rank, step.lane)
                        found.append(self.violation(lane, action, "malformed", reason))
        return found

    def not_at_rest(self, words: frozenset[Word]) -> list[Violation]:
        """Return a violation for each flag whose value at the end differs from that at the beginning."""
        found = []
        for owner, flag in sorted(words ^ self.at_rest, key=str):
            last = self.lanes[owner, COPY][-1]
            state = "is still set" if (owner, flag) in words else "was taken and not given back"
            found.append(self.violation((owner, COPY), last, "not_at_rest", f"{describe(flag)} {state} at the end"))
        return found

    def stuck(self, position: dict[Lane, int]) -> list[Violation]:
        return [
            self.violation(lane, queue[position[lane]], "deadlock", "waits for ever")
            for lane, queue in self.lanes.items()
            if position[lane] < len(queue)
        ]


def _actions(program: Program, early_release: bool) -> Iterator[tuple[int, What]]:
    yield COPY, Fill()
    after = program.release if early_release else ()
    for step in (*program.cycle(early_release=early_release), Consume(), *after):
        if isinstance(step, Batch):
            yield from ((step.lane, operation) for operation in step.operations)
        else:
            yield (COPY if isinstance(step, Consume) else step.lane), step


def _nonsense(step: Step, program: Program, recorded: set[int]) -> str | None:
    match step:
        case AwaitEvent(event) if event not in recorded:
            return "the event is not recorded before, so that this would be no wait at all"
        case Copy(peer) if peer == program.rank or not 0 <= peer < program.world_size:
            return f"rank {peer} is no peer of rank {program.rank} in a group of {program.world_size}"
        case Copy(_, source, target) | LocalCopy(source, target) if source.num_bytes != target.num_bytes:
            return "source and target have different sizes"
        case Reduce(sources, target) if any(source.num_bytes != target.num_bytes for source in sources):
            return "sources and target have different sizes"
    return None


def describe(what: What | Flag) -> str:
    match what:
        case Flag():
            return f"{what.buffer} {what.kind}[{what.peer}, {what.chunk}]"
        case Signal():
            return f"signal {describe(what.flag)} to rank {what.peer}"
        case Wait():
            return f"wait {describe(what.flag)}"
    return str(what)


@dataclass(frozen=True, slots=True)
class Access:
    rank: int
    span: Span
    write: bool

    def conflicts(self, other: Access) -> bool:
        mine, yours = self.span, other.span
        if not (self.write or other.write) or (self.rank, mine.buffer) != (other.rank, yours.buffer):
            return False
        return mine.offset < yours.offset + yours.num_bytes and yours.offset < mine.offset + mine.num_bytes

    def covers(self, other: Access) -> bool:
        mine, yours = self.span, other.span
        return mine.offset <= yours.offset and yours.offset + yours.num_bytes <= mine.offset + mine.num_bytes


def accesses(action: Action) -> list[Access]:
    """Return the bytes that `action` reads and writes, without empty spans."""
    rank, call = action.rank, action.program.call
    match action.what:
        case Copy(peer, source, target):
            found = [Access(rank, source, False), Access(peer, target, True)]
        case LocalCopy(source, target):
            found = [Access(rank, source, False), Access(rank, target, True)]
        case Reduce(sources, target):
            found = [*(Access(rank, source, False) for source in sources), Access(rank, target, True)]
        case Wait(_, Span() as brings):
            found = [Access(rank, brings, False)]
        case Fill():
            found = [Access(rank, span, True) for span, _ in _inputs(call, rank)]
        case Consume():
            found = [Access(rank, Span("output", 0, call.output_bytes(rank)), False)]
            found += [Access(rank, call.source_span(rank, rank), False)] if call.own == "consumer" else []
        case _:
            found = []
    return [access for access in found if access.span.num_bytes]


def out_of_bounds(access: Access, programs: Sequence[Program]) -> str | None:
    """Return why `access` is not within a buffer of this call; None if it is."""
    program, span = programs[access.rank], access.span
    size = {
        "input": program.call.input_bytes(access.rank), "output": program.call.output_bytes(access.rank),
        "staging": program.staging_bytes, "mailbox": program.mailbox_bytes, "scratch": program.scratch_bytes,
        "network": program.reduced_bytes("network"),
    }[span.buffer]  # fmt: skip
    if span.offset >= 0 and span.offset + span.num_bytes <= size:
        return None
    end = span.offset + span.num_bytes
    return f"bytes {span.offset} to {end} of {span.buffer} of rank {access.rank}, which has {size}"


def performed(memory: Memory, action: Action) -> tuple[Memory, str | None]:
    """Return `memory` after `action`, and, if the action reads the output, the first wrong byte in words or None."""
    rank = action.rank
    match action.what:
        case Copy(peer, source, target):
            return _written(memory, peer, target, _read(memory, rank, source)), None
        case LocalCopy(source, target):
            return _written(memory, rank, target, _read(memory, rank, source)), None
        case Reduce(sources, target):
            columns = zip(*(_read(memory, rank, source) for source in sources), strict=False)
            return _written(memory, rank, target, [_combined(column) for column in columns]), None
        case Fill():
            for span, base in _inputs(action.program.call, rank):
                values = [((action.round, rank, base + index),) for index in range(span.num_bytes)]
                memory = _written(memory, rank, span, values)
            return memory, None
        case Consume():
            return memory, _difference(memory, action)
    return memory, None


def _combined(column: Sequence[Value]) -> Value:
    return None if None in column else tuple(part for value in column if value is not None for part in value)


def _read(memory: Memory, rank: int, span: Span) -> list[Value]:
    there = memory.get((rank, span.buffer), ())
    values = list(there[span.offset : span.offset + span.num_bytes])
    return values + [None] * (span.num_bytes - len(values))


def _written(memory: Memory, rank: int, span: Span, values: Sequence[Value]) -> Memory:
    there = memory.get((rank, span.buffer), ())
    there += (None,) * (span.offset - len(there))
    return memory | {(rank, span.buffer): (*there[: span.offset], *values, *there[span.offset + len(values) :])}


def _inputs(call: Call, rank: int) -> list[tuple[Span, int]]:
    """Return the spans that hold the input of `rank`, each with its offset in the input."""
    spans = [(call.input_span(rank), 0)]
    if call.own == "in_place" and (call.layout.input, call.layout.output) == ("blocks", "blocks"):  # output in input
        spans.append((call.target_span(rank, rank), call.input_offset(rank, rank)))
    return spans


def expected(call: Call, rank: int, round_: int) -> list[Value]:
    """Return the expected bytes of the output of `rank`; None for an own block that the consumer reads from input."""
    return [
        None
        if sources == (rank,) and call.own == "consumer" and not call.reduces
        else tuple((round_, source, offset + index) for source in sources)
        for span, sources, offset in call.output_contents(rank)
        for index in range(span.num_bytes)
    ]


def _difference(memory: Memory, action: Action) -> str | None:
    want = expected(action.program.call, action.rank, action.round)
    have = _read(memory, action.rank, Span("output", 0, len(want)))
    for offset, (wanted, held) in enumerate(zip(want, have, strict=True)):
        if wanted is not None and wanted != held:
            return f"byte {offset} of output holds {_say(held)}; it must hold {_say(wanted)}"
    return None


def _say(value: Value) -> str:
    if value is None:
        return "nothing"
    return " + ".join(f"byte {offset} of rank {rank} of round {round_}" for round_, rank, offset in value)
