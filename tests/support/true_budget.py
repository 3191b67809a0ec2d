"""The made-up machine of the budget's tests: its curves as they would be measured, and the times that are true."""

from functools import cache
from statistics import fmean

import msgspec
from budget_rule import products_of
from hypothesis import strategies as st
from measure_suites import BUDGET, BUDGET_GEMMS, BUDGET_LIMITS, BUDGET_SIZES, BUDGET_SMS
from synthetic_machine import SyntheticMachine

from counterpoint.machine.profile import default_profile
from counterpoint.pair.choice import ORDERS
from counterpoint.pair.curves import Curves, curves_from
from counterpoint.pair.sm_split import SmLayout, SmSplit
from counterpoint.records.measurement import Order

UNDISTURBED = msgspec.structs.replace(default_profile().contention, compute_loss=0.0, comm_loss=0.0)


ONE_GPC = SmLayout(gpc_sms=(132,), gemm_cluster=1)  # the made-up machine does not look at clusters


CANDIDATES = tuple(map(SmSplit.parse, BUDGET))


Shape = tuple[int, int, int]


def shape_of(workload: str) -> Shape:
    m, n, k = map(int, workload.split()[1].split("x"))
    return m, n, k


@cache
def curves(noise: float = 0.0, seed: int = 0) -> Curves:
    """The building blocks of the suite on the made-up machine."""
    machine = SyntheticMachine(noise=noise)
    machine.random.seed(seed)
    shapes = [shape_of(gemm) for gemm in BUDGET_GEMMS]
    blocks = list(machine.blocks(shapes, (*BUDGET_SMS, 132), BUDGET_SIZES, BUDGET_LIMITS))
    return curves_from(blocks, products_of(blocks), layout=ONE_GPC)


def true_us(workload: str, size_bytes: int, choice: SmSplit, orders: tuple[Order, ...] = ORDERS) -> float:
    """Mean over the orders, played block by block."""
    play = SyntheticMachine().together_us
    return fmean(
        play(shape_of(workload), size_bytes, choice.max_ctas, choice.gemm_sms, order) for order in orders
    )  # fmt: skip


pairs = st.tuples(st.sampled_from(BUDGET_GEMMS), st.integers(2 << 20, 1 << 30))
