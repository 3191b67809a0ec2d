"""Turn pairs of a step into parts of a measurement, and what was measured into the times of each mechanism. No torch.

An independent pair is a `Scenario`, a matmul that depends on communication or an exchange of tokens is a `Block`. The
time that counts is that of both sides, from the first start to the last end:

    independent     mean over the launch orders of the pair; over all three where its order is not known
    dependent       matmul and collective by one mechanism
    tokens          dispatch + combine with nothing beside them: experts wait for one, and the next layer for the other

Times are medians over interleaved rounds, each with its standard error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

from counterpoint.errors import Misconfigured
from counterpoint.measurement.dependent import is_dependent, is_exchange
from counterpoint.pair.choice import ORDERS
from counterpoint.records.measurement import LEGS, Block, BlockRow, Measurement, Order, Row, Scenario, Timing
from counterpoint.records.tuning import StepPair, Tried, as_sentence

STOCK = {"cuda": "nccl", "cpu": "gloo"}  # of independent pairs
TORCH = "torch"  # the stock of what depends on communication
MEASURED_DTYPE = {"cuda": "bfloat16", "cpu": "float32"}


def stock_of(pair: StepPair, device: str) -> str:
    """Return the mechanism by which a pair runs where nothing is chosen."""
    return TORCH if depends(pair) else STOCK[device]


def depends(pair: StepPair) -> bool:
    """Return whether the computation of a pair needs what the communication brings, or the other way round."""
    return is_dependent(pair.operation) or is_exchange(pair.operation)


def part_of(pair: StepPair, mechanisms: Sequence[str]) -> Scenario | Block:
    """Return what to measure; pairs that take equally long for the same reasons get parts of the same name."""
    if depends(pair):
        return Block(name=block_name(pair), what=block_name(pair), mechanisms=tuple(mechanisms))
    return Scenario(
        name=f"{pair.operation} of {pair.bytes_per_rank} bytes a rank | {pair.compute} | {pair.first or 'all orders'}",
        workload=pair.compute,
        collective=pair.operation,
        size_bytes=pair.bytes_per_rank * pair.ranks,
        mechanisms=tuple(mechanisms),
        orders=orders_of(pair),
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
    rounds = measured.rounds - measured.dropped_rounds
    if is_exchange(pair.operation):
        return _exchange_times(pair, measured.blocks, rounds)
    if is_dependent(pair.operation):
        return _dependent_times(pair, measured.blocks, rounds)
    name = part_of(pair, ()).name
    mine = [row for row in measured.rows if row.scenario == name]
    by_mechanism = {row.mechanism: [each for each in mine if each.mechanism == row.mechanism] for row in mine}
    return PairTimes(
        tried=tuple(_mean(rows, rounds) for rows in by_mechanism.values()),
        compute_us=mine[0].compute_alone.us if mine else None,
        comm_us=mine[0].best_comm_alone_us if mine else None,
    )


def standard_error(time: Timing, rounds: int) -> float:
    """Return the standard error of a median in µs, from its 10th and 90th percentile.

        s = (p90 - p10) / d(n)                 standard deviation of one round
        sigma = sqrt(pi / 2) · s / sqrt(n)     standard error of the median of n rounds

    d(n) is the expected distance of both percentiles in n normal samples, in standard deviations: 2.56 for many, less
    for few, whose percentiles lie further inside. Sample i of n is expected at the quantile (i - 3/8) / (n + 1/4)
    (Blom 1958), and percentiles are interpolated between samples as numpy does. Drift of clocks over rounds counts as
    noise, although it slows all mechanisms alike: sigma is rather too large than too small.

    Args:
        time: of a mechanism.
        rounds: n where the time does not say how many count.
    """
    runs = time.runs or rounds
    return math.sqrt(math.pi / 2 / runs) * (time.p90_us - time.p10_us) / _width(runs)


def _width(runs: int) -> float:
    if runs < 2:
        raise Misconfigured(f"{runs} rounds have no spread; measure at least 2 that count")
    expected = [NormalDist().inv_cdf((place - 3 / 8) / (runs + 1 / 4)) for place in range(1, runs + 1)]
    at = 0.1 * (runs - 1)
    low = int(at)
    return -2 * (expected[low] + (at - low) * (expected[low + 1] - expected[low]))


def _mean(rows: Sequence[Row], rounds: int) -> Tried:
    """Return the mean over launch orders, with the error of a mean of independent times."""
    sigmas = [standard_error(row.together, rounds) for row in rows]
    return Tried(
        mechanism=rows[0].mechanism,
        us=round(fmean(row.together.us for row in rows), 3),
        sigma_us=round(math.hypot(*sigmas) / len(rows), 3),
        runs=min(row.together.runs or rounds for row in rows),
        marked=_marked(rows),
    )


def _dependent_times(pair: StepPair, blocks: Sequence[BlockRow], rounds: int) -> PairTimes:
    alone: dict[str, float] = {}
    tried = []
    for row in blocks:
        if row.what != block_name(pair):
            continue
        if row.mechanism.endswith(" alone"):  # the matmul, and the collective by torch
            alone["compute" if row.mechanism.startswith("matmul") else "comm"] = row.time.us
            continue
        tried.append(_sum((row,), rounds))
    return PairTimes(tried=tuple(tried), compute_us=alone.get("compute"), comm_us=alone.get("comm"))


def _exchange_times(pair: StepPair, blocks: Sequence[BlockRow], rounds: int) -> PairTimes:
    legs: dict[str, list[BlockRow]] = {}
    for row in blocks:
        if row.what in [f"{leg} {pair.compute}" for leg in LEGS]:
            legs.setdefault(row.mechanism, []).append(row)
    tried = tuple(_sum(rows, rounds) for rows in legs.values() if len(rows) == len(LEGS))
    return PairTimes(tried=tried, comm_us=min((each.us for each in tried), default=None))


def _sum(rows: Sequence[BlockRow], rounds: int) -> Tried:
    """Return the sum of times that come one after another."""
    return Tried(
        mechanism=rows[0].mechanism,
        us=round(sum(row.time.us for row in rows), 3),
        sigma_us=round(math.hypot(*(standard_error(row.time, rounds) for row in rows)), 3),
        runs=min(row.time.runs or rounds for row in rows),
        marked=_marked(rows),
    )


def _marked(rows: Sequence[Row] | Sequence[BlockRow]) -> str | None:
    return as_sentence("; ".join(dict.fromkeys(row.marked for row in rows if row.marked))) or None
