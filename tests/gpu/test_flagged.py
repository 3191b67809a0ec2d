"""Matmuls that poll, on a GPU: the trials of their benchmark, in small."""

import sys

import pytest

from tests.support.command import ROOT, program


@pytest.mark.gpu(1)
@pytest.mark.needs("triton", "cuda-bindings")
def test_late_rows_change_no_bit() -> None:
    """Rows that come late, in any order, are waited for; partial products leave when they are there."""
    command = [sys.executable, "benchmarks/flagged_matmul.py", "--trials", "60", "--shapes"]
    done = program(command, folder=ROOT, timeout_s=220)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "120 of 120 trials right" in done.stdout
