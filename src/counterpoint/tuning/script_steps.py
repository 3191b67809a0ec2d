"""Record the steps of a training script, or run and time them by several variants alternately, on all ranks.

The script is not changed. A step ends when the script's first optimizer steps. The script's call of
`counterpoint.overlap` returns an object that can be switched: to torch's collectives, and to the choices of a file. All
ranks count the same steps, so that they switch at the same step; rank 0 alone decides the number of rounds.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import counterpoint
from counterpoint.errors import Misconfigured
from counterpoint.monitoring.recording import Recording
from counterpoint.processes import write_whole
from counterpoint.tuning.script_launch import ALIVE, RESULT, OverlapCalls, ScriptResult, ScriptTask, ScriptVariant

STOCK = ScriptVariant(name="stock", file=None)
_KEY = "counterpoint/tuning"  # in the process group's store
_LEFT = "torch's collectives, while counterpoint tune records or compares"


class ScriptFinished(BaseException):
    """Ends the script from inside its optimizer step; no `except Exception` catches it."""


class SwitchedOverlap:
    """Replaces the object that `counterpoint.overlap` returns, and changes the model's communication between steps.

    `options` are the arguments of the script's call; the variant's file replaces `tuned` among them.
    """

    def __init__(self, overlap: Callable[..., Any], model: nn.Module, options: dict[str, Any]) -> None:
        self._overlap, self._model, self._options = overlap, model, options
        self._real: Any = None
        self.is_closed = False
        self.is_fixed = isinstance(model, DistributedDataParallel)  # DDP keeps its communication hook for good

    def use(self, variant: ScriptVariant) -> None:
        """Switch the model to a variant; all ranks call this between the same two steps."""
        if self.is_closed:
            raise Misconfigured("the script has taken counterpoint.overlap back by restore(); leave that out")
        if self._real is not None:
            self._real.restore()
            self._real = None
        if variant.file is not None:
            self._real = self._overlap(self._model, **(self._options | {"tuned": variant.file}))

    def __enter__(self) -> SwitchedOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def __str__(self) -> str:
        return _LEFT if self._real is None else str(self._real)

    def report(self) -> Any:
        """Return the report of the current variant, or a sentence if torch's collectives run."""
        return _LEFT if self._real is None else self._real.report()

    def followed(self) -> str:
        """Return in words how many of the current file's choices have been followed so far; "" if torch runs."""
        said = "" if self._real is None else str(getattr(self._real.report(), "tuned", ""))
        return said.partition(": ")[2]  # without the name of the file

    def check(self) -> None:
        """Raise the error that ended the communication, if there was one."""
        if self._real is not None:
            self._real.check()

    def reset_iter_state(self) -> None:
        """Discard a forward or backward pass that an exception interrupted."""
        if self._real is not None:
            self._real.reset_iter_state()

    def restore(self) -> None:
        """Put torch's collectives back for good."""
        if not self.is_closed and self._real is not None:
            self._real.restore()
        self._real, self.is_closed = None, True


@contextmanager
def answering_overlap(answer: Callable[..., Any]) -> Iterator[None]:
    """Replace `counterpoint.overlap` in the `with` block by `answer(overlap, model, **options)`."""
    module: Any = importlib.import_module("counterpoint.parallel.overlap")
    overlap, public = module.overlap, cast(Any, counterpoint)
    module.overlap = public.overlap = partial(answer, overlap)
    try:
        yield
    finally:
        module.overlap = overlap
        del public.overlap  # the package finds it by itself again


class ScriptSteps:
    """Carries out a `ScriptTask`; call `advance` after each of the script's steps. `rank` is the launcher's RANK."""

    def __init__(self, task: ScriptTask, rank: int) -> None:
        self.task, self.folder, self.rank = task, Path(task.folder), rank
        self.count = 0
        self.is_done = False
        self._overlaps: list[SwitchedOverlap] = []
        self._variant = task.variants[0] if len(task.variants) == 1 else STOCK
        self._blocks: list[list[float]] = [[] for _ in task.variants]
        self._followed: dict[str, str] = {}  # by name of a variant
        self._course = self._compared() if task.variants else self._recorded()
        next(self._course)

    @contextmanager
    def intercepted(self) -> Iterator[None]:
        """Make `counterpoint.overlap` return `SwitchedOverlap` objects in the `with` block."""

        def answered(overlap: Callable[..., Any], model: nn.Module, **options: Any) -> SwitchedOverlap:
            switched = SwitchedOverlap(overlap, model, options)
            if switched.is_fixed and len(self.task.variants) > 1:
                raise Misconfigured("DistributedDataParallel cannot be switched between steps")
            switched.use(self._variant)
            self._overlaps.append(switched)
            return switched

        with answering_overlap(answered):
            yield

    def advance(self) -> None:
        """Continue the task after a step; raise ScriptFinished after the last one."""
        self.count += 1
        if self.rank == 0:
            (self.folder / ALIVE).touch()
        try:
            next(self._course)
        except StopIteration:
            self.is_done = True
            raise ScriptFinished from None

    def _recorded(self) -> Iterator[None]:
        """Record the steps after the warm-up; each `yield` waits for the end of a step."""
        for _ in range(self.task.warmup_steps):
            yield
        recording = Recording(self.task.recorded_steps, record_shapes=True, with_stack=False)
        while True:
            yield
            if recording.step():
                break
        recording.write(self.folder / f"rank{self.rank}.json")
        if self.rank == 0:
            write_whole(self.folder / RESULT, self._result())

    def _compared(self) -> Iterator[None]:
        """Time blocks of steps for each variant alternately, in reverse order every second round, yielding at steps."""
        task = self.task
        for _ in range(task.warmup_steps):
            yield
        begun = time.perf_counter()
        for number in range(task.rounds):
            order = range(len(task.variants))
            for index in order if number % 2 == 0 else reversed(order):
                self._use(task.variants[index])
                for _ in range(task.dropped_steps):
                    yield
                started = _now()
                for _ in range(task.block_steps):
                    yield
                self._blocks[index].append((_now() - started) / task.block_steps * 1e6)
            elapsed = time.perf_counter() - begun
            is_last = number + 1 >= task.rounds or (
                number + 1 >= task.min_rounds and elapsed * (number + 2) / (number + 1) > task.budget_s
            )
            go_on = self._agreed(number, go_on=not is_last)
            self.is_done = number + 1 >= task.min_rounds  # a script that ends from here on has made enough steps
            if not go_on:
                break
        for overlap in self._overlaps:
            overlap.restore()

    def _use(self, variant: ScriptVariant) -> None:
        if variant == self._variant or len(self.task.variants) == 1:
            return
        self._note_followed()
        self._variant = variant
        for overlap in self._overlaps:
            overlap.use(variant)

    def _note_followed(self) -> None:
        said = [text for overlap in self._overlaps if (text := overlap.followed())]
        if said:
            self._followed[self._variant.name] = "; ".join(said)

    def _agreed(self, number: int, *, go_on: bool) -> bool:
        """Gather all ranks' times of this round on rank 0, and return whether rank 0 goes on to another round."""
        mine = [each[number] for each in self._blocks]
        if not dist.is_initialized():
            self._keep(number, [mine])
            return go_on
        store: Any = dist.distributed_c10d._get_default_store()
        if dist.get_rank() > 0:
            store.set(f"{_KEY}/{number}/{dist.get_rank()}", msgspec.json.encode(mine))
            return bool(store.get(f"{_KEY}/{number}/go") == b"1")
        others = [store.get(f"{_KEY}/{number}/{rank}") for rank in range(1, dist.get_world_size())]
        self._keep(number, [mine, *(msgspec.json.decode(each, type=list[float]) for each in others)])
        store.set(f"{_KEY}/{number}/go", b"1" if go_on else b"0")
        return go_on

    def _keep(self, number: int, ranks: list[list[float]]) -> None:
        """Store the slowest rank's times of a round, and write the result once there are enough rounds."""
        self._note_followed()
        for index, each in enumerate(self._blocks):
            each[number] = max(times[index] for times in ranks)
        if number + 1 >= self.task.min_rounds:
            write_whole(self.folder / RESULT, self._result())

    def _result(self) -> ScriptResult:
        calls: OverlapCalls = "never"
        if self._overlaps:
            calls = "fixed" if any(one.is_fixed for one in self._overlaps) else "switched"
        return ScriptResult(
            overlap=calls,
            device="cuda" if torch.cuda.is_initialized() else "cpu",
            world_size=dist.get_world_size() if dist.is_initialized() else 1,
            blocks_us=tuple(map(tuple, self._blocks)),
            followed=self._followed,
        )


def _now() -> float:
    """Wait for all queued GPU work of this rank, and return the time in seconds."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
