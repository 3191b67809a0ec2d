"""Runs a script in a process of its own, for Triton's interpreter and compiler are modes of a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


def ran(script: Path, cases: list[Any]) -> list[Any]:
    """What a script says about `cases`."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    if "only 0-dimensional arrays" in done.stderr:
        pytest.skip(f"Triton's interpreter does not work with numpy {np.__version__}")
    assert done.returncode == 0, done.stderr[-3000:]
    answer: list[Any] = json.loads(done.stdout)
    return answer
