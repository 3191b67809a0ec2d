"""Define records of a machine's readings, and make records of checks; unknown values are None, never guesses.

A probe runs in a child process and prints a reading as JSON, or raises `ProbeUnavailable`; `checkup.examine` turns all
of them into checks. Texts from outside become safe to print where `fine`, `warning`, `problem` and `not_seen` use them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from counterpoint.errors import printable
from counterpoint.records import Record
from counterpoint.records.doctor import Check


class NvLink(Record, frozen=True, kw_only=True):
    """Describes one NVLink of one GPU, as NVML sees it. Error counters count since the driver was loaded."""

    active: bool
    speed_mb_per_s: int | None = None
    replays: int | None = None
    recoveries: int | None = None
    crc_errors: int | None = None


class GpuReading(Record, frozen=True, kw_only=True):
    """Describes one GPU, as NVML sees it; indices are NVML's, which ignores CUDA_VISIBLE_DEVICES."""

    index: int
    name: str
    lost: str | None = None  # NVML's error, if the GPU does not answer at all
    mig: bool | None = None
    compute_mode: str | None = None  # default | exclusive_thread | prohibited | exclusive_process
    persistence: bool | None = None
    utilization_percent: int | None = None
    clock_reasons: tuple[str, ...] | None = None
    sm_mhz: int | None = None
    sm_mhz_max: int | None = None
    power_limit_w: float | None = None
    power_limit_default_w: float | None = None
    temperature_c: int | None = None
    ecc: bool | None = None
    ecc_uncorrected: int | None = None  # since the driver was loaded
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    rows_remapped: int | None = None  # since it left the factory
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_replays: int | None = None
    nvlinks: tuple[NvLink, ...] | None = None  # (): a GPU without NVLink
    fabric: str | None = None  # completed | in_progress | not_started | failed; None without NVSwitch
    processes: tuple[str, ...] | None = None  # "name (pid)" of compute processes


class Nvml(Record, frozen=True, kw_only=True):
    """Holds NVML's readings of all GPUs, and NVML's reason for each pair of GPUs without peer access."""

    driver: str | None = None
    gpus: tuple[GpuReading, ...] = ()
    denied_peers: dict[str, str] = msgspec.field(default_factory=dict)  # "0-3": "chipset_not_supported"


class CudaDevice(Record, frozen=True, kw_only=True):
    """Describes one GPU, as the CUDA driver shows it to this process."""

    name: str
    num_sms: int
    copy_engines: int
    stream_memory_ops: bool
    multicast: bool
    dma_buf: bool


class Cuda(Record, frozen=True, kw_only=True):
    """Holds all devices of this process; indices are CUDA's."""

    version: int  # 13000 for 13.0, what the driver supports
    devices: tuple[CudaDevice, ...] = ()
    no_peer_access: tuple[tuple[int, int], ...] = ()  # (a, b): a cannot map the memory of b


class Nccl(Record, frozen=True, kw_only=True):
    """Describes the libnccl that torch would load."""

    path: str
    found_by: str
    version: tuple[int, int, int]
    has_window_register: bool


class InstalledTorch(Record, frozen=True, kw_only=True):
    """Describes the installed torch, as read from its files without importing it."""

    torch: str | None = None
    torch_cuda: str | None = None  # the CUDA it was built with; None for a CPU or ROCm build
    torch_hip: str | None = None
    features: dict[str, bool] = msgspec.field(default_factory=dict)


class TorchRuntime(Record, frozen=True, kw_only=True):
    """Describes torch as a child process found it after importing it."""

    device_count: int
    nccl_version: tuple[int, ...] | None = None
    nccl_path: str | None = None


class RdmaPort(Record, frozen=True, kw_only=True):
    """Describes one port of one device of /sys/class/infiniband."""

    device: str
    port: str
    link_layer: str | None = None  # InfiniBand | Ethernet
    state: str | None = None  # ACTIVE, DOWN
    rate_gbit_per_s: float | None = None
    firmware: str | None = None
    board: str | None = None
    mtu: int | None = None  # of its network interface, bytes


class NetPort(Record, frozen=True, kw_only=True):
    """Describes one network interface of a physical or virtual device (no bridge, tunnel or loopback)."""

    name: str
    state: str | None = None
    speed_gbit_per_s: float | None = None
    mtu: int | None = None


class System(Record, frozen=True, kw_only=True):
    """Holds what /sys, /proc and /etc say about drivers, PCI and network ports."""

    modules: tuple[str, ...] | None = None
    open_driver: bool | None = None  # the open kernel module of NVIDIA
    gpu_iommu: dict[str, str] | None = None  # bus id: type of its IOMMU group; {} without an IOMMU
    acs_redirects: tuple[str, ...] | None = None  # PCI bridges that send peer traffic up to the root
    rdma: tuple[RdmaPort, ...] | None = None
    net: tuple[NetPort, ...] | None = None
    nccl_conf: dict[str, str] = msgspec.field(default_factory=dict)  # /etc/nccl.conf, which the environment overrides


class PairRate(Record, frozen=True, kw_only=True):
    """Holds the rate in GB/s at which one GPU's copy engine writes to another GPU."""

    source: int
    target: int
    gb_per_s: float


class Bandwidth(Record, frozen=True, kw_only=True):
    """Holds median GB/s of copies: of pairs of GPUs alone, and of the slowest pair while all GPUs copy at once."""

    pairs: tuple[PairRate, ...]
    rotation: tuple[PairRate, ...] = ()  # for each rotation, its slowest GPU; `target - source` is its shift


class Readings(Record, frozen=True, kw_only=True):
    """Holds all readings of a machine; `unavailable` has the reason for each part that is None."""

    host: str
    nvml: Nvml | None = None
    cuda: Cuda | None = None
    nccl: Nccl | None = None
    software: InstalledTorch | None = None
    torch_runtime: TorchRuntime | None = None
    system: System | None = None
    bandwidth: Bandwidth | None = None
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    unavailable: dict[str, str] = msgspec.field(default_factory=dict)
    failed: tuple[str, ...] = ()  # probes that hung, crashed, or failed where they should not

    @property
    def gpus(self) -> tuple[GpuReading, ...]:
        """Return the GPUs that answered NVML; () if NVML could not be asked."""
        return tuple(gpu for gpu in self.nvml.gpus if gpu.lost is None) if self.nvml else ()

    @property
    def devices(self) -> tuple[CudaDevice, ...]:
        """Return the devices that CUDA shows; () if CUDA could not be asked."""
        return self.cuda.devices if self.cuda else ()

    @property
    def has_nvlink(self) -> bool:
        """Return whether any GPU has an active NVLink."""
        return any(link.active for gpu in self.gpus for link in gpu.nvlinks or ())

    def why_no_device(self) -> str:
        """Return the reason why `devices` is empty."""
        return self.unavailable.get("cuda", "CUDA shows no device to this process")


Value = int | float | str | None
_LIMIT = 600


def fine(name: str, seen: str, means: str = "", **values: Value) -> Check:
    """Return a check with status `ok`: nothing was found that reduces overlap."""
    return _check(name, "ok", seen, means, "", values)


def warning(name: str, seen: str, *, means: str, fix: str, **values: Value) -> Check:
    """Return a check with status `warning`: a fault that may reduce overlap, or may hide another fault."""
    return _check(name, "warning", seen, means, fix, values)


def problem(name: str, seen: str, *, means: str, fix: str, **values: Value) -> Check:
    """Return a check with status `problem`: a fault that reduces or prevents overlap."""
    return _check(name, "problem", seen, means, fix, values)


def not_seen(name: str, why: str) -> Check:
    """Return a check with status `not_seen`, with the reason why nothing could be checked."""
    return _check(name, "not_seen", why, "", "", {})


def and_so_on(items: Iterable[str], most: int = 8) -> str:
    """Join the first `most` items into one text, which ends with the number of further items."""
    every = list(items)
    return "; ".join(every[:most]) + (f"; and {len(every) - most} more" if len(every) > most else "")


Status = Literal["ok", "warning", "problem", "not_seen"]


def _check(name: str, status: Status, seen: str, means: str, fix: str, values: Mapping[str, Value]) -> Check:
    safe = {key: printable(value, _LIMIT) if isinstance(value, str) else value for key, value in values.items()}
    return Check(
        name=printable(name, 80), status=status, seen=printable(seen, _LIMIT), means=printable(means, _LIMIT),
        fix=printable(fix, _LIMIT), values=safe,
    )  # fmt: skip
