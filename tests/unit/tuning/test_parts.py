"""From pairs to parts of a measurement, and from its rows to times with their errors."""

from __future__ import annotations

import random
from statistics import fmean, pstdev

import numpy as np
import pytest

from counterpoint.measurement.rows import timing
from counterpoint.measurement.suites import scenarios_of
from counterpoint.records.measurement import Block, Scenario
from counterpoint.records.tuning import StepPair
from counterpoint.tuning.parts import part_of, standard_error, times_of
from tests.support.planted_machine import COMM_US, COMPUTE_US, PlantedMachine

GATHER = StepPair(operation="all_gather", compute="gemm 8192x8192x8192", bytes_per_rank=1 << 20, ranks=4)
MATMUL = StepPair(operation="all_gather_matmul", compute="gemm 1024x1024x512", bytes_per_rank=1 << 18, ranks=4)
EXCHANGE = StepPair(operation="exchange", compute="tiny 128 zipf", bytes_per_rank=32768, ranks=2)


def test_an_independent_pair_is_a_scenario_of_the_full_array() -> None:
    """All ranks' bytes, and every launch order where the pair does not know its own."""
    part = part_of(GATHER, ["nccl", "zero_sm"])
    assert isinstance(part, Scenario)
    assert (part.size_bytes, part.mechanisms, part.workload) == (4 << 20, ("nccl", "zero_sm"), GATHER.compute)
    assert part.orders == scenarios_of("quick", device="cuda")[0].orders


@pytest.mark.parametrize(
    ("pair", "what"), [(MATMUL, "all_gather_matmul 1024x1024x512"), (EXCHANGE, "exchange tiny 128 zipf")]
)
def test_what_depends_on_communication_is_a_block(pair: StepPair, what: str) -> None:
    part = part_of(pair, ["torch"])
    assert isinstance(part, Block)
    assert (part.what, part.mechanisms) == (what, ("torch",))


def test_a_pair_of_unknown_order_counts_by_the_mean_over_orders() -> None:
    """Of equally uncertain times the error of their mean is smaller by the root of their number."""
    machine = PlantedMachine(
        together_us=lambda _, name, order: {"together": 1000.0, "comm_first": 1300.0, "compute_first": 1600.0}[order],
        noise=0.01,
    )
    part = part_of(GATHER, ["nccl"])
    measured = machine.measure_parts("t", [part], device="cuda", world_size=4, rounds=12)
    found = times_of(GATHER, measured)
    assert found.tried[0].us == pytest.approx(1300, rel=0.02)
    assert found.compute_us == pytest.approx(COMPUTE_US, rel=0.05)
    assert (found.tried[0].runs, found.comm_us) == (10, COMM_US)
    one_us = 1.25 * 1300 * 0.01 / 10**0.5  # of a median of ten rounds
    assert 0.5 * one_us / 3**0.5 < found.tried[0].sigma_us < 2 * one_us / 3**0.5


def test_an_exchange_is_dispatch_and_combine() -> None:
    """Their times add up, and another exchange has none of them."""
    machine = PlantedMachine(together_us=lambda _, name, order: {"torch": 900.0, "push": 500.0}[name])
    measured = machine.measure_parts("t", [part_of(EXCHANGE, ["torch", "push"])], device="cpu", world_size=2, rounds=6)
    found = times_of(EXCHANGE, measured)
    assert {each.mechanism: each.us for each in found.tried} == {"torch": 900.0, "push": 500.0}
    assert (
        times_of(StepPair(operation="exchange", compute="tiny 64 zipf", bytes_per_rank=1, ranks=2), measured).tried
        == ()
    )


def test_a_matmul_has_its_time_alone_too() -> None:
    machine = PlantedMachine(together_us=lambda _, name, order: 1400.0)
    measured = machine.measure_parts("t", [part_of(MATMUL, ["torch"])], device="cuda", world_size=4, rounds=6)
    found = times_of(MATMUL, measured)
    assert ([each.mechanism for each in found.tried], found.compute_us) == (["torch"], COMPUTE_US)


@pytest.mark.parametrize("runs", [3, 5, 10, 30])
def test_the_standard_error_is_that_of_medians(runs: int) -> None:
    """Over 1500 draws of normal noise it is, in the mean, the standard deviation of the medians, at most 15 % more."""
    draw = random.Random(0)
    times = [timing([[draw.gauss(1000.0, 10.0) for _ in range(runs)]]) for _ in range(1500)]
    spread = pstdev(time.us for time in times)
    assert 0.95 * spread < fmean(standard_error(time, runs) for time in times) < 1.15 * spread


def test_rounds_that_were_dropped_do_not_count() -> None:
    """A time knows its rounds; where it does not, those of the measurement count."""
    time = timing([list(np.linspace(1.0, 2.0, 5))])
    assert standard_error(time, 100) == standard_error(time, 5)
