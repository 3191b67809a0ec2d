"""Run torchtitan's column- and row-parallel linear layers by `torch.ops.counterpoint`: mixed into those they replace.

`counterpoint.torchtitan` puts them there; nothing here imports torchtitan before a layer runs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from counterpoint.parallel.tensor.linear import (
    all_gather_linear,
    linear_all_reduce,
    linear_reduce_scatter,
    replicated_linear,
)


class _DividedLinear:
    """Replaces the forward of a layer whose weight is divided among ranks: communication comes with its matmuls."""

    _flatten_weight_and_bias: Any
    _unflatten_output: Any
    _product: Any  # of input, weight and bias, given the group and whether its ranks divide the rows

    def forward(self, input: Tensor) -> Tensor:
        """Return what the layer does; with sequence parallelism ranks have their own rows outside of it."""
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
    """Returns this rank's columns for all rows: its gather, or the sum of its derivative, comes with matmuls."""

    @staticmethod
    def _product(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, has_own_rows: bool) -> Tensor:
        if has_own_rows:
            return all_gather_linear(x, [weight], [bias], 0, group)[1][0]
        return replicated_linear(x, [weight], [bias], group)[0]


class RowLinear(_DividedLinear):
    """Returns the sums of all ranks, added up as their products are made: for this rank's rows, or for all."""

    @staticmethod
    def _product(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, has_own_rows: bool) -> Tensor:
        if has_own_rows:
            return linear_reduce_scatter(x, weight, bias, 0, group)
        return linear_all_reduce(x, weight, bias, group)
