"""Join the phases of a call over several hosts into one program for each rank, for the checker and the clock.

A collective of another library between hosts is modelled as the program that this package would run, on lanes of its
own: it begins when every rank of the rail has made the call, moves the data, and lets a rank go on when its part has
arrived. All phases inside a host use the same flags and staging in turn, as on one channel of a communicator.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from counterpoint.collectives.multihost.phases import Grid, Level, Phase, phases, scratch_bytes
from counterpoint.collectives.program.calls import Call, Span
from counterpoint.collectives.program.operations import (
    DEFAULT,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    plan,
    reduce_scatter,
)
from counterpoint.collectives.program.steps import (
    BETWEEN,
    COPY,
    HERE,
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
    Tuning,
    Wait,
    merge_batches,
)
from counterpoint.errors import Misconfigured

LEVELS: tuple[Level, ...] = ("inside", "between", "here")


def phases_all(call: Call, grid: Grid, *, slice_bytes: int | None = None) -> tuple[tuple[Phase, ...], ...]:
    return tuple(phases(call, grid, rank, slice_bytes=slice_bytes) for rank in range(grid.world_size))


def flatten(
    call: Call, grid: Grid, made: Sequence[Sequence[Phase]], *, tuning: Tuning = DEFAULT
) -> tuple[Program, ...]:
    """Return one program for each rank."""
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
        steps = [
            RecordEvent(_BEGUN, COPY),
            AwaitEvent(_BEGUN, BETWEEN),
            *steps,
            RecordEvent(_ENDED, BETWEEN),
            AwaitEvent(_ENDED, COPY),
            *(AwaitEvent(translation.end, COPY) for translation in translations if translation.first_lane == HERE),
        ]
    kept = scratch_bytes(made[rank])
    return Program(call=call, tuning=tuning, rank=rank, steps=merge_batches(tuple(steps)), scratch_bytes=kept)


_BEGUN, _ENDED = 0, 1  # events of the whole program; phase k has those from _EVENTS * (k + 1) on, first its end
_EVENTS = 1 << 16
_FIRST_LANES = {"inside": COPY, "between": BETWEEN, "here": HERE}


class _Translation:
    """Translates the program of one phase: to ranks of the grid, buffers of the whole call, own events and lanes."""

    def __init__(self, grid: Grid, rank: int, number: int, made: Sequence[Sequence[Phase]], tuning: Tuning) -> None:
        self.number, self.phase = number, made[rank][number]
        level = self.phase.level
        self.members = grid.members(level, rank)
        self.first_lane = _FIRST_LANES[level]
        self.end = _EVENTS * (number + 1)
        self.program = plan(self.phase.call, self.members.index(rank), tuning if level == "inside" else DEFAULT)
        # a group knows its calls by their order: the same call of a peer has the same place on this level
        place = len(_of(made[rank][:number], level))
        self.theirs = [_of(made[peer], level)[place] for peer in self.members]
        self.awaited = level == "here" or any(number in phase.after for phase in made[rank])

    def steps(self) -> Iterator[Step]:
        for number in self.phase.after:
            yield AwaitEvent(_EVENTS * (number + 1), self.first_lane)
        if self.phase.level == "here":
            yield Reduce(self.phase.summands(), self.phase.output, HERE)
        else:
            yield from map(self.step, self.program.cycle())
        if self.awaited:
            yield RecordEvent(self.end, self.first_lane)

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
            case RecordEvent(event) | AwaitEvent(event):
                return replace(step, event=_EVENTS * (self.number + 1) + 1 + event, lane=lane)

    def operation(self, operation: Signal | Wait) -> Signal | Wait:
        if isinstance(operation, Signal):
            return Signal(self.members[operation.peer], self.flag(operation.flag))
        return Wait(self.flag(operation.flag), None if operation.brings is None else self.span(operation.brings))

    def flag(self, flag: Flag) -> Flag:
        return replace(flag, peer=self.members[flag.peer])

    def span(self, span: Span, phase: Phase | None = None) -> Span:
        """Return a span in the buffers of the whole call; `phase` is that of the rank that owns it, None: this rank."""
        if span.buffer == "staging":
            return span if self.first_lane == COPY else replace(span, buffer="network")
        phase = phase or self.phase
        there = phase.input if span.buffer == "input" else phase.output
        return Span(there.buffer, there.offset + span.offset, span.num_bytes)


GRIDS = [Grid(hosts=hosts, local=local) for hosts, local in ((1, 3), (3, 1), (2, 2), (2, 3), (3, 2))]


SLICE = 32  # bytes: several slices and a rest in small calls


def cases(n: int) -> dict[str, Call]:
    return {
        "all_gather": all_gather(n, 3),
        "all_gather, out of place": all_gather(n, 3, own="copy"),
        "all_gather, own block left": all_gather(n, 3, own="consumer"),
        "reduce_scatter": reduce_scatter(n, 5),
        "all_reduce": all_reduce(n, 40 * n + 3),
        "all_reduce, out of place": all_reduce(n, 40 * n, own="consumer"),
        "all_reduce, small": all_reduce(n, 3),
        "all_to_all": all_to_all([[3] * n] * n),
        "all_to_all, own block left": all_to_all([[3] * n] * n, own="consumer"),
        "broadcast": broadcast(n, 40 * n + 3, root=n - 1),
        "broadcast, small": broadcast(n, 3),
        "barrier": barrier(n),
    }


NAMES = list(cases(2))


def whole(call: Call, grid: Grid, tuning: Tuning = Tuning(), *, slice_bytes: int | None = SLICE) -> tuple[Program, ...]:  # noqa: B008
    return flatten(call, grid, phases_all(call, grid, slice_bytes=slice_bytes), tuning=tuning)
