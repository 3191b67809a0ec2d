"""Matmuls that poll, on a GPU: the trials of their benchmark, in small."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.gpu(1)
@pytest.mark.needs("triton", "cuda-bindings")
def test_late_rows_change_no_bit() -> None:
    """Rows that come late, in any order, are waited for; partial products leave when they are there."""
    command = [sys.executable, "benchmarks/flagged_matmul.py", "--trials", "60", "--shapes"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=220)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "120 of 120 trials right" in done.stdout
