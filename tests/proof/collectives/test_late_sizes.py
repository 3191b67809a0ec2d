"""Programs that are filled in late are proved as the all_to_all with split sizes that they become."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.collectives.program.late_sizes import LATE_SIZES, LateSizes, PushedBlock, filled_in, late_sizes_call
from counterpoint.collectives.program.operations import all_to_all, plan
from counterpoint.collectives.program.steps import (
    COPY,
    REDUCE,
    AwaitEvent,
    Batch,
    Copy,
    Program,
    RecordEvent,
    Signal,
    Step,
)
from counterpoint.collectives.proof.check import check
from counterpoint.errors import Misconfigured

ROOM, ROW_BYTES = 3, 2


def blocks(counts: list[list[int]], rank: int) -> list[PushedBlock]:
    """Where an all_to_all with split sizes takes and puts its blocks."""
    sources = [0, *accumulate(counts[rank])]
    return [
        PushedBlock(sources[peer], sum(row[peer] for row in counts[:rank]), counts[rank][peer])
        for peer in range(len(counts))
    ]


def filled(counts: list[list[int]]) -> list[Program]:
    n = len(counts)
    call = late_sizes_call(n, n * ROOM * ROW_BYTES)
    real = all_to_all([[size * ROW_BYTES for size in row] for row in counts], own="consumer")
    made = [filled_in(plan(call, rank, LATE_SIZES), blocks(counts, rank), ROW_BYTES) for rank in range(n)]
    return [replace(program, call=real) for program in made]


def on_two_lanes(program: Program) -> Program:
    """The pushes on a stream of their own, as on a GPU; what the host sees at its ends are events here."""
    pushes: list[Step] = [replace(step, lane=REDUCE) for step in program.steps]
    steps = RecordEvent(0, COPY), AwaitEvent(0, REDUCE), *pushes, RecordEvent(1, REDUCE)
    return replace(program, steps=steps, finish=(*program.finish, AwaitEvent(1, COPY)))


@st.composite
def rounds(draw: st.DrawFn) -> list[list[list[int]]]:
    n = draw(st.integers(2, 4))
    row = st.lists(st.integers(0, ROOM), min_size=n, max_size=n)
    table = st.lists(row, min_size=n, max_size=n).filter(lambda counts: any(map(any, counts)))
    return draw(st.lists(table, min_size=1, max_size=4))


@settings(max_examples=150, deadline=None)
@given(rounds())
def test_any_sizes_are_right(tables: list[list[list[int]]]) -> None:
    """Up to four calls of other sizes on the same memory, on one stream and on two, in every interleaving."""
    programs = [filled(counts) for counts in tables]
    assert check(programs, early_release=True).violations == ()
    assert check([list(map(on_two_lanes, one)) for one in programs], early_release=True).violations == ()


def test_a_program_that_signals_before_it_pushes_is_found() -> None:
    """The checker would see it."""
    programs = filled([[1, 2], [3, 1]])
    first = programs[0]
    copies = tuple(step for step in first.steps if isinstance(step, Copy))
    others = tuple(step for step in first.steps if not isinstance(step, Copy))
    assert {one.kind for one in check([[replace(first, steps=others + copies), programs[1]]]).violations} >= {"race"}


def test_only_copies_depend_on_sizes() -> None:
    """Signals and waits are those of the program that is filled in, also where nothing is sent."""
    call = late_sizes_call(3, 48)
    program = plan(call, 1, LATE_SIZES)
    none = filled_in(program, [PushedBlock(0, 0, 0)] * 3, 4)
    assert [step for step in program.steps if isinstance(step, Batch)] == list(none.steps)
    signals = [op for step in none.steps if isinstance(step, Batch) for op in step.operations if isinstance(op, Signal)]
    assert sorted(signal.peer for signal in signals) == [0, 2]


@pytest.mark.parametrize("numbers", [(-1, 0, 1), (0, 0, -1), (0, 4, 2), (3, 0, 2)])
def test_blocks_beyond_the_tensors_are_refused(numbers: tuple[int, int, int]) -> None:
    """Of four rows there and five in the output."""
    sizes = LateSizes(table=0, row_bytes=8, input_rows=4, output_rows=5)
    assert sizes.blocks([0, 3, 2]) == (PushedBlock(0, 3, 2),)
    with pytest.raises(Misconfigured, match="within both tensors"):
        sizes.blocks(numbers)
