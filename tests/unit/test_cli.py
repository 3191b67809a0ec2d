"""How a command ends, in the test's own process."""

import sys

import pytest

from counterpoint.cli import main


def test_a_command_ends_well_without_a_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python has it where the caller closed it: what would be printed is for nobody."""
    monkeypatch.setattr(sys, "argv", ["counterpoint", "--version"])
    monkeypatch.setattr(sys, "stdout", None)
    main()
    assert sys.stdout is None
