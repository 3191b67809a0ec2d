"""Find and open the traces of a job: files, folders, globs or tars; uncompressed, gzip or zstd.

The first bytes of a file, not its name, tell Kineto JSON, Nsight SQLite and digests apart. All decompressed bytes count
against a limit, so that a small hostile file cannot fill the memory or the disk.
"""

from __future__ import annotations

import gzip
import io
import lzma
import os
import re
import shutil
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, BinaryIO, NoReturn

from counterpoint.errors import BadTrace, Misconfigured, Unsupported
from counterpoint.records.diagnosis import OWN_MARK

_SUFFIXES = (".json", ".json.gz", ".gz", ".zst", ".sqlite", ".sqlite3", ".db", ".digest")
_TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tzst")
_SQLITE_MAGIC, _GZIP_MAGIC, _ZSTD_MAGIC = b"SQLite format 3\0", b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_ZIP_MAGIC = b"PK\x03\x04"
DIGEST_MAGIC = b"counterpoint.digest/"  # how a file of `counterpoint digest` begins; its version follows
_HEAD_BYTES = 1 << 16
_KINETO_KEYS = (b'"traceEvents"', b'"schemaVersion"', b'"deviceProperties"')
_OWN = re.compile(rb'"otherData":\s*\{"(?:written_by":"' + OWN_MARK.encode() + rb'|schema":"counterpoint\.)')
_OTHERS = (  # first bytes or name of a file of another program, and what it is
    (re.compile(rb'"rocprofiler-sdk-tool"'), "JSON of rocprofv3"),
    (re.compile(rb'^"?Kind"?,"?Agent_Id'), "CSV of rocprofv3"),
    (re.compile(rb"\.(?:pftrace|perfetto-trace)$"), "a Perfetto trace, such as rocprofv3 writes"),
    (re.compile(rb"\.xplane\.pb$"), "a profile of XLA"),
    (re.compile(rb'"schema":\s*"[^"]*chakra|"nodes":\s*\['), "an execution trace, without times"),
    (re.compile(rb"^\x80[\x02-\x05]"), "a pickle (dumps of a hang have names that end with a rank: nccl_trace_rank_3)"),
)
_DAMAGED = (
    tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, ValueError, OverflowError,
)  # fmt: skip
_RANK = (  # a number without the word rank does not count: it may be a step, a batch size, a process or a year
    re.compile(r"(?<![a-z])(?<!local[-_.])(?<!local)rank[-_.]?(\d{1,6})(?!\d)", re.IGNORECASE),
    re.compile(r"(?:^|[-_.])r(\d{1,5})(?=\.)", re.IGNORECASE),
)
_RANK_FOLDER = re.compile(r"rank[-_.]?(\d{1,6})", re.IGNORECASE)
_ITERATION = re.compile(r"(?<![a-z])(?:iteration|iter|step|epoch)[-_.]?\d+(?!\d)", re.IGNORECASE)
_WORKER = re.compile(r"(.+?)\.(\d{10,})(?=\.)")  # torch.profiler.tensorboard_trace_handler: worker, time


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits the sizes of input files after decompression, and their number."""

    trace_bytes: int = 8 << 30  # decompressed bytes of one trace; an archive may have eight times as many
    ratio: int = 64  # decompressed bytes per compressed byte (real traces: 8 to 40), checked above trace_bytes / 32
    files: int = 100_000  # number of traces in one folder or archive

    @classmethod
    def of_gb(cls, max_trace_gb: float) -> Limits:
        """Return limits with traces of at most so many GiB; raise `Misconfigured` if the number is too large."""
        if not max_trace_gb < 1 << 30:
            raise Misconfigured(f"--max-trace-gb {max_trace_gb}: give GiB of memory, such as 64")
        return cls(trace_bytes=int(max_trace_gb * (1 << 30)))

    def allow(self, compressed_bytes: int, *, traces: int = 1) -> int:
        """Return the most bytes that a compressed file may expand to."""
        most = self.trace_bytes * traces
        return min(most, max(self.trace_bytes // 32, compressed_bytes * self.ratio))


@dataclass(frozen=True, kw_only=True)
class TraceFile:
    """Identifies one file to read; `label` is its name in messages (`archive.tar!rank3.json` for a member)."""

    path: Path
    label: str
    format: str  # kineto | nsys | digest: by `counterpoint digest` | own: a timeline that this library wrote


def rank_from_name(name: str) -> int | None:
    """Return the rank that a file name states (`rank3.json.gz`, `host_r4.json`, `rank_3/trace.json`), else None."""
    parts = re.split(r"[/\\!]", name)
    for pattern in _RANK:
        if found := pattern.search(parts[-1]):
            return int(found.group(1))
    folder = _RANK_FOLDER.fullmatch(parts[-2]) if len(parts) > 1 else None
    return int(folder.group(1)) if folder else None


def recordings(files: Sequence[TraceFile]) -> dict[str, list[TraceFile]]:
    """Return a job's files grouped by recording, by name, earliest first; a single recording is named ''.

    There are several recordings if two files are of the same rank or worker, and the files differ in iteration
    (`iteration_10/rank0.json`), in the numbers of their folder, or in time.
    """
    for key in (_iteration, _folder_of, _turn(files)):
        groups: dict[str, list[TraceFile]] = {}
        for file in files:
            groups.setdefault(key(file), []).append(file)
        alike = len({re.sub(r"\d+", "#", name) for name in groups}) == 1
        if len(groups) > 1 and alike and _clash(files) and not any(map(_clash, groups.values())):
            return {name: groups[name] for name in sorted(groups, key=_natural)}
    return {"": list(files)}


def _clash(files: Sequence[TraceFile]) -> bool:
    """Return whether the names of any two files state the same rank or worker."""
    found = [_identity(file) for file in files]
    stated = [identity for identity in found if identity is not None]
    return len(set(stated)) < len(stated)


def _identity(file: TraceFile) -> str | None:
    rank = rank_from_name(file.label)
    if rank is not None:
        return f"rank {rank}"
    base = re.split(r"[/\\!]", file.label)[-1]
    if found := _WORKER.match(base):
        return found.group(1)
    return _ITERATION.sub("#", base) if _ITERATION.search(file.label) else None


def _iteration(file: TraceFile) -> str:
    found = _ITERATION.findall(file.label)
    return found[-1] if found else ""


def _folder_of(file: TraceFile) -> str:
    parts = re.split(r"[/\\!]", file.label)
    return "/".join(parts[:-1]) if rank_from_name(parts[-1]) is not None else ""


def _turn(files: Sequence[TraceFile]) -> Callable[[TraceFile], str]:
    """Return a function that maps a file to a recording: `recording N` for the N-th file, by time, of a worker."""
    stated = [(file, _WORKER.match(re.split(r"[/\\!]", file.label)[-1])) for file in files]
    times: dict[str, list[int]] = {}
    for _, found in stated:
        if found:
            times.setdefault(found.group(1), []).append(int(found.group(2)))
    turns = {
        file: f"recording {sorted(times[found.group(1)]).index(int(found.group(2)))}" for file, found in stated if found
    }
    return lambda file: turns.get(file, "")


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders names by the value of their numbers: `step2` before `step10`."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", name)]


@contextmanager
def find_traces(sources: Sequence[str], limits: Limits, notes: list[str] | None = None) -> Iterator[list[TraceFile]]:
    """Yield the trace files in `sources` as a list; files unpacked from archives are deleted as the context ends.

    Timelines that this library wrote itself are skipped, with an entry in `notes`.

    Raises:
        BadTrace: a source that does not exist, cannot be read, is not a trace, or is larger than `limits` allows.
    """
    with TemporaryDirectory(prefix="counterpoint-") as scratch:
        found: list[TraceFile] = []
        for number, source in enumerate(sources):
            found += _expand(source, Path(scratch) / str(number), limits)
        seen: dict[Path, TraceFile] = {}
        for file in found:
            first = seen.setdefault(file.path.resolve(), file)
            if first is not file and file.path.is_symlink() and notes is not None:
                notes.append(f"{file.label} is {first.label} by another name, and counts once")
        if len(seen) > limits.files:
            raise BadTrace(f"{len(seen)} traces; at most {limits.files} are read at once")
        own = [file for file in seen.values() if file.format == "own"]
        if own and len(own) == len(seen):
            raise BadTrace(
                "a timeline that counterpoint wrote by --perfetto; give the traces it was made from", path=own[0].label
            )
        if own and notes is not None:
            notes.append(
                f"passed over, since counterpoint wrote it by --perfetto: {', '.join(f.label for f in own[:8])}"
            )
        yield [file for file in seen.values() if file.format != "own"]


def _expand(source: str, scratch: Path, limits: Limits) -> list[TraceFile]:
    path, name = Path(source), _readable(source)
    try:
        if has_magic(source) and not path.exists():
            return _pattern(source, name)
        if path.is_dir():
            return _folder(path, name, limits)
        if not path.is_file():
            raise BadTrace("not a regular file" if path.exists() else "no such file or folder", path=name)
        if _is_tar(path, name):
            return _unpack(path, name, scratch, limits)
        file = _sniff(path, name, strict=True)
    except OSError as error:
        _raise_unreadable(error, name)
    assert file is not None
    return [file]


def _readable(path: str) -> str:
    """Return a path as text that can be printed, even if its name is not valid UTF-8."""
    return os.fsencode(path).decode("utf-8", "replace")


def _raise_unreadable(error: OSError, label: str) -> NoReturn:
    if isinstance(error, PermissionError):
        raise BadTrace("no permission to read it; check the owner and mode of the file", path=label) from None
    raise BadTrace(f"cannot be read: {error.strerror or error}", path=label) from None


@contextmanager
def reading(label: str) -> Iterator[None]:
    """Turn an `OSError` into a `BadTrace` that names the file `label`."""
    try:
        yield
    except OSError as error:
        _raise_unreadable(error, label)


def _pattern(pattern: str, label: str) -> list[TraceFile]:
    matches = [Path(match) for match in sorted(glob(pattern, recursive=True), key=_natural)]  # noqa: PTH207 (absolute patterns)
    traces = [file for p in matches if p.is_file() and (file := _sniff(p, _readable(str(p)), strict=False))]
    if not traces:
        raise BadTrace("no trace matches this pattern; quote it and check the folder", path=label)
    return traces


def _folder(path: Path, label: str, limits: Limits) -> list[TraceFile]:
    with os.scandir(path):
        pass  # raises for an unreadable folder, which rglob would show as empty
    inside = (p for p in path.rglob("*") if p.is_file() and p.name.lower().endswith(_SUFFIXES))
    candidates = sorted(inside, key=lambda p: [_natural(part) for part in p.parts])
    if len(candidates) > limits.files:
        raise BadTrace(f"{len(candidates)} files; at most {limits.files} are read at once", path=label)
    traces = [file for p in candidates if (file := _sniff(p, _readable(str(p)), strict=False))]
    if not traces:
        raise BadTrace(
            "no trace in this folder; expected Kineto *.json or *.json.gz (torch.profiler's export_chrome_trace) "
            "or Nsight Systems *.sqlite, one per rank",
            path=label,
        )
    return traces


def _is_tar(path: Path, label: str) -> bool:
    if path.name.lower().endswith(_TAR_SUFFIXES):
        return True
    try:
        if compression(path) == "zstd":
            with _open_zstd(path, label) as stream:
                return bool(stream.read(tarfile.BLOCKSIZE)[257:262] == b"ustar")
        return tarfile.is_tarfile(path)
    except _damage():
        return False  # reading it as a trace raises the error with its offset


def _unpack(path: Path, label: str, scratch: Path, limits: Limits) -> list[TraceFile]:
    """Unpack the traces of a tar under numbered names, so that no path leaves `scratch`."""
    budget = limits.allow(path.stat().st_size, traces=8)
    found: list[TraceFile] = []
    scratch.mkdir()
    try:
        with _open_tar(path, label, budget) as archive:
            for number, member in enumerate(archive):
                budget -= member.size  # skipped members count too: they are decompressed as well
                if number >= limits.files or budget < 0:
                    what = f"more than {limits.files} members" if budget >= 0 else "unpacks to more than allowed"
                    raise BadTrace(f"{what}; raise --max-trace-gb or give a folder if it is yours", path=label)
                wanted = member.isreg() and member.name.lower().endswith(_SUFFIXES)
                source = archive.extractfile(member) if wanted else None
                if source is not None:
                    with source:
                        found += _member(source, member.name, number, label, scratch)
    except _damage() as error:
        raise BadTrace(f"the archive is damaged: {error}", path=label) from None
    if not found:
        raise BadTrace(
            "no trace in this archive; expected *.json, *.json.gz, *.json.zst or *.sqlite, one per rank", path=label
        )
    return sorted(found, key=lambda file: _natural(file.label))


def _open_tar(path: Path, label: str, most_bytes: int) -> tarfile.TarFile:
    """Open a tar with any compression; Python's own module opens zstd only from 3.14 on."""
    if compression(path) != "zstd":
        return tarfile.open(path)
    stream: Any = _Capped(_open_zstd(path, label), label, most_bytes)
    return tarfile.open(fileobj=stream, mode="r|")


def _member(source: IO[bytes], name: str, number: int, label: str, scratch: Path) -> list[TraceFile]:
    """Copy one member of an archive to `scratch`; return a list with the copy, empty if it is no trace."""
    base = re.sub(r"[^\w.-]", "_", name.rsplit("/", 1)[-1], flags=re.ASCII)
    target = scratch / f"{number:06d}-{base[-100:]}"
    with target.open("wb") as copy:
        shutil.copyfileobj(source, copy, 1 << 20)
    file = _sniff(target, f"{label}!{_readable(name)}", strict=False)
    return [file] if file else []


def _sniff(path: Path, label: str, *, strict: bool) -> TraceFile | None:
    """Return a file with the format that its first bytes show; for no trace return None or, if `strict`, raise."""
    try:
        with path.open("rb") as raw:
            head = raw.read(_HEAD_BYTES)
    except OSError as error:
        _raise_unreadable(error, label)
    if head.startswith(_SQLITE_MAGIC):
        return TraceFile(path=path, label=label, format="nsys")
    if head.startswith(DIGEST_MAGIC):
        return TraceFile(path=path, label=label, format="digest")
    if _compression(head) == "gzip":
        try:
            head = zlib.decompressobj(wbits=31).decompress(head, _HEAD_BYTES)
        except zlib.error as error:
            raise BadTrace(f"the gzip stream is damaged: {error}", path=label, offset=0) from None
    elif _compression(head) == "zstd":
        with _open_zstd(path, label) as stream:
            head = _Capped(stream, label, _HEAD_BYTES).read(_HEAD_BYTES)
    if _OWN.search(head, 0, 1024):
        return TraceFile(path=path, label=label, format="own")
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    known = any(key in head for key in _KINETO_KEYS) or (strict and len(head) == _HEAD_BYTES)
    if (start.startswith(b"{") and known) or (start.startswith(b"[") and b'"ph"' in head):
        return TraceFile(path=path, label=label, format="kineto")
    if not strict:
        return None
    raise _no_trace(path, label, head)


def _no_trace(path: Path, label: str, head: bytes) -> BadTrace:
    """Return the error for a file that is no trace, which says what the file is and what to do."""
    if head.startswith(_ZIP_MAGIC):
        return BadTrace("a zip; unpack it and give its folder, or give a tar", path=label)
    if path.suffix in (".nsys-rep", ".qdrep", ".qdstrm"):
        return BadTrace(
            "an Nsight Systems report; run `nsys export --type sqlite FILE` and give its .sqlite", path=label
        )
    if head.startswith(_SQLITE_MAGIC):
        return BadTrace("a compressed SQLite export; decompress it (gunzip, unzstd) and give the .sqlite", path=label)
    if other := next((name for sign, name in _OTHERS if sign.search(head) or sign.search(path.name.encode())), None):
        return BadTrace(
            f"{other}, which cannot be read; record with torch.profiler and export_chrome_trace", path=label
        )
    what = "empty" if not head else "neither a Kineto JSON trace (no traceEvents) nor an Nsight Systems SQLite export"
    return BadTrace(f"{what}; record one with torch.profiler and export_chrome_trace", path=label, offset=0)


class _Capped(io.RawIOBase):
    """Reads from a stream; raises `BadTrace` with the byte offset if data are damaged or exceed the limit."""

    def __init__(self, stream: BinaryIO, label: str, limit: int) -> None:
        self._stream, self._label, self._limit, self._count = stream, label, limit, 0

    def read(self, size: int = -1) -> bytes:
        try:
            block = self._stream.read(size)
        except EOFError:
            raise BadTrace(
                "the compressed stream ends too early: truncated", path=self._label, offset=self._count
            ) from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise BadTrace(f"the gzip stream is damaged: {error}", path=self._label, offset=self._count) from None
        except _zstd_errors() as error:
            raise BadTrace(f"the zstd stream is damaged: {error}", path=self._label, offset=self._count) from None
        except OSError as error:
            raise BadTrace(f"reading failed: {error.strerror or error}", path=self._label, offset=self._count) from None
        self._count += len(block)
        if self._count > self._limit:
            raise BadTrace(
                f"expands to more than {self._limit >> 20} MiB; raise --max-trace-gb if the file is yours",
                path=self._label,
                offset=self._count,
            )
        return block

    def close(self) -> None:
        self._stream.close()
        super().close()


def open_bytes(file: TraceFile, limits: Limits) -> io.RawIOBase:
    """Return a stream of a trace's decompressed bytes, which raises `BadTrace` beyond what `limits` allows.

    Raises:
        BadTrace: the file cannot be opened; on a cluster every worker needs it under the same path.
    """
    try:
        how = compression(file.path)
        if how == "gzip":
            stream: Any = gzip.GzipFile(file.path)
        elif how == "zstd":
            stream = _open_zstd(file.path, file.label)
        else:
            stream = file.path.open("rb")
        limit = limits.allow(file.path.stat().st_size) if how else limits.trace_bytes
    except OSError as error:
        _raise_unreadable(error, file.label)
    return _Capped(stream, file.label, limit)


def compression(path: Path) -> str | None:
    """Return the compression of a file, `gzip` or `zstd`; None if it is not compressed."""
    with path.open("rb") as raw:
        return _compression(raw.read(4))


def _compression(head: bytes) -> str | None:
    if head.startswith(_GZIP_MAGIC):
        return "gzip"
    return "zstd" if head.startswith(_ZSTD_MAGIC) else None


def _open_zstd(path: Path, label: str) -> Any:
    """Open a zstd file: with Python's own module from 3.14 on, else with the package `zstandard`."""
    if sys.version_info >= (3, 14):
        from compression import zstd

        return zstd.ZstdFile(path)
    try:
        import zstandard
    except ImportError:
        raise Unsupported(
            f"{label} is compressed by zstd, which Python reads from 3.14 on: pip install 'counterpoint[zstd]', or "
            "unpack it by zstd -d"
        ) from None
    return zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(
        path.open("rb"), read_across_frames=True, closefd=True
    )


def _damage() -> tuple[type[Exception], ...]:
    """Return the exception types that reading a damaged archive raises."""
    return (*_DAMAGED, *_zstd_errors())


def _zstd_errors() -> tuple[type[Exception], ...]:
    """Return the exception types that the loaded zstd module raises for damaged data; empty if none is loaded."""
    module = sys.modules.get("compression.zstd") or sys.modules.get("zstandard")
    return (module.ZstdError,) if module else ()
