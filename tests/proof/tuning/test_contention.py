"""The fit finds what was planted, and nothing but its rows."""

from collections.abc import Iterator

import msgspec
import pytest
from budget_rule import products_of
from measure_suites import BUDGET, BUDGET_LIMITS, BUDGET_SIZES, BUDGET_SMS
from synthetic_machine import SyntheticMachine

from counterpoint.errors import Misconfigured
from counterpoint.machine.profile import Contention, default_profile
from counterpoint.measurement.suites import GEMM
from counterpoint.pair.choice import ORDERS, predict
from counterpoint.pair.curves import curves_from
from counterpoint.pair.sm_split import SmLayout, SmSplit
from counterpoint.records.measurement import Row
from counterpoint.tuning.fit.matmuls import contention_of, error_of_contention

SHAPE = (8192, 8192, 8192)
MACHINE = SyntheticMachine()
BLOCKS = list(MACHINE.blocks([SHAPE], (*BUDGET_SMS, 132), BUDGET_SIZES, BUDGET_LIMITS))
CURVES = curves_from(BLOCKS, products_of(BLOCKS), layout=SmLayout.even(132))
PLANTED = msgspec.structs.replace(
    default_profile().contention, compute_loss=0.08, comm_loss=0.03, gemm_wins=0.7, comm_cluster=2
)


def rows(calibration: Contention) -> Iterator[Row]:
    """What a machine with that contention would measure."""
    for size in (50_000_000, 400_000_000):
        for mechanism in BUDGET:
            choice = SmSplit.parse(mechanism)
            for order in ORDERS:
                row = MACHINE.row(SHAPE, "all_gather", size, None, mechanism, order)
                end_us = predict(
                    CURVES, GEMM, "all_gather", size, choice, orders=(order,), contention=calibration
                ).objective_us
                yield msgspec.structs.replace(row, together=MACHINE.told(end_us))


def test_planted_contention_is_found() -> None:
    """All four parameters come back as they were planted."""
    assert contention_of(rows(PLANTED), CURVES) == PLANTED


def test_the_error_of_the_truth_is_nothing() -> None:
    """log(predicted / measured) is 0 where the calibration is the planted one."""
    assert error_of_contention(list(rows(PLANTED)), CURVES, PLANTED) == pytest.approx(0.0, abs=1e-12)


def test_the_head_start_is_the_measured_one() -> None:
    """The median over rows with an order."""
    late = [msgspec.structs.replace(row, head_start_us=120.0) for row in rows(PLANTED) if row.order == "comm_first"]
    assert contention_of(late, CURVES).head_start_us == 120.0


def test_marked_rows_teach_nothing() -> None:
    """A row that must not be believed does not move the fit."""
    wrong = [msgspec.structs.replace(row, together=MACHINE.told(1.0), marked="late") for row in rows(PLANTED)]
    assert contention_of([*rows(PLANTED), *wrong], CURVES) == PLANTED


def test_no_row_is_an_error() -> None:
    """Without anything to learn from there is no default in disguise."""
    with pytest.raises(Misconfigured, match="no row to fit"):
        contention_of([], CURVES)


def test_a_time_that_cannot_be_is_an_error() -> None:
    """A damaged row is named, and no logarithm of 0 is taken."""
    damaged = [msgspec.structs.replace(row, together=MACHINE.told(0.0)) for row in rows(PLANTED)]
    with pytest.raises(Misconfigured, match=r"together in 0\.0 µs; measure it again"):
        contention_of(damaged, CURVES)
