"""Modules that share the places to which their parameters are gathered, in orders that they were not given them for."""

import pytest

from counterpoint.parallel.options import OverlapOptions
from tests.dist import fsdp_places_programs as programs
from tests.dist.fsdp_places_programs import Affine, Case
from tests.support.ranks import Ranks, finding


@pytest.mark.parametrize("orders", programs.ORDERS)
@pytest.mark.parametrize("prepared", programs.PREPARED)
def test_training_is_that_of_stock_in_any_order(two_ranks: Ranks, orders: str, prepared: str) -> None:
    """Layers in other orders, twice, one inside the other; kept, gathered by hand, gathered for nothing: the same
    bits."""
    for ahead in (None, 2):
        options = OverlapOptions(prefetch=None if prepared == "prefetched in vain" else ahead)
        case = Case(orders=orders, prepared=prepared, options=options)
        assert two_ranks.run(programs.beside_stock, case) == [[], []]


@pytest.mark.parametrize("orders", programs.ORDERS)
@pytest.mark.parametrize("prepared", programs.PREPARED)
def test_a_layer_that_moves_before_its_backward_pass_keeps_its_gradients(
    two_ranks: Ranks, orders: str, prepared: str
) -> None:
    """Autograd has no views of its parameters, and reads them where they are then."""
    assert two_ranks.run(programs.beside_stock, Case(orders=orders, prepared=prepared, kind=Affine)) == [[], []]


@pytest.mark.parametrize("orders", ["backwards", "every other", "again"])
def test_views_that_one_rank_still_has_decide_for_all(two_ranks: Ranks, orders: str) -> None:
    """When a layer is gathered, and where to, does not depend on when a rank's garbage collector runs."""
    assert two_ranks.run(programs.viewed_on_one, orders) == [[], []]


@pytest.mark.parametrize(("ahead", "expected"), [(None, 2), (1, 2), (2, 3), (3, 4)])
def test_there_are_as_many_places_as_are_gathered_at_once(two_ranks: Ranks, ahead: int | None, expected: int) -> None:
    """The one that computes, and those ahead of it; and no more after further steps."""
    case = Case(options=OverlapOptions(prefetch=ahead))
    assert two_ranks.run(programs.places, case) == [[expected] * 3] * 2


@pytest.mark.needs("torch-2.13")
def test_parameters_of_several_dtypes_are_gathered_as_they_are(two_ranks: Ranks) -> None:
    assert two_ranks.run(programs.mixed_dtypes) == [[True, True]] * 2


def test_two_modules_in_use_at_one_place_are_an_error(two_ranks: Ranks) -> None:
    """Named, with what to do; not wrong numbers."""
    for said in two_ranks.run(programs.in_use_at_once):
        assert said.startswith("Unsupported: layers.0 and layers.2 are in use at the same time")
        assert "use OverlapOptions(direct=False)" in said


test_what_ranks_find = finding({
    "a model may be cast before it runs": (2, programs.cast_before_the_first_step, (), []),
    "restore gives torch memory for parameters in use": (2, programs.left_in_use, (), []),
})  # fmt: skip
