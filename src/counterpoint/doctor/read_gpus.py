"""Read every GPU through NVML and through CUDA, and measure copies between GPUs. All of it runs in child processes.

NVML hangs when a GPU has fallen off the bus. Whatever a GPU or driver does not offer is None; source: NVML API
reference, structures of nvidia-ml-py 13. Copies are pushed by one copy engine per source (cuMemcpyPeerAsync) and timed
by CUDA events: rate = bytes / median time, of random pairs, then of all GPUs at once, each pushing to the one `shift`
places on: every link carries one copy each way, which is what an all-gather does.
"""

from __future__ import annotations

import ctypes
import importlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_float, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from itertools import combinations, permutations
from pathlib import Path
from statistics import median
from typing import Any

from counterpoint.doctor.readings import Bandwidth, Cuda, CudaDevice, GpuReading, NvLink, Nvml, PairRate
from counterpoint.machine.driver import Driver, ProbeFailed, ProbeUnavailable

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
    """Read every GPU by NVML, lost ones last; raise `ProbeUnavailable` without NVML, `ProbeFailed` if NVML fails."""
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
        """Call an NVML function; return None if driver, GPU or nvidia-ml-py lack it, or its text is not UTF-8."""
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
    """Return the value of an NVML field, read from the union's member for the field's type; None if NVML failed."""
    members = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
    if value.nvmlReturn != nvml.NVML_SUCCESS or value.valueType not in members:
        return None
    return int(getattr(value.value, members[value.valueType]))


def _fabric(nvml: Any, handle: Any) -> str | None:
    """Return a GPU's state in the NVSwitch fabric; None without a fabric, or with a driver before 535."""
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


# CUdevice_attribute, cuda.h 13.0
_NUM_SMS, _ASYNC_ENGINES, _STREAM_MEMORY_OPS_V1, _DMA_BUF, _MULTICAST = 16, 40, 92, 124, 132
_STREAM_MEMORY_OPS_SINCE = 12000  # CUDA 12 made them part of every device; before, attribute 92 tells
SIZE_BYTES = 256 << 20
MAX_PAIRS = 12
_ROUNDS = 7
_WARM_UPS = 2
_COPIES_AT_ONCE = 4  # per GPU, so that those launched first still run when the last one starts


def read_cuda() -> Cuda:
    """Read by CUDA every device that this process may use, and the ordered pairs of devices without peer access."""
    driver = Driver()
    version = driver.version()
    devices = range(driver.device_count())
    denied = tuple(pair for pair in permutations(devices, 2) if not driver.can_access(*pair))
    return Cuda(version=version, devices=tuple(_device(driver, i, version) for i in devices), no_peer_access=denied)


def _device(driver: Driver, device: int, version: int) -> CudaDevice:
    memory_ops = version >= _STREAM_MEMORY_OPS_SINCE or driver.attribute(device, _STREAM_MEMORY_OPS_V1) == 1
    return CudaDevice(
        name=driver.name(device),
        num_sms=driver.attribute(device, _NUM_SMS),
        copy_engines=driver.attribute(device, _ASYNC_ENGINES),
        stream_memory_ops=memory_ops,
        multicast=driver.attribute(device, _MULTICAST) == 1,
        dma_buf=driver.attribute(device, _DMA_BUF) == 1,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _CopyDevice:
    """Holds the handles of one GPU that copies: context, stream, buffers and events."""

    context: int
    stream: int
    source: int
    target: int
    start: int
    end: int


def choose_pairs(gpus: int, *, chance: random.Random, most: int = MAX_PAIRS) -> list[tuple[int, int]]:
    """Choose pairs of GPUs (a < b): all, or about `most` random ones that include each GPU at least once."""
    every = list(combinations(range(gpus), 2))
    if len(every) <= most:
        return every
    order = chance.sample(range(gpus), gpus)
    if gpus % 2:
        order.append(order[0])
    chosen = {(min(a, b), max(a, b)) for a, b in zip(order[::2], order[1::2], strict=True)}
    rest = [pair for pair in every if pair not in chosen]
    return sorted(chosen.union(chance.sample(rest, max(0, most - len(chosen)))))


def measure_bandwidth() -> Bandwidth:
    """Measure copies in GB/s: random pairs, both ways, then all GPUs at once; raise `ProbeUnavailable` below 2 GPUs."""
    driver = Driver()
    count = driver.device_count()
    if count < 2:
        raise ProbeUnavailable(f"it takes two GPUs to copy between them; CUDA shows {count}")
    gpus = [_prepare(driver, device) for device in range(count)]
    _map_peers(driver, gpus)
    directions = [each for a, b in choose_pairs(count, chance=random.Random()) for each in ((a, b), (b, a))]
    pairs = tuple(PairRate(source=a, target=b, gb_per_s=_rates(driver, gpus, [(a, b)], 1)[0]) for a, b in directions)
    rotation = tuple(_rotate(driver, gpus, shift) for shift in range(1, count))
    return Bandwidth(pairs=pairs, rotation=rotation)


def _prepare(driver: Driver, device: int) -> _CopyDevice:
    context = driver.context(device)
    driver.use(context)
    return _CopyDevice(
        context=context,
        stream=driver.get(c_void_p, "cuStreamCreate", c_uint(1)),  # 1: the stream does not wait for the default stream
        source=driver.get(c_uint64, "cuMemAlloc_v2", c_size_t(SIZE_BYTES)),
        target=driver.get(c_uint64, "cuMemAlloc_v2", c_size_t(SIZE_BYTES)),
        start=driver.get(c_void_p, "cuEventCreate", c_uint(0)),  # 0: the event records a time
        end=driver.get(c_void_p, "cuEventCreate", c_uint(0)),
    )


def _map_peers(driver: Driver, gpus: list[_CopyDevice]) -> None:
    """Enable peer access between all GPUs that allow it; CUDA copies through host memory between the others."""
    for mine, gpu in enumerate(gpus):
        driver.use(gpu.context)
        for other, peer in enumerate(gpus):
            if mine != other and driver.can_access(mine, other):
                driver.call("cuCtxEnablePeerAccess", c_void_p(peer.context), c_uint(0))


def _rotate(driver: Driver, gpus: list[_CopyDevice], shift: int) -> PairRate:
    pairs = [(source, (source + shift) % len(gpus)) for source in range(len(gpus))]
    rates = _rates(driver, gpus, pairs, _COPIES_AT_ONCE)
    slowest = min(range(len(gpus)), key=lambda index: rates[index])
    return PairRate(source=pairs[slowest][0], target=pairs[slowest][1], gb_per_s=rates[slowest])


def _rates(driver: Driver, gpus: list[_CopyDevice], pairs: list[tuple[int, int]], copies: int) -> list[float]:
    """Return the GB/s of each (source, target) while all pairs copy at once; the source's copy engine pushes."""
    times: list[list[float]] = [[] for _ in pairs]
    for round_ in range(_WARM_UPS + _ROUNDS):
        for source, target in pairs:
            _push(driver, gpus[source], gpus[target], copies)
        for index, (source, _) in enumerate(pairs):
            gpu = gpus[source]
            driver.use(gpu.context)
            driver.call("cuEventSynchronize", c_void_p(gpu.end))
            elapsed_ms = driver.get(c_float, "cuEventElapsedTime", c_void_p(gpu.start), c_void_p(gpu.end))
            if round_ >= _WARM_UPS:
                times[index].append(elapsed_ms)
    return [copies * SIZE_BYTES / median(of_pair) / 1e6 for of_pair in times]


def _push(driver: Driver, source: _CopyDevice, target: _CopyDevice, copies: int) -> None:
    """Queue `copies` copies from one GPU to another, between the source GPU's start and end events."""
    driver.use(source.context)
    stream = c_void_p(source.stream)
    driver.call("cuEventRecord", c_void_p(source.start), stream)
    to, start = (c_uint64(target.target), c_void_p(target.context)), (c_uint64(source.source), c_void_p(source.context))
    for _ in range(copies):
        driver.call("cuMemcpyPeerAsync", *to, *start, c_size_t(SIZE_BYTES), stream)
    driver.call("cuEventRecord", c_void_p(source.end), stream)
