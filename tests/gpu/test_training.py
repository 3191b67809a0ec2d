"""Unmodified ways to train, rehearsed with 4 ranks: losses by stock and by counterpoint are those of one launch."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
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


def rehearsed(*programs: str, hosts: int) -> Iterator[dict[str, Any]]:
    """What the worker prints about these programs, run by four ranks."""
    command = ["torchrun", "--standalone", "--nproc-per-node", "4", str(WORKER), "--programs", *programs]
    words = [
        sys.executable,
        "-m",
        "counterpoint",
        "rehearse",
        "--timeout",
        "100",
        "--hosts",
        str(hosts),
        shlex.join(command),
    ]
    done = subprocess.run(
        words, env=os.environ | NO_MULTICAST, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    print(done.stdout[-6000:])
    yield from (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"program"'))


@cache
def found(programs: tuple[str, ...], hosts: int) -> dict[str, Any]:
    """What each program of one launch found."""
    return {row["program"]: row for row in rehearsed(*programs, hosts=hosts)}


@pytest.mark.parametrize(
    ("program", "hosts"),
    [
        *((name, 1) for name in PROGRAMS if name not in OF_LIBRARIES),
        ("hsdp", 2),
        *(pytest.param(name, 1, marks=pytest.mark.needs("transformers")) for name in OF_LIBRARIES),
    ],
)
def test_losses_are_stocks(program: str, hosts: int) -> None:
    row = found(LAUNCHES[program], hosts)[program]
    assert row["calls"] > 0
    assert len(row["stock"]) > 1
    assert row["ours"] == pytest.approx(row["stock"], rel=CLOSE, abs=CLOSE)
