"""Exceptions in a pass that the caller catches: the next step says how to start again, and then has right gradients."""

from __future__ import annotations

import pytest

from counterpoint.parallel.options import OverlapOptions
from tests.dist import fsdp_exceptions_programs as programs
from tests.dist.fsdp_exceptions_programs import Case
from tests.support.ranks import Ranks

PLACES = [(where, layer) for where in ("input", "middle", "output") for layer in (0, 3, 5)]
CASES = {f"{where} of layer {layer}": Case(where=where, layer=layer) for where, layer in PLACES} | {
    "accumulated": Case(microbatches=2),
    "checkpointed": Case(checkpointed=True),
    "the graph is kept": Case(held=True),
    "prefetch": Case(options=OverlapOptions(prefetch=2), held=True),
    "copied": Case(options=OverlapOptions(direct=False)),
    "one module": Case(whole=True),
    "one module, accumulated": Case(whole=True, microbatches=2, where="output"),
}
FORWARD = {
    "first layer": Case(where="forward", layer=0),
    "middle layer": Case(where="forward", layer=3),
    "last layer": Case(where="forward", layer=5),
    "checkpointed": Case(where="forward", checkpointed=True),
    "prefetch": Case(where="forward", options=OverlapOptions(prefetch=2)),
    "one module": Case(where="forward", whole=True),
}
LEFT_IN_USE = Case(where="forward", layer=4, held=True)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_step_after_an_exception_in_backward_raises(two_ranks: Ranks, case: Case) -> None:
    """FSDP2 would lose gradients in silence."""
    for said in two_ranks.run(programs.said_after, case):
        assert said.startswith("the backward pass before this forward pass did not end")
        assert "call reset_iter_state() of what overlap() returned, on all ranks, then zero_grad()" in said


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_backward_pass_that_was_discarded_leaves_nothing(two_ranks: Ranks, case: Case) -> None:
    """After `reset_iter_state` losses and gradients are those of a model that had no exception, bit by bit."""
    assert two_ranks.run(programs.started_again, case) == [[], []]


@pytest.mark.parametrize("case", FORWARD.values(), ids=FORWARD)
def test_a_step_after_an_exception_in_forward_has_right_gradients(two_ranks: Ranks, case: Case) -> None:
    """As in stock FSDP2, nothing has to be called."""
    assert two_ranks.run(programs.went_on, case) == [[], []]


def test_a_layer_left_in_use_at_the_place_of_another_raises(two_ranks: Ranks) -> None:
    """After an exception in a forward pass of which the caller keeps the graph; the text says how to start again."""
    for said in two_ranks.run(programs.said_after, LEFT_IN_USE):
        assert said.startswith("layers.0 and layers.4 are in use at the same time")
        assert "if an exception ended a pass before, call reset_iter_state()" in said


@pytest.mark.parametrize("case", [*FORWARD.values(), LEFT_IN_USE], ids=[*FORWARD, "left in use"])
def test_a_forward_pass_may_be_discarded(two_ranks: Ranks, case: Case) -> None:
    """`reset_iter_state` leaves nothing of it; gradients of microbatches before are lost with it."""
    assert two_ranks.run(programs.started_again, case) == [[], []]


@pytest.mark.parametrize("where", ["input", "middle", "output", "forward"])
def test_restore_after_an_exception_gives_torch_a_clean_model(two_ranks: Ranks, where: str) -> None:
    """Stock FSDP2 goes on without it."""
    assert two_ranks.run(programs.restored_after, Case(where=where, held=True)) == [[], []]


def test_nothing_is_discarded_before_the_first_step(two_ranks: Ranks) -> None:
    """`reset_iter_state` does no harm there."""
    assert two_ranks.run(programs.reset_before_the_first_step) == [[], []]
