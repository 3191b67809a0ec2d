"""Count training steps by the steps of the training's first optimizer."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook


class OptimizerSteps:
    """Calls `advance` after each step of the first optimizer to step in the thread that made this object.

    Several optimizers each step once per training step, so only the one that stepped first counts; if it is deleted,
    the next one that steps.

    Args:
        advance: a function; `optimizer.step()` raises the errors of this function.
    """

    def __init__(self, advance: Callable[[], None]) -> None:
        self._advance, self._thread = advance, threading.get_ident()
        self._optimizer: weakref.ref[Any] | None = None
        self._hook = register_optimizer_step_post_hook(self._stepped)

    def remove(self) -> None:
        """Stop counting: remove the hook."""
        self._hook.remove()

    def _stepped(self, optimizer: object, *_: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is optimizer:
            self._advance()
