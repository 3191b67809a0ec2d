# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
"""Define the Triton kernel of `wire.py`, which imports it at the first launch."""

import triton
import triton.language as tl


@triton.jit
def _part(x, start, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """Return columns of a token, which of them there are, and their values in float32."""
    columns = start + tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    return columns, mask, tl.load(x + columns, mask=mask, other=0).to(tl.float32)


@triton.jit
def narrow(x, values, scales, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr):
    """Divide a token by its scale, which makes its largest element `LARGEST`."""
    token = tl.program_id(0).to(tl.int64)
    source, target = x + token * HIDDEN, values + token * HIDDEN
    columns, mask, part = _part(source, 0, HIDDEN, BLOCK)
    largest = tl.max(tl.abs(part))
    for start in tl.static_range(BLOCK, HIDDEN, BLOCK):
        largest = tl.maximum(largest, tl.max(tl.abs(_part(source, start, HIDDEN, BLOCK)[2])))
    scale = tl.where(largest > 0, tl.div_rn(largest, LARGEST), 1.0)
    tl.store(scales + token, scale)
    tl.store(target + columns, tl.div_rn(part, scale).to(values.dtype.element_ty), mask=mask)
    for start in tl.static_range(BLOCK, HIDDEN, BLOCK):
        columns, mask, part = _part(source, start, HIDDEN, BLOCK)
        tl.store(target + columns, tl.div_rn(part, scale).to(values.dtype.element_ty), mask=mask)
