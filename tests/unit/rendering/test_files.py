"""Atomic writing: a file appears whole or not at all."""

import os
from pathlib import Path

import msgspec
import pytest

from counterpoint.records.diagnosis import Diagnosis, TimelineLane
from counterpoint.rendering.diagnosis_html import write_html
from counterpoint.rendering.diagnosis_perfetto import write_perfetto
from counterpoint.rendering.files import replacing


class Broken(Exception):
    pass


def write_half(path: Path) -> None:
    with replacing(path) as file:
        file.write(b"half")
        raise Broken


def test_old_file_survives_a_failure(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"old")
    with pytest.raises(Broken):
        write_half(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"old"


def test_nothing_is_left_behind_by_a_failure(tmp_path: Path) -> None:
    with pytest.raises(Broken):
        write_half(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_behind_by_success(tmp_path: Path) -> None:
    with replacing(tmp_path / "out") as file:
        file.write(b"all")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_file_gets_the_mode_of_an_ordinary_file(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        with replacing(tmp_path / "out"):
            pass
    finally:
        os.umask(old)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("write", [write_html, write_perfetto])
def test_missing_folder_is_an_os_error(
    tmp_path: Path, training: Diagnosis, lanes: list[TimelineLane], write: object
) -> None:
    assert callable(write)
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "none" / "out", training, lanes)


@pytest.mark.parametrize("write", [write_html, write_perfetto])
def test_lane_that_cannot_be_written_leaves_no_file(tmp_path: Path, training: Diagnosis, write: object) -> None:
    assert callable(write)
    broken = TimelineLane(rank=0, name="compute", start_us=(0.0, 1.0), duration_us=(1.0, 1.0), labels=("one",))
    with pytest.raises((ValueError, IndexError)):
        write(tmp_path / "out", training, [broken])
    assert list(tmp_path.iterdir()) == []


def test_report_can_be_written_twice_over_itself(tmp_path: Path, training: Diagnosis, empty: Diagnosis) -> None:
    write_perfetto(tmp_path / "out", training, [])
    write_perfetto(tmp_path / "out", empty, [])
    written = msgspec.json.decode((tmp_path / "out").read_bytes())
    assert written["otherData"]["verdict"] == empty.verdict
