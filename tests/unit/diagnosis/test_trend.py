"""Many recordings of one job: one row each in order of time, and the worst named."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from counterpoint.diagnosis.api import diagnose_trend
from counterpoint.errors import BadTrace
from counterpoint.records.comparison import Trend
from counterpoint.rendering.comparison_terminal import render_trend

SAMPLES = Path(__file__).resolve().parents[3] / "samples"
RANKS = ("rank0.json.gz", "rank1.json.gz")


@pytest.fixture(name="folder")
def folder_fixture(tmp_path: Path) -> Path:
    """Two ranks of three recordings, as torchtitan lays them out; the second one is of a longer step."""
    for iteration, sample in ((9, "tail-effect"), (10, "fsdp-2-ranks"), (100, "tail-effect")):
        target = tmp_path / f"iteration_{iteration}"
        target.mkdir()
        for name in RANKS:
            shutil.copy(SAMPLES / sample / name, target / name)
    return tmp_path


def printed(trend: Trend) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    render_trend(trend, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_every_recording_is_a_row_in_order_of_time_and_the_worst_is_named(folder: Path) -> None:
    trend = diagnose_trend(folder)
    assert [row.name for row in trend.recordings] == ["iteration_9", "iteration_10", "iteration_100"]
    assert trend.worst == "iteration_10"
    assert trend.recordings[0].step_us == trend.recordings[2].step_us
    assert trend.difference is not None
    assert trend.difference.step.change_us > 0
    assert "3 recordings" in trend.verdict
    lines = printed(trend)
    assert lines[-1] == trend.verdict
    assert [line.split()[1] for line in lines if line.startswith("> ")] == ["iteration_10"]


def test_a_damaged_recording_is_a_row_with_its_error(folder: Path) -> None:
    damaged = folder / "iteration_9" / RANKS[0]
    damaged.write_bytes(damaged.read_bytes()[:5000])
    trend = diagnose_trend(folder)
    (failed,) = (row for row in trend.recordings if row.error is not None)
    assert (failed.name, failed.step_us) == ("iteration_9", None)
    assert trend.best == "iteration_100"
    assert any("iteration_9: " in line for line in printed(trend))


def test_one_recording_has_no_worst(folder: Path) -> None:
    trend = diagnose_trend(folder / "iteration_9")
    assert (len(trend.recordings), trend.worst, trend.difference) == (1, None, None)


def test_nothing_to_diagnose_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTrace):
        diagnose_trend(tmp_path)
