"""Small trainings for test_watch.py, run by every rank of a pool."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

import counterpoint
from counterpoint.measurement.session import Session
from counterpoint.monitoring import beside
from counterpoint.monitoring.api import TrainingWatch
from counterpoint.monitoring.exporters import JsonLines, Prometheus
from counterpoint.records.watch import WatchedStep
from counterpoint.rehearsed import rank_variables

# In a training what diagnoses gives way to everybody; on two busy cores it would never come to its turn here.
beside.COMMAND = (*beside.COMMAND[:2], beside.COMMAND[2].replace("os.nice(19); ", ""))
STALL_S = 0.5  # far more than four ranks on two busy cores wait for each other


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __enter__(self) -> list[str]:
        logging.getLogger("counterpoint.watch").addHandler(self)
        return self.lines

    def __exit__(self, *_: object) -> None:
        logging.getLogger("counterpoint.watch").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Planted(Exception):
    """The training's own failure."""


@contextmanager
def scratch(folder: str) -> Iterator[Callable[[], list[str]]]:
    """Have temporary files made in a folder; yields what says which are left, with the processes beside this one."""
    path = Path(folder, "scratch")
    path.mkdir(exist_ok=True)
    before, tempfile.tempdir = tempfile.tempdir, str(path)
    try:
        yield lambda: [found.name for found in path.glob("counterpoint-*")] + children()
    finally:
        tempfile.tempdir = before


def children() -> list[str]:
    """Command lines of the processes beside this one."""
    listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, check=False)
    return [line for line in listed.stdout.decode().splitlines() if "counterpoint.monitoring" in line]


def trained(
    watched: AbstractContextManager[Any],
    *,
    steps: int,
    stall_s: float = 0.0,
    at: Mapping[int, Callable[[], object]] | None = None,
) -> None:
    """Train a small model; something holds up every step on the last rank; calls of `at` come after their step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watched:
        for step in range(1, steps + 1):
            if stall_s and dist.get_rank() == dist.get_world_size() - 1:
                with record_function("tokenizer.encode"):
                    time.sleep(stall_s)
            model(torch.randn(64, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            (at or {}).get(step, int)()
        if isinstance(watched, TrainingWatch) and not at:
            watched.close(linger=240.0)  # machines may be busy, and what diagnoses is nice to everybody


def planted_stall(session: Session, folder: str) -> tuple[list[str], list[str]]:
    """Train with a stall; return what is logged and what is left."""
    export: list[Callable[[WatchedStep], None]] = [
        JsonLines(Path(folder, "watch.jsonl")),
        Prometheus(Path(folder, "job.prom")),
    ]
    with Lines() as lines, scratch(folder) as left:
        trained(counterpoint.watch(every=10, export=export), steps=10, stall_s=STALL_S)
        dist.barrier()
        return lines, left()


def shared_folder(session: Session, folder: str, rehearsed: bool) -> tuple[list[str], list[str]]:
    """Train as on two hosts of two ranks with a common folder; return what is logged and what is left in the folder."""
    place = {"LOCAL_RANK": str(dist.get_rank() % 2), "LOCAL_WORLD_SIZE": "2"}
    if rehearsed:
        place = rank_variables(dist.get_rank(), ranks_per_host=2, gpus=("0",))
    with patch.dict(os.environ, place), Lines() as lines:
        trained(counterpoint.watch(every=10, folder=folder), steps=10)
    dist.barrier()
    return lines, [path.name for path in Path(folder).iterdir()]


def exception(session: Session, folder: str, step: int) -> tuple[list[str], list[str]]:
    """Fail at a step, as of step 10 with a diagnosis under way; return what is logged and what is left."""

    def fail() -> None:
        dist.barrier()  # a rank that fails takes its host's folder away from ranks that are still recording
        raise Planted

    with Lines() as lines, scratch(folder) as left:
        try:
            trained(counterpoint.watch(every=10), steps=20, at={step: fail})
        except Planted:
            lines.append("planted")
        dist.barrier()
        return lines, left()


def busy(session: Session) -> list[str]:
    """Let every diagnosis take long; return what is logged."""
    command, beside.COMMAND = beside.COMMAND, (sys.executable, "-c", "import time; time.sleep(600)")
    watch = counterpoint.watch(every=10)

    def end() -> None:
        dist.barrier()
        watch.close(linger=0.0)

    try:
        with Lines() as lines:
            trained(watch, steps=20, at={20: end})
        return lines + children()
    finally:
        beside.COMMAND = command


def broken(session: Session) -> list[str]:
    """Let every diagnosis fail."""
    command, beside.COMMAND = beside.COMMAND, (sys.executable, "-c", "import sys; sys.exit('out of luck')")
    try:
        with Lines() as lines:
            trained(counterpoint.watch(every=10), steps=12)
        return lines
    finally:
        beside.COMMAND = command


def another_profiler(session: Session, first: int, last: int) -> tuple[list[str], int]:
    """Use a profiler of one's own on rank 1 after steps `first` to `last`; return what is logged and what it saw."""
    own = profile(activities=[ProfilerActivity.CPU], acc_events=True)
    at = {first: own.start, last: own.stop} if dist.get_rank() == 1 else {}
    with Lines() as lines:
        trained(counterpoint.watch(every=10), steps=14, at=at)
    return lines, len(own.events()) if at else 0


def only_one_rank(session: Session) -> list[str]:
    """Watch on rank 0 alone: a mistake, which must not hold up the others."""
    with Lines() as lines:
        trained(counterpoint.watch(every=10) if dist.get_rank() == 0 else nullcontext(), steps=12)
    return lines


def own_counts(session: Session) -> list[int]:
    """Count by two optimizers, by calls, and by both."""
    one, other = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(2))
    counts = []
    for optimizers, calls in (([one, other], False), ([], True), ([one, other], True)):
        with counterpoint.watch(every=100) as watch:
            for _ in range(5):
                for optimizer in optimizers:
                    optimizer.step()
                if calls:
                    watch.step()
        counts.append(watch.count)
    return counts
