"""A Kineto file into columns: in one go, or a large one by two processes at once, half each.

Where the second half begins is guessed, at something in the middle that looks like the beginning of an event. The guess
is proved by reading: JSON is read from left to right, so if the first half decodes as whole events up to there, it is
one. If it does not, or if either half is bad, the file is read again in one go, which also words the error.
"""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from counterpoint.errors import BadTrace
from counterpoint.trace.chunks import EventRuns
from counterpoint.trace.columns import Intern
from counterpoint.trace.kineto_columns import Columns, absorb
from counterpoint.trace.kineto_events import Event
from counterpoint.trace.source import Limits, TraceFile, open_bytes
from counterpoint.trace.timeline import CollectiveInfo

__all__ = ["read_events", "read_halves"]

_LARGE_BYTES = 64 << 20  # below, starting a process takes longer than it saves
_EVENT = re.compile(rb"\}\s*,\s*(\{\s*\"(?:ph|name|cat)\"\s*:)")


class Half(msgspec.Struct, kw_only=True):
    """Columns on their way from one process to the other: arrays as (dtype, bytes)."""

    names: list[str]
    shapes: list[bytes]
    grids: list[bytes]
    threads: list[list[Any]]
    gpu: dict[str, tuple[str, bytes]]
    host: dict[str, tuple[str, bytes]]
    infos: list[CollectiveInfo]
    info_by_external: dict[int, int]
    count: int
    base_us: int | None
    comm_rank: int | None
    header: dict[str, Any]


def read_events(
    file: TraceFile,
    limits: Limits,
    *,
    begin: int | None = None,
    stop: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[Columns, dict[str, Any]]:
    """The events of a file, or of the part from byte `begin` to before `stop`, and the other keys met on the way.

    Raises:
        BadTrace: with file and byte offset.
    """
    columns = Columns()
    collecting = gc.isenabled()
    gc.disable()  # millions of short-lived structs that cannot form cycles
    try:
        with open_bytes(file, limits, begin=begin or 0, stop=stop) as stream:
            runs = EventRuns(stream, file.label, Event, begins_at=begin, open_ended=stop is not None)
            for run, events in runs:
                absorb(columns, runs, run, events)
                if progress:
                    progress(columns.count)
    finally:
        if collecting:
            gc.enable()
    return columns, runs.header


def read_halves(
    file: TraceFile, limits: Limits, progress: Callable[[int], None] | None
) -> tuple[Columns, dict[str, Any]] | None:
    """What `read_events` gives, by two processes; None where that cannot be done, for whatever reason."""
    middle = _middle(file, limits)
    if middle is None:
        return None
    command = [sys.executable, "-m", "counterpoint.trace.kineto_halves", str(file.path), file.label, str(middle)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as other:
        try:
            assert other.stdout is not None
            columns, header = read_events(file, limits, stop=middle, progress=progress)
            message = other.stdout.read()
        except BaseException as error:
            other.kill()
            if isinstance(error, BadTrace):
                return None
            raise
    if other.returncode != 0:
        return None
    half = msgspec.msgpack.decode(message, type=Half)
    columns.extend(_unpacked(half))
    return columns, header | half.header


def _middle(file: TraceFile, limits: Limits) -> int | None:
    """Where an event seems to begin near the middle of a large file of plain text."""
    size = file.path.stat().st_size
    if not _LARGE_BYTES <= size <= limits.trace_bytes:
        return None
    with file.path.open("rb") as raw:
        if raw.read(2) == b"\x1f\x8b":
            return None
        raw.seek(size // 2)
        found = _EVENT.search(raw.read(1 << 20))
    return size // 2 + found.start(1) if found else None


def _packed(columns: Columns, header: dict[str, Any]) -> Half:
    def arrays(table: dict[str, list[Any]]) -> dict[str, tuple[str, bytes]]:
        joined = {name: np.concatenate(parts) for name, parts in table.items()}
        return {name: (values.dtype.str, values.tobytes()) for name, values in joined.items()}

    return Half(
        names=list(columns.names),
        shapes=list(columns.shapes),
        grids=list(columns.grids),
        threads=[list(thread) for thread in columns.threads],
        gpu=arrays(columns.gpu),
        host=arrays(columns.host),
        infos=columns.infos,
        info_by_external=columns.info_by_external,
        count=columns.count,
        base_us=columns.base_us,
        comm_rank=columns.comm_rank,
        header=header,
    )


def _unpacked(half: Half) -> Columns:
    def arrays(table: dict[str, tuple[str, bytes]]) -> dict[str, list[Any]]:
        return {name: [np.frombuffer(values, np.dtype(kind))] for name, (kind, values) in table.items()}

    def numbered(keys: Any) -> Intern[Any]:
        return Intern({key: number for number, key in enumerate(keys)})

    return Columns(
        names=numbered(half.names),
        shapes=numbered(half.shapes),
        grids=numbered(half.grids),
        threads=numbered(tuple(thread) for thread in half.threads),
        gpu=arrays(half.gpu),
        host=arrays(half.host),
        infos=half.infos,
        info_by_external=half.info_by_external,
        count=half.count,
        base_us=half.base_us,
        comm_rank=half.comm_rank,
    )


if __name__ == "__main__":  # the process that reads the second half; what it has to say of a bad file is said again
    path, label, begin = sys.argv[1:]
    trace = TraceFile(path=Path(path), label=label, format="kineto")
    sys.stdout.buffer.write(msgspec.msgpack.encode(_packed(*read_events(trace, Limits(), begin=int(begin)))))
