"""Traces that another user keeps to himself are refused in words."""

import sys
from pathlib import Path

import pytest

from tests.support import kineto_trace as kt
from tests.support.command import program


@pytest.mark.needs("root")  # who alone can become nobody
@pytest.mark.parametrize("what", ["folder", "folder/rank0.json"])
def test_no_permission_as_another_user(what: str, tmp_path: Path) -> None:
    kt.write(tmp_path / "folder" / "rank0.json", kt.training())
    (tmp_path / what).chmod(0)
    script = (
        "import os, sys; from counterpoint.trace.source import *; from counterpoint.errors import BadTrace; "
        "os.chdir('/'); os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try:\n  with find_traces([sys.argv[1]], Limits()): pass\n"
        "except BadTrace as error: print(error.reason)"
    )
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    done = program([sys.executable, "-c", script, tmp_path / "folder"])
    assert done.stdout.startswith("no permission"), done.stdout + done.stderr
