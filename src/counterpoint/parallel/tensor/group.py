"""Run the matmuls of one process group with their collectives, and count which way each call went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from counterpoint.collectives.host.group import torch_function
from counterpoint.collectives.submit.tensors import flat_bytes
from counterpoint.errors import Misconfigured
from counterpoint.parallel.tensor.matmul import Weight


class TensorGroup:
    """Runs the operations of one process group."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    def all_gather_matmul(
        self,
        a_shard: Tensor,
        weights: Sequence[Weight],
        gather_dim: int,
        *,
        return_gathered: bool,
        a_scale: Tensor | None = None,
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Do `torch.ops.counterpoint.all_gather_matmul`, or its float8 sister with `a_scale`."""
        gather_dim = _rows_dim(a_shard, gather_dim)
        for weight in weights:
            _check_product(a_shard, weight.matrix)
        gathered = self._gathered(a_shard, gather_dim)
        if a_scale is not None and a_scale.numel() == a_shard.numel() // a_shard.shape[-1] > 1:
            a_scale = self._gathered(a_scale, gather_dim)
        return gathered if return_gathered else None, [_product(gathered, weight, a_scale) for weight in weights]

    def all_gather_matmul_backward(
        self,
        a_shard: Tensor,
        weights: Sequence[Tensor],
        grads: Sequence[Tensor],
        grad_gathered: Tensor | None,
        gather_dim: int,
        *,
        needs_a: bool,
        needs_weights: bool,
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Return the derivatives of `a_shard` and of the weights."""
        gather_dim = _rows_dim(a_shard, gather_dim)
        grad_a: Tensor | None = None
        if needs_a:
            whole = grad_gathered
            for grad, weight in zip(grads, weights, strict=True):
                whole = grad @ weight.t() if whole is None else whole + grad @ weight.t()
            assert whole is not None
            grad_a = self._scattered(whole, "sum", gather_dim)
        if not needs_weights:
            return grad_a, []
        rows = self._gathered(a_shard, gather_dim).flatten(0, -2)
        return grad_a, [rows.t() @ grad.flatten(0, -2) for grad in grads]

    def matmul_reduce_scatter(
        self, a: Tensor, weight: Weight, reduce_op: str, scatter_dim: int, *, a_scale: Tensor | None = None
    ) -> Tensor:
        """Do `torch.ops.counterpoint.matmul_reduce_scatter`, or its float8 sister with `a_scale`."""
        scatter_dim = _rows_dim(a, scatter_dim)
        _check_product(a, weight.matrix)
        _check_op(reduce_op)
        if a.shape[scatter_dim] % self.world_size:
            raise Misconfigured(
                f"matmul_reduce_scatter of {a.shape[scatter_dim]} rows over {self.world_size} ranks: give a multiple"
            )
        return self._scattered(_product(a, weight, a_scale), reduce_op, scatter_dim)

    def matmul_reduce_scatter_backward(
        self, grad: Tensor, a: Tensor, b: Tensor, reduce_op: str, scatter_dim: int, *, needs_a: bool, needs_b: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the derivatives of `a` and `b`."""
        scatter_dim = _rows_dim(a, scatter_dim)
        whole = self._gathered(grad, scatter_dim)
        if reduce_op == "avg":
            whole = whole / self.world_size
        grad_b = a.flatten(0, -2).t() @ whole.flatten(0, -2) if needs_b else None
        return whole @ b.t() if needs_a else None, grad_b

    def matmul_all_reduce(self, a: Tensor, weight: Weight, reduce_op: str) -> Tensor:
        """Do `torch.ops.counterpoint.matmul_all_reduce`."""
        _check_product(a, weight.matrix)
        _check_op(reduce_op)
        product = _product(a, weight, None)
        torch_function("all_reduce")(product, group=self.group)
        return self._averaged(product, reduce_op)

    # by torch's own collectives

    def _gathered(self, shard: Tensor, dim: int) -> Tensor:
        """Return all ranks' shards behind one another along `dim`."""
        shard = shard.contiguous()
        stacked = shard.new_empty(self.world_size, *shard.shape)
        torch_function("all_gather")(flat_bytes(stacked), flat_bytes(shard), group=self.group)
        return stacked.movedim(0, dim).reshape(*shard.shape[:dim], -1, *shard.shape[dim + 1 :])

    def _scattered(self, whole: Tensor, reduce_op: str, dim: int) -> Tensor:
        """Return this rank's part along `dim` of the sum of all ranks' tensors."""
        parts = whole.unflatten(dim, (self.world_size, -1)).movedim(dim, 0).contiguous()
        out = torch.empty_like(parts[0])
        torch_function("reduce_scatter")(out.view(-1), parts.view(-1), group=self.group)
        return self._averaged(out, reduce_op)

    def _averaged(self, total: Tensor, reduce_op: str) -> Tensor:
        """Return what `reduce_op` makes of a sum over ranks; gloo has sums only."""
        return total if reduce_op == "sum" else total.div_(self.world_size)


def _product(rows: Tensor, weight: Weight, row_scale: Tensor | None) -> Tensor:
    """Return `rows @ weight`."""
    out = rows.new_empty(*rows.shape[:-1], weight.columns, dtype=weight.product_dtype(rows))
    if row_scale is not None and row_scale.numel() > 1:
        row_scale = row_scale.reshape(-1, 1)
    weight.multiply(rows.flatten(0, -2), out.view(-1, weight.columns), row_scale)
    return out


def _rows_dim(tensor: Tensor, dim: int) -> int:
    """Return a dimension of rows counted from the first."""
    found = dim + tensor.dim() if dim < 0 else dim
    if not 0 <= found < tensor.dim() - 1:
        raise Misconfigured(f"dimension {dim} of a tensor of shape {tuple(tensor.shape)}: give one but the last")
    return found


def _check_product(rows: Tensor, matrix: Tensor) -> None:
    if matrix.dim() != 2 or rows.shape[-1] != matrix.shape[0]:
        raise Misconfigured(f"rows {tuple(rows.shape)} times {tuple(matrix.shape)}: give a matrix [k, n] for [..., k]")


def _check_op(reduce_op: str) -> None:
    if reduce_op not in ("sum", "avg"):
        raise Misconfigured(f"reduce_op={reduce_op!r}: allowed are 'sum' and 'avg'")


_GROUPS: dict[str, TensorGroup] = {}


def tensor_group(name: str) -> TensorGroup:
    """Return what runs the operations of the process group of this name; raise `Misconfigured` if there is none."""
    found = _GROUPS.get(name)
    try:
        group = distributed_c10d._resolve_process_group(name)
    except (RuntimeError, ValueError, KeyError) as error:
        raise Misconfigured(f"no process group {name!r}: give group.group_name of one of this process") from error
    if found is None or found.group is not group:
        found = _GROUPS[name] = TensorGroup(group)
    return found
