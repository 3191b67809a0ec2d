"""Find and open traces: a file, a folder, a glob or a tar of ranks; plain or gzip; Kineto JSON or Nsight SQLite.

The first bytes of a file say what it is, not its name. Everything that comes out of a compressed file is counted
against a limit, so that a small hostile file cannot fill the memory or the disk.
"""

from __future__ import annotations

import gzip
import io
import lzma
import os
import re
import shutil
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, NoReturn

from counterpoint.errors import BadTrace

_SUFFIXES = (".json", ".json.gz", ".gz", ".sqlite", ".sqlite3", ".db")
_TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
_SQLITE_MAGIC, _GZIP_MAGIC = b"SQLite format 3\0", b"\x1f\x8b"
_HEAD_BYTES = 1 << 16
_KINETO_KEYS = (b'"traceEvents"', b'"schemaVersion"', b'"deviceProperties"')
_DAMAGED = (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, ValueError, OverflowError)
_RANK = (
    re.compile(r"rank[-_.]?(\d{1,6})(?!\d)", re.IGNORECASE),
    re.compile(r"(?:^|[-_.])r(\d{1,6})(?=[-_.]|$)", re.IGNORECASE),
    re.compile(r"(?:^|[-_.])(\d{1,6})(?:\.pt)?(?:\.trace)?\.(?:json|sqlite|gz)", re.IGNORECASE),
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits what one input may ask of this machine."""

    trace_bytes: int = 8 << 30  # decompressed, of one trace; an eighth of those of an archive
    ratio: int = 64  # decompressed bytes per compressed byte (real traces: 8 to 40), checked above trace_bytes / 32
    files: int = 100_000  # traces in one folder or archive

    def allow(self, compressed_bytes: int, *, traces: int = 1) -> int:
        """Return the most bytes that a compressed file may expand to."""
        most = self.trace_bytes * traces
        return min(most, max(self.trace_bytes // 32, compressed_bytes * self.ratio))


@dataclass(frozen=True, kw_only=True)
class TraceFile:
    """Names one file to read; `label` is what messages call it (`archive.tar!rank3.json` for a member)."""

    path: Path
    label: str
    format: str  # kineto | nsys


def rank_from_name(name: str) -> int | None:
    """Return the rank that a file name states (`rank3.json.gz`, `trace_rank-12.json`, `host_r4.json`)."""
    base = name.replace("\\", "/").rsplit("/", 1)[-1].rsplit("!", 1)[-1]
    for pattern in _RANK:
        if found := pattern.search(base):
            return int(found.group(1))
    return None


@contextmanager
def find_traces(sources: Sequence[str], limits: Limits) -> Iterator[list[TraceFile]]:
    """Yield the trace files that `sources` name; archives are unpacked for as long as the context lives.

    Raises:
        BadTrace: nothing there, no permission, not a trace, or more than `limits` allows.
    """
    with TemporaryDirectory(prefix="counterpoint-") as scratch:
        found: list[TraceFile] = []
        for number, source in enumerate(sources):
            found += _expand(source, Path(scratch) / str(number), limits)
        seen: dict[Path, TraceFile] = {}
        for file in found:
            seen.setdefault(file.path.resolve(), file)
        if len(seen) > limits.files:
            raise BadTrace(f"{len(seen)} traces; at most {limits.files} are read at once")
        yield list(seen.values())


def _expand(source: str, scratch: Path, limits: Limits) -> list[TraceFile]:
    path, name = Path(source), _readable(source)
    try:
        if has_magic(source) and not path.exists():
            return _pattern(source, name)
        if path.is_dir():
            return _folder(path, name, limits)
        if not path.is_file():
            raise BadTrace("not a regular file" if path.exists() else "no such file or folder", path=name)
        if _is_archive(path):
            return _unpack(path, name, scratch, limits)
        file = _sniff(path, name, strict=True)
    except OSError as error:
        _raise_unreadable(error, name)
    assert file is not None
    return [file]


def _readable(path: str) -> str:
    """Return a path that can be printed and encoded, whatever bytes its name is made of."""
    return os.fsencode(path).decode("utf-8", "replace")


def _raise_unreadable(error: OSError, label: str) -> NoReturn:
    if isinstance(error, PermissionError):
        raise BadTrace("no permission to read it; check the owner and mode of the file", path=label) from None
    raise BadTrace(f"cannot be read: {error.strerror or error}", path=label) from None


def _pattern(pattern: str, label: str) -> list[TraceFile]:
    matches = [Path(match) for match in sorted(glob(pattern, recursive=True))]  # noqa: PTH207 (absolute patterns)
    traces = [file for p in matches if p.is_file() and (file := _sniff(p, _readable(str(p)), strict=False))]
    if not traces:
        raise BadTrace("no trace matches this pattern; quote it and check the folder", path=label)
    return traces


def _folder(path: Path, label: str, limits: Limits) -> list[TraceFile]:
    with os.scandir(path):
        pass  # rglob would call a folder that it may not read empty
    candidates = sorted(p for p in path.rglob("*") if p.is_file() and p.name.lower().endswith(_SUFFIXES))
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


def _is_archive(path: Path) -> bool:
    if path.name.lower().endswith(_TAR_SUFFIXES):
        return True
    try:
        return tarfile.is_tarfile(path)
    except _DAMAGED:
        return False  # a damaged gzip file: its reader says where


def _unpack(path: Path, label: str, scratch: Path, limits: Limits) -> list[TraceFile]:
    """Unpack the traces among the regular files, under numbers, so that links and the members' paths lead nowhere."""
    budget = limits.allow(path.stat().st_size, traces=8)
    found: list[TraceFile] = []
    scratch.mkdir()
    try:
        with tarfile.open(path) as archive:
            for number, member in enumerate(archive):
                budget -= member.size  # of those passed over, too: they have to be decompressed
                if number >= limits.files or budget < 0:
                    what = f"more than {limits.files} members" if budget >= 0 else "unpacks to more than allowed"
                    raise BadTrace(f"{what}; raise --max-trace-gb or give a folder if it is yours", path=label)
                source = archive.extractfile(member) if member.isreg() else None
                if source is None or not member.name.lower().endswith(_SUFFIXES):
                    continue
                base = re.sub(r"[^\w.-]", "_", member.name.rsplit("/", 1)[-1], flags=re.ASCII)
                target = scratch / f"{number:06d}-{base[-100:]}"
                with source, target.open("wb") as copy:
                    shutil.copyfileobj(source, copy, 1 << 20)
                if file := _sniff(target, f"{label}!{_readable(member.name)}", strict=False):
                    found.append(file)
    except _DAMAGED as error:
        raise BadTrace(f"the archive is damaged: {error}", path=label) from None
    if not found:
        raise BadTrace("no trace in this archive; expected *.json, *.json.gz or *.sqlite, one per rank", path=label)
    return sorted(found, key=lambda file: file.label)


def _sniff(path: Path, label: str, *, strict: bool) -> TraceFile | None:
    """Return what the file is by its first bytes; None (or BadTrace when `strict`) if it is no trace at all."""
    try:
        with path.open("rb") as raw:
            head = raw.read(_HEAD_BYTES)
    except OSError as error:
        _raise_unreadable(error, label)
    if head.startswith(_SQLITE_MAGIC):
        return TraceFile(path=path, label=label, format="nsys")
    if head.startswith(_GZIP_MAGIC):
        try:
            head = zlib.decompressobj(wbits=31).decompress(head, _HEAD_BYTES)
        except zlib.error as error:
            raise BadTrace(f"the gzip stream is damaged: {error}", path=label, offset=0) from None
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    known = any(key in head for key in _KINETO_KEYS) or (strict and len(head) == _HEAD_BYTES)
    if (start.startswith(b"{") and known) or (start.startswith(b"[") and b'"ph"' in head):
        return TraceFile(path=path, label=label, format="kineto")
    if not strict:
        return None
    if path.suffix in (".nsys-rep", ".qdrep", ".qdstrm"):
        raise BadTrace(
            "an Nsight Systems report; run `nsys export --type sqlite FILE` and give its .sqlite", path=label
        )
    what = "empty" if not head else "neither a Kineto JSON trace (no traceEvents) nor an Nsight Systems SQLite export"
    raise BadTrace(f"{what}; record one with torch.profiler and export_chrome_trace", path=label, offset=0)


class _Capped(io.RawIOBase):
    """Counts what comes out of a stream and stops at a limit; turns damage into BadTrace with its offset."""

    def __init__(self, stream: BinaryIO, label: str, limit: int, *, stop: int | None = None) -> None:
        self._stream, self._label, self._limit, self._stop, self._count = stream, label, limit, stop, 0

    def read(self, size: int = -1) -> bytes:
        if self._stop is not None:
            size = min(size, self._stop - self._count) if size >= 0 else self._stop - self._count
        try:
            block = self._stream.read(size)
        except EOFError:
            raise BadTrace("the gzip stream ends too early: truncated", path=self._label, offset=self._count) from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise BadTrace(f"the gzip stream is damaged: {error}", path=self._label, offset=self._count) from None
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


def open_bytes(file: TraceFile, limits: Limits, *, begin: int = 0, stop: int | None = None) -> io.RawIOBase:
    """Return the decompressed bytes of a trace from `begin` to `stop`, in order, never more than `limits` allows.

    A file that cannot be opened raises `BadTrace`: on a cluster every worker needs it under the same path.
    """
    try:
        with file.path.open("rb") as raw:
            compressed = raw.read(2) == _GZIP_MAGIC
        stream = gzip.GzipFile(file.path) if compressed else file.path.open("rb")
        limit = limits.allow(file.path.stat().st_size) if compressed else limits.trace_bytes
    except OSError as error:
        _raise_unreadable(error, file.label)
    if begin:
        stream.seek(begin)
    return _Capped(stream, file.label, limit, stop=None if stop is None else stop - begin)  # type: ignore[arg-type]
