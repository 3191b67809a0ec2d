"""A file read by two processes is read as by one, also where the guess of its middle is wrong or a half is bad."""

import gzip
import re
from pathlib import Path

import pytest

from counterpoint.errors import BadTrace
from counterpoint.trace import kineto
from counterpoint.trace.kineto import read_kineto
from counterpoint.trace.source import Limits, TraceFile
from counterpoint.trace.timeline import Timeline
from tests.support import kineto_trace as kt
from tests.support.kineto_trace import awkward, plain


@pytest.fixture(autouse=True)
def small_files_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kineto, "_LARGE_BYTES", 1)
    monkeypatch.setattr(kineto, "_LARGE_PACKED_BYTES", 1)


def read(path: Path, processes: int = 2) -> Timeline:
    return read_kineto(trace(path), processes=processes)[0]


def trace(path: Path) -> TraceFile:
    return TraceFile(path=path, label=str(path), format="kineto")


@pytest.mark.parametrize("layout", ["kineto", "compact", "pretty", "lines"])
@pytest.mark.parametrize("events_first", [False, True])
def test_two_processes_read_what_one_reads(tmp_path: Path, layout: str, events_first: bool) -> None:
    path = kt.write(tmp_path / "t.json", awkward(), kt.header(), layout=layout, events_first=events_first)
    assert plain(read(path)) == plain(read(path, processes=1))


def test_both_halves_are_really_read_apart(tmp_path: Path) -> None:
    path = kt.write(tmp_path / "t.json", awkward(), kt.header(), layout="kineto")
    halves = kineto.read_by_two_processes(trace(path), Limits(), None)
    assert halves is not None
    assert halves[0].count == read(path, processes=1).events


def test_wrong_guess_of_the_middle_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [kt.op('"}, {"ph": "X"}, {"', 10.0 + row, 0.5, external=row) for row in range(6)]
    path = kt.write(tmp_path / "t.json", events, kt.header(), layout="compact")
    inside_a_name = path.read_bytes().index(b'{\\"ph\\"', path.stat().st_size // 2)
    monkeypatch.setattr(kineto, "_middle", lambda file, size: inside_a_name)
    assert read(path).events == 6


@pytest.mark.parametrize("share", [0.2, 0.9])
def test_damage_in_either_half_is_told_as_when_read_in_one_go(tmp_path: Path, share: float) -> None:
    content = kt.text(awkward(), kt.header(), layout="kineto")
    at = re.compile(rb'"ts": ?').search(content, int(share * len(content))).end()  # type: ignore[union-attr]
    path = kt.write_bytes(tmp_path / "t.json", content[:at] + b"NaN" + content[at + 3 :])
    told = []
    for processes in (1, 2):
        with pytest.raises(BadTrace) as caught:
            read(path, processes)
        told.append(str(caught.value))
    assert told[0] == told[1]


def test_truncated_file_is_bad(tmp_path: Path) -> None:
    content = kt.text(awkward(), kt.header(), layout="kineto")
    with pytest.raises(BadTrace, match="truncated"):
        read(kt.write_bytes(tmp_path / "t.json", content[:-60]))


@pytest.mark.parametrize("ending", [".gz", pytest.param(".zst", marks=pytest.mark.needs("zstandard"))])
def test_other_process_decompresses(tmp_path: Path, ending: str) -> None:
    content = kt.text(awkward(), kt.header())
    path = tmp_path / f"t.json{ending}"
    path.write_bytes(packed(content, ending))
    found = kineto.read_by_two_processes(trace(path), Limits(), None)
    assert found is not None
    assert plain(read(path)) == plain(read(path, processes=1))


@pytest.mark.parametrize("ending", [".gz", pytest.param(".zst", marks=pytest.mark.needs("zstandard"))])
def test_damaged_or_huge_compressed_file_is_told_as_when_read_in_one_go(tmp_path: Path, ending: str) -> None:
    whole = packed(kt.text(awkward(), kt.header()), ending)
    for content in (whole[: len(whole) // 2], packed(b'{"traceEvents": [' + b" " * (2 << 20), ending)):
        path = tmp_path / f"bad.json{ending}"
        path.write_bytes(content)
        told = []
        for processes in (1, 2):
            with pytest.raises(BadTrace) as caught:
                read_kineto(trace(path), Limits(trace_bytes=1 << 20), processes=processes)
            told.append(str(caught.value))
        assert told[0] == told[1]


def packed(content: bytes, ending: str) -> bytes:
    if ending == ".gz":
        return gzip.compress(content)
    import zstandard

    return zstandard.compress(content)
