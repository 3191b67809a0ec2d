"""The registry: what a row says holds for its programs, and a new row is all that a new collective needs."""

from dataclasses import replace

import pytest

from counterpoint.collectives.program.clock import simulate
from counterpoint.collectives.program.operations import (
    BY_TORCH,
    OPERATIONS,
    crossovers,
    even_call,
    find_operation,
    has_equal_outputs,
    plan_all,
)
from counterpoint.collectives.program.steps import Copy
from counterpoint.collectives.program.tuning import best_tuning
from counterpoint.errors import Misconfigured
from counterpoint.machine.bus_bandwidth import bus_gb_per_s
from counterpoint.machine.profile import default_profile
from tests.support.check import check
from tests.support.explore import explore
from tests.support.shift import SHIFT

MIB = 1 << 20


@pytest.fixture
def shift(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(OPERATIONS, "shift", SHIFT)
    return "shift"


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_even_call_of_every_row_is_right(name: str) -> None:
    """Sizes, layout and program of a row belong together: the checker passes two calls in a row."""
    assert check([plan_all(even_call(name, 4, 64, root=0))] * 2).violations == ()


@pytest.mark.parametrize("name", OPERATIONS)
def test_outputs_that_nobody_writes_are_not_at_equal_places(name: str) -> None:
    """A row whose outputs are equal on all ranks has programs that push into outputs."""
    call = even_call(name, 4, 64)
    copies = [step for program in plan_all(call) for step in program.cycle() if isinstance(step, Copy)]
    assert not has_equal_outputs(call) or any(copy.target.buffer == "output" for copy in copies)


def test_a_crossover_that_is_given_comes_before_the_one_of_the_profile() -> None:
    """Operations that neither has have none; those that torch cannot make are not there."""
    shipped = default_profile()
    found = crossovers(shipped, {"all_gather": 5, "broadcast": 7})
    assert (found["all_gather"], found["broadcast"], list(found)) == (5, 7, list(BY_TORCH))
    assert crossovers(shipped)["all_reduce"] == found["all_reduce"] == shipped.nccl.crossover_bytes["all_reduce"]


@pytest.mark.parametrize("given", [{"send": 5}, {"all_gather": -1}])
def test_a_crossover_of_nothing_is_refused(given: dict[str, int]) -> None:
    [(name, size)] = given.items()
    with pytest.raises(Misconfigured, match=f"crossover_bytes {name}={size}: give 0 or more for all_gather, "):
        crossovers(default_profile(), given)


def test_a_name_that_is_none_is_refused_with_what_there_is() -> None:
    with pytest.raises(Misconfigured, match="choose from: all_gather, reduce_scatter"):
        find_operation("all_gathers")


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_a_toy_collective_is_proved(shift: str, world_size: int) -> None:
    assert check([plan_all(even_call(shift, world_size, 40))] * 3).violations == ()


def test_every_interleaving_of_a_toy_collective_is_right(shift: str) -> None:
    assert explore([plan_all(even_call(shift, 3, 40))] * 2).violations == ()


def test_a_wrong_toy_program_is_caught(shift: str) -> None:
    """Without one of its copies the output of a rank is not what the row says."""
    first, *others = plan_all(even_call(shift, 3, 40))
    idle = replace(first, steps=tuple(step for step in first.steps if not isinstance(step, Copy)))
    assert {violation.kind for violation in check([[idle, *others]]).violations} == {"content"}


def test_a_toy_collective_has_a_tuning_and_a_time(shift: str) -> None:
    """On the clock its bus bandwidth is that of one copy over one link."""
    call = even_call(shift, 8, 1024 * MIB)
    us = simulate(plan_all(call, best_tuning(call))).us
    assert bus_gb_per_s(shift, 1024 * MIB, 8, us) == pytest.approx(384, rel=0.02)
