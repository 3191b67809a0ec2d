"""What ran on a GPU, and what that proves about a control."""

from __future__ import annotations

from typing import Literal

from counterpoint.records.base import Record

__all__ = ["Evidence", "Launched", "Seen"]


class Launched(Record, frozen=True, kw_only=True):
    """One kernel, copy or memset as the profiler (CUPTI) or the driver saw it. Unknown is `null`."""

    kind: Literal["kernel", "copy", "memset"]
    name: str
    stream: int | None = None  # the profiler's number of the stream
    priority: int | None = None  # of the stream, as the driver says; lower goes first, 0 is the default
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    cluster: tuple[int, int, int] | None = None
    regs_per_thread: int | None = None
    smem_bytes: int | None = None  # static + dynamic, per block
    bytes: int | None = None  # of a copy
    start_us: float = 0.0  # on the profiler's clock
    duration_us: float = 0.0

    @property
    def num_blocks(self) -> int:
        """Blocks of the grid; 0 for a copy."""
        return 0 if self.grid is None else self.grid[0] * self.grid[1] * self.grid[2]


class Seen(Record, frozen=True, kw_only=True):
    """One pair watched with a control and without it: all that `Control.verify` may look at."""

    compute: tuple[Launched, ...] = ()
    comm: tuple[Launched, ...] = ()
    compute_without: tuple[Launched, ...] = ()  # the same launches with the control off
    comm_without: tuple[Launched, ...] = ()
    compute_sms: tuple[int, ...] | None = None  # ids of the SMs on which a probe ran in the compute stream
    comm_sms: tuple[int, ...] | None = None


class Evidence(Record, frozen=True, kw_only=True):
    """Whether one control did what was asked, and by what that was told."""

    control: str  # as in a mechanism's name: "gemm_sms=108"
    asked: str
    seen: str
    took_effect: bool
