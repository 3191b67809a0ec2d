# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
"""Define the Triton kernels of `activation.py`, which imports them at the first launch.

A program takes every `num_programs`-th tile of the rows before the last offset, however many there could be.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(tile, end, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return rows, columns and mask of a tile."""
    across: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    rows = (tile // across * ROWS + tl.arange(0, ROWS))[:, None]
    columns = (tile % across * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    return rows.to(tl.int64), columns, (rows < end) & (columns < WIDTH)


@triton.jit
def _gate_up(gate_up, rows, columns, mask, WIDTH: tl.constexpr):
    """Return gate, its sigmoid, and up."""
    places = gate_up + rows * (2 * WIDTH) + columns
    gate, up = tl.load(places, mask=mask, other=0), tl.load(places + WIDTH, mask=mask, other=0)
    if gate_up.dtype.element_ty != tl.float64:
        gate, up = gate.to(tl.float32), up.to(tl.float32)
    return gate, 1 / (1 + tl.exp(-gate)), up


@triton.jit(do_not_specialize=["experts"])
def forward(gate_up, out, offsets, experts, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute silu(gate) * up."""
    across: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    end = tl.load(offsets + experts - 1)
    for tile in range(tl.program_id(0), tl.cdiv(end, ROWS) * across, tl.num_programs(0)):
        rows, columns, mask = _tile(tile, end, WIDTH, ROWS, COLUMNS)
        gate, sigmoid, up = _gate_up(gate_up, rows, columns, mask, WIDTH)
        tl.store(out + rows * WIDTH + columns, (gate * sigmoid * up).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["experts"])
def backward(gate_up, grads, out, offsets, experts, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute the derivatives of gate and up."""
    across: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    end = tl.load(offsets + experts - 1)
    for tile in range(tl.program_id(0), tl.cdiv(end, ROWS) * across, tl.num_programs(0)):
        rows, columns, mask = _tile(tile, end, WIDTH, ROWS, COLUMNS)
        gate, sigmoid, up = _gate_up(gate_up, rows, columns, mask, WIDTH)
        gradient = tl.load(grads + rows * WIDTH + columns, mask=mask, other=0).to(gate.dtype)
        of_gate = gradient * up * sigmoid * (1 + gate * (1 - sigmoid))
        places = out + rows * (2 * WIDTH) + columns
        tl.store(places, of_gate.to(out.dtype.element_ty), mask=mask)
        tl.store(places + WIDTH, (gradient * gate * sigmoid).to(out.dtype.element_ty), mask=mask)
