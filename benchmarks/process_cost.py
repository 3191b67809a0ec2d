"""What a command costs as a whole: wall time and the memory of its process tree."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Cost", "run"]

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SAMPLE_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One run. `peak_mb` (10^6 bytes) is the largest sum of resident sizes over the tree, sampled every 20 ms, or the
    kernel's own peak of the largest single process if that is more; pages shared by forked processes count in each.
    """

    seconds: float
    cpu_seconds: float  # of the process and those of its descendants that it waited for
    peak_mb: float
    output: str


def run(command: Sequence[str], *, timeout_s: float = 900.0) -> Cost:
    """Run `command` in a fresh process; a non-zero exit raises RuntimeError with the end of what it said."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=err, stdin=subprocess.DEVNULL)
        sampler = _Sampler(process.pid)
        sampler.start()
        watchdog = threading.Timer(timeout_s, process.kill)
        watchdog.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
        finally:
            seconds = time.perf_counter() - start
            watchdog.cancel()
            sampler.stop()
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: exit {process.returncode}\n{err.read()[-2000:]}")
        peak_bytes = max(sampler.peak_bytes, usage.ru_maxrss * 1024)
        cpu_seconds = usage.ru_utime + usage.ru_stime
        return Cost(seconds=seconds, cpu_seconds=cpu_seconds, peak_mb=peak_bytes / 1e6, output=out.read())


class _Sampler(threading.Thread):
    """Watches the resident size of a process and all its descendants."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._done = threading.Event()
        self.peak_bytes = 0

    def run(self) -> None:
        while not self._done.wait(SAMPLE_S):
            self.peak_bytes = max(self.peak_bytes, tree_bytes(self._pid))

    def stop(self) -> None:
        self._done.set()
        self.join()


def tree_bytes(pid: int) -> int:
    """Resident bytes of `pid` and its descendants now; 0 for what has ended in the meantime."""
    total, queue = 0, [pid]
    while queue:
        folder = Path(f"/proc/{queue.pop()}")
        try:
            total += int((folder / "statm").read_text().split()[1]) * PAGE_BYTES
            for task in (folder / "task").iterdir():
                queue.extend(int(child) for child in (task / "children").read_text().split())
        except (OSError, IndexError):
            continue
    return total
