"""Define `torch.ops.counterpoint`: matmuls with the collective before or after them, with the schemas of torch's own.

`torch.ops.symm_mem.fused_all_gather_matmul` and its three sisters take the same arguments. Ours work on CPUs and GPUs,
have derivatives, can be captured in CUDA graphs and compiled, and several may be under way on one group. Each call
runs in the way that was measured as fastest, down to torch's own collective and one matmul: see `group.py`.

All ranks of a group make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from counterpoint.errors import Misconfigured
from counterpoint.parallel.tensor.group import tensor_group
from counterpoint.parallel.tensor.matmul import Weight, grad_of_weight

_LIBRARY = torch.library.Library("counterpoint", "DEF")  # its operations live as long as this object


def _operation(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that makes a function the operation of this schema, on CPUs and GPUs."""

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.define(schema, tags=[torch.Tag.pt2_compliant_tag])
        _LIBRARY.impl(schema.split("(")[0], function, "CompositeExplicitAutograd")
        return function

    return define


def _fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that makes a function say what an operation returns, without data."""
    made: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.library.register_fake(
        f"counterpoint::{name}", lib=_LIBRARY
    )
    return made


# all_gather, then matmul


@_operation(
    "all_gather_matmul(Tensor a_shard, Tensor[] weights, int gather_dim, str group_name, *, bool return_gathered=True) "
    "-> (Tensor?, Tensor[])"
)
def all_gather_matmul(
    a_shard: Tensor, weights: Sequence[Tensor], gather_dim: int, group_name: str, *, return_gathered: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    """Multiply all ranks' rows by each of this rank's weights: rows that have arrived, while others are under way.

    Args:
        a_shard: this rank's `[..., k]`, equal in shape and dtype on all ranks.
        weights: matrices `[k, n]`, which may differ in `n`, but not between ranks; a view `weight.t()` costs nothing.
        gather_dim: dimension along which shards lie behind one another by rank; not the last.
        group_name: name of the process group.
        return_gathered: return the gathered rows, too; without them this rank's own are never copied.

    Returns:
        The gathered rows (None without `return_gathered`), and the product with each weight.

    Raises:
        Misconfigured: shapes do not fit.
    """
    given = [Weight(matrix=matrix) for matrix in weights]
    return tensor_group(group_name).all_gather_matmul(a_shard, given, gather_dim, return_gathered=return_gathered)


@_operation(
    "all_gather_linear(Tensor a_shard, Tensor[] weights, Tensor[] biases, int gather_dim, str group_name, "
    "bool return_gathered) -> (Tensor?, Tensor[])"
)
def all_gather_linear(
    a_shard: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    gather_dim: int,
    group_name: str,
    return_gathered: bool,
) -> tuple[Tensor | None, list[Tensor]]:
    """Do `all_gather_matmul`, and add a bias to each product.

    Args:
        a_shard: as in `all_gather_matmul`.
        weights: as in `all_gather_matmul`.
        biases: for each weight `[n]`, or none at all.
        gather_dim: as in `all_gather_matmul`.
        group_name: as in `all_gather_matmul`.
        return_gathered: as in `all_gather_matmul`.

    Returns:
        As `all_gather_matmul`.

    Raises:
        Misconfigured: shapes do not fit.
    """
    pairs = zip(weights, _for_each(biases, len(weights)), strict=True)
    given = [Weight(matrix=matrix, bias=bias) for matrix, bias in pairs]
    return tensor_group(group_name).all_gather_matmul(a_shard, given, gather_dim, return_gathered=return_gathered)


def _gathered_like(a_shard: Tensor, gather_dim: int, group_name: str) -> Tensor:
    shape = list(a_shard.shape)
    shape[gather_dim] *= tensor_group(group_name).world_size
    return a_shard.new_empty(shape)


@_fake("all_gather_matmul")
def _(a: Any, weights: Any, dim: int, group: str, return_gathered: bool = True) -> Any:
    gathered = _gathered_like(a, dim, group)
    outs = [gathered.new_empty(*gathered.shape[:-1], weight.shape[1]) for weight in weights]
    return gathered if return_gathered else None, outs


@_fake("all_gather_linear")
def _(a: Any, weights: Any, biases: Any, dim: int, group: str, return_gathered: bool) -> Any:
    return torch.ops.counterpoint.all_gather_matmul(a, weights, dim, group, return_gathered=return_gathered)


@_operation(
    "all_gather_matmul_backward(Tensor a_shard, Tensor[] weights, Tensor[] grads, Tensor? grad_gathered, "
    "int gather_dim, str group_name, bool needs_a, bool needs_weights) -> (Tensor?, Tensor[])"
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
    """Return the derivatives of `all_gather_matmul`.

    Rows are gathered again, beside the matmuls of the rows' derivative, whose sums arrive beside those of the weights.

    Args:
        a_shard: as in `all_gather_matmul`.
        weights: those with a derivative of their product.
        grads: these derivatives.
        grad_gathered: derivative of the gathered rows.
        gather_dim: as in `all_gather_matmul`.
        group_name: as in `all_gather_matmul`.
        needs_a: whether the derivative of `a_shard` is wanted.
        needs_weights: whether those of the weights are.

    Returns:
        The derivative of `a_shard`, and those of the weights.
    """
    return tensor_group(group_name).all_gather_matmul_backward(
        a_shard, weights, grads, grad_gathered, gather_dim, needs_a=needs_a, needs_weights=needs_weights
    )


@_fake("all_gather_matmul_backward")
def _(a: Any, weights: Any, grads: Any, grad_gathered: Any, dim: int, group: str, *needs: bool) -> Any:
    needs_a, needs_weights = needs
    return (
        a.new_empty(a.shape) if needs_a else None,
        [torch.empty_like(weight) for weight in weights] if needs_weights else [],
    )


def _save_for_gather(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    a_shard, weights, ctx.gather_dim, ctx.group_name = inputs
    ctx.save_for_backward(a_shard, *weights)
    ctx.set_materialize_grads(False)


def _save_for_gather_linear(ctx: Any, inputs: Any, output: Any) -> None:
    a_shard, weights, biases, ctx.gather_dim, ctx.group_name, _ = inputs
    ctx.has_biases = bool(biases)
    ctx.save_for_backward(a_shard, *weights)
    ctx.set_materialize_grads(False)


def _gather_backward(ctx: Any, grad_gathered: Tensor | None, grads: Any) -> Any:
    a_shard, *weights = ctx.saved_tensors
    used = [index for index, grad in enumerate(grads) if grad is not None]
    grad_a, grad_weights = torch.ops.counterpoint.all_gather_matmul_backward(
        a_shard,
        [weights[index] for index in used],
        [grads[index].contiguous() for index in used],
        grad_gathered,
        ctx.gather_dim,
        ctx.group_name,
        ctx.needs_input_grad[0],
        any(_flat(ctx.needs_input_grad[1])),
    )
    by_index = dict(zip(used, grad_weights, strict=False))
    return grad_a, [by_index.get(index) for index in range(len(weights))], None, None


def _gather_linear_backward(ctx: Any, grad_gathered: Tensor | None, grads: Any) -> Any:
    sums = [None if grad is None else grad.flatten(0, -2).sum(dim=0) for grad in grads] if ctx.has_biases else []
    grad_a, grad_weights, *_ = _gather_backward(ctx, grad_gathered, grads)
    return grad_a, grad_weights, sums, None, None, None


for _name, _backward, _save in (
    ("all_gather_matmul", _gather_backward, _save_for_gather),
    ("all_gather_linear", _gather_linear_backward, _save_for_gather_linear),
):
    torch.library.register_autograd(f"counterpoint::{_name}", _backward, setup_context=_save, lib=_LIBRARY)


# matmul, then reduce_scatter


@_operation("matmul_reduce_scatter(Tensor a, Tensor b, str reduce_op, int scatter_dim, str group_name) -> Tensor")
def matmul_reduce_scatter(a: Tensor, b: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    """Multiply, add up all ranks' products, and keep this rank's rows: products leave while others are computed.

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


@_fake("matmul_reduce_scatter")
def _(a: Any, b: Any, reduce_op: str, scatter_dim: int, group_name: str) -> Any:
    shape = [*a.shape[:-1], b.shape[1]]
    shape[scatter_dim] //= tensor_group(group_name).world_size
    return a.new_empty(shape)


@_operation(
    "matmul_reduce_scatter_backward(Tensor grad, Tensor a, Tensor b, str reduce_op, int scatter_dim, str group_name, "
    "bool needs_a, bool needs_b) -> (Tensor?, Tensor?)"
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
    """Return the derivatives of `matmul_reduce_scatter`: one gather of `grad` serves both.

    Args:
        grad: derivative of the result.
        a: as in `matmul_reduce_scatter`.
        b: as in `matmul_reduce_scatter`.
        reduce_op: as in `matmul_reduce_scatter`.
        scatter_dim: as in `matmul_reduce_scatter`.
        group_name: as in `matmul_reduce_scatter`.
        needs_a: whether the derivative of `a` is wanted.
        needs_b: whether that of `b` is.

    Returns:
        The derivatives of `a` and `b`.
    """
    return tensor_group(group_name).matmul_reduce_scatter_backward(
        grad, a, b, reduce_op, scatter_dim, needs_a=needs_a, needs_b=needs_b
    )


@_fake("matmul_reduce_scatter_backward")
def _(grad: Any, a: Any, b: Any, op: str, dim: int, group: str, needs_a: bool, needs_b: bool) -> Any:
    return a.new_empty(a.shape) if needs_a else None, torch.empty_like(b) if needs_b else None


def _save_for_scatter(ctx: Any, inputs: Any, output: Any) -> None:
    a, b, ctx.reduce_op, ctx.scatter_dim, ctx.group_name = inputs
    ctx.save_for_backward(a, b)


def _scatter_backward(ctx: Any, grad: Tensor) -> Any:
    a, b = ctx.saved_tensors
    needs_a, needs_b, *_ = ctx.needs_input_grad
    grad_a, grad_b = torch.ops.counterpoint.matmul_reduce_scatter_backward(
        grad.contiguous(), a, b, ctx.reduce_op, ctx.scatter_dim, ctx.group_name, needs_a, needs_b
    )
    return grad_a, grad_b, None, None, None


torch.library.register_autograd(
    "counterpoint::matmul_reduce_scatter", _scatter_backward, setup_context=_save_for_scatter, lib=_LIBRARY
)


@_operation(
    "linear_reduce_scatter(Tensor a, Tensor b, Tensor bias, str reduce_op, int scatter_dim, str group_name) -> Tensor"
)
def linear_reduce_scatter(
    a: Tensor, b: Tensor, bias: Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> Tensor:
    """Do `matmul_reduce_scatter`, with a bias that each rank adds to its own product: it need not be equal on all.

    Args:
        a: as in `matmul_reduce_scatter`.
        b: as in `matmul_reduce_scatter`.
        bias: this rank's `[n]`.
        reduce_op: as in `matmul_reduce_scatter`.
        scatter_dim: as in `matmul_reduce_scatter`.
        group_name: as in `matmul_reduce_scatter`.

    Returns:
        As `matmul_reduce_scatter`.

    Raises:
        Misconfigured: shapes do not fit, the dimension does not divide, or another reduction.
    """
    return tensor_group(group_name).matmul_reduce_scatter(a, Weight(matrix=b, bias=bias), reduce_op, scatter_dim)


@_fake("linear_reduce_scatter")
def _(a: Any, b: Any, bias: Any, *where: Any) -> Any:
    return torch.ops.counterpoint.matmul_reduce_scatter(a, b, *where)


def _save_for_linear_scatter(ctx: Any, inputs: Any, output: Any) -> None:
    a, b, _, *where = inputs
    _save_for_scatter(ctx, (a, b, *where), output)


def _linear_scatter_backward(ctx: Any, grad: Tensor) -> Any:
    grad_a, grad_b, *_ = _scatter_backward(ctx, grad)
    grad_bias = None
    if ctx.needs_input_grad[2]:  # its sum over the rows of all ranks
        own = grad.flatten(0, -2).sum(dim=0)
        if ctx.reduce_op == "avg":
            own = own / tensor_group(ctx.group_name).world_size
        functional = torch.ops._c10d_functional
        grad_bias = functional.wait_tensor(functional.all_reduce(own, "sum", ctx.group_name))
    return grad_a, grad_b, grad_bias, None, None, None


torch.library.register_autograd(
    "counterpoint::linear_reduce_scatter",
    _linear_scatter_backward,
    setup_context=_save_for_linear_scatter,
    lib=_LIBRARY,
)


# matmul, then all_reduce


@_operation("matmul_all_reduce(Tensor a, Tensor b, str reduce_op, str group_name) -> Tensor")
def matmul_all_reduce(a: Tensor, b: Tensor, reduce_op: str, group_name: str) -> Tensor:
    """Multiply, and add up all ranks' products on every rank.

    Its derivative takes that of the result as equal on all ranks, as tensor parallelism has it (Megatron-LM's `g`), so
    it communicates nothing.

    Args:
        a: this rank's `[..., k]`, equal in shape and dtype on all ranks.
        b: `[k, n]`.
        reduce_op: `sum` or `avg`.
        group_name: name of the process group.

    Returns:
        `[..., n]`, equal on all ranks.

    Raises:
        Misconfigured: shapes do not fit, or another reduction.
    """
    return tensor_group(group_name).matmul_all_reduce(a, Weight(matrix=b), reduce_op)


@_fake("matmul_all_reduce")
def _(a: Any, b: Any, reduce_op: str, group_name: str) -> Any:
    return a.new_empty(*a.shape[:-1], b.shape[1])


def _save_for_all_reduce(ctx: Any, inputs: Any, output: Any) -> None:
    a, b, reduce_op, group_name = inputs
    ctx.factor = 1.0 if reduce_op == "sum" else 1.0 / tensor_group(group_name).world_size
    ctx.save_for_backward(a, b)


def _all_reduce_backward(ctx: Any, grad: Tensor) -> Any:
    a, b = ctx.saved_tensors
    needs_a, needs_b, *_ = ctx.needs_input_grad
    grad = grad if ctx.factor == 1.0 else grad * ctx.factor
    grad_b = grad_of_weight(a, grad, b) if needs_b else None
    return grad @ b.t() if needs_a else None, grad_b, None, None


torch.library.register_autograd(
    "counterpoint::matmul_all_reduce", _all_reduce_backward, setup_context=_save_for_all_reduce, lib=_LIBRARY
)


@_operation("linear_all_reduce(Tensor a, Tensor b, Tensor bias, str reduce_op, str group_name) -> Tensor")
def linear_all_reduce(a: Tensor, b: Tensor, bias: Tensor, reduce_op: str, group_name: str) -> Tensor:
    """Do `matmul_all_reduce`, with a bias that each rank adds to its own product: it need not be equal on all.

    Args:
        a: as in `matmul_all_reduce`.
        b: as in `matmul_all_reduce`.
        bias: this rank's `[n]`.
        reduce_op: as in `matmul_all_reduce`.
        group_name: as in `matmul_all_reduce`.

    Returns:
        As `matmul_all_reduce`.

    Raises:
        Misconfigured: shapes do not fit, or another reduction.
    """
    return tensor_group(group_name).matmul_all_reduce(a, Weight(matrix=b, bias=bias), reduce_op)


@_fake("linear_all_reduce")
def _(a: Any, b: Any, bias: Any, *where: Any) -> Any:
    return torch.ops.counterpoint.matmul_all_reduce(a, b, *where)


def _save_for_linear_all_reduce(ctx: Any, inputs: Any, output: Any) -> None:
    a, b, _, *where = inputs
    _save_for_all_reduce(ctx, (a, b, *where), output)


def _linear_all_reduce_backward(ctx: Any, grad: Tensor) -> Any:
    grad_a, grad_b, *_ = _all_reduce_backward(ctx, grad)
    grad_bias = grad.flatten(0, -2).sum(dim=0) * ctx.factor if ctx.needs_input_grad[2] else None
    return grad_a, grad_b, grad_bias, None, None


torch.library.register_autograd(
    "counterpoint::linear_all_reduce",
    _linear_all_reduce_backward,
    setup_context=_save_for_linear_all_reduce,
    lib=_LIBRARY,
)


# float8


@_operation(
    "all_gather_scaled_matmul(Tensor a_shard, Tensor[] weights, Tensor a_scale, Tensor[] scales, int gather_dim, "
    "str group_name, Tensor?[] biases, Tensor?[] result_scales, ScalarType?[] out_dtypes, bool[] use_fast_accum) "
    "-> (Tensor, Tensor[])"
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
    """Do `all_gather_matmul` of float8 rows and weights, as `torch._scaled_mm` multiplies them.

    Args:
        a_shard: this rank's float8 `[..., k]`.
        weights: float8 matrices `[k, n]`.
        a_scale: scale of the rows: one value, equal on all ranks; or of each row `[..., 1]`, of this rank's rows, which
            are gathered, or of all.
        scales: for each weight one value, or `[1, n]`.
        gather_dim: as in `all_gather_matmul`.
        group_name: as in `all_gather_matmul`.
        biases: for each weight `[n]` or None.
        result_scales: for each weight, as `torch._scaled_mm` takes it.
        out_dtypes: for each weight the dtype of the product; None: that of the rows.
        use_fast_accum: for each weight, as `torch._scaled_mm` takes it.

    Returns:
        The gathered rows, and the product with each weight.

    Raises:
        Misconfigured: shapes do not fit.
    """
    count = len(weights)
    lists = (weights, scales, biases, result_scales, out_dtypes, use_fast_accum)
    given = [
        Weight(
            matrix=matrix,
            scale=scale,
            bias=bias,
            result_scale=result_scale,
            out_dtype=_dtype(dtype),
            use_fast_accum=fast,
        )
        for matrix, scale, bias, result_scale, dtype, fast in zip(
            *(_for_each(one, count) for one in lists), strict=True
        )
    ]
    group = tensor_group(group_name)
    gathered, outs = group.all_gather_matmul(a_shard, given, gather_dim, return_gathered=True, a_scale=a_scale)
    assert gathered is not None
    return gathered, outs


@_fake("all_gather_scaled_matmul")
def _(a: Any, weights: Any, a_scale: Any, scales: Any, dim: int, group: str, *rest: Any) -> Any:
    dtypes = rest[2]
    gathered = _gathered_like(a, dim, group)
    return gathered, [
        gathered.new_empty(*gathered.shape[:-1], weight.shape[1], dtype=_dtype(dtype) or a.dtype)
        for weight, dtype in zip(weights, _for_each(dtypes, len(weights)), strict=True)
    ]


@_operation(
    "scaled_matmul_reduce_scatter(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, str reduce_op, "
    "int orig_scatter_dim, int scatter_dim_after_maybe_reshape, str group_name, SymInt[]? output_shape, "
    "Tensor? bias=None, Tensor? result_scale=None, ScalarType? out_dtype=None, bool use_fast_accum=False) -> Tensor"
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
    """Do `matmul_reduce_scatter` of float8 tensors, as `torch._scaled_mm` multiplies them.

    The arguments are those of `torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter`, where a compiler may have made
    rows of `a` flat.

    Args:
        a: this rank's float8 `[..., k]`.
        b: float8 `[k, n]`.
        a_scale: one value, or of each row `[..., 1]`.
        b_scale: one value, or `[1, n]`.
        reduce_op: `sum` or `avg`.
        orig_scatter_dim: dimension of the product, of shape `output_shape`, that is scattered.
        scatter_dim_after_maybe_reshape: the same of `a`, as it is given.
        group_name: as in `matmul_reduce_scatter`.
        output_shape: shape of the product before it is scattered; None: that of `a` with `n` columns.
        bias: not supported, as it would be added once for each rank.
        result_scale: as `torch._scaled_mm` takes it.
        out_dtype: dtype of the product; None: that of `a`.
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


@_fake("scaled_matmul_reduce_scatter")
def _(
    a: Any,
    b: Any,
    a_scale: Any,
    b_scale: Any,
    reduce_op: str,
    dim: int,
    dim_of_rows: int,
    group: str,
    output_shape: Any,
    bias: Any = None,
    result_scale: Any = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> Any:
    shape = [*a.shape[:-1], b.shape[1]] if output_shape is None else [*output_shape]
    shape[dim] //= tensor_group(group).world_size
    return a.new_empty(shape, dtype=out_dtype or a.dtype)


def _for_each(values: Sequence[Any] | None, count: int) -> list[Any]:
    """Return one value for each weight: those that were given, or None."""
    found = [None] * count if not values else list(values)
    if len(found) != count:
        raise Misconfigured(f"{len(found)} values for {count} weights: give one for each, or none")
    return found


def _dtype(given: torch.dtype | int | None) -> torch.dtype | None:
    """Return a dtype, of which torch's dispatcher gives the number where it is in a list."""
    if isinstance(given, int):
        found: torch.dtype = torch.ops.aten.empty.memory_format([0], dtype=given, device="cpu").dtype
        return found
    return given


def _flat(needs: Any) -> list[bool]:
    return list(needs) if isinstance(needs, list | tuple) else [needs]
