"""Exceptions in a pass that the caller catches: the next step says how to start again, and then has right gradients."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from counterpoint.measurement.session import Session
from counterpoint.parallel.options import OverlapOptions
from counterpoint.parallel.overlap import Overlap, overlap
from tests.dist.fsdp_places_programs import ALL, WIDTH, different, model
from tests.dist.fsdp_places_programs import Case as Layers
from tests.support.ranks import Ranks, error_of

FAILING = 1  # the step with the exception


@dataclass(frozen=True, kw_only=True)
class Case:
    """One exception."""

    where: str = "middle"  # `input`, `middle` or `output` of the layer: of its backward pass; `forward`: before it runs
    layer: int = 3  # its number
    microbatches: int = 1  # of every step; the exception is in the last
    checkpointed: bool = False  # activations of the layer are computed again
    whole: bool = False  # `fully_shard` is called on the model only, not on its layers
    held: bool = False  # the caller keeps the exception, and with it the graph
    options: OverlapOptions | None = None


class Planted(Exception):
    """The exception."""


def _raise(gradient: Tensor) -> None:
    raise Planted


class Plant:
    def __init__(self, made: Any, case: Case) -> None:
        self.layer, self.case, self.is_on = made.layers[case.layer], case, False
        self.layer.forward = self.checkpointed if case.checkpointed else self.forward

    def checkpointed(self, hidden: Tensor, inner: None) -> Any:
        return checkpoint(self.forward, hidden, inner, use_reentrant=False)

    def forward(self, hidden: Tensor, inner: None) -> Tensor:
        if self.is_on and self.case.where == "forward":
            raise Planted
        middle = torch.tanh(hidden @ self.layer.weight)
        output: Tensor = middle @ self.layer.weight.t() + self.layer.bias
        points = {"input": hidden, "middle": middle, "output": output}
        if self.is_on and self.case.where in points:
            points[self.case.where].register_hook(_raise)
        return output


class Training:
    """Steps of one model, of which the caller chooses what becomes of a failing one."""

    def __init__(self, made: Any, session: Session, case: Case) -> None:
        self.model, self.rank, self.case = made, session.rank, case
        self.plant, self.parameters = Plant(made, case), list(made.parameters())
        self.held: list[Exception] = []

    def step(self, number: int) -> list[Any]:
        seen: list[Any] = []
        for micro in range(self.case.microbatches):
            last = micro == self.case.microbatches - 1
            self.model.set_requires_gradient_sync(last)
            self.plant.is_on = number == FAILING and last
            state = torch.Generator().manual_seed(100 * number + 10 * micro + self.rank)
            loss = self.model(torch.randn(4, WIDTH, generator=state).requires_grad_(), ALL)
            loss.backward()
            seen.append(loss.item())
        return seen + [None if one.grad is None else one.grad.to_local().clone() for one in self.parameters]

    def fail(self) -> None:
        try:
            self.step(FAILING)
        except Planted as error:
            self.held += [error] * self.case.held
        else:
            raise AssertionError("nothing was raised")

    def zero(self) -> None:
        for one in self.parameters:
            one.grad = None


def _without_failure(session: Session, case: Case, numbers: list[int]) -> list[Any]:
    training = Training(model(Layers(whole=case.whole)), session, case)
    seen = []
    for number in numbers:
        seen += training.step(number)
        training.zero()
    return seen


def said_after(session: Session, case: Case) -> str:
    made = model(Layers(whole=case.whole))
    with overlap(made, options=case.options):
        training = Training(made, session, case)
        training.step(0)
        training.fail()
        training.zero()
        return error_of(lambda: training.step(FAILING + 1))


def gone_on(session: Session, case: Case, how: str) -> list[int]:
    """What differs, in two steps after the failing one and `how` of the handle, from a stock model without failure."""
    made = model(Layers(whole=case.whole))
    handle: Overlap = overlap(made, options=case.options)
    training = Training(made, session, case)
    training.step(0)
    if not how:
        training.zero()  # in a forward pass nothing is lost, and nothing has to be called
    training.fail()
    if how:
        getattr(handle, how)()
    got = []
    for number in (2, 3):
        training.zero()
        got += training.step(number)
    handle.restore()
    return different(got, _without_failure(session, case, [2, 3]))


def reset_before_the_first_step(session: Session) -> list[int]:
    case = Case()
    made = model(Layers(whole=case.whole))
    with overlap(made) as handle:
        handle.reset_iter_state()
        return different(Training(made, session, case).step(0), _without_failure(session, case, [0]))


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
    for said in two_ranks.run(said_after, case):
        assert "the backward pass before this forward pass did not end" in said
        assert "call reset_iter_state() of what overlap() returned, on all ranks, then zero_grad()" in said


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_backward_pass_that_was_discarded_leaves_nothing(two_ranks: Ranks, case: Case) -> None:
    """After `reset_iter_state` losses and gradients are those of a model that had no exception, bit by bit."""
    assert two_ranks.run(gone_on, case, "reset_iter_state") == [[], []]


@pytest.mark.parametrize("case", FORWARD.values(), ids=FORWARD)
def test_a_step_after_an_exception_in_forward_has_right_gradients(two_ranks: Ranks, case: Case) -> None:
    assert two_ranks.run(gone_on, case, "") == [[], []]


def test_a_layer_left_in_use_at_the_place_of_another_raises(two_ranks: Ranks) -> None:
    """After an exception in a forward pass of which the caller keeps the graph; the text says how to start again."""
    for said in two_ranks.run(said_after, LEFT_IN_USE):
        assert "layers.0 and layers.4 are in use at the same time" in said
        assert "if an exception ended a pass before, call reset_iter_state()" in said


@pytest.mark.parametrize("case", [*FORWARD.values(), LEFT_IN_USE], ids=[*FORWARD, "left in use"])
def test_a_forward_pass_may_be_discarded(two_ranks: Ranks, case: Case) -> None:
    """`reset_iter_state` leaves nothing of it; gradients of microbatches before are lost with it."""
    assert two_ranks.run(gone_on, case, "reset_iter_state") == [[], []]


@pytest.mark.parametrize("where", ["input", "middle", "output", "forward"])
def test_restore_after_an_exception_gives_torch_a_clean_model(two_ranks: Ranks, where: str) -> None:
    assert two_ranks.run(gone_on, Case(where=where, held=True), "restore") == [[], []]


def test_nothing_is_discarded_before_the_first_step(two_ranks: Ranks) -> None:
    assert two_ranks.run(reset_before_the_first_step) == [[], []]
