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


class ColumnLinear:
    """Replaces the forward of a column-parallel layer: its gather, or the sum of its derivative, comes with matmuls."""

    _flatten_weight_and_bias: Any
    _unflatten_output: Any

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's columns for all rows; with sequence parallelism `input` has this rank's rows."""
        from torchtitan.distributed.spmd_types import spmd_dense_sp_enabled, spmd_mesh_group

        group = spmd_mesh_group("tp")
        out: Tensor
        if group is None:
            out = super().forward(input)  # type: ignore[misc]  # torchtitan's class comes after this one
            return out
        weight, bias = self._flatten_weight_and_bias()
        if spmd_dense_sp_enabled():
            _, (out,) = all_gather_linear(input, [weight], [bias], 0, group.group_name)
        else:
            (out,) = replicated_linear(input, [weight], [bias], group.group_name)
        out = self._unflatten_output(out)
        return out


class RowLinear:
    """Replaces the forward of a row-parallel layer, whose products of all ranks are added up as they are made."""

    _flatten_weight_and_bias: Any
    _unflatten_output: Any

    def forward(self, input: Tensor) -> Tensor:
        """Return the sums of all ranks: with sequence parallelism for this rank's rows, else for all."""
        from torchtitan.distributed.spmd_types import spmd_dense_sp_enabled, spmd_mesh_group

        group = spmd_mesh_group("tp")
        out: Tensor
        if group is None:
            out = super().forward(input)  # type: ignore[misc]
            return out
        weight, bias = self._flatten_weight_and_bias()
        if spmd_dense_sp_enabled():
            out = linear_reduce_scatter(input, weight, bias, 0, group.group_name)
        else:
            out = linear_all_reduce(input, weight, bias, group.group_name)
        out = self._unflatten_output(out)
        return out
