# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
"""Define the Triton kernel of reductions; `sum_launch.py` imports it, and so Triton, at the first launch."""

import triton
import triton.language as tl

FULL_WIDTH = tl.constexpr(16)  # bytes of the widest load


@triton.jit
def _pointer(address, start, DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a pointer to element `start`, marked as aligned if `ALIGNED`: Triton cannot infer it from an integer."""
    pointer = (address + start * ITEM_BYTES).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, FULL_WIDTH) if ALIGNED else pointer


@triton.jit
def _read(address, start, left, DTYPE: tl.constexpr, ACC: tl.constexpr, ITEM_BYTES: tl.constexpr,
          ALIGNED: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr):  # fmt: skip
    """Return one block of a source, widened to `ACC`; loads are marked evict-first, as each block is read once."""
    lanes = tl.arange(0, BLOCK)
    pointers = _pointer(address, start, DTYPE, ITEM_BYTES, ALIGNED) + lanes
    if TAIL:  # only the last block has a mask: a mask of any length makes every load one element wide
        return tl.load(pointers, mask=lanes < left, other=0, eviction_policy="evict_first").to(ACC)
    return tl.load(pointers, eviction_policy="evict_first").to(ACC)


@triton.jit
def _block(own, staged, stride, target, start, left, factor, OP: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr,
           ITEM_BYTES: tl.constexpr, RESULT: tl.constexpr, RESULT_BYTES: tl.constexpr, SOURCES: tl.constexpr,
           OWN: tl.constexpr, OWN_ALIGNED: tl.constexpr, STAGED_ALIGNED: tl.constexpr,
           TARGET_ALIGNED: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr):  # fmt: skip
    """Combine one block of elements of every source, in the order of sources, and store it to the target."""
    for source in tl.static_range(SOURCES):
        if source == OWN:
            value = _read(own, start, left, DTYPE, ACC, ITEM_BYTES, OWN_ALIGNED, BLOCK, TAIL)
        else:
            slot = source - (1 if source > OWN else 0)
            value = _read(staged + slot * stride, start, left, DTYPE, ACC, ITEM_BYTES, STAGED_ALIGNED, BLOCK, TAIL)
        if OP == "premul_sum":
            value *= factor
        if source == 0:
            total = value
        elif OP == "max":
            total = tl.maximum(total, value)
        elif OP == "min":
            total = tl.minimum(total, value)
        else:
            total += value
    if OP == "avg":
        count = tl.full([BLOCK], SOURCES, ACC)  # `/` of float32 is approximate, to 2 units in the last place
        total = tl.div_rn(total, count) if tl.float32 == ACC else total / count
    lanes = tl.arange(0, BLOCK)
    pointers = _pointer(target, start, RESULT, RESULT_BYTES, TARGET_ALIGNED) + lanes
    if TAIL:
        tl.store(pointers, total.to(RESULT), mask=lanes < left)
    else:
        tl.store(pointers, total.to(RESULT))


@triton.jit(do_not_specialize=["own", "staged", "stride", "target", "numel", "factor_bits"])
def combine(own: tl.int64, staged: tl.int64, stride: tl.int64, target: tl.int64, numel: tl.int64,
            factor_bits: tl.int64, OP: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr, ITEM_BYTES: tl.constexpr,
            RESULT: tl.constexpr, RESULT_BYTES: tl.constexpr, SOURCES: tl.constexpr, OWN: tl.constexpr,
            OWN_ALIGNED: tl.constexpr, STAGED_ALIGNED: tl.constexpr,
            TARGET_ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Compute `target[i] = source_0[i] op source_1[i] op ...` for `numel` elements, with any number of programs.

    Source `OWN` is at address `own`; the others follow in order, `stride` bytes apart, from address `staged` on.
    `factor_bits` are the bits of a float64 (Triton would round a float argument to float32). Addresses are integers,
    since peers' memory is no torch tensor.
    """
    factor = factor_bits.to(tl.float64, bitcast=True).to(ACC) if OP == "premul_sum" else 0
    first, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    full = numel // BLOCK
    for block in range(first, full, programs):
        _block(own, staged, stride, target, block * BLOCK, BLOCK, factor, OP, DTYPE, ACC, ITEM_BYTES,
               RESULT, RESULT_BYTES, SOURCES, OWN, OWN_ALIGNED, STAGED_ALIGNED,
               TARGET_ALIGNED, BLOCK, False)  # fmt: skip
    left = numel - full * BLOCK
    if left > 0 and first == full % programs:
        _block(own, staged, stride, target, full * BLOCK, left, factor, OP, DTYPE, ACC, ITEM_BYTES,
               RESULT, RESULT_BYTES, SOURCES, OWN, OWN_ALIGNED, STAGED_ALIGNED,
               TARGET_ALIGNED, BLOCK, True)  # fmt: skip
