"""Define `torch.ops.counterpoint`: matmuls fused with a collective, with the arguments of `torch.ops.symm_mem`.

`torch.ops.symm_mem.fused_all_gather_matmul` and its three sisters take the same arguments. Ours work on CPUs and GPUs,
have derivatives, can be captured in CUDA graphs and compiled, and several may be under way on one group. Each call
runs in the way that was measured as fastest, down to torch's own collective and one matmul: see `group.py`.
`*_linear` and `linear_*` do as `*_matmul` and `matmul_*`, with a bias.

All ranks of a group make the same calls in the same order. The functions here are what the operations run: calling
them saves the dispatcher's time, but records no derivatives, except with `eager_*`, which are functions of autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from counterpoint.errors import Misconfigured
from counterpoint.parallel.tensor.group import ReturnRows, tensor_group
from counterpoint.parallel.tensor.overlapped import Weight, grad_of_weight

F = TypeVar("F", bound=Callable[..., Any])
_LIBRARY = torch.library.Library("counterpoint", "DEF")  # its operations live as long as this object
_ours = torch.ops.counterpoint


def _operation(schema: str, fake: Callable[..., Any]) -> Callable[[F], F]:
    """Return a decorator that registers a function as the operation of a schema; `fake` makes its fake results."""

    def define(function: F) -> F:
        name = schema.split("(", maxsplit=1)[0]
        _LIBRARY.define(schema, tags=[torch.Tag.pt2_compliant_tag])
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"counterpoint::{name}", fake, lib=_LIBRARY)
        return function

    return define


def _derive(names: Sequence[str], save: Callable[..., None], backward: Callable[..., Any]) -> None:
    """Register how operations save tensors for backward, and their backward function."""
    for name in names:
        torch.library.register_autograd(f"counterpoint::{name}", backward, setup_context=save, lib=_LIBRARY)


def _eager(function: Callable[..., Tensor], save: Callable[..., None], backward: Callable[..., Any]) -> Any:
    """Return `function` as an autograd function, which costs less host time than a custom operator."""

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Tensor:
            save(ctx, inputs, None)
            return function(*inputs)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return backward(ctx, *grads)

    return Eager.apply


# all_gather, then matmul


def _fake_products(
    a: Any, weights: Any, dim: int, group: str, return_gathered: bool = True, dtypes: Sequence[Any] = ()
) -> Any:
    shape = list(a.shape)
    shape[dim] *= tensor_group(group).world_size
    pairs = zip(weights, _for_each(dtypes, len(weights)), strict=True)
    outs = [a.new_empty(*shape[:-1], weight.shape[1], dtype=_dtype(dtype) or a.dtype) for weight, dtype in pairs]
    return a.new_empty(shape) if return_gathered else None, outs


@_operation(
    "all_gather_matmul(Tensor a_shard, Tensor[] weights, int gather_dim, str group_name, *, bool return_gathered=True) "
    "-> (Tensor?, Tensor[])",
    _fake_products,
)
def all_gather_matmul(
    a_shard: Tensor, weights: Sequence[Tensor], gather_dim: int, group_name: str, *, return_gathered: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    """Multiply all ranks' rows by each of this rank's weights, first the rows that have arrived.

    Args:
        a_shard: this rank's `[..., k]`, equal in shape and dtype on all ranks.
        weights: matrices `[k, n]`, which may differ in `n`, but not between ranks; a view `weight.t()` costs nothing.
        gather_dim: dimension along which shards lie behind one another by rank; not the last.
        group_name: name of the process group.
        return_gathered: return the gathered rows, too; if False, this rank's own rows are never copied.

    Returns:
        The gathered rows (None without `return_gathered`), and the product with each weight.

    Raises:
        Misconfigured: shapes do not fit.
    """
    given = [Weight(matrix=matrix) for matrix in weights]
    rows: ReturnRows = "copy" if return_gathered else "no"
    return tensor_group(group_name).all_gather_matmul(a_shard, given, gather_dim, return_rows=rows)


@_operation(
    "all_gather_linear(Tensor a_shard, Tensor[] weights, Tensor[] biases, int gather_dim, str group_name, "
    "bool return_gathered) -> (Tensor?, Tensor[])",
    lambda a, weights, _, *where: _fake_products(a, weights, *where),
)
def all_gather_linear(
    a_shard: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    gather_dim: int,
    group_name: str,
    return_gathered: bool,
) -> tuple[Tensor | None, list[Tensor]]:
    """Do `all_gather_matmul`, and add each weight's bias `[n]` to its product; `biases` may be empty."""
    pairs = zip(weights, _for_each(biases, len(weights)), strict=True)
    given = [Weight(matrix=matrix, bias=bias) for matrix, bias in pairs]
    rows: ReturnRows = "copy" if return_gathered else "no"
    return tensor_group(group_name).all_gather_matmul(a_shard, given, gather_dim, return_rows=rows)


def _fake_gather_backward(a: Any, weights: Any, *others: Any) -> Any:
    *_, needs_a, needs_weights = others
    of_weights = [torch.empty_like(weight) for weight in weights] if needs_weights else []
    return a.new_empty(a.shape) if needs_a else None, of_weights


@_operation(
    "all_gather_matmul_backward(Tensor a_shard, Tensor[] weights, Tensor[] grads, Tensor? grad_gathered, "
    "int gather_dim, str group_name, bool needs_a, bool needs_weights) -> (Tensor?, Tensor[])",
    _fake_gather_backward,
)
def all_gather_matmul_backward(
    a_shard: Tensor,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    grad_gathered: Tensor | None,
    gather_dim: int,
    group_name: str,
    needs_a: bool,
    needs_weights: bool,
) -> tuple[Tensor | None, list[Tensor]]:
    """Return the derivatives of `a_shard` and the weights, given the gradients of the products and gathered rows."""
    return tensor_group(group_name).all_gather_matmul_backward(
        a_shard, weights, grads, grad_gathered, gather_dim, needs_a=needs_a, needs_weights=needs_weights
    )


def save_for_gather(ctx: Any, inputs: Any, output: Any, keyword_only_inputs: Any = None) -> None:
    """Save the inputs that the backward of `all_gather_matmul` or `all_gather_linear` needs."""
    ctx.has_biases, where = False, inputs[2:]
    if len(inputs) > 4:
        ctx.has_biases, where = bool(inputs[2]), inputs[3:5]
    ctx.gather_dim, ctx.group_name = where
    ctx.save_for_backward(inputs[0], *inputs[1])
    ctx.set_materialize_grads(False)


def gather_derivatives(
    run: Callable[..., Any], ctx: Any, grad_gathered: Tensor | None, grads: Sequence[Any], needs_weights: bool
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """Return the derivatives of rows, weights and biases; `run` is `all_gather_matmul_backward` or its operation."""
    a_shard, *weights = ctx.saved_tensors
    used = [index for index, grad in enumerate(grads) if grad is not None]
    grad_a, of_used = run(
        a_shard,
        [weights[index] for index in used],
        [grads[index].contiguous() for index in used],
        grad_gathered,
        ctx.gather_dim,
        ctx.group_name,
        ctx.needs_input_grad[0],
        needs_weights,
    )
    by_index = dict(zip(used, of_used, strict=False))
    of_biases = [None if grad is None else _sum_of_rows(grad) for grad in grads] if ctx.has_biases else []
    return grad_a, [by_index.get(index) for index in range(len(weights))], of_biases


def _gather_backward(ctx: Any, grad_gathered: Tensor | None, grads: Any) -> Any:
    needs = ctx.needs_input_grad[1]
    needs_weights = any(needs) if isinstance(needs, list | tuple) else needs
    run = _ours.all_gather_matmul_backward
    grad_a, of_weights, of_biases = gather_derivatives(run, ctx, grad_gathered, grads, needs_weights)
    if len(ctx.needs_input_grad) == 4:
        return grad_a, of_weights, None, None
    return grad_a, of_weights, of_biases, None, None, None


_derive(("all_gather_matmul", "all_gather_linear"), save_for_gather, _gather_backward)


# matmul, then reduce_scatter


def _fake_scatter(a: Any, b: Any, *where: Any) -> Any:
    *_, dim, group = where
    shape = [*a.shape[:-1], b.shape[1]]
    shape[dim] //= tensor_group(group).world_size
    return a.new_empty(shape)


@_operation(
    "matmul_reduce_scatter(Tensor a, Tensor b, str reduce_op, int scatter_dim, str group_name) -> Tensor",
    _fake_scatter,
)
def matmul_reduce_scatter(a: Tensor, b: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    """Multiply `a @ b`, sum over ranks, and keep this rank's rows; products are sent while others are computed.

    Args:
        a: this rank's `[..., k]`, equal in shape and dtype on all ranks.
        b: `[k, n]`.
        reduce_op: `sum` or `avg`.
        scatter_dim: dimension of which each rank keeps an equal part, in the order of ranks; not the last.
        group_name: name of the process group.

    Returns:
        This rank's part `[..., n]`.

    Raises:
        Misconfigured: shapes do not fit, the dimension does not divide, or another reduction.
    """
    return tensor_group(group_name).matmul_reduce_scatter(a, Weight(matrix=b), reduce_op, scatter_dim)


@_operation(
    "linear_reduce_scatter(Tensor a, Tensor b, Tensor bias, str reduce_op, int scatter_dim, str group_name) -> Tensor",
    _fake_scatter,
)
def linear_reduce_scatter(
    a: Tensor, b: Tensor, bias: Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> Tensor:
    """Do `matmul_reduce_scatter`, and add to each rank's product its own bias `[n]`, which may differ between ranks."""
    return tensor_group(group_name).matmul_reduce_scatter(a, Weight(matrix=b, bias=bias), reduce_op, scatter_dim)


def _fake_scatter_backward(grad: Any, a: Any, b: Any, *others: Any) -> Any:
    *_, needs_a, needs_b = others
    return a.new_empty(a.shape) if needs_a else None, torch.empty_like(b) if needs_b else None


@_operation(
    "matmul_reduce_scatter_backward(Tensor grad, Tensor a, Tensor b, str reduce_op, int scatter_dim, str group_name, "
    "bool needs_a, bool needs_b) -> (Tensor?, Tensor?)",
    _fake_scatter_backward,
)
def matmul_reduce_scatter_backward(
    grad: Tensor,
    a: Tensor,
    b: Tensor,
    reduce_op: str,
    scatter_dim: int,
    group_name: str,
    needs_a: bool,
    needs_b: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the derivatives of `a` and `b`, given the result's derivative; one gather of `grad` serves both."""
    return tensor_group(group_name).matmul_reduce_scatter_backward(
        grad, a, b, reduce_op, scatter_dim, needs_a=needs_a, needs_b=needs_b
    )


def _save_for_scatter(ctx: Any, inputs: Any, output: Any) -> None:
    a, b, *_, ctx.reduce_op, ctx.scatter_dim, ctx.group_name = inputs
    ctx.save_for_backward(a, b)


def _scatter_backward(run: Callable[..., Any], ctx: Any, grad: Tensor) -> Any:
    a, b = ctx.saved_tensors
    needs_a, needs_b, *_ = needs = ctx.needs_input_grad
    grad_a, grad_b = run(grad.contiguous(), a, b, ctx.reduce_op, ctx.scatter_dim, ctx.group_name, needs_a, needs_b)
    if len(needs) == 5:
        return grad_a, grad_b, None, None, None
    grad_bias = None
    if needs[2]:  # the sum over the rows of all ranks
        own = _sum_of_rows(grad)
        if ctx.reduce_op == "avg":
            own = own / tensor_group(ctx.group_name).world_size
        grad_bias = sum_of_ranks(own, ctx.group_name)
    return grad_a, grad_b, grad_bias, None, None, None


_derive(
    ("matmul_reduce_scatter", "linear_reduce_scatter"),
    _save_for_scatter,
    partial(_scatter_backward, _ours.matmul_reduce_scatter_backward),
)
eager_matmul_reduce_scatter = _eager(
    matmul_reduce_scatter, _save_for_scatter, partial(_scatter_backward, matmul_reduce_scatter_backward)
)


# matmul, then all_reduce


def _fake_all_reduce(a: Any, b: Any, *_: Any) -> Any:
    return a.new_empty(*a.shape[:-1], b.shape[1])


@_operation("matmul_all_reduce(Tensor a, Tensor b, str reduce_op, str group_name) -> Tensor", _fake_all_reduce)
def matmul_all_reduce(a: Tensor, b: Tensor, reduce_op: str, group_name: str) -> Tensor:
    """Do `matmul_reduce_scatter`, but return all rows of the sum on every rank; sizes need not divide by the ranks.

    Backward takes the result's derivative as equal on all ranks, as in tensor parallelism (Megatron-LM's `g`), so it
    communicates nothing.

    Returns:
        `[..., n]`, equal on all ranks.

    Raises:
        Misconfigured: shapes do not fit, or another reduction.
    """
    return tensor_group(group_name).matmul_all_reduce(a, Weight(matrix=b), reduce_op)


@_operation(
    "linear_all_reduce(Tensor a, Tensor b, Tensor bias, str reduce_op, str group_name) -> Tensor", _fake_all_reduce
)
def linear_all_reduce(a: Tensor, b: Tensor, bias: Tensor, reduce_op: str, group_name: str) -> Tensor:
    """Do `matmul_all_reduce`, and add to each rank's product its own bias `[n]`, which may differ between ranks."""
    return tensor_group(group_name).matmul_all_reduce(a, Weight(matrix=b, bias=bias), reduce_op)


def _save_for_all_reduce(ctx: Any, inputs: Any, output: Any) -> None:
    a, b, *_, reduce_op, group_name = inputs
    ctx.factor = 1.0 if reduce_op == "sum" else 1.0 / tensor_group(group_name).world_size
    ctx.save_for_backward(a, b)


def _all_reduce_backward(ctx: Any, grad: Tensor) -> Any:
    a, b = ctx.saved_tensors
    needs_a, needs_b, *_ = needs = ctx.needs_input_grad
    own = grad if ctx.factor == 1.0 else grad * ctx.factor
    grad_b = grad_of_weight(a, own, b) if needs_b else None
    grad_a = own @ b.t() if needs_a else None
    if len(needs) == 4:
        return grad_a, grad_b, None, None
    return grad_a, grad_b, _sum_of_rows(grad) * ctx.factor if needs[2] else None, None, None


_derive(("matmul_all_reduce", "linear_all_reduce"), _save_for_all_reduce, _all_reduce_backward)
eager_matmul_all_reduce = _eager(matmul_all_reduce, _save_for_all_reduce, _all_reduce_backward)


# float8


@_operation(
    "all_gather_scaled_matmul(Tensor a_shard, Tensor[] weights, Tensor a_scale, Tensor[] scales, int gather_dim, "
    "str group_name, Tensor?[] biases, Tensor?[] result_scales, ScalarType?[] out_dtypes, bool[] use_fast_accum) "
    "-> (Tensor, Tensor[])",
    lambda a, weights, _a, _b, dim, group, *lists: _fake_products(a, weights, dim, group, dtypes=lists[2]),
)
def all_gather_scaled_matmul(
    a_shard: Tensor,
    weights: Sequence[Tensor],
    a_scale: Tensor,
    scales: Sequence[Tensor],
    gather_dim: int,
    group_name: str,
    biases: Sequence[Tensor | None],
    result_scales: Sequence[Tensor | None],
    out_dtypes: Sequence[torch.dtype | None],
    use_fast_accum: Sequence[bool],
) -> tuple[Tensor, list[Tensor]]:
    """Do `all_gather_matmul` for float8 rows and weights, multiplied as by `torch._scaled_mm`.

    Args:
        a_shard: this rank's float8 `[..., k]`.
        weights: float8 matrices `[k, n]`.
        a_scale: scale of the rows: one value, equal on all ranks; or one for each row, `[..., 1]`: of this rank's rows,
            then gathered, or of all rows.
        scales: for each weight one value, or `[1, n]`.
        gather_dim: dimension along which shards lie behind one another by rank; not the last.
        group_name: name of the process group.
        biases: for each weight `[n]` or None.
        result_scales: for each weight, as `torch._scaled_mm` takes it.
        out_dtypes: for each weight the dtype of the product; None: the dtype of the rows.
        use_fast_accum: for each weight, as `torch._scaled_mm` takes it.

    Returns:
        The gathered rows, and the product with each weight.

    Raises:
        Misconfigured: shapes do not fit.
    """
    lists = (weights, scales, biases, result_scales, out_dtypes, use_fast_accum)
    given = [
        Weight(matrix=matrix, scale=scale, bias=bias, result_scale=result, out_dtype=_dtype(dtype), use_fast_accum=fast)
        for matrix, scale, bias, result, dtype, fast in zip(
            *(_for_each(one, len(weights)) for one in lists), strict=True
        )
    ]
    group = tensor_group(group_name)
    gathered, outs = group.all_gather_matmul(a_shard, given, gather_dim, return_rows="copy", a_scale=a_scale)
    assert gathered is not None
    return gathered, outs


def _fake_scaled_scatter(a: Any, b: Any, *others: Any) -> Any:
    _, _, _, dim, _, group, shape, *options = others
    out_dtype = (*options, None, None, None)[2]  # behind bias and result_scale; torch leaves defaults at the end out
    shape = [*a.shape[:-1], b.shape[1]] if shape is None else [*shape]
    shape[dim] //= tensor_group(group).world_size
    return a.new_empty(shape, dtype=out_dtype or a.dtype)


@_operation(
    "scaled_matmul_reduce_scatter(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, str reduce_op, "
    "int orig_scatter_dim, int scatter_dim_after_maybe_reshape, str group_name, SymInt[]? output_shape, "
    "Tensor? bias=None, Tensor? result_scale=None, ScalarType? out_dtype=None, bool use_fast_accum=False) -> Tensor",
    _fake_scaled_scatter,
)
def scaled_matmul_reduce_scatter(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: Sequence[int] | None,
    bias: Tensor | None = None,
    result_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """Do `matmul_reduce_scatter` for float8 tensors, multiplied as by `torch._scaled_mm`.

    The arguments are those of `torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter`, where a compiler may have made
    rows of `a` flat.

    Args:
        a: this rank's float8 `[..., k]`.
        b: float8 `[k, n]`.
        a_scale: one value, or of each row `[..., 1]`.
        b_scale: one value, or `[1, n]`.
        reduce_op: `sum` or `avg`.
        orig_scatter_dim: dimension of the product, of shape `output_shape`, that is scattered.
        scatter_dim_after_maybe_reshape: that dimension of `a`, as it is given.
        group_name: name of the process group.
        output_shape: shape of the product before it is scattered; None: the shape of `a` with `n` columns.
        bias: not supported, as it would be added once for each rank.
        result_scale: as `torch._scaled_mm` takes it.
        out_dtype: dtype of the product; None: the dtype of `a`.
        use_fast_accum: as `torch._scaled_mm` takes it.

    Returns:
        This rank's part of the product.

    Raises:
        Misconfigured: shapes do not fit, or a bias is given.
    """
    if bias is not None:
        raise Misconfigured("scaled_matmul_reduce_scatter with a bias, which all ranks would add: add it to the result")
    weight = Weight(
        matrix=b, scale=b_scale, result_scale=result_scale, out_dtype=out_dtype, use_fast_accum=use_fast_accum
    )
    rows = a if output_shape is None else a.reshape(*output_shape[:-1], a.shape[-1])
    if output_shape is not None and a_scale.numel() > 1:
        a_scale = a_scale.reshape(*output_shape[:-1], 1)
    return tensor_group(group_name).matmul_reduce_scatter(rows, weight, reduce_op, orig_scatter_dim, a_scale=a_scale)


def sum_of_ranks(tensor: Tensor, group_name: str) -> Tensor:
    """Return the sum of all ranks' tensors, computed by torch's all_reduce."""
    functional = torch.ops._c10d_functional
    total: Tensor = functional.wait_tensor(functional.all_reduce(tensor.contiguous(), "sum", group_name))
    return total


def _sum_of_rows(grad: Tensor) -> Tensor:
    """Return the derivative of a bias, given the derivative of the rows to which the bias was added."""
    return grad.flatten(0, -2).sum(dim=0)


def _for_each(values: Sequence[Any] | None, count: int) -> list[Any]:
    """Return `values` as a list, or `count` Nones if there are no values; raise for another number of values."""
    found = [None] * count if not values else list(values)
    if len(found) != count:
        raise Misconfigured(f"{len(found)} values for {count} weights: give one for each, or none")
    return found


def _dtype(given: torch.dtype | int | None) -> torch.dtype | None:
    """Return `given` as a dtype; torch's dispatcher passes dtypes in lists as numbers."""
    if isinstance(given, int):
        found: torch.dtype = torch.ops.aten.empty.memory_format([0], dtype=given, device="cpu").dtype
        return found
    return given
