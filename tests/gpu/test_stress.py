"""FSDP2, tensor and expert parallelism, and the backend on the same 8 GPUs, all of whose streams share one queue."""

from pathlib import Path

import msgspec
import pytest

from counterpoint.processes import reserved_port
from tests.dist.stress_programs import Seen
from tests.support.gpu_ranks import run_ranks

pytestmark = pytest.mark.gpu(8)

WORKER = Path(__file__).with_name("stress_worker.py")
TIMEOUT_S, STEPS = 570, 200


def test_training_by_all_at_once_is_that_of_stock(tmp_path: Path) -> None:
    """It ends; losses, gradients and parameters are within twice stock's own error."""
    with reserved_port() as port:
        run_ranks(
            WORKER, tmp_path, "cuda", str(STEPS), folder=tmp_path, world_size=8, timeout_s=TIMEOUT_S,
            paths=[Path(__file__).parents[2]],
            environment={
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "8",
                "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1",
            },
        ).well()  # fmt: skip
    found = msgspec.json.decode((tmp_path / "seen.json").read_bytes(), type=list[Seen])
    assert max(rank.error for rank in found) <= 2 * max(rank.stock for rank in found)
    assert [[rank.paths[0], rank.copied] for rank in found] == [[{"gather"}, []]] * 8
