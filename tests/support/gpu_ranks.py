"""Processes of a worker, one for each GPU: started together, with NVLink multicast off, and none left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import counterpoint

__all__ = ["Ended", "run_ranks"]

NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the ranks ended, and what they printed."""

    codes: list[int]
    logs: list[str]

    def well(self) -> None:
        """Fails, with the ends of the logs, unless every rank came to its end."""
        assert self.codes == [0] * len(self.codes), "\n".join(log[-3000:] for log in self.logs)


def run_ranks(
    worker: Path,
    *arguments: str | Path,
    folder: Path,
    world_size: int,
    timeout_s: float,
    paths: Sequence[Path] = (),
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Runs `worker` with RANK, LOCAL_RANK and WORLD_SIZE set; fails the test if a rank has not ended in time.

    Args:
        worker: script of every rank.
        arguments: of the script.
        folder: for the logs.
        world_size: ranks.
        timeout_s: seconds for each.
        paths: from which it imports, besides the package's own.
        environment: more variables.
    """
    found = [Path(counterpoint.__file__).parents[1], *paths]
    shared = os.environ | NO_MULTICAST | dict(environment or {})
    shared["PYTHONPATH"] = os.pathsep.join([*map(str, found), os.environ.get("PYTHONPATH", "")])
    logs = [folder / f"{'_'.join([worker.stem, *_words(arguments)])}{rank}.log" for rank in range(world_size)]
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            mine = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
            with log.open("wb") as out:
                command = [sys.executable, str(worker), *map(str, arguments)]
                workers.append(subprocess.Popen(command, env=shared | mine, stdout=out, stderr=out))
        codes = [process.wait(timeout_s) for process in workers]
    except subprocess.TimeoutExpired:
        pytest.fail("hangs:\n" + "\n".join(log.read_text()[-1500:] for log in logs))
    finally:
        for process in workers:
            process.kill()
            process.wait()
    return Ended(codes=codes, logs=[log.read_text() for log in logs])


def _words(arguments: Sequence[str | Path]) -> list[str]:
    """Those that tell two runs in one folder apart."""
    return [argument.replace(" ", "_") for argument in arguments if isinstance(argument, str)]
