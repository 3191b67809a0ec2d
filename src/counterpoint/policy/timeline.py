"""One pair played on the SMs: kernels of a computation beside one collective, wave by wave.

CTAs of a collective that find no SMs start when the kernel that holds them ends. While the collective is resident, a
kernel whose blocks do not all fit works through its tiles on the SMs left; the rest of its blocks join when it ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from counterpoint.machine.occupancy import waves

__all__ = ["Kernel", "Shares", "finish_us", "play"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One GEMM alone: `tiles` taken in turn by `num_sms` resident blocks."""

    tiles: int
    num_sms: int
    time_us: float

    @property
    def tile_us(self) -> float:
        """Of one tile, which is also that of one wave."""
        return self.time_us / waves(self.tiles, num_sms=self.num_sms, blocks_per_sm=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Who gets what while both run."""

    fits: bool  # the collective starts beside a resident kernel
    sms_beside: int  # for a kernel, while the collective is resident
    waiting_us: float = math.inf  # of work for CTAs that wait, once they start; never more than the collective's time
    compute_slowdown: float = 1.0  # at equal SMs: memory bandwidth and power
    comm_slowdown: float = 1.0


def finish_us(tiles: int, tile_us: float, *, sms: int, late_sms: int, late_us: float) -> float:
    """When the last of `tiles` is done by `sms` from 0 on and `late_sms` more from `late_us` on, each when it is free.

    The least x of {k t, late + k t} with sms * floor(x / t) + late_sms * floor((x - late) / t) >= tiles.
    """
    if late_sms <= 0:
        return tile_us * waves(tiles, num_sms=sms, blocks_per_sm=1)
    early_waves = late_waves = 0
    end = 0.0
    while sms * early_waves + late_sms * late_waves < tiles:
        early, late = (early_waves + 1) * tile_us, late_us + (late_waves + 1) * tile_us
        end = min(early, late)
        early_waves += early <= late
        late_waves += late <= early
    return end


def play(
    kernels: Sequence[Kernel],
    comm_us: float,
    *,
    compute_at_us: float,
    comm_at_us: float,
    comm_first: bool,
    shares: Shares,
) -> float:
    """When the last of both sides ends.

    Args:
        kernels: in stream order, each with its time alone.
        comm_us: the collective alone.
        compute_at_us: when the first kernel may start.
        comm_at_us: when the collective may start.
        comm_first: it takes its SMs before the first kernel does; otherwise a kernel that leaves it none holds it back.
        shares: of the SMs, and what contention costs.
    """
    now, left_us = compute_at_us, comm_us - max(0.0, compute_at_us - comm_at_us)
    resident = shares.fits or comm_first
    for index, kernel in enumerate(kernels):
        resident = resident or (index > 0 and comm_at_us <= now)  # it slips in between two kernels
        if not resident or left_us <= 0.0:
            now += kernel.time_us
            if not resident and comm_at_us < now:
                left_us = min(left_us, shares.waiting_us)
            continue
        alone_us, busy_us = kernel.time_us, left_us * shares.comm_slowdown
        if not shares.fits:
            sms = min(kernel.num_sms, shares.sms_beside)
            late_sms = kernel.num_sms - sms
            alone_us = finish_us(kernel.tiles, kernel.tile_us, sms=sms, late_sms=late_sms, late_us=busy_us)
        before_us = max(0.0, comm_at_us - now)
        shared_us = min(max(0.0, alone_us - before_us) * shares.compute_slowdown, busy_us)
        now += alone_us + shared_us * (1.0 - 1.0 / shares.compute_slowdown)
        left_us -= shared_us / shares.comm_slowdown
    return max(now, max(now, comm_at_us) + left_us)
