"""One program of all ranks out of the phases of a call over several hosts, for the checker and the clock.

What another library does between hosts is written down as the program that this package would run, on lanes of its
own: it begins when every rank of the rail has come, moves the data, and lets a rank go on when its part is there. That
is what is known of it. All phases inside a host use the same flags and staging, one after the other, as they do on one
channel of a communicator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from counterpoint.collectives.hierarchical import LEVELS, Grid, Level, Phase, scratch_bytes
from counterpoint.collectives.plan import DEFAULT, plan
from counterpoint.collectives.program import (
    BETWEEN,
    COPY,
    Await,
    Batch,
    Call,
    Copy,
    Flag,
    LocalCopy,
    Program,
    Record,
    Reduce,
    Signal,
    Span,
    Step,
    Tuning,
    Wait,
    joined,
)
from counterpoint.errors import Misconfigured

__all__ = ["flattened"]


def flattened(
    call: Call, grid: Grid, made: Sequence[Sequence[Phase]], *, tuning: Tuning = DEFAULT
) -> tuple[Program, ...]:
    """One program for each rank.

    Args:
        call: of all ranks.
        grid: where they are.
        made: the phases of every rank, as `phases_all` gives them.
        tuning: of the phases inside hosts.

    Raises:
        Misconfigured: the ranks of a group do not make the same calls.
    """
    for rank in range(grid.world_size):
        for level in LEVELS:
            first = grid.members(level, rank)[0]
            if [phase.call for phase in _of(made[rank], level)] != [phase.call for phase in _of(made[first], level)]:
                raise Misconfigured(f"ranks {first} and {rank} make different calls {level} hosts: make the same")
    return tuple(_flat(call, grid, rank, made, tuning) for rank in range(grid.world_size))


def _of(found: Sequence[Phase], level: Level) -> list[Phase]:
    return [phase for phase in found if phase.level == level]


def _flat(call: Call, grid: Grid, rank: int, made: Sequence[Sequence[Phase]], tuning: Tuning) -> Program:
    translations = [_Translation(grid, rank, number, made, tuning) for number in range(len(made[rank]))]
    steps = [step for translation in translations for step in translation.steps()]
    if any(translation.first_lane == BETWEEN for translation in translations):
        steps = [Record(_BEGUN, COPY), Await(_BEGUN, BETWEEN), *steps, Record(_ENDED, BETWEEN), Await(_ENDED, COPY)]
    kept = scratch_bytes(made[rank])
    return Program(call=call, tuning=tuning, rank=rank, steps=joined(tuple(steps)), scratch_bytes=kept)


_BEGUN, _ENDED = 0, 1  # events of the whole; phase k has those from _EVENTS * (k + 1) on, the first of them its end
_EVENTS = 1 << 16


class _Translation:
    """One phase in words of the whole: ranks of the grid, buffers of the call, events and lanes of its own."""

    def __init__(self, grid: Grid, rank: int, number: int, made: Sequence[Sequence[Phase]], tuning: Tuning) -> None:
        self.number, self.phase = number, made[rank][number]
        level = self.phase.level
        self.members = grid.members(level, rank)
        self.first_lane = COPY if level == "inside" else BETWEEN
        self.program = plan(self.phase.call, self.members.index(rank), tuning if level == "inside" else DEFAULT)
        # a group knows its calls by their order: the same call of a peer is its how-manieth of this level
        place = len(_of(made[rank][:number], level))
        self.theirs = [_of(made[peer], level)[place] for peer in self.members]
        self.awaited = any(number in phase.after for phase in made[rank])

    def steps(self) -> Iterator[Step]:
        """After what it waits for; its end is marked if it is waited for."""
        for number in self.phase.after:
            yield Await(_EVENTS * (number + 1), self.first_lane)
        for step in self.program.cycle():
            yield self.step(step)
        if self.awaited:
            yield Record(_EVENTS * (self.number + 1), self.first_lane)

    def step(self, step: Step) -> Step:
        lane = self.first_lane + step.lane
        match step:
            case Copy(peer, source, target):
                return Copy(self.members[peer], self.span(source), self.span(target, self.theirs[peer]), lane)
            case LocalCopy(source, target):
                return LocalCopy(self.span(source), self.span(target), lane)
            case Reduce(sources, target):
                return Reduce(tuple(map(self.span, sources)), self.span(target), lane)
            case Batch(operations):
                return Batch(tuple(map(self.operation, operations)), lane)
            case Record(event) | Await(event):
                return replace(step, event=_EVENTS * (self.number + 1) + 1 + event, lane=lane)

    def operation(self, operation: Signal | Wait) -> Signal | Wait:
        if isinstance(operation, Signal):
            return Signal(self.members[operation.peer], self.flag(operation.flag))
        return Wait(self.flag(operation.flag), None if operation.brings is None else self.span(operation.brings))

    def flag(self, flag: Flag) -> Flag:
        return replace(flag, peer=self.members[flag.peer])

    def span(self, span: Span, phase: Phase | None = None) -> Span:
        """Where it lies in the buffers of the whole; `phase`: of the rank that it belongs to, None: of this one."""
        if span.buffer == "staging":
            return span if self.first_lane == COPY else replace(span, buffer="network")
        phase = phase or self.phase
        there = phase.input if span.buffer == "input" else phase.output
        return Span(there.buffer, there.offset + span.offset, span.num_bytes)
