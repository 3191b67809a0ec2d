"""Record the derivatives of a dispatch and a combine in halves, so that a caller can compute between two halves.

Each half is an autograd function of its own: the first half begins communication, the second half waits for it.
Autograd runs nodes in the reverse order of their making. So the derivative of a second half, which begins communication
backward, runs before the derivatives of all that was computed between the halves, and the derivative of the first half,
which waits, runs after them: what was hidden forward is hidden backward, too. Between the halves an empty tensor stands
for the communication.

The derivative of a dispatch is a combine without weights. The derivative of a combine sends the derivatives of the sums
to the rows; the derivatives of the weights go back while those of the experts are computed, and are waited for together
with the derivatives of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from counterpoint.errors import Unsupported
from counterpoint.parallel.expert.options import Halves, TokenMechanism, finished


class Trip:
    """Sends the tokens of one dispatch to their experts and back, in four halves that the caller runs in order.

    A trip refers to no autograd function, so that it is freed with the graph.
    """

    def __init__(self, mechanism: TokenMechanism) -> None:
        self.mechanism = mechanism
        self.route: Any = None
        self._forward: Any = None  # the operation whose first half has run: the dispatch, then the combine
        self._backward: Any = None  # the derivative whose first half has run: the spread, then the combine
        self._weights_grad: Halves[Tensor] | None = None
        self._needs_x = self._needs_weights = False
        self._weights_dtype = torch.float32

    def start_dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Start to send tokens to their experts; return the empty tensor that stands for them in autograd."""
        self._needs_x, self._needs_weights, self._weights_dtype = x.requires_grad, weights.requires_grad, weights.dtype
        under_way: Tensor = _run(self._start_dispatch, self._finish_tokens_grad, x, ids, weights)
        return under_way

    def finish_dispatch(self, dispatched: Tensor) -> tuple[Tensor, Tensor]:
        """Finish the dispatch; return rows and offsets."""
        rows, offsets = _run(self._finish_dispatch, self._start_tokens_grad, dispatched)
        return rows, offsets

    def start_combine(self, rows: Tensor, dispatched: Tensor) -> Tensor:
        """Start to send experts' outputs back; return an empty tensor that stands for the sums in autograd."""
        under_way: Tensor = _run(self._start_combine, self._finish_rows_grad, rows, dispatched)
        return under_way

    def finish_combine(self, combined: Tensor) -> Tensor:
        """Finish the combine; return the sums."""
        sums: Tensor = _run(self._finish_combine, self._start_rows_grad, combined)
        return sums

    # Each half with its derivative, which gets the gradient of its first output. A second half saves a tensor in any
    # case: a recomputation ends where the last tensor is saved, and must not end between halves.

    def _start_dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        self._forward = self.mechanism.dispatch(x.contiguous(), ids, weights)
        next(self._forward)
        return x.new_empty(0), None

    def _finish_tokens_grad(self, _: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        tokens, weights = self._backward, self._weights_grad
        self._backward = self._weights_grad = None
        grad_x = None if tokens is None else finished(tokens)[0]
        return grad_x, None, None if weights is None else finished(weights).to(self._weights_dtype)

    def _finish_dispatch(self, dispatched: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        rows, offsets, self.route = finished(self._forward)
        self._forward = None
        return (rows, offsets), offsets

    def _start_tokens_grad(self, grads: Tensor, _: Tensor) -> tuple[Tensor]:
        if self._needs_x:
            self._backward = self.mechanism.combine(grads, self.route, weighted=False)
            next(self._backward)
        return (grads.new_empty(0),)

    def _start_combine(self, rows: Tensor, dispatched: Tensor) -> tuple[Tensor, None]:
        self._forward = self.mechanism.combine(rows.contiguous(), self.route, weighted=True)
        next(self._forward)
        return rows.new_empty(0), None

    def _finish_rows_grad(self, under_way: Tensor) -> tuple[Tensor, Tensor]:
        grads, self._weights_grad = finished(self._backward)
        self._backward = None
        return grads, under_way

    def _finish_combine(self, combined: Tensor) -> tuple[Tensor, Tensor]:
        sums, saved = finished(self._forward)
        self._forward = None
        return sums, saved if self._needs_weights and saved is not None else sums.new_empty(0)

    def _start_rows_grad(self, grads: Tensor, saved: Tensor) -> tuple[Tensor]:
        self._backward = self.mechanism.spread(grads, self.route, saved if self._needs_weights else None)
        next(self._backward)
        return (grads.new_empty(0),)


def _run(half: Callable[..., Any], derivative: Callable[..., Any], *inputs: Tensor) -> Any:
    """Run a half; if no derivative is needed, run it without autograd, whose `apply` costs the host 10 µs."""
    function: Any = _Half
    return function.apply(half, derivative, *inputs) if torch.is_grad_enabled() else half(*inputs)[0]


class _Half(torch.autograd.Function):
    """Runs one half of a trip forward, and the derivative of this half backward."""

    @staticmethod
    def forward(ctx: Any, half: Callable[..., Any], derivative: Callable[..., Any], *inputs: Tensor) -> Any:
        outputs, saved = half(*inputs)
        ctx.derivative = derivative
        ctx.save_for_backward(*([] if saved is None else [saved]))
        return outputs

    @staticmethod
    def backward(ctx: Any, grads: Tensor, *_: Any) -> Any:
        if torch.is_grad_enabled():
            raise Unsupported("create_graph=True of a dispatch or a combine, whose derivatives have none: leave it out")
        return None, None, *ctx.derivative(grads.contiguous(), *ctx.saved_tensors)
