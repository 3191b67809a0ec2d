"""The rule against a machine whose truth is known, and against figures of a real one."""

from __future__ import annotations

from functools import cache
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_machine import SyntheticMachine

from counterpoint.errors import Misconfigured
from counterpoint.measure.suites import BUDGET, BUDGET_GEMMS, BUDGET_LIMITS, BUDGET_SIZES, BUDGET_SMS
from counterpoint.policy.budget import ORDERS, Calibration, Objective, candidates_for, choose, predict
from counterpoint.policy.choice import Choice
from counterpoint.policy.curves import CommCurve, CommPoint, Curves, GemmCurve, curves_from
from counterpoint.policy.layout import SmLayout
from counterpoint.records.measurement import Order

UNDISTURBED = Calibration(compute_loss=0.0, comm_loss=0.0)
ONE_GPC = SmLayout(gpc_sms=(132,), gemm_cluster=1)  # the made-up machine does not look at clusters
CANDIDATES = tuple(map(Choice.parse, BUDGET))
Shape = tuple[int, int, int]


def shape_of(workload: str) -> Shape:
    m, n, k = map(int, workload.split()[1].split("x"))
    return m, n, k


@cache
def curves(noise: float = 0.0, seed: int = 0) -> Curves:
    """The building blocks of the suite on the made-up machine."""
    machine = SyntheticMachine(noise=noise)
    machine.random.seed(seed)
    return curves_from(
        machine.blocks([shape_of(gemm) for gemm in BUDGET_GEMMS], (*BUDGET_SMS, 132), BUDGET_SIZES, BUDGET_LIMITS),
        layout=ONE_GPC,
    )


def true_us(workload: str, size_bytes: int, choice: Choice, orders: tuple[Order, ...] = ORDERS) -> float:
    """Mean over the orders, played block by block."""
    play = SyntheticMachine().together_us
    return fmean(
        play(shape_of(workload), size_bytes, choice.max_ctas, choice.gemm_sms, order) for order in orders
    )  # fmt: skip


pairs = st.tuples(st.sampled_from(BUDGET_GEMMS), st.integers(2 << 20, 1 << 30))


@given(pair=pairs, choice=st.sampled_from(CANDIDATES), order=st.sampled_from(ORDERS))
def test_predictions_are_exact_where_the_model_is(pair: tuple[str, int], choice: Choice, order: Order) -> None:
    """Without contention, every T is the one of the machine that was played block by block."""
    budget = predict(curves(), pair[0], "all_gather", pair[1], choice, orders=(order,), calibration=UNDISTURBED)
    assert budget.objective_us == pytest.approx(true_us(*pair, choice, (order,)))


@given(pair=pairs, orders=st.sampled_from([ORDERS, *((order,) for order in ORDERS)]))
def test_the_best_division_is_found(pair: tuple[str, int], orders: tuple[Order, ...]) -> None:
    """No candidate is faster than the chosen one, for all orders or any single one."""
    found = choose(
        curves(), pair[0], "all_gather", pair[1], orders=orders, candidates=CANDIDATES, calibration=UNDISTURBED
    )
    best = min(true_us(*pair, choice, orders) for choice in CANDIDATES)
    assert true_us(*pair, found.choice, orders) == pytest.approx(best)


def test_noise_costs_little() -> None:
    """With 3 % noise on every point of the curves, the picks lose less than 1 % in the mean."""
    regrets = []
    for seed in range(5):
        for workload in BUDGET_GEMMS:
            for size in (10_000_000, 100_000_000, 700_000_000):
                noisy = curves(noise=0.03, seed=seed)
                found = choose(noisy, workload, "all_gather", size, candidates=CANDIDATES, calibration=UNDISTURBED)
                best = min(true_us(workload, size, choice) for choice in CANDIDATES)
                regrets.append(true_us(workload, size, found.choice) / best - 1.0)
    assert fmean(regrets) < 0.01


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
    gemms={"gemm 8192x8192x8192": GemmCurve(workload="gemm 8192x8192x8192", points=((132, 1410.3),))},
    comms={
        ("all_gather", None, None): CommCurve(
            points=tuple(CommPoint(size_bytes=size, time_us=us, num_ctas=24) for size, us, _ in MEASURED)
        )
    },
)


@pytest.mark.parametrize(("size_bytes", "comm_us", "measured"), MEASURED)
def test_stock_nccl_on_h200_is_predicted(size_bytes: int, comm_us: float, measured: dict[Order, float]) -> None:
    """From T_g and T_c alone, T of plain NCCL in every order is within 5 % of what was measured."""
    predicted = predict(ON_8_H200, "gemm 8192x8192x8192", "all_gather", size_bytes, Choice()).together_us
    assert predicted == pytest.approx(measured, rel=0.05)


def test_few_ctas_keep_the_waves() -> None:
    """512 tiles need 4 waves on 132 or 128 SMs and 5 on 108: that is told before and after."""
    both = [predict(curves(), "gemm 4096x4096x4096", "all_gather", 1 << 24, choice) for choice in CANDIDATES]
    waves = {budget.choice.mechanism: (budget.waves_alone, budget.waves_together) for budget in both}
    assert (waves["nccl"], waves["nccl+max_ctas=4+cga_cluster=2+gemm_sms=128"]) == ((4, 5), (4, 4))


def test_the_worst_order_can_decide() -> None:
    """`worst` minimises the largest T: with SMs of its own no order has to wait."""
    found = choose(curves(), "gemm 8192x8192x8192", "all_gather", 1 << 28, objective="worst", candidates=CANDIDATES)
    assert (found.objective_us, found.fits) == (max(found.together_us.values()), True)


@pytest.mark.parametrize("objective", ["mean", "worst"])
def test_equal_choices_leave_things_as_they_are(objective: Objective) -> None:
    """Of two candidates with equal times the first is taken."""
    twins = (Choice(max_ctas=24), Choice())
    table = curves()
    same = Curves(
        layout=table.layout,
        gemms=table.gemms,
        comms={**table.comms, ("all_gather", 24, None): table.comms["all_gather", None, None]},
    )
    found = choose(same, "gemm 8192x8192x8192", "all_gather", 1 << 28, candidates=twins, objective=objective)
    assert found.choice == twins[0]


def test_hidden_is_one_where_nothing_waits() -> None:
    """A collective that fits beside 128 tiles on 132 SMs and disturbs nobody is hidden wholly."""
    gemm = "gemm 4096x1024x8192"
    table = Curves(
        layout=ONE_GPC,
        gemms={gemm: GemmCurve(workload=gemm, points=((132, 1000.0),))},
        comms={
            ("all_gather", 4, None): CommCurve(
                points=tuple(CommPoint(size_bytes=s, time_us=s, num_ctas=4) for s in (1, 99))
            )
        },
    )
    found = predict(table, gemm, "all_gather", 50, Choice(max_ctas=4), calibration=UNDISTURBED, orders=("together",))
    assert found.hidden == pytest.approx(1.0)


def test_the_reason_names_the_limits_and_the_gain() -> None:
    """One sentence with CTAs, SMs, waves and what plain NCCL would take."""
    found = choose(curves(), "gemm 8192x8192x8192", "all_gather", 1 << 29, calibration=UNDISTURBED)
    assert found.reason == (
        "16 CTAs beside 116 SMs: the collective starts beside the GEMM, the GEMM takes 18 waves instead of 16, "
        "1,644 µs, 29% less time than plain NCCL"
    )


def test_without_plain_nccl_the_reason_claims_no_gain() -> None:
    """A gain is told only over a candidate that was looked at."""
    found = choose(curves(), "gemm 8192x8192x8192", "all_gather", 1 << 29, candidates=CANDIDATES[1:])
    assert "plain NCCL" not in found.reason


def test_candidates_of_a_machine_are_those_of_the_suite() -> None:
    """What `choose` tries by itself on an H200 holds every division that the suite measures."""
    assert set(CANDIDATES) <= set(candidates_for(SmLayout.even(132), 24, clusters=(2,)))


def test_what_was_not_measured_is_no_candidate() -> None:
    """Without curves of clusters of 2 none is proposed, though it would be faster."""
    table = curves()
    known = Curves(
        layout=SmLayout.even(132),
        gemms=table.gemms,
        comms={key: curve for key, curve in table.comms.items() if key[2] is None},
    )
    assert choose(known, "gemm 8192x8192x8192", "all_gather", 1 << 28).choice.cga_cluster is None


def test_a_size_off_the_curves_is_an_error() -> None:
    """Where not even plain NCCL was measured nothing is chosen."""
    with pytest.raises(Misconfigured, match="too far from the measured sizes"):
        choose(curves(), "gemm 8192x8192x8192", "all_gather", 1 << 40)


def test_the_cluster_of_a_choice_decides_whether_it_fits() -> None:
    """16 CTAs beside 116 SMs start in clusters of 2, and not in NCCL's own of 4."""
    table = curves()
    clustered = Curves(layout=SmLayout.even(132), gemms=table.gemms, comms=table.comms)
    names = ("nccl+max_ctas=16+gemm_sms=116", "nccl+max_ctas=16+cga_cluster=2+gemm_sms=116")
    found = [predict(clustered, "gemm 8192x8192x8192", "all_gather", 1 << 28, Choice.parse(name)) for name in names]
    assert [budget.fits for budget in found] == [False, True]


def test_waiting_ctas_have_their_share_left() -> None:
    """24 CTAs in clusters of 4 beside 108 SMs: 8 start at once, 16 have 2/3 of the bytes to move when the GEMM ends."""
    gemm, size = "gemm 8192x8192x8192", 1 << 30
    table = curves()
    clustered = Curves(layout=SmLayout.even(132), gemms=table.gemms, comms=table.comms)
    choice = Choice.parse("nccl+gemm_sms=108")
    found = predict(clustered, gemm, "all_gather", size, choice, orders=("together",), calibration=UNDISTURBED)
    left_us = table.comm("all_gather", size, Choice(max_ctas=16)).time_us * 16 / 24
    assert found.objective_us == pytest.approx(table.gemms[gemm].time_us(108) + left_us)


@pytest.mark.parametrize(
    ("orders", "candidates", "message"),
    [((), CANDIDATES, "choose from: together, comm_first"), (ORDERS, (), "no candidate is given")],
)
def test_nothing_to_choose_from_is_an_error(
    orders: tuple[Order, ...], candidates: tuple[Choice, ...], message: str
) -> None:
    """Empty orders or candidates say what to give."""
    with pytest.raises(Misconfigured, match=message):
        choose(curves(), "gemm 8192x8192x8192", "all_gather", 1 << 28, orders=orders, candidates=candidates)


def test_a_choice_without_alternatives_says_so() -> None:
    """Plain NCCL because nothing else was measured is not plain NCCL because it is best."""
    alone, gemm = curves(), "gemm 8192x8192x8192"
    plain = Curves(
        layout=alone.layout,
        gemms={gemm: GemmCurve(workload=gemm, points=alone.gemms[gemm].points[-1:])},
        comms={key: curve for key, curve in alone.comms.items() if key == ("all_gather", None, None)},
    )
    found = choose(plain, gemm, "all_gather", 100_000_000)
    assert found.reason.endswith("nothing else could be compared, the curves cover no other division")
