"""Results on their way: only results of the same run are taken up again, and a cut line is measured again."""

from __future__ import annotations

import resource
from pathlib import Path

import msgspec
import pytest

from counterpoint.errors import Misconfigured
from counterpoint.measurement.resume import finished, resumable
from counterpoint.records.measurement import Outcome

RUN = {"suite": "quick", "torch": "2.11"}


@pytest.fixture(name="path")
def path_fixture(tmp_path: Path) -> Path:
    """Two outcomes of `RUN`, and a third cut short."""
    path = tmp_path / "x.partial.jsonl"
    with resumable(path, RUN, fresh=False), path.open("ab") as file:
        for name in ("one", "two", "three"):
            file.write(msgspec.json.encode(Outcome(scenario=name)) + b"\n")
    path.write_bytes(path.read_bytes()[:-9])
    return path


def test_what_was_finished_is_taken_up(path: Path) -> None:
    """Whole outcomes stay; the one that a kill cut short is gone."""
    with resumable(path, RUN, fresh=False):
        assert [outcome.scenario for outcome in finished(path)] == ["one", "two"]


def test_the_next_outcome_stands_on_a_line_of_its_own(path: Path) -> None:
    """What is appended after a cut line can be read."""
    with resumable(path, RUN, fresh=False), path.open("ab") as file:
        file.write(msgspec.json.encode(Outcome(scenario="three")) + b"\n")
    assert [outcome.scenario for outcome in finished(path)] == ["one", "two", "three"]


def test_results_of_another_run_are_refused(path: Path) -> None:
    """The text says what differs and how to go on."""
    with (
        pytest.raises(Misconfigured, match=r"\(torch was 2.11, is 2.13\).*--fresh"),
        resumable(path, RUN | {"torch": "2.13"}, fresh=False),
    ):
        pass


def test_fresh_discards_them(path: Path) -> None:
    with resumable(path, RUN | {"torch": "2.13"}, fresh=True):
        assert finished(path) == ()


@pytest.mark.parametrize("text", ["dear diary\n", "dear diary"])
def test_a_file_of_someone_else_is_left_alone(tmp_path: Path, text: str) -> None:
    """Its text is not overwritten without --fresh."""
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(Misconfigured, match="not written by counterpoint"), resumable(path, RUN, fresh=False):
        pass
    assert path.read_text() == text


def test_nothing_is_left_where_nothing_was_finished(tmp_path: Path) -> None:
    """A run that ends before its first outcome leaves no file for the next one to stumble over."""
    with resumable(tmp_path / "x.jsonl", RUN, fresh=False):
        pass
    assert list(tmp_path.iterdir()) == []


def test_two_runs_do_not_share_a_file(path: Path) -> None:
    """The second one is refused while the first one lasts."""
    with (
        resumable(path, RUN, fresh=False),
        pytest.raises(Misconfigured, match="being written by another"),
        resumable(path, RUN, fresh=False),
    ):
        pass


def test_a_damaged_line_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"}\n")
    with pytest.raises(Misconfigured, match=r"damaged.*--fresh"):
        finished(path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"scenario": "two"}', "holds 'two' 2 times"),
        (b'{"scenario": "four"}', "holds the unknown 'four'"),
        (b"", "Input data was truncated"),
        (b'{"scenario": 3}', "Expected `str`"),
    ],
)
def test_damage_is_seen_before_ranks_start(path: Path, line: bytes, said: str) -> None:
    """What was edited by hand is refused with a way out, not with a traceback after the measuring."""
    whole = path.read_bytes().rpartition(b"\n")[0]
    path.write_bytes(whole + b"\n" + line + b"\n")
    with (
        pytest.raises(Misconfigured, match=f"damaged.*{said}.*--fresh"),
        resumable(path, RUN, fresh=False, names={"one", "two", "three"}),
    ):
        raise AssertionError("it was taken up")


def test_a_file_that_is_taken_away_is_an_error_of_ours(path: Path) -> None:
    """Not a traceback, neither while results are read nor at the end."""
    with resumable(path, RUN, fresh=False):
        path.unlink()
        with pytest.raises(Misconfigured, match="taken away"):
            finished(path)


def test_a_full_disk_is_told_before_ranks_start(tmp_path: Path) -> None:
    """As a file that cannot be written, and nothing is left there."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(Misconfigured, match="cannot write"), resumable(tmp_path / "x.jsonl", RUN, fresh=False):
            raise AssertionError("it was taken for written")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
