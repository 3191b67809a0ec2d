"""Turns on the links: who tells whom, and when there are none."""

from collections.abc import Iterator

import pytest

from counterpoint.collectives.program.calls import Call
from counterpoint.collectives.program.operations import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    plan_all,
    reduce_scatter,
)
from counterpoint.collectives.program.steps import Batch, Copy, Program, Signal, Tuning, Wait

ALWAYS = Tuning(turn_bytes=1)


def operations(program: Program) -> Iterator[Signal | Wait]:
    """Those of turns, in their order."""
    for step in program.cycle():
        for operation in step.operations if isinstance(step, Batch) else ():
            if operation.flag.kind == "turn":
                yield operation


def pushers(programs: tuple[Program, ...], receiver: int) -> list[int]:
    """Who pushes to a receiver, as the signals of its turn pass from one to the next."""
    order = [next(program.rank for program in programs if not waits(program, receiver) and pushes(program, receiver))]
    while told := [
        op.peer for op in operations(programs[order[-1]]) if isinstance(op, Signal) and op.flag.peer == receiver
    ]:
        order += told[:1]
    return order


def waits(program: Program, receiver: int) -> bool:
    return any(isinstance(op, Wait) and op.flag.peer == receiver for op in operations(program))


def pushes(program: Program, receiver: int) -> bool:
    return any(isinstance(step, Copy) and step.peer == receiver for step in program.steps)


@pytest.mark.parametrize("world_size", [3, 4, 8])
@pytest.mark.parametrize("make", [all_gather, reduce_scatter])
def test_the_link_goes_from_hand_to_hand(world_size: int, make: object) -> None:
    """Into every rank the one before it pushes first, then the one before that, and so on."""
    assert callable(make)
    programs = plan_all(make(world_size, 4096), ALWAYS)
    for receiver in range(world_size):
        wanted = [(receiver - distance) % world_size for distance in range(1, world_size)]
        assert pushers(programs, receiver) == wanted


@pytest.mark.parametrize("world_size", [3, 4, 8])
def test_every_turn_that_is_given_is_taken(world_size: int) -> None:
    programs = plan_all(all_reduce(world_size, 64 * world_size), Tuning(chunk_bytes=16, turn_bytes=16))
    given = sorted(
        (op.peer, str(op.flag)) for program in programs for op in operations(program) if isinstance(op, Signal)
    )
    taken = sorted(
        (program.rank, str(op.flag)) for program in programs for op in operations(program) if isinstance(op, Wait)
    )
    assert given == taken
    assert given


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(all_gather(2, 4096), id="two-never-meet"),
        pytest.param(all_gather(4, [4096, 4096, 4096, 16]), id="sizes-differ"),
        pytest.param(all_to_all([[16 * (source + target) for target in range(4)] for source in range(4)]), id="uneven"),
        pytest.param(all_gather(4, 0), id="nothing"),
        pytest.param(broadcast(4, 4096), id="not-all-push"),
    ],
)
def test_where_none_are_needed_there_are_none(call: Call) -> None:
    assert [list(operations(program)) for program in plan_all(call, ALWAYS)] == [[]] * call.world_size


def test_small_chunks_take_none() -> None:
    programs = plan_all(reduce_scatter(3, 80), Tuning(last_bytes=16, turn_bytes=32))
    turns = [sum(isinstance(op, Wait) for op in operations(program)) for program in programs]
    assert turns == [1, 1, 1]
