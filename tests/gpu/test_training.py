"""Unmodified ways to train, rehearsed with 4 ranks: losses by stock and by counterpoint are those of one launch."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import NEEDS
from tests.gpu.training_worker import OF_LIBRARIES, PROGRAMS
from tests.support.gpu_ranks import NO_MULTICAST

pytestmark = pytest.mark.gpu(1)
WORKER = Path(__file__).with_name("training_worker.py")
LIBRARIES = tuple(OF_LIBRARIES) if NEEDS["transformers"][0]() else ()
OTHERS = tuple(name for name in PROGRAMS if name not in OF_LIBRARIES)
CLOSE = 5e-3  # of losses, in bfloat16 by sums in another order


def rehearsed(*programs: str, hosts: int) -> Iterator[dict[str, Any]]:
    """What the worker prints about these programs, run by four ranks."""
    command = ["torchrun", "--standalone", "--nproc-per-node", "4", str(WORKER), "--programs", *programs]
    words = [sys.executable, "-m", "counterpoint", "rehearse", "--hosts", str(hosts), shlex.join(command)]
    done = subprocess.run(
        words, env=os.environ | NO_MULTICAST, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    print(done.stdout[-6000:])
    yield from (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"program"'))


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """All programs; HSDP on two hosts, too."""
    launches = [OTHERS, *([name] for name in LIBRARIES)]
    on_one = {row["program"]: row for programs in launches for row in rehearsed(*programs, hosts=1)}
    [on_two] = rehearsed("hsdp", hosts=2)
    return on_one | {"hsdp on two hosts": on_two}


@pytest.mark.parametrize("program", [*OTHERS, *LIBRARIES, "hsdp on two hosts"])
def test_losses_are_stocks(found: dict[str, Any], program: str) -> None:
    row = found[program]
    assert row["calls"] > 0
    assert len(row["stock"]) > 1
    assert row["ours"] == pytest.approx(row["stock"], rel=CLOSE, abs=CLOSE)
