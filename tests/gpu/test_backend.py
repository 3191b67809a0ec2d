"""Backend `counterpoint` and DDP on all GPUs of this machine (2 to 8), beside NCCL."""

from pathlib import Path

import msgspec
import pytest

from tests.support.gpu_ranks import run_ranks, world_size_here

pytestmark = pytest.mark.gpu(2)

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("backend_worker.py")
TIMEOUT_S = 200
Seen = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    folder = tmp_path_factory.mktemp("backend")
    world_size = world_size_here()
    ended = run_ranks(WORKER, folder, folder=folder, world_size=world_size, timeout_s=TIMEOUT_S, paths=[ROOT])
    ended.well()
    print(ended.logs[0])
    answers = [folder / f"answer{rank}.json" for rank in range(world_size)]
    return [msgspec.json.decode(answer.read_bytes(), type=Seen) for answer in answers]


def test_every_call_is_nccls(seen: list[Seen]) -> None:
    """4 KiB to 64 MiB, all taken."""
    assert [rank["calls"] for rank in seen] == [{"wrong": "0", "taken": "True"}] * len(seen)


def test_ddp_trains_as_by_nccl(seen: list[Seen]) -> None:
    """Between two ranks bit by bit; buckets of the registered model and of `overlap` are written in place."""
    for rank in seen:
        told = rank["data parallel"]
        if len(seen) == 2:
            assert told["equal"] == "['stock', 'backend', 'registered', 'overlap']"
        assert told["in place"] == "True"
        assert " 0 buckets in place" not in told["overlap"]


def test_tensor_parallel_is_nccls(seen: list[Seen]) -> None:
    assert {tuple(rank["tensor parallel"].items()) for rank in seen} == {(("close", "True"), ("taken", "True"))}


def test_functional_collectives_compile_in_one_graph(seen: list[Seen]) -> None:
    assert {tuple(rank["compiled"].items()) for rank in seen} == {(("equal", "True"), ("taken", "6"))}


def test_a_graph_can_be_replayed(seen: list[Seen]) -> None:
    assert {rank["captured"]["value"] for rank in seen} == {"as it should be"}


def test_groups_end_with_calls_under_way(seen: list[Seen]) -> None:
    assert {rank["ended"]["right"] for rank in seen} == {"True"}
