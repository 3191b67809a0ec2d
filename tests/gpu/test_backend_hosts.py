"""Backend `counterpoint` on four GPUs as two hosts of two: NCCL may take neither NVLink nor shared memory."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.support.gpu_ranks import run_ranks

pytestmark = pytest.mark.gpu(4)

WORKER = Path(__file__).with_name("backend_hosts_worker.py")
NO_FAST_PATH = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("hosts")
    ended = run_ranks(WORKER, folder, folder=folder, world_size=4, timeout_s=400, environment=NO_FAST_PATH)
    ended.well()
    print(ended.logs[0])
    return [msgspec.json.decode((folder / f"{rank}.json").read_bytes(), type=dict[str, str]) for rank in range(4)]


@pytest.mark.parametrize(
    ("what", "wanted"),
    [
        ("alone", "none"),
        ("later", "none"),
        ("futures", "equal, completed True, error None"),
        ("streams", "0"),
        ("symmetric", "0 wrong, True"),
        ("paths", "hosts"),
    ],
)
def test_every_operation_is_right(found: list[dict[str, str]], what: str, wanted: str) -> None:
    """From 1 to 256 MiB: at once, later, by futures, on several streams, in place; all of them over hosts."""
    assert {rank[what] for rank in found} == {wanted}
