"""Read every GPU through NVML (nvidia-ml-py). Runs in a child process: NVML hangs when a GPU has fallen off the bus.

Whatever a GPU or driver does not offer is None; source: NVML API reference, structures of nvidia-ml-py 13.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from typing import Any

from counterpoint.doctor.readings import GpuReading, NvLink, Nvml
from counterpoint.machine.driver import ProbeFailed, ProbeUnavailable

CLOCK_REASONS = {  # bits of nvmlDeviceGetCurrentClocksEventReasons
    0x1: "gpu_idle",
    0x2: "clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}
_COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
_FABRIC_STATES = {1: "not_started", 2: "in_progress", 3: "completed"}
_PEER_STATUS = {
    1: "chipset_not_supported",
    2: "gpu_not_supported",
    3: "topology_not_supported",
    4: "disabled_by_regkey",
    5: "not_supported",
}
_MAX_LINKS = 18
_MOST_GPUS = 1024  # a larger number is an error, and asking all would take days
_ABSENT = (4, 9, 12, 13)  # error codes: no permission, no driver, no library, no function; nothing is broken
_FIELD_REPLAY, _FIELD_RECOVERY, _FIELD_CRC, _FIELD_SPEED = 161, 162, 163, 164
_UNCORRECTED, _VOLATILE = 1, 0
_CLOCK_SM = 1
_PEER_READ = 0


def read_nvml() -> Nvml:
    """Read every GPU, lost ones last; raise `ProbeUnavailable` if there is no NVML, `ProbeFailed` if it fails."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        raise ProbeUnavailable("no NVIDIA driver: libnvidia-ml.so.1 is not on this machine") from None
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        raise ProbeUnavailable("nvidia-ml-py is not installed: pip install nvidia-ml-py") from None
    with _session(nvml):
        handles: dict[int, Any] = {}
        lost: list[GpuReading] = []
        count = nvml.nvmlDeviceGetCount()
        if count > _MOST_GPUS:
            raise ProbeFailed(f"nvmlDeviceGetCount says {count}, which is no number of GPUs")
        for index in range(count):
            try:
                handles[index] = nvml.nvmlDeviceGetHandleByIndex(index)
            except nvml.NVMLError as error:
                lost.append(GpuReading(index=index, name="a GPU that does not answer", lost=str(error)))
        gpus = (*(_gpu(nvml, handle, index) for index, handle in handles.items()), *lost)
        return Nvml(driver=_text(nvml.nvmlSystemGetDriverVersion()), gpus=gpus, denied_peers=_denied(nvml, handles))


@contextmanager
def _session(nvml: Any) -> Iterator[None]:
    try:
        nvml.nvmlInit()
        yield
    except nvml.NVMLError as error:
        absent = getattr(error, "value", None) in _ABSENT
        raise (ProbeUnavailable if absent else ProbeFailed)(f"NVML: {error}") from None


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)  # bytes before version 12


def _asking(nvml: Any, handle: Any) -> Callable[..., Any]:
    def ask(name: str, *arguments: object) -> Any:
        """Return the answer of an NVML function; None if driver, GPU or nvidia-ml-py lack it, or text is not UTF-8."""
        try:
            return getattr(nvml, name)(handle, *arguments)
        except (nvml.NVMLError, AttributeError, UnicodeDecodeError):
            return None

    return ask


def _gpu(nvml: Any, handle: Any, index: int) -> GpuReading:
    ask = _asking(nvml, handle)
    use, mig, ecc = (ask(f"nvmlDeviceGet{name}") for name in ("UtilizationRates", "MigMode", "EccMode"))
    limit, default = ask("nvmlDeviceGetPowerManagementLimit"), ask("nvmlDeviceGetPowerManagementDefaultLimit")
    rows = ask("nvmlDeviceGetRemappedRows")
    mode, persistence = ask("nvmlDeviceGetComputeMode"), ask("nvmlDeviceGetPersistenceMode")
    running = ask("nvmlDeviceGetComputeRunningProcesses")
    return GpuReading(
        index=index,
        name=_text(ask("nvmlDeviceGetName") or "a GPU without a name"),
        mig=None if mig is None else mig[0] == 1,
        compute_mode=_COMPUTE_MODES.get(mode),
        persistence=None if persistence is None else persistence == 1,
        utilization_percent=None if use is None else use.gpu,
        clock_reasons=_clock_reasons(ask),
        sm_mhz=ask("nvmlDeviceGetClockInfo", _CLOCK_SM),
        sm_mhz_max=ask("nvmlDeviceGetMaxClockInfo", _CLOCK_SM),
        power_limit_w=None if limit is None else limit / 1000,
        power_limit_default_w=None if default is None else default / 1000,
        temperature_c=ask("nvmlDeviceGetTemperature", 0),
        ecc=None if ecc is None else ecc[0] == 1,
        ecc_uncorrected=ask("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE),
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
        rows_remapped=None if rows is None else rows[0] + rows[1],
        pcie_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_generation_max=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_width_max=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        pcie_replays=ask("nvmlDeviceGetPcieReplayCounter"),
        nvlinks=_links(nvml, ask),
        fabric=_fabric(nvml, handle),
        processes=None if running is None else tuple(f"{_name(process.pid)} ({process.pid})" for process in running),
    )


def _clock_reasons(ask: Callable[..., Any]) -> tuple[str, ...] | None:
    bits = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if bits is None:
        bits = ask("nvmlDeviceGetCurrentClocksThrottleReasons")  # its name before driver 535
    return None if bits is None else tuple(name for bit, name in CLOCK_REASONS.items() if bits & bit)


def _links(nvml: Any, ask: Callable[..., Any]) -> tuple[NvLink, ...]:
    states = [ask("nvmlDeviceGetNvLinkState", link) for link in range(_MAX_LINKS)]
    return tuple(_link(nvml, ask, link, state == 1) for link, state in enumerate(states) if state is not None)


def _link(nvml: Any, ask: Callable[..., Any], link: int, active: bool) -> NvLink:
    names = (_FIELD_REPLAY, _FIELD_RECOVERY, _FIELD_CRC, _FIELD_SPEED)
    values = ask("nvmlDeviceGetFieldValues", [(name, link) for name in names]) if active else None
    read = [None] * 4 if values is None else [_field(nvml, value) for value in values]
    counters = (  # before Hopper the counters have a function of their own: replay 0, recovery 1, CRC of flits 2
        ask("nvmlDeviceGetNvLinkErrorCounter", link, which) if value is None and active else value
        for which, value in enumerate(read[:3])
    )
    replays, recoveries, crc_errors = counters
    return NvLink(active=active, replays=replays, recoveries=recoveries, crc_errors=crc_errors, speed_mb_per_s=read[3])


def _field(nvml: Any, value: Any) -> int | None:
    """Return a field's value, read from the member of the union that its type names."""
    members = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
    if value.nvmlReturn != nvml.NVML_SUCCESS or value.valueType not in members:
        return None
    return int(getattr(value.value, members[value.valueType]))


def _fabric(nvml: Any, handle: Any) -> str | None:
    """Return the state of the NVSwitch fabric; None if there is none, or with a driver before 535."""
    try:
        info = nvml.c_nvmlGpuFabricInfoV_t()
        nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    except (nvml.NVMLError, AttributeError):
        return None
    state = _FABRIC_STATES.get(info.state & 0xFF)  # one byte in nvml.h
    return "failed" if state is not None and info.status != 0 else state


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return "of another container or user"


def _denied(nvml: Any, handles: dict[int, Any]) -> dict[str, str]:
    denied = {}
    for first, second in permutations(handles, 2):
        status = _asking(nvml, handles[first])("nvmlDeviceGetP2PStatus", handles[second], _PEER_READ)
        if status:
            denied[f"{first}-{second}"] = _PEER_STATUS.get(status, "unknown")
    return denied
