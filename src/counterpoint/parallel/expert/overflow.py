"""Count on the device the expert choices that exceed the capacity of a rank's experts, and raise an error for them."""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoint.errors import Misconfigured
from counterpoint.parallel.options import ExpertOptions


def no_room(rows: int, options: ExpertOptions) -> Misconfigured:
    """Return the error for a call in which `rows` rows exceed the capacity of a rank's experts."""
    return Misconfigured(
        f"no room for {rows} rows of a rank's experts with capacity_factor={options.capacity_factor}: "
        "give a larger one, or overflow='drop'"
    )


class RoomCheck:
    """Counts on the device the expert choices that exceed capacity; `check` and `check_all` raise an error for them."""

    def __init__(self, device: torch.device, world_size: int, options: ExpertOptions) -> None:
        on_gpu = device.type == "cuda"
        self._options = options
        self._total = torch.zeros(1, dtype=torch.int64, device=device)
        self._most = torch.zeros(world_size, dtype=torch.int64, device=device)  # by rank, since the last error
        self._copy = torch.zeros_like(self._most, device="cpu", pin_memory=True) if on_gpu else self._most
        self._copied = torch.cuda.Event() if on_gpu else None

    def add(self, choices: Tensor) -> None:
        """Add the number of this rank's choices that exceed capacity to the total."""
        self._total += choices

    def note(self, choices: Tensor) -> None:
        """Record, for a later check, how many choices of each rank exceeded capacity in a call."""
        if self._options.overflow != "raise":
            return
        torch.maximum(self._most, choices, out=self._most)
        # the host cannot wait for a graph
        if self._copied is not None and not torch.cuda.is_current_stream_capturing():
            self._copy.copy_(self._most, non_blocking=True)
            self._copied.record()

    def check(self) -> None:
        """Raise, on all ranks alike, if an eager call exceeded capacity; the host waits for the last recorded call."""
        if self._copied is not None and self._options.overflow == "raise":
            self._copied.synchronize()
        self._tell(self._copy)

    def check_all(self) -> None:
        """Raise if any call, eager or in a graph, exceeded capacity; wait for replays of graphs first."""
        self._tell(self._most)

    def total(self) -> int:
        """Return how many choices of this rank exceeded capacity, after waiting for the device."""
        return int(self._total)

    def _tell(self, noted: Tensor) -> None:
        """Raise if `noted` has choices that exceeded capacity, and clear all records, to raise the error once."""
        if self._options.overflow == "raise" and (most := int(noted.max())):
            self._most.zero_()
            self._copy.zero_()
            raise no_room(most, self._options)
