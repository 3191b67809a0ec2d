"""Read a Kineto file into columns: in one go, or a large one by two processes at once, half each.

Where the second half begins is guessed, at something in the middle that looks like the beginning of an event. The guess
is proved by reading: JSON is read from left to right, so if the first half decodes as whole events up to there, it is
one. If it does not, or if either half is bad, the file is read again in one go, which also words the error.
"""

from __future__ import annotations

import gc
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from counterpoint.errors import BadTrace
from counterpoint.trace.chunks import EventRuns
from counterpoint.trace.kineto_columns import Columns, absorb
from counterpoint.trace.kineto_events import KinetoEvent
from counterpoint.trace.source import Limits, TraceFile, open_bytes

__all__ = ["read_by_two_processes", "read_events"]

_LARGE_BYTES = 64 << 20  # below, starting a process takes longer than it saves
_EVENT = re.compile(rb"\}\s*,\s*(\{\s*\"(?:ph|name|cat)\"\s*:)")


def read_events(
    file: TraceFile,
    limits: Limits,
    *,
    begin: int | None = None,
    stop: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[Columns, dict[str, Any]]:
    """Return the events of a file as columns, and the other keys of the file.

    Args:
        file: where it is.
        limits: caps on what it may expand to.
        begin: byte from which on events are read; None: the file's beginning.
        stop: byte before which reading stops; None: the file's end.
        progress: called with the number of events read so far.
    """
    columns = Columns()
    collecting = gc.isenabled()
    gc.disable()  # millions of short-lived structs that cannot form cycles
    try:
        with open_bytes(file, limits, begin=begin or 0, stop=stop) as stream:
            runs = EventRuns(stream, file.label, KinetoEvent, begins_at=begin, open_ended=stop is not None)
            for run, events in runs:
                absorb(columns, runs, run, events)
                if progress:
                    progress(columns.count)
    finally:
        if collecting:
            gc.enable()
    return columns, runs.header


def read_by_two_processes(
    file: TraceFile, limits: Limits, progress: Callable[[int], None] | None
) -> tuple[Columns, dict[str, Any]] | None:
    """Return what `read_events` does, read by two processes; None where that cannot be done, for whatever reason."""
    middle = _middle(file, limits)
    if middle is None:
        return None
    command = [sys.executable, "-m", "counterpoint.trace.kineto_processes", str(file.path), file.label, str(middle)]
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
    later, trailer = pickle.loads(message)  # what our own process made, never bytes of the trace
    columns.extend(later)
    return columns, header | trailer


def _middle(file: TraceFile, limits: Limits) -> int | None:
    """Guess where an event begins near the middle of a large file of plain text."""
    size = file.path.stat().st_size
    if not _LARGE_BYTES <= size <= limits.trace_bytes:
        return None
    with file.path.open("rb") as raw:
        if raw.read(2) == b"\x1f\x8b":
            return None
        raw.seek(size // 2)
        found = _EVENT.search(raw.read(1 << 20))
    return size // 2 + found.start(1) if found else None


if __name__ == "__main__":  # the process that reads the second half; the first one words the errors
    path, label, begin = sys.argv[1:]
    trace = TraceFile(path=Path(path), label=label, format="kineto")
    pickle.dump(read_events(trace, Limits(), begin=int(begin)), sys.stdout.buffer)
