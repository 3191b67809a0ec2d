"""Halves of a dispatch and a combine: what was between them forward is between them backward, too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from counterpoint.errors import Unsupported
from counterpoint.parallel.expert.dispatcher import Trip
from counterpoint.parallel.expert.token_mechanism import Halves
from counterpoint.parallel.report import RoutedPath


class Log:
    """A mechanism of one rank and one expert that only writes down what it is asked for."""

    name: RoutedPath = "torch"

    def __init__(self, said: list[str], number: int) -> None:
        self.said, self.number = said, number

    def say(self, what: str) -> None:
        self.said.append(f"{what} {self.number}")

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> Halves[tuple[Tensor, Tensor, Any]]:
        self.say("dispatch starts")
        sent = x.clone()
        yield
        self.say("dispatch ends")
        return sent.clone(), torch.tensor([len(x)], dtype=torch.int32), weights

    def combine(self, rows: Tensor, route: Any, *, weighted: bool) -> Halves[tuple[Tensor, Tensor | None]]:
        self.say("combine starts")
        sent = rows.detach().clone()
        yield
        self.say("combine ends")
        return sent * route if weighted else sent, sent

    def spread(self, grads: Tensor, route: Any, saved: Tensor | None) -> Halves[tuple[Tensor, Halves[Tensor] | None]]:
        self.say("spread starts")
        sent = grads.clone()
        yield
        self.say("spread ends")
        if saved is None:
            return sent * route, None
        weights = self.weights_grad((saved * sent).sum(1, keepdim=True))
        next(weights)
        return sent * route, weights

    def weights_grad(self, grads: Tensor) -> Halves[Tensor]:
        yield
        self.say("weights end")
        return grads

    def dropped(self) -> int:
        return 0

    def check(self) -> None:
        """Nothing ends it."""

    def close(self) -> None:
        self.say("closed")


class Work(torch.autograd.Function):
    """Stands for what is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, said: list[str], name: str) -> Tensor:
        ctx.said, ctx.name = said, name
        said.append(name)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.said.append(ctx.name)
        return grads[0], None, None


def work(x: Tensor, said: list[str], name: str) -> Tensor:
    function: Any = Work
    made: Tensor = function.apply(x, said, name)
    return made


def test_two_halves_of_a_batch_overlap_backward_as_forward() -> None:
    """Experts of one half run between the halves of the other's communication, both ways; derivatives are right."""
    said: list[str] = []
    x, weights = torch.randn(2, 3, 4, requires_grad=True), torch.rand(2, 3, 1, requires_grad=True)
    ids = torch.zeros(3, 1, dtype=torch.int32)
    trips = [Trip(Log(said, number)) for number in range(2)]
    first = trips[0].start_dispatch(x[0], ids, weights[0])
    rows, _ = trips[0].finish_dispatch(first)
    second = trips[1].start_dispatch(x[1], ids, weights[1])
    rows = work(rows, said, "experts 0")
    sums = trips[0].start_combine(rows, first)
    others, _ = trips[1].finish_dispatch(second)
    others = work(others, said, "experts 1")
    y = [trips[0].finish_combine(sums)]
    y.append(trips[1].finish_combine(trips[1].start_combine(others, second)))
    assert said == [
        "dispatch starts 0", "dispatch ends 0", "dispatch starts 1", "experts 0", "combine starts 0", "dispatch ends 1",
        "experts 1", "combine ends 0", "combine starts 1", "combine ends 1",
    ]  # fmt: skip
    said.clear()
    grad = torch.randn(2, 3, 4)
    torch.autograd.backward(y, list(grad))
    assert said == [
        "spread starts 1", "spread ends 1", "spread starts 0", "experts 1", "combine starts 1", "spread ends 0",
        "experts 0", "combine ends 1", "weights end 1", "combine starts 0", "combine ends 0", "weights end 0",
    ]  # fmt: skip
    assert x.grad is not None
    assert weights.grad is not None
    torch.testing.assert_close(x.grad, grad * weights.detach())
    torch.testing.assert_close(weights.grad, (grad * x.detach()).sum(-1, keepdim=True))


def there_and_back(x: Tensor, said: list[str], experts: Callable[[Tensor], Tensor]) -> Tensor:
    """The sums of three tokens of one choice, one part after the other."""
    trip = Trip(Log(said, 0))
    under_way = trip.start_dispatch(x, torch.zeros(3, 1, dtype=torch.int32), torch.rand(3, 1))
    rows, _ = trip.finish_dispatch(under_way)
    return trip.finish_combine(trip.start_combine(experts(rows), under_way))


def test_no_derivative_is_sent_that_nobody_needs() -> None:
    said, scale = list[str](), torch.ones(4, requires_grad=True)
    y = there_and_back(torch.randn(3, 4), said, lambda rows: rows * scale)
    said.clear()
    y.sum().backward()
    assert said == ["spread starts 0", "spread ends 0"]
    assert scale.grad is not None


def test_derivatives_of_derivatives_are_refused() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    y = there_and_back(x, [], torch.square)
    with pytest.raises(Unsupported, match="leave it out"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
