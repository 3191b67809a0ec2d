"""Zero-SM collectives on all GPUs of this machine (2 to 8), through the driver: copies, signals and waits.

As many processes as there are GPUs run all scenarios of collectives_worker.py once; each test asserts one claim about
what they saw.
"""

from pathlib import Path

import msgspec
import pytest

from tests.support.gpu_ranks import run_ranks, world_size_here

pytestmark = pytest.mark.gpu(2)

WORKER = Path(__file__).with_name("collectives_worker.py")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TIMEOUT_S = 110
Seen = list[dict[str, dict[str, str]]]  # for each rank, scenario by scenario, what came of each case


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder, world_size = tmp_path_factory.mktemp("collectives"), world_size_here()
    answer = folder / "answer.json"
    run_ranks(
        WORKER, folder, answer, folder=folder, world_size=world_size, timeout_s=TIMEOUT_S, paths=[BENCHMARKS]
    ).well()
    return msgspec.json.decode(answer.read_bytes(), type=Seen)


def of(seen: Seen, scenario: str) -> dict[str, set[str]]:
    return {case: {rank[scenario][case] for rank in seen} for case in seen[0][scenario]}


def wrong(seen: Seen, scenario: str) -> dict[str, set[str]]:
    return {case: said for case, said in of(seen, scenario).items() if said != {"equal"}}


@pytest.mark.parametrize("scenario", ["every_operation", "every_reduction", "captured_by_the_caller"])
def test_every_case_is_right(seen: Seen, scenario: str) -> None:
    assert wrong(seen, scenario) == {}


def test_movement_is_bit_equal_to_nccl(seen: Seen) -> None:
    assert of(seen, "like_nccl")["all_gather like NCCL"] == {"equal"}


def test_sums_are_nearer_to_float64_than_nccls(seen: Seen) -> None:
    assert of(seen, "like_nccl")["reduce_scatter error"] == {"smaller"}


@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.own_gpus("which of two ends first is a matter of time")
def test_all_gather_ends_before_a_resident_gemm(seen: Seen, how: str) -> None:
    """96 MiB gathered beside an 8192³ GEMM that began first: it ends before the GEMM, on every rank."""
    assert of(seen, "beside_a_gemm")[f"beside a GEMM, {how}"] == {"before"}


@pytest.mark.own_gpus("a copy within a GPU may be a kernel")
def test_no_kernel_and_no_local_copy(seen: Seen) -> None:
    assert of(seen, "no_kernel")["seen"] == {"Memcpy PtoP"}


def test_random_calls_are_right(seen: Seen) -> None:
    assert of(seen, "random_calls")["random"] == {"equal"}
    assert int(seen[0]["random_calls"]["random count"]) >= 50
