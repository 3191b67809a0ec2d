"""From pairs to parts of a measurement, and from its rows to times with their errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
from msgspec.structs import replace

from counterpoint.measurement.suites import parts_of
from counterpoint.records.measurement import LEGS, Block, Scenario
from counterpoint.records.tuning import StepPair
from counterpoint.tuning.experiment import part_of, times_of
from tests.support.planted_machine import COMM_US, COMPUTE_US, PlantedMachine

GATHER = StepPair(operation="all_gather", compute="gemm 8192x8192x8192", bytes_per_rank=1 << 20, ranks=4)
MATMUL = StepPair(operation="all_gather_matmul", compute="gemm 1024x1024x512", bytes_per_rank=1 << 18, ranks=4)
EXCHANGE = StepPair(operation="exchange", compute="tiny 128 zipf", bytes_per_rank=32768, ranks=2)


def test_an_independent_pair_is_a_scenario_of_the_full_array() -> None:
    """All ranks' bytes, and every launch order where the pair does not know its own."""
    part = part_of(GATHER, ["nccl", "zero_sm"])
    assert isinstance(part, Scenario)
    assert (part.size_bytes, part.mechanisms, part.workload) == (4 << 20, ("nccl", "zero_sm"), GATHER.compute)
    assert {part.orders} == {each.orders for each in parts_of("quick", device="cuda") if isinstance(each, Scenario)}


@pytest.mark.parametrize(
    ("pair", "what"), [(MATMUL, "all_gather_matmul 1024x1024x512"), (EXCHANGE, "exchange tiny 128 zipf")]
)
def test_what_depends_on_communication_is_a_block(pair: StepPair, what: str) -> None:
    part = part_of(pair, ["torch"])
    assert isinstance(part, Block)
    assert (part.what, part.mechanisms) == (what, ("torch",))


def test_a_sum_has_its_own_dtype() -> None:
    """Gradients may be added up in float32 beside matmuls in bfloat16; parts of other dtypes have other names."""
    pairs = [GATHER, *(replace(GATHER, dtype=dtype) for dtype in ("float16", "float32"))]
    pairs.append(replace(GATHER, dtype="float32", compute_dtype="bfloat16"))
    parts = [part_of(pair, ["nccl"]) for pair in pairs]
    assert all(isinstance(part, Scenario) for part in parts)
    assert (parts[3].dtype, getattr(parts[3], "compute_dtype", None)) == ("float32", "bfloat16")
    assert len({part.name for part in parts}) == 4


def test_what_cannot_be_measured_in_its_dtype_is_in_that_of_the_device() -> None:
    """No matmul of torch takes two tensors of float8 without scales."""
    part = part_of(replace(MATMUL, dtype="float8_e4m3fn"), ["torch"])
    assert (part.dtype, "float8_e4m3fn" in part.name) == (None, True)


def test_rows_of_another_dtype_are_not_those_of_a_pair() -> None:
    """One matmul in two dtypes gives rows of one name; rows from before dtypes were kept fit any."""
    machine = PlantedMachine(together_us=lambda _, name, order: 1400.0)
    measured = machine.measure_parts("t", [part_of(MATMUL, ["torch"])], device="cuda", world_size=4, rounds=6)
    blocks = tuple(replace(row, dtype="float16") for row in measured.blocks)
    assert times_of(MATMUL, replace(measured, blocks=blocks)).tried == ()
    assert len(times_of(replace(MATMUL, dtype="float16"), replace(measured, blocks=blocks)).tried) == 1
    assert len(times_of(MATMUL, measured).tried) == 1


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
    one_us = 1300 * 0.01 / 10**0.5  # of a mean over ten rounds
    assert 0.4 * one_us / 3**0.5 < found.tried[0].sigma_us < 2 * one_us / 3**0.5


def test_an_exchange_is_dispatch_and_combine() -> None:
    """Their times add up, and another exchange has none of them."""
    machine = PlantedMachine(together_us=lambda _, name, order: {"torch": 900.0, "slabs": 500.0}[name])
    measured = machine.measure_parts("t", [part_of(EXCHANGE, ["torch", "slabs"])], device="cpu", world_size=2, rounds=6)
    found = times_of(EXCHANGE, measured)
    assert {each.mechanism: each.us for each in found.tried} == {"torch": 900.0, "slabs": 500.0}
    assert (
        times_of(StepPair(operation="exchange", compute="tiny 64 zipf", bytes_per_rank=1, ranks=2), measured).tried
        == ()
    )


def test_a_matmul_has_its_time_alone_too() -> None:
    machine = PlantedMachine(together_us=lambda _, name, order: 1400.0)
    measured = machine.measure_parts("t", [part_of(MATMUL, ["torch"])], device="cuda", world_size=4, rounds=6)
    found = times_of(MATMUL, measured)
    assert ([each.mechanism for each in found.tried], found.compute_us) == (["torch"], COMPUTE_US)


def test_a_mechanism_is_compared_with_stock_in_each_round() -> None:
    """Clocks drift by a sixth over the rounds: each time by itself is uncertain by more than its gain, that is not."""
    machine = PlantedMachine(together_us=lambda _, name, order: {"nccl": 1000.0}.get(name, 980.0), drift=0.001)
    measured = machine.measure_parts(
        "t", [part_of(GATHER, ["nccl", "zero_sm"])], device="cuda", world_size=4, rounds=12
    )
    stock, other = times_of(GATHER, measured).tried
    assert stock.paired_sigma_us is None
    assert other.paired_sigma_us is not None
    assert stock.us - other.us == pytest.approx(20, abs=3 * other.paired_sigma_us)
    assert 4 * other.paired_sigma_us < stock.us - other.us < 2 * math.hypot(stock.sigma_us, other.sigma_us)


def test_both_legs_of_an_exchange_are_compared_together() -> None:
    """The difference to stock is that of their sum."""
    machine = PlantedMachine(
        together_us=lambda _, name, order: {"torch": 900.0, "slabs": 500.0}[name], noise=0.01, drift=0.001
    )
    measured = machine.measure_parts(
        "t", [part_of(EXCHANGE, ["torch", "slabs"])], device="cpu", world_size=2, rounds=12
    )
    stock, slabs = times_of(EXCHANGE, measured).tried
    legs = [
        {row.mechanism: np.array(row.time.rounds_us, float) for row in measured.blocks if row.what.startswith(leg)}
        for leg in LEGS
    ]
    less = legs[0]["torch"] - legs[0]["slabs"] + legs[1]["torch"] - legs[1]["slabs"]
    assert stock.us - slabs.us == pytest.approx(np.sort(less)[1:-1].mean(), abs=0.002)


def test_a_measurement_without_its_rounds_gives_medians() -> None:
    """As one from before they were kept."""
    machine = PlantedMachine(together_us=lambda _, name, order: {"nccl": 1000.0}.get(name, 980.0), drift=0.001)
    measured = machine.measure_parts(
        "t", [part_of(GATHER, ["nccl", "zero_sm"])], device="cuda", world_size=4, rounds=12
    )
    rows = tuple(replace(row, together=replace(row.together, rounds_us=())) for row in measured.rows)
    found = times_of(GATHER, replace(measured, rows=rows)).tried
    assert [each.paired_sigma_us for each in found] == [None, None]
    assert found[1].us == pytest.approx(sum(row.together.us for row in rows[3:]) / 3, abs=0.001)
