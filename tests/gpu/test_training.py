"""Unmodified ways to train, rehearsed with 4 ranks: losses by stock and by counterpoint are those of one launch."""

import json
import os
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.training_worker import OF_LIBRARIES, PROGRAMS
from tests.support.gpu_ranks import NO_MULTICAST

pytestmark = pytest.mark.gpu(1)
WORKER = Path(__file__).with_name("training_worker.py")
PIPELINES = tuple(name for name in PROGRAMS if name.startswith("pipeline"))
LAUNCHES = {**{name: (name,) for name in PROGRAMS if name not in PIPELINES}, **dict.fromkeys(PIPELINES, PIPELINES)}
CLOSE = 5e-3  # of losses, in bfloat16 by sums in another order


@cache
def rehearsed(programs: tuple[str, ...], hosts: int) -> tuple[dict[str, Any], int, str]:
    """What each program of one launch of four ranks found, the exit code, and the end of all that was printed."""
    command = ["torchrun", "--standalone", "--nproc-per-node", "4", str(WORKER), "--programs", *programs]
    words = [sys.executable, "-m", "counterpoint", "rehearse", "--timeout", "100", "--hosts", str(hosts)]
    done = subprocess.run(
        [*words, shlex.join(command)], env=os.environ | NO_MULTICAST, capture_output=True, text=True, check=False
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"program"')]
    return {row["program"]: row for row in rows}, done.returncode, done.stdout[-6000:] + done.stderr[-4000:]


@pytest.mark.parametrize(
    ("program", "hosts"),
    [
        *((name, 1) for name in PROGRAMS if name not in OF_LIBRARIES),
        ("hsdp", 2),
        *(pytest.param(name, 1, marks=pytest.mark.needs("transformers")) for name in OF_LIBRARIES),
    ],
)
def test_losses_are_stocks(program: str, hosts: int) -> None:
    found, code, printed = rehearsed(LAUNCHES[program], hosts)
    assert program in found, printed
    assert code == 0 or len(found) < len(LAUNCHES[program]), printed  # else it failed in a later program
    row = found[program]
    assert row["calls"] > 0
    assert len(row["stock"]) > 1
    assert row["ours"] == pytest.approx(row["stock"], rel=CLOSE, abs=CLOSE)
