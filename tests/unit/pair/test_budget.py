"""The rule against a machine whose truth is known, and against figures of a real one."""

from typing import Any

import pytest
from budget_rule import gemm_curve
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import Misconfigured
from counterpoint.pair.choice import ORDERS, Objective, candidates_for, choose_split, predict
from counterpoint.pair.curves import CommCurve, CommPoint, Curves
from counterpoint.pair.sm_split import SmLayout, SmSplit
from counterpoint.records.measurement import Order
from tests.support.true_budget import CANDIDATES, ONE_GPC, UNDISTURBED, curves, pairs, true_us


@given(pair=pairs, choice=st.sampled_from(CANDIDATES), order=st.sampled_from(ORDERS))
def test_predictions_are_exact_where_the_model_is(pair: tuple[str, int], choice: SmSplit, order: Order) -> None:
    """Without contention, every T is the one of the machine that was played block by block."""
    budget = predict(curves(), pair[0], "all_gather", pair[1], choice, orders=(order,), contention=UNDISTURBED)
    assert budget.objective_us == pytest.approx(true_us(*pair, choice, (order,)))


GEMM = "gemm 8192x8192x8192"

# 8 x H200, NCCL 2.28.9 (24 CTAs), 2026-11-20, gemm 8192x8192x8192 beside an all_gather: bytes, T_c alone, and T
# launched together, communication 100 µs first, computation 100 µs first; T_g = 1410.3 µs.
MEASURED: tuple[tuple[int, float, dict[Order, float]], ...] = (
    (127_336_448, 363.3, {"together": 1732.2, "comm_first": 1632.4, "compute_first": 1716.7}),
    (254_672_896, 691.2, {"together": 2050.6, "comm_first": 1669.7, "compute_first": 2060.5}),
    (509_345_792, 1330.8, {"together": 2754.8, "comm_first": 1763.3, "compute_first": 2745.9}),
    (1_018_724_352, 2599.7, {"together": 4057.2, "comm_first": 2678.8, "compute_first": 4088.8}),
)
ON_8_H200 = Curves(
    layout=SmLayout.even(132),
    gemms={GEMM: gemm_curve(GEMM, ((132, 1410.3),))},
    comms={("all_gather", None, None): CommCurve(points=tuple(CommPoint(size_bytes=size, time_us=us, num_ctas=24)
                                                              for size, us, _ in MEASURED))},
)  # fmt: skip


@pytest.mark.parametrize(("size_bytes", "comm_us", "measured"), MEASURED)
def test_stock_nccl_on_h200_is_predicted(size_bytes: int, comm_us: float, measured: dict[Order, float]) -> None:
    """From T_g and T_c alone, T of plain NCCL in every order is within 5 % of what was measured."""
    predicted = predict(ON_8_H200, GEMM, "all_gather", size_bytes, SmSplit()).together_us
    assert predicted == pytest.approx(measured, rel=0.05)


def test_few_ctas_keep_the_waves() -> None:
    """512 tiles need 4 waves on 132 or 128 SMs and 5 on 108: that is told before and after."""
    both = [predict(curves(), "gemm 4096x4096x4096", "all_gather", 1 << 24, choice) for choice in CANDIDATES]
    waves = {budget.split.mechanism: (budget.waves_alone, budget.waves_together) for budget in both}
    assert (waves["nccl"], waves["nccl+max_ctas=4+cga_cluster=2+gemm_sms=128"]) == ((4, 5), (4, 4))


@pytest.mark.parametrize("objective", ["mean", "worst"])
def test_equal_choices_leave_things_as_they_are(objective: Objective) -> None:
    """Of two candidates with equal times the first is taken."""
    twins = (SmSplit(max_ctas=24), SmSplit())
    table = curves()
    comms = {**table.comms, ("all_gather", 24, None): table.comms["all_gather", None, None]}
    same = Curves(layout=table.layout, gemms=table.gemms, comms=comms)
    found = choose_split(same, GEMM, "all_gather", 1 << 28, candidates=twins, objective=objective)
    assert found.split == twins[0]


def test_hidden_is_one_where_nothing_waits() -> None:
    """A collective that fits beside 128 tiles on 132 SMs and disturbs nobody is hidden wholly."""
    gemm = "gemm 4096x1024x8192"
    curve = CommCurve(points=tuple(CommPoint(size_bytes=s, time_us=s, num_ctas=4) for s in (1, 99)))
    gemms = {gemm: gemm_curve(gemm, ((132, 1000.0),))}
    table = Curves(layout=ONE_GPC, gemms=gemms, comms={("all_gather", 4, None): curve})
    found = predict(table, gemm, "all_gather", 50, SmSplit(max_ctas=4), contention=UNDISTURBED, orders=("together",))
    assert found.hidden == pytest.approx(1.0)


def test_the_reason_names_the_limits_and_the_gain() -> None:
    found = choose_split(curves(), GEMM, "all_gather", 1 << 29, contention=UNDISTURBED)
    assert found.reason == (
        "16 CTAs beside 116 SMs: the collective starts beside the GEMM, the GEMM takes 18 waves instead of 16, "
        "1,644 µs, 29% less time than plain NCCL"
    )


def test_without_plain_nccl_the_reason_claims_no_gain() -> None:
    found = choose_split(curves(), GEMM, "all_gather", 1 << 29, candidates=CANDIDATES[1:])
    assert "plain NCCL" not in found.reason


def test_candidates_of_a_machine_are_those_of_the_suite() -> None:
    """What `choose` tries by itself on an H200 holds every division that the suite measures."""
    assert set(CANDIDATES) <= set(candidates_for(SmLayout.even(132), 24, clusters=(2,)))


def test_what_was_not_measured_is_no_candidate() -> None:
    """Without curves of clusters of 2 none is proposed, though it would be faster."""
    table = curves()
    comms = {key: curve for key, curve in table.comms.items() if key[2] is None}
    known = Curves(layout=SmLayout.even(132), gemms=table.gemms, comms=comms)
    assert choose_split(known, GEMM, "all_gather", 1 << 28).split.cga_cluster is None


def test_waiting_ctas_have_their_share_left() -> None:
    """24 CTAs in clusters of 4 beside 108 SMs: 8 start at once, 16 have 2/3 of the bytes to move when the GEMM ends."""
    size, table = 1 << 30, curves()
    clustered = Curves(layout=SmLayout.even(132), gemms=table.gemms, comms=table.comms)
    choice = SmSplit.parse("nccl+gemm_sms=108")
    found = predict(clustered, GEMM, "all_gather", size, choice, orders=("together",), contention=UNDISTURBED)
    left_us = table.comm("all_gather", size, SmSplit(max_ctas=16)).time_us * 16 / 24
    assert found.objective_us == pytest.approx(table.gemms[GEMM].time_us(108) + left_us)


@pytest.mark.parametrize(
    ("size_bytes", "options", "message"),
    [
        (1 << 28, {"orders": ()}, "choose from: together, comm_first"),
        (1 << 28, {"candidates": ()}, "no candidate is given"),
        (1 << 40, {}, "too far from the measured sizes"),
    ],
)
def test_nothing_to_choose_from_is_an_error(size_bytes: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(Misconfigured, match=message):
        choose_split(curves(), GEMM, "all_gather", size_bytes, **options)


def test_a_choice_without_alternatives_says_so() -> None:
    alone = curves()
    comms = {key: curve for key, curve in alone.comms.items() if key[1:] == (None, None)}
    gemms = {GEMM: gemm_curve(GEMM, alone.gemms[GEMM].points[-1:])}
    found = choose_split(Curves(layout=alone.layout, gemms=gemms, comms=comms), GEMM, "all_gather", 100_000_000)
    assert found.reason.endswith("nothing else could be compared, the curves cover no other division")
