"""Clocks, power, temperature and what holds the clocks back, read from NVML beside a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from counterpoint.records.measurement import DeviceState

__all__ = ["Reading", "combine", "driver_version", "read_device"]

Reading = tuple[int, float, int, tuple[str, ...]]  # SM clock in MHz, power in W, temperature in °C, reasons

_REASONS = {  # nvml.h, nvmlClocksEventReason*; idle and "applications clocks" are not faults
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}


def read_device(uuid: str) -> Reading | None:
    """One GPU now; None where NVML or nvidia-ml-py is missing.

    Args:
        uuid: as `nvidia-smi -L` says it, `GPU-...`: CUDA's numbers are others where CUDA_VISIBLE_DEVICES is set.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        handle: Any = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        mask = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        return (
            int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
            float(pynvml.nvmlDeviceGetPowerUsage(handle)) / 1e3,
            int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
            tuple(text for bit, text in _REASONS.items() if mask & bit),
        )
    except Exception:  # a missing library, an old driver, a reading this GPU does not have: then nothing is claimed
        return None


def driver_version() -> str | None:
    """Such as 580.159.04; None where NVML is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:
        return None


def combine(readings: Sequence[Reading | None]) -> DeviceState | None:
    """The extremes over ranks; None if nobody could read."""
    known = [reading for reading in readings if reading is not None]
    if not known:
        return None
    return DeviceState(
        sm_mhz_min=min(reading[0] for reading in known),
        sm_mhz_max=max(reading[0] for reading in known),
        power_w_max=max(reading[1] for reading in known),
        temperature_c_max=max(reading[2] for reading in known),
        throttle=tuple(sorted({reason for reading in known for reason in reading[3]})),
    )
