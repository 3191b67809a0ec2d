"""Programs with one thing wrong: what a checker has to catch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from counterpoint.collectives.program.calls import Span
from counterpoint.collectives.program.steps import (
    AwaitEvent,
    Batch,
    Copy,
    LocalCopy,
    Program,
    RecordEvent,
    Reduce,
    Signal,
    Step,
    Wait,
)

PARTS = ("release", "steps", "finish")


@dataclass(frozen=True)
class Mutant:
    kind: str  # remove | change | swap
    steps: tuple[Step, ...]  # the step, and what it was changed to or swapped with
    where: str
    program: Program


def mutants(program: Program) -> Iterator[Mutant]:
    for part in PARTS:
        steps = _single(getattr(program, part))
        for index, step in enumerate(steps):
            before, after = steps[:index], steps[index + 1 :]
            where = f"rank {program.rank}, {part}[{index}]"
            yield Mutant("remove", (step,), where, _with(program, part, before + after))
            for changed in _changed(step, program.world_size):
                yield Mutant("change", (step, changed), where, _with(program, part, [*before, changed, *after]))
            if after and order_matters(step, after[0]):
                swapped = [*before, after[0], step, *after[1:]]
                yield Mutant("swap", (step, after[0]), where, _with(program, part, swapped))


def order_matters(first: Step, second: Step) -> bool:
    """Whether the second of two neighbours relies on the first.

    A signal may always come later, a wait for one rank may change places with a push to another, and what is on two
    lanes is in no order. Turns cost time and nothing else.
    """
    if first.lane != second.lane:
        return False
    match first, second:
        case Copy(), Batch((Signal(peer, flag),)):
            return first.peer == peer and flag.kind == "arrived"
        case Batch((Wait(flag, brings),)), Copy():
            if flag.kind == "ready":
                return flag.peer == second.peer
            return brings is not None and _overlap(brings, second.source)
        case (Batch((Wait(),)), Reduce()) | (Reduce(), RecordEvent()) | (AwaitEvent(), Copy()):
            return True
        case Reduce(), Batch((Signal(),)):
            return True
    return False


def _overlap(one: Span, other: Span) -> bool:
    return (
        one.buffer == other.buffer
        and one.offset < other.offset + other.num_bytes
        and other.offset < one.offset + one.num_bytes
    )


def _single(steps: tuple[Step, ...]) -> list[Step]:
    single: list[Step] = []
    for step in steps:
        single += [Batch((op,), step.lane) for op in step.operations] if isinstance(step, Batch) else [step]
    return single


def _with(program: Program, part: str, steps: list[Step]) -> Program:
    """A new object: nothing that was cached from the right program stays."""
    parts: dict[str, Any] = {part: tuple(steps)}
    return replace(program, **parts)


def _changed(step: Step, world_size: int) -> Iterator[Step]:
    match step:
        case Copy(peer, source, target):
            yield replace(step, peer=(peer + 1) % world_size)
            yield from (replace(step, source=span) for span in _moved(source))
            yield from (replace(step, target=span) for span in _moved(target))
        case LocalCopy(source, target):
            yield from (replace(step, source=span) for span in _moved(source))
            yield from (replace(step, target=span) for span in _moved(target))
        case Reduce(sources, target):
            yield replace(step, sources=sources[1:])
            yield replace(step, sources=tuple(reversed(sources)))
            yield from (replace(step, target=span) for span in _moved(target))
        case Batch(operations):
            for changed in _changed_operation(operations[0], world_size):
                yield replace(step, operations=(changed,))


def _moved(span: Span) -> Iterator[Span]:
    yield replace(span, offset=span.offset + 1)
    yield replace(span, num_bytes=span.num_bytes - 1)


def _changed_operation(operation: Signal | Wait, world_size: int) -> Iterator[Signal | Wait]:
    flag = operation.flag
    yield replace(operation, flag=replace(flag, chunk=flag.chunk + 1))
    yield replace(operation, flag=replace(flag, kind="arrived" if flag.kind == "ready" else "ready"))
    yield replace(operation, flag=replace(flag, peer=(flag.peer + 1) % world_size))
    if isinstance(operation, Signal):
        yield replace(operation, peer=(operation.peer + 1) % world_size)
