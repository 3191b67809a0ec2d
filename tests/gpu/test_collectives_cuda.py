"""Zero-SM collectives on all GPUs of this machine (2 to 8), through the driver: copies, signals and waits."""

import pytest

from tests.support.gpu_ranks import Seen, of

pytestmark = pytest.mark.gpu(2)

RUN = {"timeout_s": 110}


@pytest.mark.parametrize("scenario", ["every_operation", "every_reduction", "captured_by_the_caller"])
def test_every_case_is_right(seen: Seen, scenario: str) -> None:
    said = {case: of(seen, scenario, case) for case in seen[0][scenario]}
    assert {case: each for case, each in said.items() if each != {"equal"}} == {}


def test_sums_are_nearer_to_float64_than_nccls(seen: Seen) -> None:
    """And movement has NCCL's bits."""
    assert of(seen, "like_nccl", "all_gather like NCCL") == {"equal"}
    assert of(seen, "like_nccl", "reduce_scatter error") == {"smaller"}


@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.own_gpus("which of two ends first is a matter of time")
def test_all_gather_ends_before_a_resident_gemm(seen: Seen, how: str) -> None:
    """96 MiB gathered beside an 8192³ GEMM that began first: it ends before the GEMM, on every rank."""
    assert of(seen, "beside_a_gemm", f"beside a GEMM, {how}") == {"before"}


@pytest.mark.own_gpus("a copy within a GPU may be a kernel")
def test_no_kernel_and_no_local_copy(seen: Seen) -> None:
    assert of(seen, "no_kernel", "seen") == {"Memcpy PtoP"}


def test_random_calls_are_right(seen: Seen) -> None:
    assert of(seen, "random_calls", "random") == {"equal"}
    assert int(seen[0]["random_calls"]["random count"]) >= 50
