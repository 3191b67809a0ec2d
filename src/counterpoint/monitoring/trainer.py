"""Run `counterpoint.watch` in Hugging Face's Trainer: `Trainer(..., callbacks=[TrainerWatch(every=500)])`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from counterpoint.monitoring.api import TrainingWatch, watch


class TrainerWatch(TrainerCallback):
    """Watches a `Trainer`'s training; takes the arguments of `counterpoint.watch`, and counts `global_step`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        watch(*args, **options)  # wrong arguments are refused here, not when the training starts
        self._arguments, self._options = args, options
        self._watch: TrainingWatch | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin to count steps."""
        self._watch = watch(*self._arguments, **self._options)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count a training step."""
        if self._watch is not None:
            self._watch.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for the last diagnosis, and end the watch."""
        if self._watch is not None:
            self._watch.close()
