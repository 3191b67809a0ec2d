"""The rule beside what was measured on one machine: 4 x H200, NCCL 2.28.9, 2026-11-21, 8192^3 beside an all_gather."""

from statistics import fmean, median

import msgspec
import pytest
from budget_rule import gemm_curve

from counterpoint.machine.profile import default_profile
from counterpoint.pair.choice import ORDERS, Objective, choose_split, predict
from counterpoint.pair.curves import CommCurve, CommPoint, Curves, comm_key
from counterpoint.pair.sm_split import SmLayout, SmSplit
from counterpoint.records.measurement import Order

GEMM = "gemm 8192x8192x8192"
GEMM_US = 1440.0
KEPT = {132: 1.0, 124: 0.949, 116: 0.935, 112: 0.89, 108: 0.88, 100: 0.80}  # of its speed, alone, by SMs
LONG, SHORT = 2, 1  # bytes in units of the shorter one: only curves are asked for them
# alone, us, at the longer size; 16 CTAs as single blocks were not measured alone and taken as in clusters of 2
COMM_US = {
    "nccl": 1836.0, "nccl+cga_cluster=2": 1914.0, "nccl+max_ctas=16": 2066.0, "nccl+max_ctas=16+cga_cluster=2": 2140.0,
    "nccl+max_ctas=16+cga_cluster=1": 2140.0, "nccl+max_ctas=12+cga_cluster=2": 2522.0, "nccl+max_ctas=8": 3596.0,
    "nccl+max_ctas=8+cga_cluster=2": 3681.0,
}  # fmt: skip
SHORTER = 979.0 / 1792.0  # the fastest at the shorter size and at the longer one: the others are taken to scale alike
HEAD_US = 110.0  # measured: 102 to 125
# T in us: launched together, communication first, computation first
TOGETHER_US: dict[int, dict[str, tuple[float, float, float]]] = {
    SHORT: {
        "nccl": (2323, 1785, 2342),
        "nccl+gemm_sms=108": (1726, 1841, 1751),
        "nccl+gemm_sms=116": (2169, 1787, 2259),
        "nccl+cga_cluster=2+gemm_sms=108": (1715, 1836, 1636),
        "nccl+max_ctas=16+gemm_sms=116": (2516, 1779, 2526),
        "nccl+max_ctas=16+cga_cluster=2+gemm_sms=116": (1613, 1788, 1582),
        "nccl+max_ctas=16+cga_cluster=1+gemm_sms=116": (1630, 1797, 1581),
        "nccl+max_ctas=16+cga_cluster=2+gemm_sms=112": (1768, 1928, 1621),
        "nccl+max_ctas=8+gemm_sms=124": (2220, 2218, 2287),
        "nccl+max_ctas=8+cga_cluster=2+gemm_sms=124": (2222, 2269, 2291),
        "nccl+max_ctas=12+cga_cluster=2+gemm_sms=120": (1719, 1821, 1808),
    },
    LONG: {
        "nccl": (3176, 1991, 3166),
        "nccl+gemm_sms=108": (2960, 2026, 3063),
        "nccl+cga_cluster=2+gemm_sms=108": (2004, 1985, 2127),
        "nccl+max_ctas=16+gemm_sms=116": (3595, 2370, 3609),
        "nccl+max_ctas=16+cga_cluster=2+gemm_sms=116": (2405, 2431, 2509),
        "nccl+max_ctas=8+gemm_sms=124": (4020, 4041, 4093),
    },
}
# at this size all 24 CTAs found room beside 108 SMs, at the longer one they did not: what decides is not known
UNEXPLAINED = (SHORT, "nccl+gemm_sms=108")
EXPLAINED = [(size, name) for size, rows in TOGETHER_US.items() for name in rows if (size, name) != UNEXPLAINED]
VIEWS: tuple[tuple[tuple[Order, ...], Objective], ...] = ((ORDERS, "mean"), (ORDERS, "worst"))


def comm_curve(mechanism: str) -> CommCurve:
    time_us, num_ctas = COMM_US[mechanism], SmSplit.parse(mechanism).max_ctas or 24
    short = CommPoint(size_bytes=SHORT, time_us=time_us * SHORTER, num_ctas=num_ctas)
    return CommCurve(points=(short, CommPoint(size_bytes=LONG, time_us=time_us, num_ctas=num_ctas)))


CURVES = Curves(
    layout=SmLayout.even(132),
    gemms={GEMM: gemm_curve(GEMM, tuple(sorted((n, GEMM_US / kept) for n, kept in KEPT.items())))},
    comms={comm_key("all_gather", SmSplit.parse(name)): comm_curve(name) for name in COMM_US},
)
CALIBRATION = msgspec.structs.replace(default_profile().contention, head_start_us=HEAD_US)  # the rest as by default


def errors(size: int, mechanism: str) -> list[float]:
    """T predicted / T measured - 1, by order."""
    predicted = predict(CURVES, GEMM, "all_gather", size, SmSplit.parse(mechanism), contention=CALIBRATION)
    measured = dict(zip(ORDERS, TOGETHER_US[size][mechanism], strict=True))
    return [predicted.together_us[order] / measured[order] - 1.0 for order in ORDERS]


@pytest.mark.parametrize("size", TOGETHER_US)
@pytest.mark.parametrize(("orders", "objective"), VIEWS)
def test_the_pick_measured_within_3_percent_of_the_best(
    size: int, orders: tuple[Order, ...], objective: Objective
) -> None:
    """Of the divisions that were measured, by the mean over the orders and by the worst of them."""
    rows = {SmSplit.parse(name): times for name, times in TOGETHER_US[size].items()}
    found = choose_split(
        CURVES, GEMM, "all_gather", size,
        orders=orders, candidates=rows, objective=objective, contention=CALIBRATION,
    )  # fmt: skip
    cost = fmean if objective == "mean" else max
    assert cost(rows[found.split]) <= 1.03 * min(cost(times) for times in rows.values())


@pytest.mark.parametrize(("size", "mechanism"), EXPLAINED)
def test_the_mean_over_orders_is_predicted_within_10_percent(size: int, mechanism: str) -> None:
    """Whether the collective fits beside the GEMM, in part or not at all."""
    assert abs(fmean(errors(size, mechanism))) < 0.10


def test_half_of_all_times_are_predicted_within_5_percent() -> None:
    """The median of the errors over all rows and orders, the unexplained one included."""
    every = [abs(error) for size, rows in TOGETHER_US.items() for name in rows for error in errors(size, name)]
    assert median(every) < 0.05
