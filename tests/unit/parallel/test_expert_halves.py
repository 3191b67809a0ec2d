"""Halves of a dispatch and a combine: what was between them forward is between them backward, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from counterpoint.errors import Unsupported
from counterpoint.parallel.expert import halves
from counterpoint.parallel.expert.halves import Trip
from counterpoint.parallel.report import RoutedPath


class Log:
    """A mechanism of one rank and one expert that only writes down what it is asked for."""

    name: RoutedPath = "torch"

    def __init__(self, said: list[str], number: int) -> None:
        self.said, self.number = said, number

    def say(self, what: str) -> None:
        self.said.append(f"{what} {self.number}")

    def dispatch_start(self, x: Tensor, ids: Tensor, weights: Tensor) -> Any:
        self.say("dispatch starts")
        return x.clone(), weights

    def dispatch_finish(self, route: Any) -> tuple[Tensor, Tensor]:
        self.say("dispatch ends")
        return route[0].clone(), torch.tensor([len(route[0])], dtype=torch.int32)

    def combine_start(self, rows: Tensor, route: Any, *, weighted: bool) -> Any:
        self.say("combine starts")
        return rows.detach().clone(), route[1] if weighted else torch.ones_like(route[1])

    def combine_finish(self, pending: Any) -> tuple[Tensor, Tensor | None]:
        self.say("combine ends")
        return pending[0] * pending[1], pending[0]

    def spread_start(self, grads: Tensor, route: Any) -> Any:
        self.say("spread starts")
        return grads.clone(), route[1]

    def spread_finish(self, pending: Any, kept: Tensor | None) -> tuple[Tensor, Any]:
        self.say("spread ends")
        return pending[0] * pending[1], None if kept is None else (kept * pending[0]).sum(1, keepdim=True)

    def weight_grads_finish(self, pending: Any) -> Tensor:
        self.say("weights end")
        grads: Tensor = pending
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
    first = halves.start_dispatch(trips[0], x[0], ids, weights[0])
    rows, _ = halves.finish_dispatch(trips[0], first)
    second = halves.start_dispatch(trips[1], x[1], ids, weights[1])
    rows = work(rows, said, "experts 0")
    sums = halves.start_combine(trips[0], rows, first)
    others, _ = halves.finish_dispatch(trips[1], second)
    others = work(others, said, "experts 1")
    y = [halves.finish_combine(trips[0], sums)]
    y.append(halves.finish_combine(trips[1], halves.start_combine(trips[1], others, second)))
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


def test_no_derivative_is_sent_that_nobody_needs() -> None:
    """Tokens and weights that need none cost no communication."""
    said: list[str] = []
    trip, scale = Trip(Log(said, 0)), torch.ones(4, requires_grad=True)
    under_way = halves.start_dispatch(trip, torch.randn(3, 4), torch.zeros(3, 1, dtype=torch.int32), torch.rand(3, 1))
    rows, _ = halves.finish_dispatch(trip, under_way)
    y = halves.finish_combine(trip, halves.start_combine(trip, rows * scale, under_way))
    said.clear()
    y.sum().backward()
    assert said == ["spread starts 0", "spread ends 0"]
    assert scale.grad is not None


def test_derivatives_of_derivatives_are_refused() -> None:
    """They would need communication that nobody recorded."""
    x = torch.randn(3, 4, requires_grad=True)
    trip = Trip(Log([], 0))
    under_way = halves.start_dispatch(trip, x, torch.zeros(3, 1, dtype=torch.int32), torch.rand(3, 1))
    rows, _ = halves.finish_dispatch(trip, under_way)
    y = halves.finish_combine(trip, halves.start_combine(trip, rows.square(), under_way))
    with pytest.raises(Unsupported, match="leave it out"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
