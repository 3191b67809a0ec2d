"""Record the derivatives of a dispatch and a combine in halves, between which a caller computes.

Each half is an autograd function of its own: the first begins communication, the second waits for it. Autograd runs
nodes in the reverse order of their making, so the derivative of a second half, which begins the way back, comes before
that of all that was computed between the halves, and the derivative of the first half, which waits, comes after it:
what was hidden forward is hidden backward. Between the halves a tensor without elements stands for what is under way.

The derivative of a dispatch is a combine that is not weighted. That of a combine spreads the derivatives of sums to the
rows; those of the weights go home while those of the experts are made, and are waited for where tokens' are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from counterpoint.errors import Unsupported
from counterpoint.parallel.expert.mechanism import TokenMechanism


@dataclass
class Trip:
    """Holds what the four functions of a handle share: none of it leads back to them, so all dies with the graph."""

    mechanism: TokenMechanism
    route: Any = None
    pending: Any = None  # of the combine that was started
    needs_x: bool = False
    needs_weights: bool = False
    # in the backward pass
    rows_grad: Any = None  # pending: derivatives of the sums, on their way to the rows
    kept: Tensor | None = None
    weights_grad: Any = None  # pending: on its way home
    x_grad: Any = None  # pending: derivatives of rows, on their way home


def start_dispatch(trip: Trip, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Begin to send tokens to their experts; return what stands for them, and for their weights."""
    under_way: Tensor = _apply(_StartDispatch, trip, x, ids, weights)
    return under_way


def finish_dispatch(trip: Trip, dispatched: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and offsets."""
    rows, offsets = _apply(_FinishDispatch, trip, dispatched)
    return rows, offsets


def start_combine(trip: Trip, rows: Tensor, dispatched: Tensor) -> Tensor:
    """Begin to send home what the experts made; return what stands for the sums."""
    under_way: Tensor = _apply(_StartCombine, trip, rows, dispatched)
    return under_way


def finish_combine(trip: Trip, combined: Tensor) -> Tensor:
    """Return the sums."""
    sums: Tensor = _apply(_FinishCombine, trip, combined)
    return sums


def _refuse_graph() -> None:
    """Raise if the derivative is to have one itself."""
    if torch.is_grad_enabled():
        raise Unsupported("create_graph=True of a dispatch or a combine, whose derivatives have none: leave it out")


def _apply(function: Any, *inputs: Any) -> Any:
    """Call a function of autograd; without derivatives to come, only what it does: `apply` costs the host 10 µs."""
    return function.apply(*inputs) if torch.is_grad_enabled() else function.forward(_NoDerivative(), *inputs)


class _NoDerivative:
    """Stands for the context of a function that has no derivative."""

    needs_input_grad = (False,) * 4

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep nothing."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Do nothing: no tensor has a derivative."""


class _StartDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trip: Trip, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        ctx.trip, ctx.dtype = trip, weights.dtype
        _, trip.needs_x, _, trip.needs_weights = ctx.needs_input_grad
        trip.route = trip.mechanism.dispatch_start(x.contiguous(), ids, weights)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _refuse_graph()
        trip, grad_x, grad_weights = ctx.trip, None, None
        if trip.x_grad is not None:
            grad_x, _ = trip.mechanism.combine_finish(trip.x_grad)
        if trip.weights_grad is not None:
            grad_weights = trip.mechanism.weight_grads_finish(trip.weights_grad).to(ctx.dtype)
        trip.x_grad = trip.weights_grad = None
        return None, grad_x, None, grad_weights


class _FinishDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trip: Trip, dispatched: Tensor) -> tuple[Tensor, Tensor]:
        ctx.trip = trip
        rows, offsets = trip.mechanism.dispatch_finish(trip.route)
        ctx.save_for_backward(offsets)  # as in _FinishCombine
        ctx.mark_non_differentiable(offsets)
        return rows, offsets

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _refuse_graph()
        trip = ctx.trip
        if trip.needs_x:
            trip.x_grad = trip.mechanism.combine_start(grads[0].contiguous(), trip.route, weighted=False)
        return None, grads[0].new_empty(0)


class _StartCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trip: Trip, rows: Tensor, dispatched: Tensor) -> Tensor:
        ctx.trip = trip
        trip.pending = trip.mechanism.combine_start(rows.contiguous(), trip.route, weighted=True)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _refuse_graph()
        trip = ctx.trip
        grad_rows, trip.weights_grad = trip.mechanism.spread_finish(trip.rows_grad, trip.kept)
        trip.rows_grad = trip.kept = None
        return None, grad_rows, grads[0]


class _FinishCombine(torch.autograd.Function):
    """Saves a tensor in any case: a recomputation ends where the last one is saved, and must not end between halves."""

    @staticmethod
    def forward(ctx: Any, trip: Trip, combined: Tensor) -> Tensor:
        ctx.trip = trip
        sums, kept = trip.mechanism.combine_finish(trip.pending)
        trip.pending = None
        ctx.save_for_backward(kept if trip.needs_weights and kept is not None else sums.new_empty(0))
        return sums

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _refuse_graph()
        trip = ctx.trip
        (saved,) = ctx.saved_tensors
        trip.kept = saved if trip.needs_weights else None
        trip.rows_grad = trip.mechanism.spread_start(grads[0].contiguous(), trip.route)
        return None, grads[0].new_empty(0)
