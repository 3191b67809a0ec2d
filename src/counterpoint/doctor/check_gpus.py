"""Check the GPUs: their number, other processes on them, clocks and memory errors.

All checks but the first apply one rule to every GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from counterpoint.doctor.readings import GpuReading, Readings, and_so_on, fine, not_seen, problem, warning
from counterpoint.records.doctor import Check

SLOWING = {  # reason of NVML: what lowers the clocks
    "hw_slowdown": "hardware slowdown",
    "hw_thermal_slowdown": "too hot, hardware limit",
    "hw_power_brake": "power brake from outside",
    "sw_thermal_slowdown": "too hot, software limit",
}
SETTING = {"clocks_setting": "clocks set by an administrator", "sync_boost": "sync boost group"}
INNOCENT = {"gpu_idle": "idle", "sw_power_cap": "at the power cap"}
LOW_POWER = 0.99  # share of the default power limit: below it, somebody has lowered the limit


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRule:
    """Describes one fault to look for on each GPU: how to detect the fault, what it does to a job, and its remedy."""

    name: str
    known_by: str  # the attribute that is None where NVML does not say
    fault: Callable[[GpuReading], str | None]  # what is wrong with a GPU; None: nothing
    breaks: Callable[[GpuReading], bool] = lambda gpu: True  # whether a fault is a problem; otherwise a warning
    good: Callable[[Sequence[GpuReading]], str]  # what to print if no GPU has the fault
    means: str  # what the fault does to a job
    fix: str  # what to do about it


def check_gpus(readings: Readings) -> list[Check]:
    """Return the check of the number of GPUs, then a check for each of `GPU_RULES`."""
    return [_count(readings), *(_check(readings, rule) for rule in GPU_RULES)]


def _count(readings: Readings) -> Check:
    lost = [gpu for gpu in readings.nvml.gpus if gpu.lost is not None] if readings.nvml else []
    if lost:
        return problem(
            "gpus", and_so_on(f"GPU {gpu.index} does not answer: {gpu.lost}" for gpu in lost), lost=len(lost),
            means="it has fallen off the bus (Xid 79): CUDA does not start, or runs without it",
            fix="dmesg | grep -i xid; drain and reboot the node; if it comes back, reseat or replace the GPU",
        )  # fmt: skip
    found = readings.gpus or readings.devices
    if not found and readings.nvml is None:
        return not_seen("gpus", readings.unavailable.get("nvml", "NVML was not asked"))
    names = Counter(gpu.name for gpu in found)
    seen, count = and_so_on(f"{count} × {name}" for name, count in names.items()) or "no GPU", names.total()
    if readings.cuda is not None and len(readings.devices) != count:
        seen += f", of which CUDA shows {len(readings.devices)} to this process"
    if len(names) > 1:
        means = "ranks of different speed: the slowest sets the pace of every collective, the others wait"
        return warning("gpus", seen, means=means, fix="one kind for one job: CUDA_VISIBLE_DEVICES=...", count=count)
    if count < 2:
        means = "no communication between GPUs of this machine, so there is nothing to overlap"
        return warning("gpus", seen, means=means, fix="take two or more; diagnose and plan need none", count=count)
    return fine("gpus", seen, count=count)


def _check(readings: Readings, rule: GpuRule) -> Check:
    gpus = readings.gpus
    if all(getattr(gpu, rule.known_by) is None for gpu in gpus):
        why = "NVML does not say for these GPUs" if gpus else readings.unavailable.get("nvml", "no GPU")
        return not_seen(rule.name, why)
    faults = {gpu: text for gpu in gpus if (text := rule.fault(gpu)) is not None}
    if not faults:
        return fine(rule.name, rule.good(gpus))
    make = problem if any(rule.breaks(gpu) for gpu in faults) else warning
    seen = and_so_on(f"GPU {gpu.index}: {text}" for gpu, text in faults.items())
    return make(rule.name, seen, means=rule.means, fix=rule.fix, gpus=len(faults))


def _clocks_fault(gpu: GpuReading) -> str | None:
    """Return the reason for low clocks (heat, outside power, a setting); None for idling or the usual power cap."""
    texts = [text for reason, text in (SLOWING | SETTING).items() if reason in (gpu.clock_reasons or ())]
    warm = "" if gpu.temperature_c is None else f" at {gpu.temperature_c} °C"
    return f"{', '.join(texts)}{warm}, {gpu.sm_mhz} of {gpu.sm_mhz_max} MHz" if texts else None


def _clocks_good(gpus: Sequence[GpuReading]) -> str:
    now, most = ([mhz for gpu in gpus if (mhz := getattr(gpu, key))] for key in ("sm_mhz", "sm_mhz_max"))
    speed = f"SM clock {min(now)} to {max(now)} MHz of {max(most)}" if now and most else "SM clock unknown"
    reasons = sorted({INNOCENT.get(reason, reason) for gpu in gpus for reason in gpu.clock_reasons or ()})
    return f"{speed}, {', '.join(reasons) or 'nothing limits it'}"


def _power_fault(gpu: GpuReading) -> str | None:
    limit, default = gpu.power_limit_w, gpu.power_limit_default_w
    if limit is None or default is None or limit >= LOW_POWER * default:
        return None
    return f"{limit:.0f} W of {default:.0f} W"


def _remap_fault(gpu: GpuReading) -> str | None:
    if gpu.remap_failed:
        return "remapping failed"
    return "a remapping is pending" if gpu.remap_pending else None


GPU_RULES: tuple[GpuRule, ...] = (
    GpuRule(
        name="mig",
        known_by="mig",
        fault=lambda gpu: "MIG is on" if gpu.mig else None,
        good=lambda gpus: "off",
        means="a slice has no peer access, and a part of the SMs and copy engines: zero-SM collectives cannot run",
        fix="nvidia-smi -i N -mig 0 (root, idle GPU)",
    ),
    GpuRule(
        name="compute_mode",
        known_by="compute_mode",
        fault=lambda gpu: None if gpu.compute_mode in (None, "default") else gpu.compute_mode,
        breaks=lambda gpu: gpu.compute_mode == "prohibited",
        good=lambda gpus: "default",
        means="a second process, such as a rank that opens its peer's GPU or a profiler, is refused",
        fix="nvidia-smi -i N -c DEFAULT (root)",
    ),
    GpuRule(
        name="clocks",
        known_by="clock_reasons",
        fault=_clocks_fault,
        breaks=lambda gpu: any(reason in SLOWING for reason in gpu.clock_reasons or ()),
        good=_clocks_good,
        means="its compute is slower than its peers'; they wait for it in every collective, and no overlap hides that",
        fix="heat or power: look at fans, inlet temperature and power feeds; a setting: nvidia-smi -rgc -rac (root)",
    ),
    GpuRule(
        name="power_limit",
        known_by="power_limit_w",
        fault=_power_fault,
        breaks=lambda gpu: False,
        good=lambda gpus: f"{max(gpu.power_limit_w or 0 for gpu in gpus):.0f} W, the default",
        means="GEMMs are limited by power: beside communication they lose more than on a GPU at its default",
        fix="nvidia-smi -i N -pl WATTS (root), if nobody meant it",
    ),
    GpuRule(
        name="ecc",
        known_by="ecc",
        fault=lambda gpu: f"{gpu.ecc_uncorrected} uncorrected errors" if gpu.ecc_uncorrected else None,
        good=lambda gpus: "no uncorrected error since the driver was loaded" if any(g.ecc for g in gpus) else "off",
        means="processes on this GPU are killed (Xid 48, 94 or 95), and their peers hang in a collective",
        fix="drain the node, reset the GPU, run the vendor's field diagnostic; replace the GPU if it comes back",
    ),
    GpuRule(
        name="row_remap",
        known_by="remap_pending",
        fault=_remap_fault,
        good=lambda gpus: f"none pending, none failed, {sum(gpu.rows_remapped or 0 for gpu in gpus)} rows remapped",
        means="a bad row of memory is still in use: the next error in it ends the job",
        fix="pending: drain the node and reset the GPU; failed: replace the GPU",
    ),
    GpuRule(
        name="persistence",
        known_by="persistence",
        fault=lambda gpu: "off" if gpu.persistence is False else None,
        breaks=lambda gpu: False,
        good=lambda gpus: "on",
        means="every start takes seconds longer, and counters of errors start anew with every job",
        fix="systemctl enable --now nvidia-persistenced, or nvidia-smi -pm 1 (root)",
    ),
    GpuRule(
        name="other_processes",
        known_by="processes",
        fault=lambda gpu: ", ".join(gpu.processes or ()) or None,
        breaks=lambda gpu: False,
        good=lambda gpus: "none on any GPU",
        means="they take SMs, copy engines, memory bandwidth and power: what is measured now is not what you will get",
        fix="end them or wait, then measure; on a shared machine ask for whole GPUs",
    ),
)
