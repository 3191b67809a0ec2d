"""Multiply rows by a weight: plain tensors, or float8 with scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
            rows: `[m, k]`, or `[batch, m, k]`.
            out: `[m, n]`, or `[batch, m, n]`; its rows may be apart, the elements of a row may not.
            row_scale: of float8 rows: one value, or `[m, 1]` (`[batch, m, 1]`).
        """
        if self.scale is not None:
            self._multiply_scaled(rows, out, row_scale)
        elif rows.dim() == 3:
            matrix = self.matrix.expand(rows.shape[0], *self.matrix.shape)
            if self.bias is None:
                torch.bmm(rows, matrix, out=out)
            else:
                torch.baddbmm(self.bias, rows, matrix, out=out)
        elif self.bias is None:
            torch.mm(rows, self.matrix, out=out)
        else:
            torch.addmm(self.bias, rows, self.matrix, out=out)

    def accumulate(self, rows: Tensor, out: Tensor, row_scale: Tensor | None = None) -> None:
        """Add `rows @ matrix` to `out` in one rounding, where the library can; `bias` is not added. See `multiply`."""
        if self.scale is not None:
            product = torch.empty_like(out)
            self._multiply_scaled(rows, product, row_scale)
            out.add_(product)
        elif rows.dim() == 3:
            out.baddbmm_(rows, self.matrix.expand(rows.shape[0], *self.matrix.shape))
        else:
            out.addmm_(rows, self.matrix)

    def _multiply_scaled(self, rows: Tensor, out: Tensor, row_scale: Tensor | None) -> None:
        if rows.dim() == 3:
            apart = row_scale is not None and row_scale.dim() == 3
            for one in range(rows.shape[0]):
                assert row_scale is not None
                self._multiply_scaled(rows[one], out[one], row_scale[one] if apart else row_scale)
            return
        options: dict[str, Any] = {"out_dtype": out.dtype, "use_fast_accum": self.use_fast_accum}
        product = torch._scaled_mm(rows, self.matrix, row_scale, self.scale, self.bias, self.result_scale, **options)
        out.copy_(product)
