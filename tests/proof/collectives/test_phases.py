"""Calls over several hosts are proved for whole grids, and every wrong one is caught."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from counterpoint.collectives.multihost.phases import Grid, Phase
from counterpoint.collectives.program.calls import Span
from counterpoint.collectives.program.operations import reduce_scatter
from counterpoint.collectives.program.steps import AwaitEvent, RecordEvent, Tuning
from tests.support.check import check
from tests.support.explore import explore
from tests.support.flatten import GRIDS, NAMES, SLICE, cases, flatten, phases_all, whole
from tests.support.mutants import mutants


@pytest.mark.parametrize("tuning", [Tuning(), Tuning(chunk_bytes=16)], ids=["whole", "chunks"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_back_to_back_calls_are_right(name: str, grid: Grid, tuning: Tuning) -> None:
    """Contents, order and flags of three rounds, inside and between hosts, in every interleaving."""
    assert check([whole(cases(grid.world_size)[name], grid, tuning)] * 3).violations == ()


@pytest.mark.parametrize("name", ["all_reduce, small", "broadcast, small", "barrier"])
def test_every_interleaving_of_two_hosts_of_two_is_right(name: str) -> None:
    """Walked one by one; where all talk to all there are too many."""
    assert explore([whole(cases(4)[name], Grid(hosts=2, local=2))]).violations == ()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_pair_of_operations_may_follow_each_other(grid: Grid) -> None:
    """On the same buffers, flags and staging."""
    made = {name: whole(call, grid) for name, call in cases(grid.world_size).items()}
    wrong = [
        (one, other) for one, first in made.items() for other, second in made.items() if not check([first, second]).ok
    ]
    assert wrong == []


@pytest.mark.parametrize("name", [name for name in NAMES if "," not in name])
def test_every_mutant_of_a_step_is_caught(name: str) -> None:
    """On two ranks of different hosts each copy, flag and reduction is removed and changed: between reductions that use
    all of staging, none goes unnoticed."""
    grid, other = Grid(hosts=2, local=2), whole(reduce_scatter(4, 16), Grid(hosts=2, local=2))
    right = whole(cases(4)[name], grid, slice_bytes=96)
    tried, passed = 0, []
    for program in (right[0], right[3]):
        for mutant in mutants(program):
            if mutant.kind != "swap" and not isinstance(mutant.steps[0], RecordEvent | AwaitEvent):
                wrong = [mutant.program if each is program else each for each in right]
                tried += 1
                passed += [mutant] if check([other, wrong, wrong, other]).ok else []
    assert tried
    assert passed == []


def later(span: Span) -> Span:
    return replace(span, offset=span.offset + 1)


def wrong_phases(found: Sequence[Phase]) -> Iterator[tuple[str, tuple[Phase, ...]]]:
    for number, phase in enumerate(found):
        changed = [replace(phase, after=tuple(a for a in phase.after if a != gone)) for gone in phase.after]
        if phase.call.operation != "barrier":
            changed.append(replace(phase, output=later(phase.output)))
            if phase.call.own != "in_place":
                changed.append(replace(phase, input=later(phase.input)))
        yield from ((f"phase {number}: {each}", (*found[:number], each, *found[number + 1 :])) for each in changed)


@pytest.mark.parametrize("name", NAMES)
def test_every_mutant_of_a_phase_is_caught(name: str) -> None:
    """On any rank: a phase that does not wait for another, or is a byte off."""
    grid = Grid(hosts=2, local=2)
    call = cases(4)[name]
    right, passed = phases_all(call, grid, slice_bytes=SLICE), []
    for rank, found in enumerate(right):
        for what, wrong in wrong_phases(found):
            made = [wrong if each == rank else theirs for each, theirs in enumerate(right)]
            programs = flatten(call, grid, made)
            passed += [(rank, what)] if check([programs] * 2).ok else []
    assert passed == []
