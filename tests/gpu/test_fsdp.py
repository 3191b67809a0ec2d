"""FSDP2 with zero-SM collectives on two GPUs, beside stock FSDP2 on NCCL.

Two processes run all of fsdp_worker.py once; each test asserts one claim about what they saw. With two ranks a sum has
one order, so results are the same bits, but for what two runs of stock do not reproduce themselves.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from counterpoint.processes import reserved_port
from tests.support.gpu_ranks import run_ranks

pytestmark = pytest.mark.gpu(2)

WORKER = Path(__file__).with_name("fsdp_worker.py")
TIMEOUT_S = 220
NAMES = (
    "float32", "bfloat16 parameters", "float32 reduction", "float16 reduction", "float16 sums", "bfloat16 in float64",
    "copied", "copied, float32 reduction", "bfloat16 model", "kept after forward", "accumulated", "checkpointed",
    "meta", "modules together", "separate groups", "prefetch", "small chunks", "compiled",
)  # fmt: skip


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("fsdp")
    with reserved_port() as port:
        ended = run_ranks(
            WORKER, folder / "answer.json", folder=folder, world_size=2, timeout_s=TIMEOUT_S,
            paths=[Path(__file__).parents[2]],
            environment={
                "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            },
        )  # fmt: skip
    print(ended.logs[0])
    ended.well()
    answer: list[dict[str, Any]] = msgspec.json.decode((folder / "answer.json").read_bytes())
    return answer


@pytest.mark.parametrize("name", NAMES)
def test_training_is_that_of_stock(seen: list[dict[str, Any]], name: str) -> None:
    """Losses, gradients, norms and parameters, bit by bit, where stock reproduces its own; every module in place.

    Stock reproduces the first loss at least, or the comparison would prove nothing.
    """
    assert [rank[name]["ours"] for rank in seen] == [[], []]
    assert [rank[name]["wrong"] for rank in seen] == [[], []]
    assert [rank[name]["noise"].count("loss 0.0") for rank in seen] == [0, 0]


def test_every_case_is_asked_about(seen: list[dict[str, Any]]) -> None:
    assert {*seen[0]} - {"kernels", "growth", "tuned", "limited"} == {*NAMES}


def test_each_module_follows_its_choice(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert rank["tuned"]["ours"] == []
        assert "tuned: tuning: 6 of 6 choices followed" in rank["tuned"]["report"]


def test_a_limit_of_sms_is_applied_and_taken_back(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        report, after = rank["limited"]
        assert report.startswith("tuning: 1 of 1 choices followed; matmuls have ")
        assert after == "carve-out of 0 SMs"


def test_nccl_runs_no_kernel(seen: list[dict[str, Any]]) -> None:
    assert [rank["kernels"] for rank in seen] == [[], []]


def test_memory_does_not_grow(seen: list[dict[str, Any]]) -> None:
    assert [rank["growth"]["bytes"] <= 0 for rank in seen] == [True, True], [rank["growth"] for rank in seen]
