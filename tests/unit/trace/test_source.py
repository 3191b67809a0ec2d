"""Files, folders, patterns and archives: what is found, what is passed over, what is refused."""

import gzip
import io
import os
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from counterpoint.diagnosis.api import diagnose
from counterpoint.errors import BadTrace, Unsupported
from counterpoint.rendering.diagnosis_perfetto import write_perfetto
from counterpoint.trace.source import Limits, TraceFile, find_traces, recordings
from tests.support import kineto_trace as kt


def found(*sources: Path | str, limits: Limits | None = None) -> list[str]:
    with find_traces([str(source) for source in sources], limits or Limits()) as files:
        return [file.label for file in files]


def refused(source: Path | str, limits: Limits | None = None) -> BadTrace:
    with pytest.raises(BadTrace) as caught:
        found(source, limits=limits)
    assert caught.value.path is not None
    return caught.value


def member(name: str, content: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, content


def tar(path: Path, members: Sequence[tuple[tarfile.TarInfo, bytes]], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for info, content in members:
            archive.addfile(info, io.BytesIO(content) if info.isreg() else None)
    return path


def rank(number: int) -> bytes:
    return kt.text(kt.training(rank=number), kt.header(rank=number))


def test_a_folder_is_searched_to_its_depth(tmp_path: Path) -> None:
    """Traces in nested folders are found in the order of their paths; what is no trace is passed over."""
    kt.write_job(tmp_path / "b" / "deep")
    kt.write(tmp_path / "a.json.gz", kt.training())
    kt.write_bytes(tmp_path / "config.json", b'{"lr": 3e-4}')
    kt.write_bytes(tmp_path / "tokenizer.json", b'{"vocab": [' + b'"w", ' * 20_000 + b'"x"]}')
    kt.write_bytes(tmp_path / "list.json", b"[1, 2, 3]")
    kt.write_bytes(tmp_path / "notes.txt", b'{"traceEvents": []}')
    assert found(tmp_path) == [str(tmp_path / name) for name in ("a.json.gz", "b/deep/rank0.json", "b/deep/rank1.json")]


def test_a_file_is_told_by_its_first_bytes(tmp_path: Path) -> None:
    path = kt.write_bytes(tmp_path / "whatever.bin", gzip.compress(kt.text(kt.training())))
    assert diagnose(path).diagnosis.source.events == len(kt.training())


def test_a_pattern_finds_what_it_matches(tmp_path: Path) -> None:
    kt.write_job(tmp_path, ranks=3)
    assert found(f"{tmp_path}/rank[02].json") == [str(tmp_path / "rank0.json"), str(tmp_path / "rank2.json")]


def test_a_file_whose_name_is_a_pattern(tmp_path: Path) -> None:
    """A name that exists is taken as it stands."""
    path = kt.write(tmp_path / "rank[0].json", kt.training())
    assert found(path) == [str(path)]


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    """Through its folder, its name and a link."""
    path = kt.write(tmp_path / "rank0.json", kt.training())
    (tmp_path / "link.json").symlink_to(path)
    link, notes = tmp_path / "link.json", list[str]()
    with find_traces([str(path), str(tmp_path), str(link)], Limits(), notes) as files:
        assert [file.label for file in files] == [str(path)]
    assert set(notes) == {f"{link} is {path} by another name, and counts once"}


def test_a_folder_named_like_a_trace(tmp_path: Path) -> None:
    kt.write(tmp_path / "x.json" / "rank0.json", kt.training())
    assert found(tmp_path) == found(tmp_path / "x.json") == [str(tmp_path / "x.json" / "rank0.json")]


@pytest.mark.parametrize("name", ["missing.json", "no*.json", "empty", "\0.json", "x" * 5000, "loop.json", "pipe.json"])
def test_nothing_to_read(name: str, tmp_path: Path) -> None:
    """No file, no match, an empty folder, an impossible name, a link to itself, a pipe: each says so, none hangs."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    os.mkfifo(tmp_path / "pipe.json")
    assert refused(str(tmp_path / name)).reason


def test_loops_of_links_in_a_folder(tmp_path: Path) -> None:
    path = kt.write(tmp_path / "rank0.json", kt.training())
    (tmp_path / "self").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    os.mkfifo(tmp_path / "pipe.json")
    assert found(tmp_path) == [str(path)]


def test_a_name_that_is_not_text(tmp_path: Path) -> None:
    """A file name of other bytes than UTF-8 is shown with marks in their place, also in the diagnosis."""
    path = tmp_path / os.fsdecode(b"rank0-\xff.json")
    kt.write(path, kt.training())
    assert diagnose(tmp_path).diagnosis.source.files == (f"{tmp_path}/rank0-�.json",)


def test_the_number_of_files_is_limited(tmp_path: Path) -> None:
    """A folder or archive of too many is refused before any is read."""
    kt.write_job(tmp_path / "job", ranks=3)
    archive = tar(tmp_path / "job.tar", [member(f"rank{n}.json", rank(n)) for n in range(3)])
    assert [refused(source, Limits(files=2)).path for source in (tmp_path / "job", archive)] == [
        str(tmp_path / "job"), str(archive),
    ]  # fmt: skip


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = kt.write(tmp_path / "rank0.json", kt.training())

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    error = refused(tmp_path)
    assert ("no permission" in error.reason, error.path) == (True, str(path))


@pytest.mark.parametrize(
    ("name", "mode"), [("t.tar", "w"), ("t.tar.gz", "w:gz"), ("t.tgz", "w:gz"), ("traces", "w:xz")]
)
def test_an_archive_reads_like_its_folder(name: str, mode: str, tmp_path: Path) -> None:
    """Plain or compressed, with nested folders, beside members that are no traces."""
    members = [member("run/", type=tarfile.DIRTYPE), *(member(f"run/{n}/rank{n}.json", rank(n)) for n in (1, 0))]
    path = tar(tmp_path / name, [*members, member("run/readme.txt", b"hello")], mode)
    diagnosis = diagnose(path).diagnosis
    assert diagnosis.ranks == (0, 1)
    assert diagnosis.source.files == (f"{path}!run/0/rank0.json", f"{path}!run/1/rank1.json")


def test_members_that_lead_elsewhere(tmp_path: Path) -> None:
    """Links, devices and pipes are passed over; a path upward or from the root is only a name."""
    kt.write_bytes(tmp_path / "secret.json", rank(5))
    kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.BLKTYPE)
    links = [member(f"{n}.json", type=kind, linkname=str(tmp_path / "secret.json")) for n, kind in enumerate(kinds)]
    named = [member("../../escaped.json", rank(0)), member("/tmp/absolute.json", rank(1))]
    path = tar(tmp_path / "t.tar", [*links, *named])
    assert found(path) == [f"{path}!../../escaped.json", f"{path}!/tmp/absolute.json"]


def test_unpacking_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither outside the scratch folder nor, afterwards, in it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    path = tar(tmp_path / "t.tar", [member("../escaped.json", rank(0))])
    diagnose(path)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["scratch", "t.tar"]


@pytest.mark.parametrize("name", ["rank0-\x1b[31m.json", "a\\..\\rank0.json", "r" * 180 + "rank0.json", "rank0 µ.json"])
def test_names_of_members_are_only_names(name: str, tmp_path: Path) -> None:
    """Whatever their characters and length, they name no file on this disk."""
    assert len(diagnose(tar(tmp_path / "t.tar", [member(name, rank(0))])).diagnosis.ranks) == 1


def test_a_member_that_claims_to_be_huge(tmp_path: Path) -> None:
    """A header of 100 GB and nothing behind it."""
    info, _ = member("rank0.json")
    info.size = 100 << 30
    path = kt.write_bytes(tmp_path / "t.tar", info.tobuf() + bytes(1024))
    assert "--max-trace-gb" in refused(path).reason


@pytest.mark.parametrize("name", ["rank0.json", "passed-over.txt"])
def test_an_archive_that_expands_beyond_the_limit(name: str, tmp_path: Path) -> None:
    """Also by members that would only be passed over: they have to be decompressed."""
    path = tar(tmp_path / "t.tar.gz", [member(name, bytes(4 << 20))], "w:gz")
    assert "unpacks to more than allowed" in refused(path, Limits(trace_bytes=32 << 20)).reason


def read_damaged(path: Path, whole: bytes, *, begin: int, step: int) -> list[int]:
    """The events that are read where the file is cut, and where a byte is wrong; else it is a BadTrace with a path."""
    read = []
    for at in range(begin, len(whole), step):
        for content in (whole[:at], whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :]):
            try:
                read.append(diagnose(kt.write_bytes(path, content)).diagnosis.source.events)
            except BadTrace as error:
                assert error.path is not None  # noqa: PT017
    return read


def test_damaged_archives(tmp_path: Path) -> None:
    """Cut at any of many places, the archive is refused, or holds no trace that can be read."""
    whole = tar(tmp_path / "whole.tar", [member("rank0.json", rank(0))]).read_bytes()
    size = len(rank(0))
    for end in (*range(1, 600, 37), *range(600, 512 + size, 997)):
        path = kt.write_bytes(tmp_path / "cut.tar", whole[:end])
        with pytest.raises(BadTrace):
            diagnose(path)


def test_damaged_compressed_archives(tmp_path: Path) -> None:
    whole = tar(tmp_path / "whole.tar.gz", [member("rank0.json", rank(0))], "w:gz").read_bytes()
    assert set(read_damaged(tmp_path / "bad.tar.gz.bin", whole, begin=0, step=13)) <= {len(kt.training())}


def test_an_archive_without_traces(tmp_path: Path) -> None:
    for members in ([], [member("a.txt", b"x"), member("b.json", b"{}")]):
        assert "no trace in this archive" in refused(tar(tmp_path / "t.tar", members)).reason


def recorded(*names: str) -> dict[str, list[str]]:
    """The recordings that files of these names make."""
    files = [TraceFile(path=Path(name), label=name, format="kineto") for name in names]
    return {name: [file.label for file in part] for name, part in recordings(files).items()}


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["p/iteration_10/rank0_trace.json", "p/iteration_10/rank1_trace.json", "p/iteration_9/rank0_trace.json",
          "p/iteration_9/rank1_trace.json"], ["iteration_9", "iteration_10"]),
        (["iteration_2/trace.json", "iteration_10/trace.json"], ["iteration_2", "iteration_10"]),
        (["node0/step_5/rank0.json", "node1/step_5/rank1.json", "node0/step_6/rank0.json", "node1/step_6/rank1.json"],
         ["step_5", "step_6"]),
        (["rank0_step10.json", "rank0_step200.json"], ["step10", "step200"]), (["step_10.json", "step_20.json"],
                                                                            ["step_10", "step_20"]),
        (["run1/rank0.json", "run2/rank0.json", "run10/rank0.json"], ["run1", "run2", "run10"]),
        (["a_1.1690000000002.pt.trace.json", "a_1.1690000000001.pt.trace.json", "b_2.1690000000005.pt.trace.json"],
         ["recording 0", "recording 1"]),
        (["rank_0.1773709742341309550.pt.trace.json", "rank_0.1773709742341309999.pt.trace.json"],
         ["recording 0", "recording 1"]),
    ],
)  # fmt: skip
def test_several_recordings_are_told_apart(names: list[str], found: list[str]) -> None:
    """By iteration, folder or time, in their order."""
    assert list(recorded(*names)) == found


@pytest.mark.parametrize(
    "names",
    [
        ["rank0.json", "rank1.json"], ["node0/rank0.json", "node1/rank1.json"], ["rank0/t.json", "rank1/t.json"],
        ["iteration_10/rank0.json", "iteration_10/rank1.json"], ["trace_0.json", "trace_1.json"],
        ["a/trace.json", "b/trace.json"], ["old/rank0.json", "new/rank0.json"],
        ["bs_32_rank0.json", "bs_64_rank0.json"],
        ["a_1.1690000000002.pt.trace.json", "b_2.1690000000001.pt.trace.json"],
        ["iteration_1/rank0.json", "iteration_1/rank0.json.gz", "iteration_2/rank0.json"], [],
    ],
)  # fmt: skip
def test_one_recording_is_one(names: list[str]) -> None:
    assert recorded(*names) == {"": names}


def test_the_last_recording_of_a_folder_is_diagnosed(tmp_path: Path) -> None:
    for iteration in (9, 10, 100):
        for number in range(2):
            kt.write_bytes(tmp_path / f"iteration_{iteration}" / f"rank{number}_trace.json", rank(number))
    diagnosis = diagnose(tmp_path).diagnosis
    last = tmp_path / "iteration_100"
    assert diagnosis.source.files == (str(last / "rank0_trace.json"), str(last / "rank1_trace.json"))
    assert diagnosis.notes[0].startswith("3 recordings of one job: the last, iteration_100, is read")
    assert "iteration_9, iteration_10" in diagnosis.notes[0]


def test_traces_without_rank_are_numbered_as_a_person_counts(tmp_path: Path) -> None:
    """2 before 10."""
    for number in (10, 2, 1):
        kt.write(tmp_path / f"trace_{number}.json", [kt.kernel("k", 1.0, 5.0)], kt.header(rank=None))
    diagnosis = diagnose(tmp_path).diagnosis
    assert [Path(file).name for file in diagnosis.source.files] == ["trace_1.json", "trace_2.json", "trace_10.json"]
    assert (diagnosis.ranks, any("without a rank" in note for note in diagnosis.notes)) == ((0, 1, 2), True)


def own(folder: Path) -> Path:
    """A timeline that --perfetto wrote."""
    result = diagnose(kt.write(folder / "made-from" / "rank0.json", kt.training()))
    path = folder / "job" / "timeline.json"
    path.parent.mkdir(exist_ok=True)
    write_perfetto(path, result.diagnosis, result.lanes)
    return path


def test_a_timeline_of_our_own_is_passed_over(tmp_path: Path) -> None:
    """In a folder, a pattern, an archive and among files; a note says so."""
    mark = own(tmp_path)
    kt.write_job(tmp_path / "job")
    ranks = [str(tmp_path / "job" / f"rank{n}.json") for n in range(2)]
    archive = tar(tmp_path / "t.tar", [member("rank0.json", rank(0)), member("own.json", mark.read_bytes())])
    for source in (tmp_path / "job", f"{tmp_path}/job/*.json", archive):
        diagnosis = diagnose(source).diagnosis
        assert [note for note in diagnosis.notes if "passed over" in note]
        assert not [file for file in diagnosis.source.files if Path(file).name in ("timeline.json", "t.tar!own.json")]
    assert diagnose([*ranks, mark]).diagnosis.ranks == (0, 1)


def test_a_timeline_of_our_own_alone_is_refused(tmp_path: Path) -> None:
    assert "--perfetto" in refused(own(tmp_path)).reason


@pytest.mark.needs("zstandard")
def test_a_trace_by_zstd(tmp_path: Path) -> None:
    """Alone, of any name and in a folder; as several frames, too."""
    import zstandard

    first, second = rank(0)[:900], rank(0)[900:]
    frames = zstandard.compress(first) + zstandard.compress(second)
    for name in ("rank0.json.zst", "any.bin"):
        path = kt.write_bytes(tmp_path / name, frames)
        assert diagnose(path).diagnosis.source.events == len(kt.training())
    assert found(tmp_path) == [str(tmp_path / "rank0.json.zst")]


@pytest.mark.needs("zstandard")
def test_limits_hold_for_zstd(tmp_path: Path) -> None:
    """A megabyte out of a few bytes stops at the cap; damage has its offset."""
    import zstandard

    text = b'{"traceEvents": [{"ph":"X","cat":"kernel","ts":1}' + b" " * (4 << 20) + b"]}"
    bomb = kt.write_bytes(tmp_path / "bomb.json.zst", zstandard.compress(text))
    with pytest.raises(BadTrace, match="--max-trace-gb"):
        diagnose(bomb, limits=Limits(trace_bytes=32 << 20))
    whole = zstandard.ZstdCompressor(write_checksum=True).compress(rank(0))
    read = read_damaged(tmp_path / "bad.json.zst", whole, begin=4, step=7)
    assert set(read) <= {len(kt.training())}  # only the checksum at its end is cut


@pytest.mark.needs("zstandard")
@pytest.mark.parametrize("name", ["t.tar.zst", "t.tzst", "traces.bin"])
def test_a_tar_by_zstd(name: str, tmp_path: Path) -> None:
    import zstandard

    members = [member(f"run/rank{n}.json", rank(n)) for n in (1, 0)]
    content = zstandard.compress(tar(tmp_path / "t.tar", [*members, member("readme.txt", b"hello")]).read_bytes())
    path = kt.write_bytes(tmp_path / name, content)
    assert diagnose(path).diagnosis.source.files == (f"{path}!run/rank0.json", f"{path}!run/rank1.json")


@pytest.mark.needs("zstandard")
def test_limits_hold_for_tars_by_zstd(tmp_path: Path) -> None:
    """What it expands to, also in a header of the tar; damage anywhere is refused or changes nothing."""
    import zstandard

    bomb = tar(tmp_path / "t.tar", [member("passed-over.txt", bytes(4 << 20))]).read_bytes()
    long_name = member("x", bytes(4 << 20), type=tarfile.GNUTYPE_LONGNAME)
    header = long_name[0].tobuf(tarfile.GNU_FORMAT) + long_name[1]
    for content in (bomb, header):
        path = kt.write_bytes(tmp_path / "bomb.tar.zst", zstandard.compress(content))
        assert "--max-trace-gb" in refused(path, Limits(trace_bytes=32 << 20)).reason
    whole = zstandard.compress(tar(tmp_path / "t.tar", [member("rank0.json", rank(0))]).read_bytes())
    assert set(read_damaged(tmp_path / "bad.tar.zst", whole, begin=4, step=13)) <= {len(kt.training())}


def test_without_a_reader_of_zstd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for reader in ("zstandard", "compression.zstd"):
        monkeypatch.setitem(sys.modules, reader, None)
    path = kt.write_bytes(tmp_path / "rank0.json.zst", b"\x28\xb5\x2f\xfd" + bytes(20))
    with pytest.raises(Unsupported, match=r"counterpoint\[zstd\]"):
        diagnose(path)


def test_a_zip_is_refused_with_what_to_do(tmp_path: Path) -> None:
    assert "give a tar" in refused(kt.write_bytes(tmp_path / "t.zip", b"PK\x03\x04" + bytes(100))).reason
