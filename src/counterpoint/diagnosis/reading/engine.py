"""Read and digest every rank: in this process, in parallel processes, or on a Dask cluster that has the files.

Every engine calls the same function, `digest_file`, for each file, so all give the same digests in the same order.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

from counterpoint.diagnosis.reading.digest import RankDigest, digest
from counterpoint.errors import BadTrace, CounterpointError, Misconfigured, Unsupported
from counterpoint.trace.kineto import read_kineto
from counterpoint.trace.source import Limits, TraceFile

Progress = Callable[[int, int, str], None]  # files done, number of files, text about the current work
_KEPT_BYTES = 16 << 20
_SMALL_BYTES = 4 << 20  # total bytes below which starting processes takes longer than reading


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Describes how traces are read; raises `Misconfigured` if an option has no effect with the chosen engine."""

    name: str = "local"  # "local" (processes of this machine) or "dask"
    workers: int | None = None  # local only: number of processes; None: one per core that this process may use
    scheduler: str | None = None  # dask only, and required there: the scheduler's address, as in `tcp://host:8786`

    def __post_init__(self) -> None:
        if self.name not in ("local", "dask"):
            raise Misconfigured(f"engine {self.name!r}; one of local, dask")
        if self.name == "dask" and not self.scheduler:
            raise Misconfigured("engine dask needs the address of a scheduler: --scheduler tcp://HOST:8786")
        if self.name == "local" and self.scheduler:
            raise Misconfigured("a scheduler is only used by --engine dask; drop it or choose that engine")
        if self.name == "dask" and self.workers is not None:
            raise Misconfigured("the number of workers is the Dask cluster's own; drop --workers")
        if self.workers is not None and self.workers < 1:
            raise Misconfigured(f"{self.workers} workers; at least 1")


def digest_file(file: TraceFile, limits: Limits) -> list[RankDigest]:
    """Return the digests of one file: mostly one rank for Kineto, every rank of the export for Nsight Systems."""
    if file.format == "nsys":
        from counterpoint.trace.nsys import read_nsys

        try:
            return [replace(digest(timeline), path=file.label) for timeline in read_nsys(file.path)]
        except BadTrace as error:  # the reader knows only the path, which may be a temporary one from an archive
            raise BadTrace(error.reason, path=file.label, offset=error.offset) from None
    return [digest(timeline) for timeline in read_kineto(file, limits)]


def digest_all(
    files: list[TraceFile], limits: Limits, engine: Engine, progress: Progress | None = None
) -> list[RankDigest]:
    """Return digests in the order of `files`.

    Raises `BadTrace` for the first file (in that order) that cannot be read, `CounterpointError` if a process or worker
    died, and `Unsupported` if dask is not installed or its scheduler does not answer.
    """
    tell = progress or (lambda done, total, what: None)
    if engine.name == "dask":
        return _on_dask(files, limits, engine, tell)
    workers = engine.workers or len(os.sched_getaffinity(0))
    small = sum(f.path.stat().st_size for f in files) < _SMALL_BYTES and engine.workers is None
    if min(workers, len(files)) == 1 or small:
        return _in_turn(files, limits, tell)
    return _in_processes(files, limits, min(workers, len(files)), tell)


def _in_turn(files: list[TraceFile], limits: Limits, tell: Progress) -> list[RankDigest]:
    found: list[RankDigest] = []
    for done, file in enumerate(files):
        tell(done, len(files), f"reading {file.label}")
        if file.format == "kineto":
            timelines = read_kineto(
                file,
                limits,
                progress=lambda events, at=done: tell(at, len(files), f"{events:,} events"),  # type: ignore[misc]
            )
            tell(done, len(files), "digesting")
            found += [digest(timeline) for timeline in timelines]
        else:
            found += digest_file(file, limits)
    return found


def _in_processes(files: list[TraceFile], limits: Limits, workers: int, tell: Progress) -> list[RankDigest]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker) as pool:
        with _main_left_alone():
            futures = [pool.submit(digest_file, file, limits) for file in files]
        pool.submit(int)  # the pool looks for its processes before it starts one: from here on it watches them all
        try:
            return _results(futures, as_completed(futures), tell)
        except BrokenProcessPool:
            raise CounterpointError(
                "a process that read a rank died; if it ran out of memory, ask for fewer at once (--workers 1)"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _results(futures: list[Any], completed: Iterable[Any], tell: Progress) -> list[RankDigest]:
    """Return the digests in the order of `futures`; as soon as one fails, raise the error of the first failed one."""
    for done, future in enumerate(completed):
        tell(done + 1, len(futures), "ranks read")
        if future.exception() is not None:
            break
    return [d for future in futures for d in future.result()]


@contextmanager
def _main_left_alone() -> Iterator[None]:
    """Keep spawned processes from importing the caller's script, since they need only functions of this package."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _start_worker() -> None:
    """Let Ctrl-C, which reaches every process of the terminal, end this worker at once and without a traceback.

    Let it keep freed memory, too, since it reads and frees thousands of blocks: glibc returns free memory at the top of
    its heap only beyond twice the largest mapping freed so far, so one large mapping is freed (untouched) first.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    np.empty(_KEPT_BYTES, np.uint8)


def _on_dask(files: list[TraceFile], limits: Limits, engine: Engine, tell: Progress) -> list[RankDigest]:
    try:
        from distributed import CancelledError, Client, KilledWorker
        from distributed import as_completed as dask_completed
        from distributed.comm import CommClosedError
    except ImportError:
        raise Unsupported("engine dask needs the package distributed: pip install 'counterpoint[cluster]'") from None
    try:
        client = Client(engine.scheduler, timeout="10s", set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise Unsupported(f"no Dask scheduler answers at {engine.scheduler}: {error}") from None
    with client, client.as_current():
        futures = client.map(digest_file, files, [limits] * len(files), pure=False)
        try:
            return _results(futures, dask_completed(futures), tell)
        except (KilledWorker, CancelledError, CommClosedError) as error:
            raise CounterpointError(f"the Dask cluster at {engine.scheduler} lost a rank's work: {error}") from None
