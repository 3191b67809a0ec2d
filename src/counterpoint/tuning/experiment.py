"""Plan what `tune` measures, the mechanisms of each pair and their order, and read the measured times. No torch.

An independent pair is a `Scenario`, a matmul that depends on communication or an exchange of tokens is a `Block`. The
time that counts lasts from the first start to the last end of computation and collective:

    independent     mean over the launch orders of the pair; over all three where its order is not known
    dependent       matmul and collective by one mechanism
    tokens          dispatch + combine with nothing beside them: experts wait for one, and the next layer for the other

All mechanisms of a pair take turns in the same rounds. With T_r for the time in round r, of the slowest rank, and the
mean over rounds of `decide.py`

    us of stock        mean of T_stock,r
    us of another      us of stock - mean of (T_stock,r - T_r)
    paired_sigma_us    standard error of the mean of (T_stock,r - T_r)

T_r is the mean over launch orders, or the sum over both legs of an exchange. Orders and legs are measured one
after the other: round r of one is added to round r of the other, though any two rounds could be. A measurement that
kept no rounds gives each mechanism's median, on the rank whose median is largest, and no `paired_sigma_us`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from counterpoint.collectives.program.operations import measured_by
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.machine.profile import Profile
from counterpoint.measurement.workloads import MEASURABLE, is_dependent, is_exchange, measured_dtype
from counterpoint.pair.expert_choice import EXCHANGE_MECHANISMS
from counterpoint.pair.matmul_choice import MATMUL_MECHANISMS
from counterpoint.records.measurement import LEGS, Block, BlockRow, Measurement, Row, Scenario, Timing
from counterpoint.records.tuning import StepPair, Tried, as_sentence
from counterpoint.tuning.decide import RoundMean, RoundTimes, apart, standard_error
from counterpoint.tuning.pairs import block_name, depends, orders_of, stock_of
from counterpoint.tuning.predictions import predicted_times

Part = Scenario | Block
Predicted = Mapping[str, float | None]
"""Maps each mechanism to measure, stock first, to its predicted µs; None: the model has no figures for it."""

MOST = 3
# where no figure tells them apart: each is the best of its kind on results/budget-pairs-4xh200.json and pairs-4xh200
UNPREDICTED = ("nccl_zero_cta", "nccl+max_ctas=8+gemm_sms=124")
_BYTES_PER_US = 1e5  # assumed for pairs without a prediction, so that they can be ordered


def planned(
    pairs: Sequence[StepPair], profile: Profile, device: str, *, most: int
) -> tuple[tuple[Part, ...], dict[str, Predicted]]:
    """Return the parts of the measurement, in order, and by each part's name the predicted times of mechanisms.

    There is one part for all pairs that take equally long; of more than `most`, those with the most bytes in a step.
    First comes the largest of each class, by weight in a step, then the others. Predictions take milliseconds, a
    measurement seconds: a budget that has no second for a pair does not get to it.
    """
    same: dict[str, list[StepPair]] = {}
    for pair in pairs:
        same.setdefault(part_of(pair, ()).name, []).append(pair)
    looked_at = sorted(same, key=lambda name: -_calls(same[name]) * same[name][0].bytes_per_rank)[:most]
    expected = {name: shortlist(same[name][0], profile, device=device) for name in looked_at}

    def step_us(name: str) -> float:
        """Return an estimate of the µs per step that the pairs of this name take by their default mechanism."""
        by_stock = next(iter(expected[name].values()))
        return _calls(same[name]) * (by_stock or same[name][0].bytes_per_rank / _BYTES_PER_US)

    heaviest = sorted(looked_at, key=lambda name: -step_us(name))
    classes: dict[object, list[str]] = {}
    for name in heaviest:
        classes.setdefault(class_of(same[name][0]), []).append(name)
    largest = [max(names, key=lambda name: same[name][0].bytes_per_rank) for names in classes.values()]
    parts = tuple(part_of(same[name][0], tuple(expected[name])) for name in dict.fromkeys((*largest, *heaviest)))
    return parts, expected


def class_of(pair: StepPair) -> tuple[object, ...]:
    """Return the class of a pair; if there is no time to measure all pairs, the pairs of a class share one mechanism.

    Pairs of a class share operation, ranks, dtypes, computation, launch order, and the power of two below
    `bytes_per_rank`. GEMMs of another shape are of another class: one tile more may take one wave more.
    """
    dtypes = pair.dtype, pair.computed_in
    return (pair.operation, pair.ranks, *dtypes, pair.compute, pair.first, pair.bytes_per_rank.bit_length())


def _calls(pairs: Sequence[StepPair]) -> int:
    return sum(pair.calls for pair in pairs)


def shortlist(pair: StepPair, profile: Profile, *, device: str = "cuda", most: int = MOST) -> Predicted:
    """Return the default mechanism, then the `most` others with the least predicted time, fastest first.

    On CPUs, for which `profile` has no figures, all mechanisms that run on CPUs are returned.
    """
    stock = stock_of(pair, device)
    try:
        times: Mapping[str, float | None] = predicted_times(pair, profile) if device == "cuda" else {}
    except (Misconfigured, Unsupported):  # a profile of a GPU without a data sheet, or without this operation
        times = {}
    return best_of(times or dict.fromkeys((stock, *_offered(pair, device))), stock, most)


def best_of(times: Predicted, stock: str, most: int = MOST) -> Predicted:
    """Return `stock` and the `most` other mechanisms with the least time; ties keep the order in `times`."""
    others = sorted((name for name in times if name != stock), key=lambda name: times[name] or 0.0)
    return {name: times.get(name) for name in (stock, *others[:most])}


def _offered(pair: StepPair, device: str) -> tuple[str, ...]:
    """Return a pair's mechanisms, besides the default, that no model ranks; measuring shows which of them can run."""
    if depends(pair):
        known: tuple[str, ...] = MATMUL_MECHANISMS if is_dependent(pair.operation) else EXCHANGE_MECHANISMS
        return tuple(name for name in known if name != stock_of(pair, device))
    copies = ("zero_sm",) if pair.operation in measured_by("programs") else ()
    return copies if device == "cpu" else (*copies, *UNPREDICTED)


def part_of(pair: StepPair, mechanisms: Sequence[str]) -> Part:
    """Return the part of the measurement for a pair; pairs with equal sizes, dtypes and launch order share one name."""
    asked = pair.dtype, pair.computed_in
    dtype, compute_dtype = (each if each in MEASURABLE else None for each in asked)  # None: that of the device
    if depends(pair):
        what = block_name(pair)
        return Block(name=f"{what} in {pair.dtype}", what=what, mechanisms=tuple(mechanisms), dtype=dtype)
    comm = f"{pair.operation} of {pair.bytes_per_rank} bytes a rank in {pair.dtype}"
    compute = f"{pair.compute} in {pair.computed_in}"
    return Scenario(
        name=f"{comm} | {compute} | {pair.first or 'all orders'}", workload=pair.compute, collective=pair.operation,
        size_bytes=pair.bytes_per_rank * pair.ranks, mechanisms=tuple(mechanisms), orders=orders_of(pair), dtype=dtype,
        compute_dtype=compute_dtype,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PairTimes:
    """Holds the measured µs of a pair by each mechanism and alone; `tried` is empty if the pair was not measured."""

    tried: tuple[Tried, ...] = ()
    compute_us: float | None = None  # alone
    comm_us: float | None = None  # alone, by the fastest mechanism


def times_of(pair: StepPair, measured: Measurement) -> PairTimes:
    """Return the measured times of a compute-collective pair, by mechanism."""
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
        tried=against_stock(
            (
                _added(rows, [row.together for row in rows], rounds, part=1 / len(rows))
                for rows in by_mechanism.values()
            ),
            stock,
        ),
        compute_us=mine[0].compute_alone.us if mine else None,
        comm_us=mine[0].best_comm_alone_us if mine else None,
    )


def against_stock(found: Iterable[tuple[Tried, RoundTimes]], stock: str) -> tuple[Tried, ...]:
    """Return mechanisms' times, with their paired difference from `stock` if enough rounds of both are valid."""
    every = list(found)
    base = next((each for each in every if each[0].mechanism == stock), None)
    return tuple(each if base is None or each is base[0] else _paired(each, times, *base) for each, times in every)


def _paired(each: Tried, times: RoundTimes, base: Tried, base_times: RoundTimes) -> Tried:
    less = RoundMean.of(apart(base_times, times))
    if less is None:
        return each
    us = max(0.0, round(base.us - less.us, 3))
    return replace(each, us=us, paired_sigma_us=round(less.sigma_us, 3), runs=less.runs)


def _sum(rows: Sequence[BlockRow], rounds: int) -> tuple[Tried, RoundTimes]:
    """Return the sum of the times of a mechanism's successive operations: over all rounds, and for each round."""
    return _added(rows, [row.time for row in rows], rounds, part=1.0)


def _added(
    rows: Sequence[Row] | Sequence[BlockRow], times: Sequence[Timing], rounds: int, *, part: float
) -> tuple[Tried, RoundTimes]:
    """Return `part` times the sum of `times`, as a mean over valid rounds (else of medians), and for each round."""
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
        marked=as_sentence("; ".join(dict.fromkeys(row.marked for row in rows if row.marked))) or None,
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
