"""What starts the processes of the tests on GPUs, without GPUs."""

from pathlib import Path

import pytest

from tests.support.gpu_ranks import run_ranks

SAYS = "import os, sys; print(*(os.environ[name] for name in sys.argv[1:]))"


def worker(folder: Path, text: str) -> Path:
    path = folder / "worker.py"
    path.write_text(text)
    return path


def test_every_rank_knows_its_number_and_multicast_is_off(tmp_path: Path) -> None:
    names = ("RANK", "WORLD_SIZE", "NCCL_NVLS_ENABLE", "NVSHMEM_DISABLE_NVLS", "TORCH_SYMM_MEM_DISABLE_MULTICAST")
    ended = run_ranks(worker(tmp_path, SAYS), *names, folder=tmp_path, world_size=2, timeout_s=60)
    ended.well()
    assert ended.logs == ["0 2 0 1 1\n", "1 2 0 1 1\n"]


def test_a_rank_that_fails_shows_its_log(tmp_path: Path) -> None:
    ended = run_ranks(worker(tmp_path, "raise SystemExit('no luck')"), folder=tmp_path, world_size=2, timeout_s=60)
    with pytest.raises(AssertionError, match="no luck"):
        ended.well()


def test_a_rank_that_hangs_fails_the_test(tmp_path: Path) -> None:
    text = "import time; print('waits', flush=True); time.sleep(600)"
    with pytest.raises(pytest.fail.Exception, match=r"hangs:\nwaits"):
        run_ranks(worker(tmp_path, text), folder=tmp_path, world_size=1, timeout_s=5)
