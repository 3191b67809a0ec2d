"""Implement `counterpoint.watch(...)`: count steps, record some of them, and have another process diagnose them.

No failure here reaches the training: it becomes one warning in the log, and the round is given up. Ranks agree on
the rounds by counting alone; what they tell each other is the names of folders, by the process group's store. A rank
writes its trace into the folder of its host's first rank, which has the trace read.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch.distributed as dist

from counterpoint.errors import CounterpointError, Misconfigured, printable
from counterpoint.monitoring import beside
from counterpoint.monitoring.optimizer_steps import OptimizerSteps
from counterpoint.monitoring.recording import OtherProfilers, Recording
from counterpoint.records.diagnosis import WatchedStep
from counterpoint.rehearsed import local_rank

Exporter = Callable[[WatchedStep], None]
_LINGER_S = 30.0  # so long `close` waits for the last diagnosis
_KEY = "counterpoint/watch"  # prefix of keys in the process group's store: names of the folders for traces and digests
log = logging.getLogger("counterpoint.watch")


def watch(
    every: int = 500,
    *,
    steps: int = 2,
    folder: str | os.PathLike[str] | None = None,
    export: Exporter | Sequence[Exporter] = (),
    record_shapes: bool = False,
    with_stack: bool = False,
) -> TrainingWatch:
    """Return a watch, a context manager to use around the training loop on every rank.

    The last `steps` of each `every` steps are recorded and diagnosed beside the training. Rank 0 says in one line of
    the log `counterpoint.watch` how long they took and who was late.

    Args:
        every: number of steps between log lines, counted by the calls of the first optimizer, or of
            `TrainingWatch.step`.
        steps: number of steps recorded at a time.
        folder: folder on storage that all hosts see; None: only the ranks on rank 0's host are diagnosed.
        export: called on rank 0 with each `WatchedStep`; `counterpoint.monitoring.exporters` has some.
        record_shapes: record tensors' shapes, which distinguish kernels of one name; recorded steps take longer.
        with_stack: record Python functions, to name code in which no operation ran; recorded steps take much longer.

    Raises:
        Misconfigured: a number of steps that cannot be recorded, or a folder that does not exist.
    """
    if steps < 1 or every < steps + 3:
        raise Misconfigured(
            f"{steps} steps recorded every {every}: record at least 1, every {max(steps, 1) + 3} steps or more"
        )
    exporters = (export,) if callable(export) else tuple(export)
    shared = None if folder is None else Path(folder)
    if shared is not None and not shared.is_dir():
        raise Misconfigured(f"folder {shared}: no such folder; make it, on storage that all hosts see")
    return TrainingWatch(every, steps, shared, exporters, {"record_shapes": record_shapes, "with_stack": with_stack})


class TrainingWatch:
    """Counts training steps, and has some of them recorded and diagnosed; made by `counterpoint.watch`.

    `count` is the number of steps so far.
    """

    def __init__(
        self, every: int, steps: int, folder: Path | None, exporters: tuple[Exporter, ...], settings: dict[str, bool]
    ) -> None:
        self.count = 0
        self._every, self._steps, self._folder = every, steps, folder
        self._exporters, self._settings = exporters, settings
        self._pid = os.getpid()
        self._optimizer_steps: OptimizerSteps | None = None
        self._recording: Recording | None = None
        self._unrecorded = (0, 0.0)  # step and time since which nothing is recorded
        self._usual_us: float | None = None  # mean time of a step that is not recorded
        self._others = OtherProfilers(give_way=self._give_way)
        self._ready = False
        self._made: dict[str, Path] = {}  # folders that this rank has made, by their keys in the store
        self._reader: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = False
        self._handler: logging.Handler | None = None

    def __enter__(self) -> TrainingWatch:
        self._optimizer_steps = OptimizerSteps(self._advance)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(linger=_LINGER_S if kind is None else 0.0)

    def step(self) -> None:
        """Count a training step; call this after each step if no torch optimizer steps exactly once per training step.

        After the first call, only these calls count as steps, no longer an optimizer's.
        """
        if self._optimizer_steps is not None:
            self._optimizer_steps.remove()
            self._optimizer_steps = None
            if self.count:
                return  # the optimizer has counted this step
        self._advance()

    def close(self, linger: float = _LINGER_S) -> None:
        """End the watch: wait up to `linger` seconds for a diagnosis under way, and leave no process or file behind."""
        if self._closing or os.getpid() != self._pid:
            return
        if self._optimizer_steps is not None:
            self._optimizer_steps.remove()
            self._optimizer_steps = None
        try:
            self._drop()
            self._others.ignore()
            if self._reader is not None:
                self._reader.join(linger)
            self._closing = True
            if self._process is not None:
                self._process.kill()
            if self._reader is not None:
                self._reader.join(1.0)
            for path in self._made.values():
                shutil.rmtree(path, ignore_errors=True)
            atexit.unregister(self.close)
            if self._handler is not None:
                log.removeHandler(self._handler)
        except Exception as error:
            log.warning("could not end cleanly: %s", _said(error))

    def _advance(self) -> None:
        """Begin, continue or end a recording at the end of a step."""
        if self._closing:
            return
        self.count += 1
        try:
            if not self._ready:
                self._prepare()
            elif self._recording is not None:
                if self._recording.step():
                    self._finish()
            elif (self.count + self._steps + 1) % self._every == 0:
                self._begin()
        except Exception as error:
            self._drop()
            self._skip(f"recording failed: {_said(error)}")

    def _begin(self) -> None:
        if self._reader is not None and self._reader.is_alive():
            self._skip("the diagnosis before is still under way")
        elif self._others.any():
            self._skip("another profiler is in use")
        else:
            step, begun = self._unrecorded
            self._usual_us = (time.perf_counter() - begun) * 1e6 / max(self.count - step, 1)
            self._recording = self._others.own(lambda: Recording(self._steps, **self._settings))

    def _prepare(self) -> None:
        """Make folders, set up the log and load torch's profiler, once: after the first step, which is slow anyway."""
        self._ready = True
        atexit.register(self.close, linger=0.0)
        self._others.observe()
        rank = _rank()
        if rank == _first_rank():
            self._make(f"traces/{rank}", None)
        if rank == 0:
            self._make("digests", self._folder)
            if log.level == logging.NOTSET:
                log.setLevel(logging.INFO)  # where handlers exist, they get the line
            if not log.hasHandlers():
                self._handler = logging.StreamHandler()
                self._handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
                log.addHandler(self._handler)
        if not self._others.any():
            self._others.own(lambda: Recording(1, **self._settings)).stop()
        self._unrecorded = self.count, time.perf_counter()

    def _finish(self) -> None:
        recording, self._recording = self._recording, None
        assert recording is not None
        rank, first = _rank(), _first_rank()
        with beside.writing(self._seen(f"traces/{first}") / f"step{self.count}", f"rank{rank}.json") as path:
            recording.write(path)
        self._unrecorded = self.count, time.perf_counter()
        if rank == first:
            arguments = (self.count,)
            self._reader = threading.Thread(
                target=self._diagnose, args=arguments, name="counterpoint.watch", daemon=True
            )
            self._reader.start()

    def _drop(self) -> None:
        """Stop a recording that is under way, and throw it away."""
        recording, self._recording = self._recording, None
        if recording is not None:
            with suppress(Exception):
                recording.stop()

    def _give_way(self) -> None:
        """Drop a recording under way, since another profiler is about to start."""
        if self._recording is not None:
            self._drop()
            self._skip("another profiler was started")

    def _skip(self, why: str) -> None:
        """Tell the log and the first rank of this host why this rank skips one recording."""
        log.warning("step %d: not diagnosed: %s", self.count, why)
        ends_at = self.count + -self.count % self._every
        with suppress(Exception):  # if this fails, the first rank waits for this rank until its time-out
            folder = self._seen(f"traces/{_first_rank()}") / f"step{ends_at}"
            beside.put(folder, f"rank{_rank()}.missing", why.encode())

    def _diagnose(self, step: int) -> None:
        """Have another process diagnose this host's traces; log the result and call the exporters. Runs in a thread."""
        try:
            record = self._ask(step)
            if record is not None:
                log.info("%s", record.line)
                for exporter in self._exporters:
                    self._export(exporter, record)
        except Exception as error:
            if not self._closing:
                log.warning("step %d: not diagnosed: %s", step, _said(error))

    def _ask(self, step: int) -> WatchedStep | None:
        """Run the diagnosis in another process, and return its `WatchedStep`; None on ranks other than 0."""
        rank = _rank()
        todo = beside.Round(
            parent=os.getpid(), traces=str(self._made[f"traces/{rank}"] / f"step{step}"), ranks=_ranks_here(),
            digests=str(self._seen("digests") / f"step{step}"), world_size=_world_size(), step=step,
            usual_us=self._usual_us,
        )  # fmt: skip
        pipe = subprocess.PIPE
        process = subprocess.Popen(beside.COMMAND, stdin=pipe, stdout=pipe, stderr=pipe, env=beside.environment())
        self._process = process
        if self._closing:
            process.kill()
        out, err = process.communicate(msgspec.json.encode(todo))
        if process.returncode != 0:
            lines = err.decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"]
            raise CounterpointError(lines[-1])
        return msgspec.json.decode(out, type=WatchedStep) if rank == 0 else None

    def _export(self, exporter: Exporter, record: WatchedStep) -> None:
        try:
            exporter(record)
        except Exception as error:
            log.warning("step %d: %s failed: %s", record.step, type(exporter).__name__, _said(error))

    def _make(self, key: str, where: Path | None) -> None:
        """Make a folder and tell the other ranks its name through the process group's store."""
        self._made[key] = Path(tempfile.mkdtemp(prefix="counterpoint-watch-", dir=where))
        if _world_size() > 1:
            _store().set(f"{_KEY}/{key}", str(self._made[key]))

    def _seen(self, key: str) -> Path:
        """Return the folder that another rank made at its first step; raise at once if no folder is made yet."""
        if key in self._made:
            return self._made[key]
        if _world_size() == 1 or not _store().check([f"{_KEY}/{key}"]):
            raise CounterpointError("a rank before this one has made no folder; use counterpoint.watch on all ranks")
        return Path(_store().get(f"{_KEY}/{key}").decode())


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _ranks_here() -> tuple[int, ...]:
    """Return the ranks of this host by torchrun's variables; without these variables, this rank alone."""
    rank, size = _rank(), _world_size()
    local, here = local_rank(), os.environ.get("LOCAL_WORLD_SIZE", "")
    if not (local.isdigit() and here.isdigit() and int(local) < int(here) and int(local) <= rank):
        return (rank,)
    first = rank - int(local)
    return tuple(range(first, min(first + int(here), size)))


def _first_rank() -> int:
    return _ranks_here()[0]


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _said(error: Exception) -> str:
    return printable(f"{type(error).__name__}: {error}" if not isinstance(error, CounterpointError) else str(error))
