"""torch.ops.counterpoint on all GPUs of this machine (2 to 8): what only GPUs can show."""

from pathlib import Path

import pytest

from tests.support.gpu_ranks import scenario_results

pytestmark = pytest.mark.gpu(2)

WORKER = Path(__file__).with_name("tensor_worker.py")
Seen = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    return scenario_results(WORKER, tmp_path_factory.mktemp("tensor"), timeout_s=240)


def test_random_shapes_are_right(ranks: list[Seen]) -> None:
    for rank in ranks:
        assert all("cuts" in paths for paths in (*rank["random"].values(), *rank["scaled"].values()))


def test_errors_are_at_most_twice_those_of_torch(ranks: list[Seen]) -> None:
    for rank in ranks:
        assert {value for name, value in rank["real"].items() if not name.endswith("paths")} == {"True"}, rank["real"]


def test_ranks_may_be_late(ranks: list[Seen]) -> None:
    assert {rank["delayed"]["wrong"] for rank in ranks} == {"0"}


def test_graphs_replay(ranks: list[Seen]) -> None:
    assert {rank["captured"]["equal"] for rank in ranks} == {"[True, True, True]"}


def test_no_kernel_of_nccl_runs(ranks: list[Seen]) -> None:
    assert {rank["profiled"]["nccl"] for rank in ranks} == {"0"}


@pytest.mark.own_gpus("a copy within a GPU is no copy to a peer")
def test_copies_to_peers_run(ranks: list[Seen]) -> None:
    assert {rank["profiled"]["copies"] for rank in ranks} == {"True"}
