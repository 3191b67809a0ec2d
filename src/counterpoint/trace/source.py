"""Where traces come from: a file, a folder, a glob or a tar of ranks; plain or gzip; Kineto JSON or Nsight SQLite.

What a file is, is told by its first bytes, not by its name. Everything that comes out of a compressed file is counted
against a limit, so that a small hostile file cannot fill the memory or the disk.
"""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from counterpoint.errors import BadTrace

__all__ = ["Limits", "TraceFile", "find_traces", "open_bytes", "rank_from_name"]

_SUFFIXES = (".json", ".json.gz", ".gz", ".sqlite", ".sqlite3", ".db")
_TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
_SQLITE_MAGIC = b"SQLite format 3\0"
_RANK = (
    re.compile(r"rank[-_.]?(\d{1,6})(?!\d)", re.IGNORECASE),
    re.compile(r"(?:^|[-_.])r(\d{1,6})(?=[-_.]|$)", re.IGNORECASE),
    re.compile(r"(?:^|[-_.])(\d{1,6})(?:\.pt)?(?:\.trace)?\.(?:json|sqlite|gz)", re.IGNORECASE),
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much one input may ask of this machine.

    Args:
        trace_bytes: decompressed bytes of one trace.
        ratio: decompressed bytes per compressed byte, checked above 256 MiB (real traces: 8 to 40).
        files: traces in one folder or archive.
    """

    trace_bytes: int = 8 << 30
    ratio: int = 250
    files: int = 100_000


@dataclass(frozen=True, kw_only=True)
class TraceFile:
    """One file to read; `label` is what messages call it (`archive.tar!rank3.json` for a member)."""

    path: Path
    label: str
    format: str  # kineto | nsys


def rank_from_name(name: str) -> int | None:
    """The rank that a file name states (`rank3.json.gz`, `trace_rank-12.json`, `host_r4.json`, `trace_5.json`)."""
    base = name.replace("\\", "/").rsplit("/", 1)[-1].rsplit("!", 1)[-1]
    for pattern in _RANK:
        if found := pattern.search(base):
            return int(found.group(1))
    return None


@contextmanager
def find_traces(sources: Sequence[str], limits: Limits) -> Iterator[list[TraceFile]]:
    """The trace files that `sources` name; archives are unpacked for as long as the context lives.

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
    path = Path(source)
    if not path.exists() and has_magic(source):
        matches = [Path(match) for match in sorted(glob(source, recursive=True))]  # noqa: PTH207 (absolute patterns)
        traces = [file for match in matches if match.is_file() and (file := _sniff(match, str(match), strict=False))]
        if not traces:
            raise BadTrace("no trace matches this pattern; quote it and check the folder", path=source)
        return traces
    try:
        if path.is_dir():
            return _folder(path, str(path), limits)
        if not path.exists():
            raise BadTrace("no such file or folder", path=source)
        if source.endswith(_TAR_SUFFIXES) or tarfile.is_tarfile(path):
            scratch.mkdir()
            _unpack(path, scratch, limits)
            return [
                TraceFile(path=file.path, label=f"{source}!{file.path.name.split('-', 1)[1]}", format=file.format)
                for file in _folder(scratch, source, limits)
            ]
        file = _sniff(path, source, strict=True)
    except PermissionError:
        raise BadTrace("no permission to read it; check the owner and mode of the file", path=source) from None
    except OSError as error:
        raise BadTrace(f"cannot be opened: {error.strerror}", path=source) from None
    assert file is not None
    return [file]


def _folder(path: Path, label: str, limits: Limits) -> list[TraceFile]:
    candidates = sorted(p for p in path.rglob("*") if p.is_file() and p.name.lower().endswith(_SUFFIXES))
    if len(candidates) > limits.files:
        raise BadTrace(f"{len(candidates)} files; at most {limits.files} are read at once", path=label)
    traces = [file for p in candidates if (file := _sniff(p, str(p), strict=False))]
    if not traces:
        raise BadTrace(
            "no trace in this folder; expected Kineto *.json or *.json.gz (torch.profiler's export_chrome_trace) "
            "or Nsight Systems *.sqlite, one per rank",
            path=label,
        )
    return traces


def _unpack(path: Path, scratch: Path, limits: Limits) -> None:
    """Regular files with a trace's name, flattened and numbered; links, devices and paths upward are never followed."""
    budget = min(limits.trace_bytes * 8, max(256 << 20, path.stat().st_size * limits.ratio))
    try:
        with tarfile.open(path) as archive:
            for number, member in enumerate(archive):
                if number > limits.files:
                    raise BadTrace(f"more than {limits.files} members", path=str(path))
                name = member.name.rsplit("/", 1)[-1]
                if not member.isreg() or not name.lower().endswith(_SUFFIXES):
                    continue
                budget -= member.size
                if budget < 0:
                    raise BadTrace("unpacks to more than allowed; raise --max-trace-gb if it is yours", path=str(path))
                source = archive.extractfile(member)
                assert source is not None
                with source, (scratch / f"{number:06d}-{name}").open("wb") as target:
                    while block := source.read(1 << 20):
                        target.write(block)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadTrace(f"the archive is damaged: {error}", path=str(path)) from None


def _sniff(path: Path, label: str, *, strict: bool) -> TraceFile | None:
    """What the file is by its first bytes; None (or BadTrace when `strict`) if it is no trace at all."""
    with path.open("rb") as raw:
        head = raw.read(1 << 16)
    if head.startswith(_SQLITE_MAGIC):
        return TraceFile(path=path, label=label, format="nsys")
    if head.startswith(b"\x1f\x8b"):
        try:
            head = zlib.decompressobj(wbits=31).decompress(head, 1 << 16)
        except zlib.error as error:
            raise BadTrace(f"the gzip stream is damaged: {error}", path=label, offset=0) from None
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if start.startswith(b"[") or (start.startswith(b"{") and (b'"traceEvents"' in head or len(head) >= 1 << 16)):
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

    def __init__(self, stream: BinaryIO, label: str, limit: int) -> None:
        self._stream, self._label, self._limit, self._count = stream, label, limit, 0

    def read(self, size: int = -1) -> bytes:
        try:
            block = self._stream.read(size)
        except EOFError:
            raise BadTrace("the gzip stream ends too early: truncated", path=self._label, offset=self._count) from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise BadTrace(f"the gzip stream is damaged: {error}", path=self._label, offset=self._count) from None
        except OSError as error:
            raise BadTrace(f"reading failed: {error.strerror}", path=self._label, offset=self._count) from None
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
    """The decompressed bytes of a trace, in order, never more than `limits` allows."""
    raw = file.path.open("rb")
    if raw.peek(2)[:2] != b"\x1f\x8b":
        return _Capped(raw, file.label, limits.trace_bytes)
    allowed = max(256 << 20, file.path.stat().st_size * limits.ratio)
    return _Capped(gzip.open(raw), file.label, min(limits.trace_bytes, allowed))  # type: ignore[arg-type]
