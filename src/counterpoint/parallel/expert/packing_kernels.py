# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
"""Define the Triton kernel of `packing.py`, which imports it at the first launch."""

import triton
import triton.language as tl

NONE = tl.constexpr(-1)


@triton.jit(do_not_specialize=["choices", "me", "first", "room", "width", "local_experts"])
def pack(ids, compact, ends, weights, scales, choices, me, first, room, width, local_experts, ranks, places, others,
         own, home, lacking, table, N: tl.constexpr, BINS: tl.constexpr, TOP_K: tl.constexpr,
         HEAD: tl.constexpr, REST: tl.constexpr, LACKING: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Say of every choice of a block where it goes, and enter it in the table; the first program does the heads."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < choices
    row = tl.load(compact + at, mask=mask, other=NONE)
    has_rank = row >= 0
    rank = tl.where(has_rank, tl.load(ids + at, mask=mask, other=0) // local_experts, N)
    begin = tl.load(ends + rank - 1, mask=has_rank & (rank > 0), other=0)
    place = tl.where(has_rank, row - begin, 0)
    travels = has_rank & (place < first)
    slot = rank * first + place
    tl.store(ranks + at, rank, mask=mask)
    tl.store(places + at, place, mask=mask)
    tl.store(home + at, tl.where(travels, slot, NONE), mask=mask)
    tl.store(others + at, tl.where(travels & (rank != me), slot, NONE), mask=mask)
    tl.store(own + at, tl.where(travels & (rank == me), place, NONE), mask=mask)
    entry = table + rank.to(tl.int64) * width + HEAD + place
    has_place = has_rank & (place < room)
    tl.store(entry, tl.load(ids + at, mask=has_place, other=NONE), mask=has_place)
    weight = tl.load(weights + at, mask=has_place, other=0)
    tl.store(entry + room, weight.to(tl.int32, bitcast=True), mask=has_place)
    if scales is not None:
        scale = tl.load(scales + at // TOP_K, mask=has_place, other=0)
        tl.store(entry + 2 * room, scale.to(tl.int32, bitcast=True), mask=has_place)
    if tl.program_id(0) == 0:
        bins = tl.arange(0, BINS)
        is_rank = bins < N
        before = tl.load(ends + bins - 1, mask=is_rank & (bins > 0), other=0)
        count = tl.load(ends + bins, mask=is_rank, other=0) - before
        short = tl.sum(tl.maximum(count - room, 0))
        tl.store(lacking, short)
        rest = tl.minimum(tl.maximum(tl.max(count) - first, 0), room - first)
        heads = table + bins.to(tl.int64) * width
        tl.store(heads + REST, tl.full([BINS], 0, tl.int32) + rest, mask=is_rank)
        tl.store(heads + LACKING, tl.full([BINS], 0, tl.int32) + short, mask=is_rank)
