"""Names of divisions of the SMs."""

import pytest

from counterpoint.errors import Misconfigured
from counterpoint.pair.sm_split import SmSplit


def test_the_order_of_limits_does_not_matter_and_an_error_says_what_is_allowed() -> None:
    choice = SmSplit(max_ctas=16, cga_cluster=2, gemm_sms=116)
    assert SmSplit.of("nccl+gemm_sms=116+cga_cluster=2+max_ctas=16") == choice
    with pytest.raises(
        Misconfigured, match=r"'nccl\+green=108' does not divide SMs; write nccl, with any of \+max_ctas=N"
    ):
        SmSplit.parse("nccl+green=108")


@pytest.mark.parametrize(
    "mechanism",
    ["gloo", "nccl_zero_cta", "nccl+priority=high", "nccl+max_ctas=0", "nccl+max_ctas=8+max_ctas=4", "nccl+", ""],
)
def test_anything_else_is_no_division(mechanism: str) -> None:
    assert SmSplit.of(mechanism) is None
