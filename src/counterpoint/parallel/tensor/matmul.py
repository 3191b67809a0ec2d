"""Multiply rows by a weight: plain tensors, or float8 with scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Weight:
    """Holds the right-hand side of a matmul, which is whole on this rank.

    Args:
        matrix: `[k, n]`, of any strides that `torch.mm` takes.
        bias: `[n]`, added to every row; None: none.
        scale: of a float8 matrix, as `torch._scaled_mm` takes it; None: plain tensors are multiplied.
        result_scale: as `torch._scaled_mm` takes it.
        out_dtype: dtype of the product; None: that of the rows.
        use_fast_accum: as `torch._scaled_mm` takes it.
    """

    matrix: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None
    result_scale: Tensor | None = None
    out_dtype: torch.dtype | None = None
    use_fast_accum: bool = False

    @property
    def columns(self) -> int:
        """Return the number of columns of the product."""
        return int(self.matrix.shape[1])

    def product_dtype(self, rows: Tensor) -> torch.dtype:
        """Return the dtype of the product with `rows`."""
        return self.out_dtype or rows.dtype

    def multiply(self, rows: Tensor, out: Tensor, row_scale: Tensor | None = None) -> None:
        """Write `rows @ matrix` to `out`.

        Args:
            rows: `[m, k]`.
            out: `[m, n]`.
            row_scale: of float8 rows: one value, or `[m, 1]`.
        """
        if self.scale is None:
            if self.bias is None:
                torch.mm(rows, self.matrix, out=out)
            else:
                torch.addmm(self.bias, rows, self.matrix, out=out)
        else:
            assert row_scale is not None, "float8 rows have a scale"
            scales = row_scale, self.scale, self.bias, self.result_scale
            out.copy_(torch._scaled_mm(rows, self.matrix, *scales, out.dtype, self.use_fast_accum))


def grad_of_weight(rows: Tensor, grad: Tensor, matrix: Tensor) -> Tensor:
    """Return the derivative of a matrix by which `rows` were multiplied, in memory as the matrix is.

    The matrix of a linear layer is a transposed view: so is the derivative, or autograd would copy it.
    """
    rows, grad = rows.reshape(-1, rows.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return (grad.t() @ rows).t() if matrix.stride(0) == 1 else rows.t() @ grad
