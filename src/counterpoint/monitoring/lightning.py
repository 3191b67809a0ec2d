"""Run `counterpoint.watch` in PyTorch Lightning: `Trainer(callbacks=[LightningWatch(every=500)])`."""

from __future__ import annotations

from typing import Any

from counterpoint.monitoring.api import TrainingWatch, watch

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    from pytorch_lightning.callbacks import Callback


class LightningWatch(Callback):
    """Watches a Lightning training; takes the arguments of `counterpoint.watch`, and counts `global_step`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        watch(*args, **options)  # wrong arguments are refused here, not when the training starts
        self._arguments, self._options = args, options
        self._watch: TrainingWatch | None = None
        self._seen = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to count steps."""
        self._watch, self._seen = watch(*self._arguments, **self._options), trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """Count a step if the optimizers stepped after this batch; with gradient accumulation they often do not."""
        if self._watch is not None and trainer.global_step != self._seen:
            self._seen = trainer.global_step
            self._watch.step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the last diagnosis, and end the watch."""
        if self._watch is not None:
            self._watch.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the watch at once, without waiting for a diagnosis."""
        if self._watch is not None:
            self._watch.close(linger=0.0)
