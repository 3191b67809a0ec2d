"""Names of divisions of the SMs."""

import pytest
from measure_suites import BUDGET

from counterpoint.errors import Misconfigured
from counterpoint.pair.sm_split import SmSplit


@pytest.mark.parametrize("mechanism", BUDGET)
def test_a_name_comes_back(mechanism: str) -> None:
    assert SmSplit.parse(mechanism).mechanism == mechanism


def test_the_order_of_the_limits_does_not_matter() -> None:
    choice = SmSplit(max_ctas=16, cga_cluster=2, gemm_sms=116)
    assert SmSplit.of("nccl+gemm_sms=116+cga_cluster=2+max_ctas=16") == choice


@pytest.mark.parametrize(
    "mechanism",
    ["gloo", "nccl_zero_cta", "nccl+priority=high", "nccl+max_ctas=0", "nccl+max_ctas=8+max_ctas=4", "nccl+", ""],
)
def test_anything_else_is_no_division(mechanism: str) -> None:
    assert SmSplit.of(mechanism) is None


def test_an_error_says_what_is_allowed() -> None:
    with pytest.raises(
        Misconfigured, match=r"'nccl\+green=108' does not divide SMs; write nccl, with any of \+max_ctas=N"
    ):
        SmSplit.parse("nccl+green=108")
