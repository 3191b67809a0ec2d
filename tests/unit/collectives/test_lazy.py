"""The room opens without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import counterpoint.collectives


def test_the_data_needs_no_torch() -> None:
    """Planning, proving and simulating import neither torch nor numpy."""
    probe = (
        "import sys; from counterpoint.collectives import plan, check, simulate; "
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_unknown_names_are_refused() -> None:
    """As of any module."""
    with pytest.raises(AttributeError, match="no attribute 'Conductor'"):
        counterpoint.collectives.Conductor  # noqa: B018
