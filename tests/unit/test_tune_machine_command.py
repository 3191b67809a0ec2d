"""`counterpoint tune --machine` around the measuring: what it writes and says, and what does not go with it."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner, Result

from counterpoint.cli import app
from counterpoint.errors import Misconfigured
from counterpoint.machine.profile import default_profile, read_profile
from counterpoint.tuning import machine

FOUND = replace(default_profile(), left_out={"sums": "not today"})


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> Result:
    def tune_machine(**options: Any) -> Any:
        return FOUND

    monkeypatch.setattr(machine, "tune_machine", tune_machine)
    return CliRunner().invoke(app, ["tune", "--machine", *map(str, arguments)], catch_exceptions=False)


def test_the_profile_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, "--out", tmp_path / "mine.json")
    assert read_profile(tmp_path / "mine.json").digest == FOUND.digest


def test_what_was_left_out_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = run(monkeypatch, "--out", tmp_path / "mine.json").stdout.splitlines()
    assert lines == [
        "measured on H200, 2026-11-21",
        "sums left out: not today",
        f"wrote {tmp_path / 'mine.json'}: export COUNTERPOINT_PROFILE={tmp_path / 'mine.json'}",
    ]


def test_quiet_says_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run(monkeypatch, "--quiet", "--out", tmp_path / "mine.json").stdout == ""


@pytest.mark.parametrize("other", [["pairs.toml"], ["--profile", "x.json"], ["--budget", "9"], ["--json", "-"]])
def test_options_of_pairs_do_not_go_with_it(monkeypatch: pytest.MonkeyPatch, other: list[str]) -> None:
    with pytest.raises(Misconfigured, match="with --machine: it measures all of a machine; leave"):
        run(monkeypatch, *other)


def test_pairs_or_a_machine_are_needed() -> None:
    with pytest.raises(Misconfigured, match=r"give one of SOURCE .*, and --machine for a profile"):
        CliRunner().invoke(app, ["tune"], catch_exceptions=False)
