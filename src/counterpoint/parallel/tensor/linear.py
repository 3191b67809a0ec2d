"""Run linear layers of tensor parallelism on local tensors, with derivatives.

`x` has this rank's rows or columns, `[..., in]`; a weight is this rank's part, `[out, in]`, of a column-wise layer its
rows, of a row-wise one its columns; a bias is `[out]` or None, and equal on all ranks in a row-wise layer. `dim`, never
the last, is the dimension along which ranks have equal parts, in their order; `group` is the name of the process group.

All functions can be compiled: in a traced graph they are `torch.ops.counterpoint`, elsewhere functions of autograd,
which cost the host a fraction of an operation's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from counterpoint.parallel.tensor import operations

Bias = Tensor | None


def all_gather_linear(
    x_shard: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Bias],
    dim: int,
    group: str,
    *,
    return_gathered: bool = False,
) -> tuple[Tensor | None, list[Tensor]]:
    """Gather all ranks' rows once, and apply column-wise layers to these rows.

    The derivative of the gathered rows is added up over ranks.

    Returns:
        The gathered rows, `[..., in]` (None without `return_gathered`), and each layer's output, `[..., out]`.
    """
    x_shard, weights, biases = _autocast(x_shard, weights, biases)
    added = [] if None in biases else list(biases)
    matrices = [weight.t() for weight in weights]
    if _is_traced():
        gathered, outs = torch.ops.counterpoint.all_gather_linear(x_shard, matrices, added, dim, group, return_gathered)
    else:
        given = x_shard, dim, group, return_gathered, len(weights), *matrices, *added
        gathered, *outs = _apply(_AllGatherLinear, *given)
    if not added:
        outs = [out if bias is None else out + bias for out, bias in zip(outs, biases, strict=True)]
    return gathered, outs


def replicated_rows(x_shard: Tensor, gathered: Tensor, dim: int, rank: int) -> Tensor:
    """Return `gathered`; `x_shard` gets rank `rank`'s part of the derivative, which must be equal on all ranks."""
    rows: Tensor = _apply(_ReplicatedRows, x_shard, gathered.detach(), dim, rank)
    return rows


def linear_reduce_scatter(x: Tensor, weight: Tensor, bias: Bias, dim: int, group: str) -> Tensor:
    """Apply a row-wise layer, sum the products over ranks, and return this rank's rows; the bias is added once."""
    x, (weight,), (bias,) = _autocast(x, [weight], [bias])
    run = torch.ops.counterpoint.matmul_reduce_scatter if _is_traced() else operations.eager_matmul_reduce_scatter
    out: Tensor = run(x, weight.t(), "sum", dim, group)
    return out if bias is None else out + _apply(_SumOfDerivatives, bias, group)


def linear_all_reduce(x: Tensor, weight: Tensor, bias: Bias, group: str) -> Tensor:
    """Apply a row-wise layer, and return the sum of all ranks' products on every rank.

    The bias is added once.

    Returns:
        `[..., out]`, equal on all ranks, as its derivative has to be.
    """
    x, (weight,), (bias,) = _autocast(x, [weight], [bias])
    run = torch.ops.counterpoint.matmul_all_reduce if _is_traced() else operations.eager_matmul_all_reduce
    out: Tensor = run(x, weight.t(), "sum", group)
    return out if bias is None else out + bias


def replicated_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Bias], group: str) -> list[Tensor]:
    """Apply column-wise layers to an input that is equal on all ranks; one all-reduce sums the input's derivative."""
    x, weights, biases = _autocast(x, weights, biases)
    return list(_apply(_ReplicatedLinear, x, group, len(weights), *weights, *biases))


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer multiplies `x`."""
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def _autocast(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Bias]) -> Any:
    dtype = autocast_dtype(x)
    cast = [None if bias is None else bias.to(dtype) for bias in biases]
    return x.to(dtype), [weight.to(dtype) for weight in weights], cast


def _is_traced() -> bool:
    """Return whether a compiler, or a dispatch mode such as `FakeTensorMode`, traces operations now."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def _apply(function: Any, *inputs: Any) -> Any:
    return function.apply(*inputs)


class _AllGatherLinear(torch.autograd.Function):
    """Does `all_gather_linear`: `apply(rows, dim, group, return_gathered, number of layers, *matrices, *biases)`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, dim: int, group: str, gathered: bool, count: int, *parameters: Any) -> Any:
        inputs = rows, parameters[:count], parameters[count:], dim, group, gathered
        operations.save_for_gather(ctx, inputs, None)
        whole, outs = operations.all_gather_linear(*inputs)
        return whole, *outs

    @staticmethod
    def backward(ctx: Any, grad_gathered: Any, *grads: Any) -> Any:
        needs_weights = any(ctx.needs_input_grad[5 : 5 + len(grads)])
        run = operations.all_gather_matmul_backward
        grad, of_weights, of_biases = operations.gather_derivatives(run, ctx, grad_gathered, grads, needs_weights)
        return grad, None, None, None, None, *of_weights, *of_biases


class _ReplicatedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_shard: Tensor, gathered: Tensor, dim: int, rank: int) -> Tensor:
        ctx.part = (dim, rank * x_shard.shape[dim], x_shard.shape[dim])
        return gathered.view_as(gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].narrow(*ctx.part), None, None, None


class _SumOfDerivatives(torch.autograd.Function):
    """Returns the input unchanged; sums the input's derivative over all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: str) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return operations.sum_of_ranks(grads[0], ctx.group), None


class _ReplicatedLinear(torch.autograd.Function):
    """Applies several layers to one input: `apply(x, group, number of layers, *weights, *biases)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, count: int, *parameters: Any) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        ctx.group = group
        ctx.save_for_backward(x, *weights)
        return tuple(linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *weights = ctx.saved_tensors
        count = len(weights)
        needs_x, _, _, *needs = ctx.needs_input_grad
        grad_x = None
        if needs_x:
            grad = grads[0].contiguous() if count == 1 else torch.cat(grads, dim=-1)
            weight = weights[0] if count == 1 else torch.cat(weights)
            run = torch.ops.counterpoint.matmul_all_reduce if _is_traced() else operations.matmul_all_reduce
            grad_x = run(grad, weight, "sum", ctx.group)
        flat = [grad.flatten(0, -2) for grad in grads]
        rows = x.flatten(0, -2)
        of_weights = [one.t() @ rows if needs[index] else None for index, one in enumerate(flat)]
        of_biases = [one.sum(dim=0) if needs[count + index] else None for index, one in enumerate(flat)]
        return grad_x, None, None, *of_weights, *of_biases


# mixins by which `counterpoint.torchtitan` replaces torchtitan's layers


class _DividedLinear:
    """Replaces `forward` of a layer whose weight is divided among ranks, so that communication overlaps its matmul."""

    _flatten_weight_and_bias: Any
    _unflatten_output: Any
    _product: Any  # called with input, weight, bias, the group, and whether its ranks divide the rows

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output; with sequence parallelism, input or output has this rank's rows only."""
        from torchtitan.distributed.spmd_types import spmd_dense_sp_enabled, spmd_mesh_group

        group = spmd_mesh_group("tp")
        out: Tensor
        if group is None:
            out = super().forward(input)  # type: ignore[misc]  # torchtitan's class comes after this one
        else:
            product = self._product(input, *self._flatten_weight_and_bias(), group.group_name, spmd_dense_sp_enabled())
            out = self._unflatten_output(product)
        return out


class ColumnLinear(_DividedLinear):
    """Computes this rank's output columns; the gather of rows or all-reduce of derivatives overlaps with matmuls."""

    @staticmethod
    def _product(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, has_own_rows: bool) -> Tensor:
        if has_own_rows:
            return all_gather_linear(x, [weight], [bias], 0, group)[1][0]
        return replicated_linear(x, [weight], [bias], group)[0]


class RowLinear(_DividedLinear):
    """Reduces products over ranks, to this rank's rows or all rows, while later products are computed."""

    @staticmethod
    def _product(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, has_own_rows: bool) -> Tensor:
        if has_own_rows:
            return linear_reduce_scatter(x, weight, bias, 0, group)
        return linear_all_reduce(x, weight, bias, group)
