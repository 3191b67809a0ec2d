"""Run linear layers of tensor parallelism on local tensors, with derivatives: `torch.nn.functional.linear`, and more.

A weight is this rank's `[out, in]`; `group` is the name of the process group. All of it can be compiled: where a graph
is traced these are `torch.ops.counterpoint`, elsewhere functions of autograd, which cost the host a fraction of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from counterpoint.parallel.tensor import operations  # noqa: F401  (defines torch.ops.counterpoint)
from counterpoint.parallel.tensor.group import tensor_group
from counterpoint.parallel.tensor.matmul import Weight, grad_of_weight

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
    """Apply column-wise layers to all ranks' rows: one gather serves all of them.

    Args:
        x_shard: this rank's `[..., in]`.
        weights: of each layer this rank's rows `[out, in]`.
        biases: of each layer `[out]` or None.
        dim: along which shards lie behind one another; not the last.
        group: name of the process group.
        return_gathered: return the gathered rows, too. Their derivative is added up over ranks.

    Returns:
        The gathered rows (None without `return_gathered`), and each layer's output.
    """
    x_shard, weights, biases = _autocast(x_shard, weights, biases)
    added = [] if None in biases else list(biases)
    if _is_traced():
        gathered, outs = torch.ops.counterpoint.all_gather_linear(
            x_shard, [weight.t() for weight in weights], added, dim, group, return_gathered
        )
    else:
        gathered, *outs = _apply(_AllGatherLinear, x_shard, dim, group, return_gathered, len(weights), *weights, *added)
    if not added:
        outs = [out if bias is None else out + bias for out, bias in zip(outs, biases, strict=True)]
    return gathered, outs


def replicated_rows(x_shard: Tensor, gathered: Tensor, dim: int, rank: int) -> Tensor:
    """Return gathered rows whose derivative is taken as equal on all ranks: this rank keeps its part of it.

    Args:
        x_shard: this rank's rows.
        gathered: all ranks' rows.
        dim: along which shards lie behind one another, counted from the first.
        rank: of this process in the group.

    Returns:
        The values of `gathered`.
    """
    rows: Tensor = _apply(_ReplicatedRows, x_shard, gathered.detach(), dim, rank)
    return rows


def linear_reduce_scatter(x: Tensor, weight: Tensor, bias: Bias, dim: int, group: str) -> Tensor:
    """Apply a row-wise layer, add up all ranks' products, and keep this rank's rows.

    Args:
        x: this rank's columns `[..., in]`.
        weight: this rank's columns `[out, in]`.
        bias: `[out]`, equal on all ranks, added once; None: there is none.
        dim: of which each rank keeps an equal part; not the last.
        group: name of the process group.

    Returns:
        This rank's part `[..., out]`.
    """
    x, (weight,), (bias,) = _autocast(x, [weight], [bias])
    out: Tensor
    if _is_traced():
        out = torch.ops.counterpoint.matmul_reduce_scatter(x, weight.t(), "sum", dim, group)
    else:
        out = _apply(_LinearReduceScatter, x, weight, dim, group)
    return out if bias is None else out + _apply(_SumOfDerivatives, bias, group)


def linear_all_reduce(x: Tensor, weight: Tensor, bias: Bias, group: str) -> Tensor:
    """Apply a row-wise layer, and add up all ranks' products on every rank.

    Args:
        x: this rank's columns `[..., in]`.
        weight: this rank's columns `[out, in]`.
        bias: `[out]`, equal on all ranks, added once; None: there is none.
        group: name of the process group.

    Returns:
        `[..., out]`, equal on all ranks. So has to be its derivative.
    """
    x, (weight,), (bias,) = _autocast(x, [weight], [bias])
    out: Tensor
    if _is_traced():
        out = torch.ops.counterpoint.matmul_all_reduce(x, weight.t(), "sum", group)
    else:
        out = _apply(_LinearAllReduce, x, weight, group)
    return out if bias is None else out + bias


def replicated_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Bias], group: str) -> list[Tensor]:
    """Apply column-wise layers to an input that is equal on all ranks; one all-reduce makes its derivative so, too.

    Args:
        x: `[..., in]`.
        weights: of each layer this rank's rows `[out, in]`.
        biases: of each layer `[out]` or None.
        group: name of the process group.

    Returns:
        Each layer's output.
    """
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
    """Return whether something looks at operations: a compiler, or a mode such as that of fake tensors."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def _apply(function: Any, *inputs: Any) -> Any:
    return function.apply(*inputs)


class _AllGatherLinear(torch.autograd.Function):
    """Does `all_gather_linear`: `apply(x_shard, dim, group, return_gathered, number of layers, *weights, *biases)`."""

    @staticmethod
    def forward(ctx: Any, x_shard: Tensor, dim: int, group: str, gathered: bool, count: int, *parameters: Any) -> Any:
        weights, biases = parameters[:count], parameters[count:] or (None,) * count
        ctx.dim, ctx.group, ctx.has_biases = dim, group, len(parameters) > count
        ctx.save_for_backward(x_shard, *weights)
        ctx.set_materialize_grads(False)
        given = [Weight(matrix=weight.t(), bias=bias) for weight, bias in zip(weights, biases, strict=True)]
        rows, outs = tensor_group(group).all_gather_matmul(x_shard, given, dim, return_gathered=gathered)
        return rows, *outs

    @staticmethod
    def backward(ctx: Any, grad_gathered: Any, *grads: Any) -> Any:
        x_shard, *weights = ctx.saved_tensors
        used = [index for index, grad in enumerate(grads) if grad is not None]
        grad_x, of_used = tensor_group(ctx.group).all_gather_matmul_backward(
            x_shard,
            [weights[index].t() for index in used],
            [grads[index].contiguous() for index in used],
            grad_gathered,
            ctx.dim,
            needs_a=ctx.needs_input_grad[0],
            needs_weights=any(ctx.needs_input_grad[5 : 5 + len(weights)]),
        )
        by_index = {index: grad.t() for index, grad in zip(used, of_used, strict=False)}
        of_weights = [by_index.get(index) for index in range(len(weights))]
        of_biases = [None if one is None else one.flatten(0, -2).sum(dim=0) for one in grads] if ctx.has_biases else []
        return grad_x, None, None, None, None, *of_weights, *of_biases


class _LinearReduceScatter(torch.autograd.Function):
    """Does `linear_reduce_scatter` without a bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dim: int, group: str) -> Tensor:
        ctx.dim, ctx.group = dim, group
        ctx.save_for_backward(x, weight)
        return tensor_group(group).matmul_reduce_scatter(x, Weight(matrix=weight.t()), "sum", dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        grad_x, grad_weight = tensor_group(ctx.group).matmul_reduce_scatter_backward(
            grads[0].contiguous(), x, weight.t(), "sum", ctx.dim, needs_a=needs_x, needs_b=needs_weight
        )
        return grad_x, None if grad_weight is None else grad_weight.t(), None, None


class _LinearAllReduce(torch.autograd.Function):
    """Does `linear_all_reduce` without a bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        return tensor_group(group).matmul_all_reduce(x, Weight(matrix=weight.t()), "sum")

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        grad_weight = grad_of_weight(x, grads[0], weight.t()).t() if needs_weight else None
        return grads[0] @ weight if needs_x else None, grad_weight, None


class _ReplicatedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_shard: Tensor, gathered: Tensor, dim: int, rank: int) -> Tensor:
        ctx.part = (dim, rank * x_shard.shape[dim], x_shard.shape[dim])
        return gathered.view_as(gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].narrow(*ctx.part), None, None, None


class _SumOfDerivatives(torch.autograd.Function):
    """Passes a tensor on; its derivative is the sum of all ranks'."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: str) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        functional = torch.ops._c10d_functional
        return functional.wait_tensor(functional.all_reduce(grads[0].contiguous(), "sum", ctx.group)), None


class _ReplicatedLinear(torch.autograd.Function):
    """Applies layers to one input: `apply(x, group, number of layers, *weights, *biases)`."""

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
            if _is_traced():
                grad_x = torch.ops.counterpoint.matmul_all_reduce(grad, weight, "sum", ctx.group)
            else:
                grad_x = tensor_group(ctx.group).matmul_all_reduce(grad, Weight(matrix=weight), "sum")
        flat = [grad.flatten(0, -2) for grad in grads]
        rows = x.flatten(0, -2)
        of_weights = [one.t() @ rows if needs[index] else None for index, one in enumerate(flat)]
        of_biases = [one.sum(dim=0) if needs[count + index] else None for index, one in enumerate(flat)]
        return grad_x, None, None, *of_weights, *of_biases
