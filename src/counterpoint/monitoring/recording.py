"""Record some steps of one rank with torch.profiler, at low cost, and never while another profiler runs."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, profile, schedule


class Recording:
    """Records `steps` steps of this rank, after one step of warm-up; call method `step` at the end of every step."""

    def __init__(self, steps: int, *, record_shapes: bool, with_stack: bool) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        _detach_afterwards()
        self._left = self._all = 1 + steps
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
            record_shapes=record_shapes,
            with_stack=with_stack,
            experimental_config=None if with_stack else _trace_only(),
        )
        with warnings.catch_warnings():  # some versions of torch warn when a recording ends
            warnings.simplefilter("ignore")
            self._profiler.start()

    def step(self) -> bool:
        """Record the end of a step; return whether all steps are recorded, so that `write` may be called."""
        if self._left == self._all and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # recordings begin after the last collective, and each operation has its launch
        self._left -= 1
        self._profiler.step()
        if self._left == 0:
            self._profiler.stop()
        return self._left == 0

    def write(self, path: Path) -> None:
        """Write the recording as Kineto JSON."""
        self._profiler.export_chrome_trace(str(path))

    def stop(self) -> None:
        """End the recording early, and discard it."""
        self._profiler.stop()


def _detach_afterwards() -> None:
    """Make CUPTI detach from the process after a recording, since an attached CUPTI slows every later launch.

    Newer versions of torch do so themselves where that is safe (CUDA 12.6 and later). If the user has set the variable,
    it stays as it is.
    """
    version = [int(part) for part in (torch.version.cuda or "0").split(".")]
    if version >= [12, 6]:
        os.environ.setdefault("TEARDOWN_CUPTI", "1")


def _trace_only() -> Any:
    """Return the profiler setting that keeps torch from building Python events; None if this torch lacks it."""
    try:
        return torch._C._profiler._ExperimentalConfig(trace_only=True)
    except (AttributeError, TypeError):
        return None


class OtherProfilers:
    """Detects profilers that the training itself uses, since of two at once the one started second breaks.

    torch tells nobody that a profiler is being prepared. So methods of torch's profiler are wrapped while a watch
    lives: `give_way` is called before another profiler is prepared, and `any` is true from then on until that one has
    ended.
    """

    def __init__(self, give_way: Callable[[], None]) -> None:
        self._give_way = give_way
        self._own = False
        self._prepared: weakref.WeakSet[Any] = weakref.WeakSet()
        self._replaced: dict[str, Any] = {}

    def any(self) -> bool:
        """Return whether another profiler records or is prepared to record."""
        return bool(getattr(autograd_profiler, "_is_profiler_enabled", False)) or len(self._prepared) > 0

    def own(self, act: Callable[[], Any]) -> Any:
        """Call `act` and return its result; a profiler that `act` prepares counts as the watch's own."""
        self._own = True
        try:
            return act()
        finally:
            self._own = False

    def observe(self) -> None:
        """Wrap torch's profiler methods."""
        methods: Any = autograd_profiler.profile
        prepare, end = methods._prepare_trace, methods.__exit__

        def noting_prepare(other: Any) -> None:
            if not self._own:
                self._give_way()
                self._prepared.add(other)
            prepare(other)

        def noting_end(other: Any, *exception: Any) -> Any:
            self._prepared.discard(other)
            return end(other, *exception)

        self._replaced = {"_prepare_trace": (prepare, noting_prepare), "__exit__": (end, noting_end)}
        for name, (_, noting) in self._replaced.items():
            setattr(autograd_profiler.profile, name, noting)

    def ignore(self) -> None:
        """Restore torch's profiler methods, unless other code has wrapped them since."""
        for name, (original, noting) in self._replaced.items():
            if getattr(autograd_profiler.profile, name) is noting:
                setattr(autograd_profiler.profile, name, original)
        self._replaced = {}
