"""Backend `counterpoint` on 4 to 8 GPUs, two hosts of half of them: NCCL may take neither NVLink nor shared memory."""

from pathlib import Path

import msgspec
import pytest

from tests.support.gpu_ranks import run_ranks, world_size_here

pytestmark = pytest.mark.gpu(4)

WORKER = Path(__file__).with_name("backend_hosts_worker.py")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NO_FAST_PATH = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder, world_size = tmp_path_factory.mktemp("hosts"), world_size_here() // 2 * 2
    ended = run_ranks(
        WORKER, folder, folder=folder, world_size=world_size, timeout_s=400, paths=[BENCHMARKS, BENCHMARKS.parent],
        environment=NO_FAST_PATH,
    )  # fmt: skip
    ended.well()
    print(ended.logs[0])
    answers = [folder / f"{rank}.json" for rank in range(world_size)]
    return [msgspec.json.decode(answer.read_bytes(), type=dict[str, str]) for answer in answers]


@pytest.mark.parametrize(
    ("what", "wanted"),
    [
        ("alone", "none"), ("later", "none"), ("futures", "equal, completed True, error None"), ("streams", "0"),
        ("symmetric", "0 wrong, True"), ("paths", "hosts"),
    ],
)  # fmt: skip
def test_every_operation_is_right(found: list[dict[str, str]], what: str, wanted: str) -> None:
    """From 1 to 256 MiB: at once, later, by futures, on several streams, in place; all of them over hosts."""
    assert {rank[what] for rank in found} == {wanted}
