"""Turn pairs of a step into parts of a measurement, and what was measured into the times of each mechanism. No torch.

An independent pair is a `Scenario`, a matmul that depends on communication or an exchange of tokens is a `Block`. The
time that counts is that of both sides, from the first start to the last end:

    independent     mean over the launch orders of the pair; over all three where its order is not known
    dependent       matmul and collective by one mechanism
    tokens          dispatch + combine with nothing beside them: experts wait for one, and the next layer for the other

All mechanisms of a pair take turns in the same rounds. With T_r for the time in round r, of the slowest rank, and the
mean over rounds of `rounds.py`

    us of stock        mean of T_stock,r
    us of another      us of stock - mean of (T_stock,r - T_r)
    paired_sigma_us    standard error of the mean of (T_stock,r - T_r)

T_r is the mean over launch orders, or the sum over both legs of an exchange. These are measured one after the other:
round r of one is added to round r of the other, as any two of them could be. A measurement that kept no rounds gives
the median of each mechanism by itself, of the rank whose median is largest, and no `paired_sigma_us`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from counterpoint.measurement.dependent import is_dependent, is_exchange
from counterpoint.measurement.dtypes import MEASURABLE, measured_dtype
from counterpoint.pair.choice import ORDERS
from counterpoint.records.measurement import LEGS, Block, BlockRow, Measurement, Order, Row, Scenario, Timing
from counterpoint.records.tuning import StepPair, Tried, as_sentence
from counterpoint.tuning.rounds import RoundMean, RoundTimes, apart, standard_error

STOCK = {"cuda": "nccl", "cpu": "gloo"}  # of independent pairs
TORCH = "torch"  # the stock of what depends on communication


def stock_of(pair: StepPair, device: str) -> str:
    """Return the mechanism by which a pair runs where nothing is chosen."""
    return TORCH if depends(pair) else STOCK[device]


def depends(pair: StepPair) -> bool:
    """Return whether the computation of a pair needs what the communication brings, or the other way round."""
    return is_dependent(pair.operation) or is_exchange(pair.operation)


def part_of(pair: StepPair, mechanisms: Sequence[str]) -> Scenario | Block:
    """Return what to measure; pairs that take equally long for the same reasons get parts of the same name."""
    asked = pair.dtype, pair.computed_in
    dtype, compute_dtype = (each if each in MEASURABLE else None for each in asked)  # None: that of the device
    if depends(pair):
        what = block_name(pair)
        return Block(name=f"{what} in {pair.dtype}", what=what, mechanisms=tuple(mechanisms), dtype=dtype)
    comm = f"{pair.operation} of {pair.bytes_per_rank} bytes a rank in {pair.dtype}"
    compute = f"{pair.compute} in {pair.computed_in}"
    return Scenario(
        name=f"{comm} | {compute} | {pair.first or 'all orders'}",
        workload=pair.compute,
        collective=pair.operation,
        size_bytes=pair.bytes_per_rank * pair.ranks,
        mechanisms=tuple(mechanisms),
        orders=orders_of(pair),
        dtype=dtype,
        compute_dtype=compute_dtype,
    )


def block_name(pair: StepPair) -> str:
    """Return the name of a building block: the sizes of a matmul are those after `gemm`."""
    sizes = pair.compute.removeprefix("gemm ") if is_dependent(pair.operation) else pair.compute
    return f"{pair.operation} {sizes}"


def orders_of(pair: StepPair) -> tuple[Order, ...]:
    """Return the launch orders that count."""
    return ORDERS if pair.first is None else (pair.first,)


@dataclass(frozen=True, kw_only=True)
class PairTimes:
    """Holds what was measured of a pair; nothing is `tried` where it was not its turn. Times in µs."""

    tried: tuple[Tried, ...] = ()
    compute_us: float | None = None  # alone
    comm_us: float | None = None  # alone, by the fastest mechanism


def times_of(pair: StepPair, measured: Measurement) -> PairTimes:
    """Return the times of a pair by each mechanism."""
    device = measured.environment.device
    rounds, stock = measured.rounds - measured.dropped_rounds, stock_of(pair, device)
    blocks = [row for row in measured.blocks if row.dtype in (None, measured_dtype(pair.dtype, device))]
    if is_exchange(pair.operation):
        return _exchange_times(pair, blocks, rounds, stock)
    if is_dependent(pair.operation):
        return _dependent_times(pair, blocks, rounds, stock)
    name = part_of(pair, ()).name
    mine = [row for row in measured.rows if row.scenario == name]
    by_mechanism = {row.mechanism: [each for each in mine if each.mechanism == row.mechanism] for row in mine}
    return PairTimes(
        tried=against_stock((_mean(rows, rounds) for rows in by_mechanism.values()), stock),
        compute_us=mine[0].compute_alone.us if mine else None,
        comm_us=mine[0].best_comm_alone_us if mine else None,
    )


def against_stock(found: Iterable[tuple[Tried, RoundTimes]], stock: str) -> tuple[Tried, ...]:
    """Return times that are compared with stock round by round, where enough rounds of both were kept."""
    every = list(found)
    base = next((each for each in every if each[0].mechanism == stock), None)
    return tuple(each if base is None or each is base[0] else _paired(each, times, *base) for each, times in every)


def _paired(each: Tried, times: RoundTimes, base: Tried, base_times: RoundTimes) -> Tried:
    less = RoundMean.of(apart(base_times, times))
    if less is None:
        return each
    us = max(0.0, round(base.us - less.us, 3))
    return replace(each, us=us, paired_sigma_us=round(less.sigma_us, 3), runs=less.runs)


def _mean(rows: Sequence[Row], rounds: int) -> tuple[Tried, RoundTimes]:
    """Return the mean over launch orders, and that of each round."""
    return _added(rows, [row.together for row in rows], rounds, part=1 / len(rows))


def _sum(rows: Sequence[BlockRow], rounds: int) -> tuple[Tried, RoundTimes]:
    """Return the sum of times that come one after another, and that of each round."""
    return _added(rows, [row.time for row in rows], rounds, part=1.0)


def _added(
    rows: Sequence[Row] | Sequence[BlockRow], times: Sequence[Timing], rounds: int, *, part: float
) -> tuple[Tried, RoundTimes]:
    """Return `part` of the sum of times of a mechanism: its mean over rounds, or where none were kept of medians."""
    known = zip(*(each.rounds_us for each in times), strict=False)
    rounds_us = [None if None in of_round else part * sum(us or 0.0 for us in of_round) for of_round in known]
    mean = RoundMean.of(rounds_us) or RoundMean(
        us=part * sum(time.us for time in times),
        sigma_us=part * math.hypot(*(standard_error(time, rounds) for time in times)),
        runs=min(time.runs or rounds for time in times),
    )
    tried = Tried(
        mechanism=rows[0].mechanism,
        us=round(mean.us, 3),
        sigma_us=round(mean.sigma_us, 3),
        runs=mean.runs,
        marked=_marked(rows),
    )
    return tried, rounds_us


def _dependent_times(pair: StepPair, blocks: Sequence[BlockRow], rounds: int, stock: str) -> PairTimes:
    alone: dict[str, float] = {}
    tried = []
    for row in blocks:
        if row.what != block_name(pair):
            continue
        if row.mechanism.endswith(" alone"):  # the matmul, and the collective by torch
            alone["compute" if row.mechanism.startswith("matmul") else "comm"] = row.time.us
            continue
        tried.append(_sum((row,), rounds))
    return PairTimes(tried=against_stock(tried, stock), compute_us=alone.get("compute"), comm_us=alone.get("comm"))


def _exchange_times(pair: StepPair, blocks: Sequence[BlockRow], rounds: int, stock: str) -> PairTimes:
    legs: dict[str, list[BlockRow]] = {}
    for row in blocks:
        if row.what in [f"{leg} {pair.compute}" for leg in LEGS]:
            legs.setdefault(row.mechanism, []).append(row)
    tried = against_stock((_sum(rows, rounds) for rows in legs.values() if len(rows) == len(LEGS)), stock)
    return PairTimes(tried=tried, comm_us=min((each.us for each in tried), default=None))


def _marked(rows: Sequence[Row] | Sequence[BlockRow]) -> str | None:
    return as_sentence("; ".join(dict.fromkeys(row.marked for row in rows if row.marked))) or None
