"""Read compute-collective pairs from `pairs.toml`, check that they can be measured, and say how they run. No torch.

docs/reference/tune.md describes the file: one table `[[pair]]` for each pair.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from counterpoint.collectives.program.operations import measured_by
from counterpoint.errors import Misconfigured, printable
from counterpoint.measurement.workloads import (
    find_dependent,
    find_exchange,
    find_workload,
    is_dependent,
    is_exchange,
    measured_dtype,
)
from counterpoint.pair.choice import ORDERS
from counterpoint.pair.curves import DTYPES
from counterpoint.read_file import parse_toml, read_text
from counterpoint.records import Record
from counterpoint.records.measurement import Order
from counterpoint.records.tuning import StepPair

STOCK = {"cuda": "nccl", "cpu": "gloo"}  # of independent pairs
TORCH = "torch"  # stock of pairs whose computation depends on the communication
MAX_BYTES = 1 << 20  # of a file
_ADVICE = "give tables [[pair]] with operation, compute, bytes_per_rank and ranks (docs/reference/tune.md)"
MOST_BYTES = 1 << 38  # both sides on one rank: no GPU has that much memory


class _PairsFile(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Represents the content of `pairs.toml`."""

    pair: Annotated[tuple[StepPair, ...], Meta(min_length=1, max_length=10_000)]


def read_pairs(path: str | Path) -> tuple[StepPair, ...]:
    """Return the pairs in a file; raise Misconfigured, with the pair and allowed values, if one cannot be measured."""
    text = read_text(Path(path), limit=MAX_BYTES, advice=_ADVICE)
    name = printable(str(path))
    content = parse_toml(text, f"{name} holds no pairs", _ADVICE)
    if "schema" in content:
        raise Misconfigured(f"{name} is what tune has chosen; give the pairs that it was made from, or --to FORM")
    try:
        pairs = msgspec.convert(content, _PairsFile).pair
    except msgspec.ValidationError as error:
        raise Misconfigured(f"{name} holds no pairs: {printable(str(error))}; {_ADVICE}") from None
    for number, pair in enumerate(pairs, 1):
        try:
            check_pair(pair)
        except Misconfigured as error:
            raise Misconfigured(f"{name}, pair {number}: {error}") from None
    return pairs


def stock_of(pair: StepPair, device: str) -> str:
    """Return the default mechanism, which runs a pair where nothing is chosen."""
    return TORCH if depends(pair) else STOCK[device]


def depends(pair: StepPair) -> bool:
    """Return whether a pair's computation needs the collective's result, or the collective needs the computation's."""
    return is_dependent(pair.operation) or is_exchange(pair.operation)


def block_name(pair: StepPair) -> str:
    """Return the building block's name for a dependent pair: operation, then `compute` without `gemm `."""
    sizes = pair.compute.removeprefix("gemm ") if is_dependent(pair.operation) else pair.compute
    return f"{pair.operation} {sizes}"


def orders_of(pair: StepPair) -> tuple[Order, ...]:
    """Return the launch orders, computation or collective first, in which a pair is measured."""
    return ORDERS if pair.first is None else (pair.first,)


def check_pair(pair: StepPair) -> None:
    """Raise Misconfigured, with the allowed values, if a pair cannot be measured."""
    for name, dtype in (("dtype", pair.dtype), ("compute_dtype", pair.computed_in)):
        if dtype not in DTYPES:
            raise Misconfigured(f"{name} {printable(dtype)!r}; choose from: {', '.join(DTYPES)}")
    if depends(pair) and pair.compute_dtype not in (None, pair.dtype):
        raise Misconfigured(
            f"{pair.operation}: compute_dtype = {pair.compute_dtype!r}, but what is communicated is a factor or "
            f"product of dtype {pair.dtype!r}; leave it out"
        )
    if depends(pair) and pair.first is not None:
        raise Misconfigured(f"{pair.operation}: first = {pair.first!r}, but one side waits for the other; leave it out")
    if is_exchange(pair.operation):
        needed = _exchange_bytes(pair)
    elif is_dependent(pair.operation):
        needed = _matmul_bytes(pair)
    elif pair.operation in measured_by("torch"):
        needed = _independent_bytes(pair)
    else:
        there = ", ".join((*measured_by("torch"), "all_gather_matmul", "matmul_reduce_scatter", "exchange"))
        raise Misconfigured(f"there is no operation {printable(pair.operation)!r}; choose from: {there}")
    if needed > MOST_BYTES:
        most = f"{MOST_BYTES / 1e9:,.0f} GB are allowed"
        raise Misconfigured(f"{pair.operation} and {pair.compute} need {needed / 1e9:,.0f} GB on a rank; {most}")


def _exchange_bytes(pair: StepPair) -> int:
    """Estimate a rank's memory for a token exchange, in bytes; raise Misconfigured if ranks or bytes do not fit."""
    exchange = find_exchange(block_name(pair))
    experts = exchange.sizes.experts
    if experts % pair.ranks:
        raise Misconfigured(f"{pair.ranks} ranks cannot share {experts} experts; give a number that divides them")
    _check_bytes(pair, exchange.size_bytes(DTYPES[pair.dtype][1]))
    return exchange.memory_bytes(_itemsize(pair.dtype), pair.ranks, 1)


def _matmul_bytes(pair: StepPair) -> int:
    """Estimate a rank's memory for a matmul, in bytes; raise Misconfigured if ranks or bytes do not fit."""
    if not pair.compute.startswith("gemm "):
        raise Misconfigured(f"{pair.operation} of {printable(pair.compute)!r}; write its matmul as gemm MxNxK")
    call = find_dependent(block_name(pair))
    if call.m % pair.ranks:
        raise Misconfigured(f"{pair.ranks} ranks cannot share {call.m} rows; give a multiple of their number as M")
    _check_bytes(pair, call.moved * DTYPES[pair.dtype][1] // pair.ranks)
    return call.memory_bytes(_itemsize(pair.dtype))


def _check_bytes(pair: StepPair, moved: int) -> None:
    """Raise Misconfigured if the bytes that a pair's sizes imply differ from its `bytes_per_rank`."""
    if moved != pair.bytes_per_rank:
        raise Misconfigured(
            f"{pair.operation} of {pair.compute} in {pair.dtype} on {pair.ranks} ranks moves {moved} bytes per rank, "
            f"not {pair.bytes_per_rank}; correct one of them"
        )


def _independent_bytes(pair: StepPair) -> int:
    """Estimate a rank's memory without buffers of mechanisms, in bytes; raise Misconfigured for an empty array."""
    if not pair.bytes_per_rank:
        raise Misconfigured(f"{pair.operation} of 0 bytes; give bytes_per_rank, those of the full array over ranks")
    return find_workload(pair.compute).memory_bytes(_itemsize(pair.computed_in)) + pair.bytes_per_rank * pair.ranks


def _itemsize(dtype: str) -> int:
    """Return the bytes of an element in the dtype that is measured in place of `dtype` (float8 is not measured)."""
    return DTYPES[measured_dtype(dtype, "cuda")][1]
