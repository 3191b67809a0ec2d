"""What a checker goes through: calls made one after the other on the same buffers, taken apart into single actions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from counterpoint.collectives.program import (
    COPY,
    Await,
    Batch,
    Copy,
    Flag,
    LocalCopy,
    Program,
    Record,
    Reduce,
    Signal,
    Step,
    Symmetric,
    Wait,
)
from counterpoint.errors import Misconfigured

__all__ = ["Action", "Consume", "Fill", "Lane", "Report", "Rounds", "Violation", "Word", "describe"]

Lane = tuple[int, int]  # rank, lane
Word = tuple[int, Flag]  # owner, flag


@dataclass(frozen=True, slots=True)
class Fill:
    """The caller writes the input of a round."""


@dataclass(frozen=True, slots=True)
class Consume:
    """The caller reads the output of a round."""


What: TypeAlias = Step | Signal | Wait | Fill | Consume


@dataclass(frozen=True, slots=True)
class Action:
    """The smallest thing that is done at once, in which round and by whose program."""

    round: int
    program: Program
    what: What

    @property
    def rank(self) -> int:
        return self.program.rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """One thing that can go wrong, and where."""

    kind: str  # deadlock | race | lost_signal | content | bounds | not_at_rest | malformed
    rank: int
    lane: int
    round: int
    step: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kind}: rank {self.rank}, lane {self.lane}, round {self.round}, {self.step}: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What was found. `visited`: actions of the one run of `check`, or states of all runs of `explore`."""

    visited: int
    violations: tuple[Violation, ...]

    @property
    def ok(self) -> bool:
        return not self.violations


class Rounds:
    """The actions of every lane of every rank, the caller's own reads and writes among them, on lane `COPY`."""

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
        )
        self.recorded: dict[tuple[int, int, int], tuple[Lane, int]] = {
            (action.rank, action.round, action.what.event): (lane, index)
            for lane, queue in self.lanes.items()
            for index, action in enumerate(queue)
            if isinstance(action.what, Record)
        }

    def violation(self, lane: Lane, action: Action, kind: str, reason: str) -> Violation:
        rank, number = lane
        return Violation(
            kind=kind, rank=rank, lane=number, round=action.round, step=describe(action.what), reason=reason
        )

    def malformed(self) -> list[Violation]:
        """Steps that make no sense, whatever the other ranks do."""
        found = []
        for index, programs in enumerate(self.programs):
            for program in programs:
                recorded: set[int] = set()
                for step in program.cycle():
                    recorded |= {step.event} if isinstance(step, Record) else set()
                    reason = _nonsense(step, program, recorded)
                    if reason:
                        action, lane = Action(index, program, step), (program.rank, step.lane)
                        found.append(self.violation(lane, action, "malformed", reason))
        return found

    def not_at_rest(self, words: frozenset[Word]) -> list[Violation]:
        """Words that are not at the end as they were at the beginning."""
        found = []
        for owner, flag in sorted(words ^ self.at_rest, key=str):
            last = self.lanes[owner, COPY][-1]
            state = "is still set" if (owner, flag) in words else "was taken and not given back"
            found.append(self.violation((owner, COPY), last, "not_at_rest", f"{describe(flag)} {state} at the end"))
        return found

    def stuck(self, position: dict[Lane, int]) -> list[Violation]:
        """Lanes that have not come to their end."""
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
        case Await(event) if event not in recorded:
            return "the event is not recorded before, so that this would be no wait at all"
        case Copy(peer) if peer == program.rank or not 0 <= peer < program.world_size:
            return f"rank {peer} is no peer of rank {program.rank} in a group of {program.world_size}"
        case Copy(_, source, target) | LocalCopy(source, target) if source.num_bytes != target.num_bytes:
            return "source and target have different sizes"
        case Reduce(sources, target) if any(source.num_bytes != target.num_bytes for source in sources):
            return "sources and target have different sizes"
    return None


def describe(what: What | Flag) -> str:
    """As one would say it."""
    match what:
        case Flag():
            return f"{what.buffer} {what.kind}[{what.peer}, {what.chunk}]"
        case Signal():
            return f"signal {describe(what.flag)} to rank {what.peer}"
        case Wait():
            return f"wait {describe(what.flag)}"
    return str(what)
