"""Say what exposed communication costs a day, in GPU-hours and money, if the job runs on as it was recorded."""

from __future__ import annotations

import math

import msgspec

from counterpoint.errors import Misconfigured
from counterpoint.records.diagnosis import Diagnosis, ExposedCost

_HOURS_A_DAY = 24.0


def with_cost(d: Diagnosis, *, gpus: int | None = None, price_per_gpu_hour: float | None = None) -> Diagnosis:
    """Return a diagnosis that also says what the time costs in which the GPUs wait for communication.

    GPU-hours a day = 24 * GPUs * exposed_comm / duration.

    Args:
        d: the diagnosis.
        gpus: GPUs of the whole job; None: one for each rank.
        price_per_gpu_hour: of any currency; None: GPU-hours only.

    Raises:
        Misconfigured: no GPU, or a price that is negative or no number.
    """
    if gpus is not None and gpus < 1:
        raise Misconfigured(f"--gpus {gpus}: give the GPUs of the job, at least 1")
    if price_per_gpu_hour is not None and not (math.isfinite(price_per_gpu_hour) and price_per_gpu_hour >= 0):
        raise Misconfigured(f"--price-per-gpu-hour {price_per_gpu_hour}: give a price such as 2.5")
    if d.idle is None or d.totals.duration_us <= 0:
        why = "no cost: GPU activity was not recorded, so it is not known how long GPUs wait for communication"
        return msgspec.structs.replace(d, notes=(*d.notes, why))
    count = gpus or max(d.world_size, len(d.per_gpu))
    hours = _HOURS_A_DAY * count * d.totals.exposed_comm_us / d.totals.duration_us
    money = None if price_per_gpu_hour is None else hours * price_per_gpu_hour
    said = f" Exposed communication takes {hours:,.1f} GPU-hours a day on {count:,} GPUs"
    said += "." if money is None else f", {money:,.2f} at {price_per_gpu_hour:g} an hour."
    cost = ExposedCost(gpus=count, gpu_hours_a_day=hours, price_per_gpu_hour=price_per_gpu_hour, cost_a_day=money)
    return msgspec.structs.replace(d, verdict=d.verdict + said, cost=cost)
