"""Observe GPUs during a measurement: kernels, used SMs, effect of controls, clocks and power."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from counterpoint.controls.control import Control, Lanes
from counterpoint.controls.observe import see_all, sides_of_all
from counterpoint.controls.occupancy import device_limits
from counterpoint.errors import Unsupported
from counterpoint.machine.occupancy import SmLimits, blocks_per_sm, waves
from counterpoint.measurement.open_mechanisms import Opened
from counterpoint.measurement.session import Session
from counterpoint.records.measurement import DeviceState, Evidence, Observation, Usage

DeviceReading = tuple[int, float, int, tuple[str, ...]]  # SM clock in MHz, power in W, temperature in °C, reasons

_REASONS = {  # nvml.h, nvmlClocksEventReason*; idle and "applications clocks" are not faults
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """Holds used SMs, evidence that controls took effect, and, in `marked`, why not to believe a row's times."""

    usage: Usage | None = None
    evidence: tuple[Evidence, ...] = ()
    marked: str | None = None


def observe(session: Session, opened: Sequence[Opened], stock: Opened) -> list[Observed]:
    """Return observations of each mechanism's computation and collective, launched together as in timed trials.

    All ranks call it; `stock` is the same pair without any control. Usage is rank 0's; a control that failed on any
    rank marks the row.
    """
    for each in opened if session.is_cuda else ():
        each.comm.reset()
    clusters = any(control.by_cluster for each in opened for control in each.mechanism.controls)
    pairs = [each.lanes for each in opened]
    return _observe(
        session,
        [each.mechanism.controls for each in opened],
        lambda: see_all(pairs, without=stock.lanes, device=session.device, clusters=clusters),
    )


def observe_compute(
    session: Session, settings: Sequence[tuple[Lanes, Sequence[Control]]], stock: Lanes
) -> list[Observed]:
    """Return observations of a computation alone under each setting of controls."""

    def look() -> list[Observation]:
        lanes = [stock, *(lanes for lanes, _ in settings)]
        without, *found = (compute for compute, _ in sides_of_all(lanes, session.device))
        return [Observation(compute=compute, compute_without=without) for compute in found]

    return _observe(session, [controls for _, controls in settings], look)


def _observe(
    session: Session, settings: list[Sequence[Control]], look: Callable[[], list[Observation]]
) -> list[Observed]:
    """Run `look` on all ranks, let each setting's controls judge what it saw; return empty observations on a CPU."""
    if not session.is_cuda:
        return [Observed() for _ in settings]
    try:
        seen = session.raise_together(look)
    except Unsupported as error:
        return [Observed(marked=f"nobody could look at what ran: {error}") for _ in settings]
    limits = device_limits(session.device.index)
    return [_judged(session, controls, one, limits) for controls, one in zip(settings, seen, strict=True)]


def _judged(session: Session, controls: Sequence[Control], seen: Observation, limits: SmLimits) -> Observed:
    everyone = session.gather(tuple(control.verify(seen) for control in controls))
    of_controls = zip(*everyone, strict=True)  # of each: the first rank where it failed, else rank 0
    evidence = tuple(next((proof for proof in ranks if not proof.took_effect), ranks[0]) for ranks in of_controls)
    failed = [proof for proof in evidence if not proof.took_effect]
    marked = "; ".join(f"{proof.control} had no effect: asked {proof.asked}, saw {proof.seen}" for proof in failed)
    return Observed(usage=usage_of(seen, limits), evidence=evidence, marked=marked or None)


def usage_of(seen: Observation, limits: SmLimits) -> Usage:
    """Return blocks and SMs of the observed kernels, and the longest compute kernel's waves alone and beside comm."""
    ctas = max((launched.num_blocks for launched in seen.comm), default=0)
    kernels = [launched for launched in seen.compute if launched.kind == "kernel" and launched.block is not None]
    if not kernels:
        return Usage(comm_ctas=ctas)
    longest = max(kernels, key=lambda kernel: kernel.duration_us)
    assert longest.block is not None
    resident = blocks_per_sm(
        threads=prod(longest.block),
        regs_per_thread=longest.regs_per_thread or 0,
        smem_bytes=longest.smem_bytes or 0,
        sm=limits,
    )
    blocks = longest.num_blocks
    return Usage(
        compute_blocks=blocks,
        compute_blocks_per_sm=resident,
        compute_sms=min(limits.num_sms, -(-blocks // resident)),
        comm_ctas=ctas,
        waves_alone=waves(blocks, num_sms=limits.num_sms, blocks_per_sm=resident),
        waves_together=waves(blocks, num_sms=limits.num_sms - ctas, blocks_per_sm=resident),
    )


def read_device(uuid: str) -> DeviceReading | None:
    """Return NVML's current reading of the GPU with this UUID (`nvidia-smi -L`); None without NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
        # not by CUDA's number, which is another one where CUDA_VISIBLE_DEVICES is set
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


def device_state(session: Session) -> DeviceState | None:
    """Return the extremes of current clocks and power over all ranks; None on CPUs. All ranks call it together."""
    return combine(session.gather(read_device(session.gpu_uuid) if session.is_cuda else None))


def driver_version() -> str | None:
    """Return the NVIDIA driver's version, such as 580.159.04; None without NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:
        return None


def combine(readings: Sequence[DeviceReading | None]) -> DeviceState | None:
    """Return the extreme clocks, power and temperature over all ranks; None if no rank could read its GPU."""
    known = [reading for reading in readings if reading is not None]
    if not known:
        return None
    clocks, powers, temperatures, reasons = zip(*known, strict=True)
    return DeviceState(
        sm_mhz_min=min(clocks),
        sm_mhz_max=max(clocks),
        power_w_max=max(powers),
        temperature_c_max=max(temperatures),
        throttle=tuple(sorted({reason for each in reasons for reason in each})),
    )
