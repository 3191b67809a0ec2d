"""Runs a script in a process of its own, for Triton's interpreter and compiler are modes of a process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.command import HANG_S, ROOT


def ran(script: Path, cases: list[Any], request: pytest.FixtureRequest) -> dict[int, Any]:
    """Return what a script says about the cases that tests with this fixture ask for by their `index`, or about all."""
    of_file = [item for item in request.session.items if item.path == request.path]
    askers = [item for item in of_file if request.fixturename in getattr(item, "fixturenames", ())]
    asked = [item.callspec.params.get("index", -1) if hasattr(item, "callspec") else -1 for item in askers]
    chosen = list(range(len(cases))) if -1 in asked else sorted({int(index) for index in asked})
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(script)], input=json.dumps([cases[index] for index in chosen]), capture_output=True,
        text=True, timeout=HANG_S, check=False, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    if "only 0-dimensional arrays" in done.stderr:
        pytest.skip(f"Triton's interpreter does not work with numpy {np.__version__}")
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(chosen, json.loads(done.stdout), strict=True))
