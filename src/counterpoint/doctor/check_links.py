"""Check how GPUs reach each other (peer access, copy engines, NVLink, PCIe, rates) and other machines (NICs)."""

from __future__ import annotations

from collections import Counter, defaultdict
from statistics import median

from counterpoint.doctor.readings import (
    Bandwidth,
    GpuReading,
    PairRate,
    RdmaPort,
    Readings,
    and_so_on,
    fine,
    not_seen,
    problem,
    warning,
)
from counterpoint.records.doctor import Check

MIN_COPY_ENGINES = 2  # one for each direction
SLOW_PAIR, BROKEN_PAIR = 0.9, 0.5  # rates as shares of the best pair's rate
SLOW_ROTATION = 0.7  # share of the best pair's rate; 8 × H200 reach 390 of 393 GB/s
MAX_LINK_ERRORS = 1000
MAX_PCIE_REPLAYS = 1000
BUSY_PERCENT = 50
MIN_ROCE_MTU = 4200  # bytes: packets of 4096 bytes with their headers
_PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")


def peer_access(readings: Readings) -> Check:
    """Check that every GPU can map the memory of every other GPU."""
    cuda = readings.cuda
    if cuda is None or not cuda.devices:
        return not_seen("peer_access", readings.why_no_device())
    count = len(cuda.devices)
    if count < 2:
        return not_seen("peer_access", "CUDA shows one device to this process")
    if not cuda.no_peer_access:
        return fine("peer_access", f"all {count * (count - 1)} ordered pairs", pairs=count * (count - 1))
    reasons = sorted(set(readings.nvml.denied_peers.values())) if readings.nvml else []
    pairs = and_so_on(f"{a} → {b}" for a, b in cuda.no_peer_access)
    why = f" (NVML: {', '.join(reasons)})" if reasons else ""
    return problem(
        "peer_access", f"missing between {pairs}{why}", pairs=len(cuda.no_peer_access),
        means="they go through host memory: no copy engine reaches the peer's buffer, zero-SM collectives cannot run",
        fix="in a container or VM pass all GPUs through together; on PCIe switch ACS and the IOMMU's translation off; "
        "start nvidia-fabricmanager on NVSwitch machines; check with nvidia-smi topo -p2p r",
    )  # fmt: skip


def copy_engines(readings: Readings) -> Check:
    """Check that each GPU has a copy engine for each direction, which moves memory while SMs compute."""
    if not readings.devices:
        return not_seen("copy_engines", readings.why_no_device())
    counts = [device.copy_engines for device in readings.devices]
    seen = f"{min(counts)} per GPU" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)} per GPU"
    if min(counts) >= MIN_COPY_ENGINES:
        return fine("copy_engines", seen, fewest=min(counts))
    return problem(
        "copy_engines", seen, fewest=min(counts),
        means="sending and receiving share an engine, or copies need SMs: nothing overlaps both ways",
        fix="use data-centre GPUs (2 or more engines); a MIG slice or vGPU profile may hide them",
    )  # fmt: skip


def stream_memory_ops(readings: Readings) -> Check:
    """Check that a stream can wait for a flag in memory (cuStreamWaitValue32) without an SM."""
    if not readings.devices:
        return not_seen("stream_memory_ops", readings.why_no_device())
    if all(device.stream_memory_ops for device in readings.devices):
        return fine("stream_memory_ops", "offered by every device")
    return problem(
        "stream_memory_ops", "cuStreamWaitValue32 and cuStreamWriteValue32 are not offered",
        means="signals between GPUs need a kernel, which waits while a persistent GEMM holds all SMs",
        fix="update to a driver of CUDA 12 or later, or load the kernel module with NVreg_EnableStreamMemOPs=1",
    )  # fmt: skip


def fabric(readings: Readings) -> Check:
    """Check that the fabric manager of an NVSwitch machine has joined every GPU."""
    states = {g.index: g.fabric for g in readings.gpus if g.fabric is not None}
    if not states:
        return not_seen("fabric", "no GPU reports an NVSwitch fabric")
    wrong = {index: state for index, state in states.items() if state != "completed"}
    if not wrong:
        return fine("fabric", "every GPU has joined")
    return problem(
        "fabric", and_so_on(f"GPU {index}: {state}" for index, state in wrong.items()), gpus=len(wrong),
        means="CUDA does not start (error 802), or GPUs reach each other over PCIe only",
        fix="systemctl restart nvidia-fabricmanager, of the same version as the driver; then its log",
    )  # fmt: skip


def nvlink(readings: Readings) -> Check:
    """Check that all links are up, at one speed and without errors."""
    found = readings.gpus
    if not found or all(gpu.nvlinks is None for gpu in found):
        return not_seen("nvlink", readings.unavailable.get("nvml", "NVML does not say"))
    active = [sum(link.active for link in gpu.nvlinks or ()) for gpu in found]
    if not any(active):
        return _no_nvlink(len(found))
    usual, _ = Counter(active).most_common(1)[0]
    most = max(usual, max(active))
    speeds = [link.speed_mb_per_s for gpu in found for link in gpu.nvlinks or () if link.active and link.speed_mb_per_s]
    down = [f"GPU {gpu.index}: {up} of {most} links" for gpu, up in zip(found, active, strict=True) if up < most]
    least = 0.95 * max(speeds, default=0)
    slow = [
        f"GPU {gpu.index}: a slower link"
        for gpu in found
        if any(link.active and 0 < (link.speed_mb_per_s or 0) < least for link in gpu.nvlinks or ())
    ]
    if down or slow:
        return problem(
            "nvlink", and_so_on(down + slow), gpus=len(down) + len(slow), links=most,
            means="collectives go at the pace of the slowest GPU: the ring or switch loses that share of its bandwidth",
            fix="drain the node; nvidia-smi nvlink -s, then reseat or replace; reset the GPUs and the fabric manager",
        )  # fmt: skip
    if noisy := [text for gpu in found if (text := _link_errors(gpu)) is not None]:
        return warning(
            "nvlink", and_so_on(noisy), gpus=len(noisy), links=most,
            means="packets are sent again: bandwidth falls and collectives of the same size take different times",
            fix="watch whether nvidia-smi nvlink -e grows under load; if it does, the link or switch wants service",
        )  # fmt: skip
    total = sum(speeds) / len(found) / 1000
    return fine("nvlink", f"{most} links per GPU" + (f", {total:.0f} GB/s each way" if total else ""), links=most)


def _no_nvlink(gpus: int) -> Check:
    if gpus < 2:
        return fine("nvlink", "no active link, and no other GPU to reach")
    return warning(
        "nvlink", "no active link", links=0,
        means="GPUs reach each other over PCIe: a tenth of the bandwidth, so there is ten times as much to hide",
        fix="bridges or an NVSwitch machine; else larger compute per byte (gradient accumulation, compression: plan)",
    )  # fmt: skip


def _link_errors(gpu: GpuReading) -> str | None:
    links = gpu.nvlinks or ()
    recoveries, replays, crc = (
        sum(getattr(link, key) or 0 for link in links) for key in ("recoveries", "replays", "crc_errors")
    )
    if recoveries == 0 and replays + crc < MAX_LINK_ERRORS:
        return None
    return f"GPU {gpu.index}: {recoveries} recoveries, {replays} replays, {crc} CRC errors"


def pcie(readings: Readings) -> Check:
    """Check PCIe lanes, replays (packets sent again) and, on busy GPUs, the generation, which idle GPUs may lower."""
    found = readings.gpus
    if not found or all(gpu.pcie_width is None for gpu in found):
        return not_seen("pcie", readings.unavailable.get("nvml", "NVML does not say"))
    faults = [f"GPU {gpu.index}: {text}" for gpu in found for text in _pcie_faults(gpu)]
    first = found[0]
    if not faults:
        return fine("pcie", f"generation {first.pcie_generation} × {first.pcie_width} lanes", lanes=first.pcie_width)
    return (warning if readings.has_nvlink else problem)(
        "pcie", and_so_on(faults), faults=len(faults),
        means="input, offloading and traffic to the network are slower" + (
            "" if readings.has_nvlink else ", and so is all traffic between GPUs"
        ),
        fix="reseat the card or riser; check the slot's bifurcation and link speed in the firmware's setup",
    )  # fmt: skip


def _pcie_faults(gpu: GpuReading) -> list[str]:
    faults = []
    if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
        faults.append(f"{gpu.pcie_width} of {gpu.pcie_width_max} lanes")
    busy = (gpu.utilization_percent or 0) >= BUSY_PERCENT
    if busy and gpu.pcie_generation and gpu.pcie_generation_max and gpu.pcie_generation < gpu.pcie_generation_max:
        faults.append(f"generation {gpu.pcie_generation} of {gpu.pcie_generation_max} under load")
    if (gpu.pcie_replays or 0) >= MAX_PCIE_REPLAYS:
        faults.append(f"{gpu.pcie_replays} replays")
    return faults


def bandwidth(readings: Readings) -> Check:
    """Check the copy rates of random pairs of GPUs, and of all GPUs at once, against the rate of the best pair."""
    found = readings.bandwidth
    if found is None or not found.pairs:
        return not_seen("bandwidth", readings.unavailable.get("bandwidth", "no pair was measured"))
    best = max(found.pairs, key=lambda pair: pair.gb_per_s)
    slow = sorted((p for p in found.pairs if p.gb_per_s < SLOW_PAIR * best.gb_per_s), key=lambda pair: pair.gb_per_s)
    rotation = min(found.rotation, key=lambda pair: pair.gb_per_s, default=None)
    crowded = rotation is not None and rotation.gb_per_s < SLOW_ROTATION * best.gb_per_s
    seen = _rates(found, best, slow, rotation)
    values = {
        "best_gb_per_s": round(best.gb_per_s, 1),
        "worst_gb_per_s": round(min(pair.gb_per_s for pair in found.pairs), 1),
        "median_gb_per_s": round(median(pair.gb_per_s for pair in found.pairs), 1),
        "rotation_gb_per_s": None if rotation is None else round(rotation.gb_per_s, 1),
        "pairs": len(found.pairs),
    }
    if not slow and not crowded:
        return fine("bandwidth", seen, "", **values)
    broken = any(pair.gb_per_s < BROKEN_PAIR * best.gb_per_s for pair in slow)
    return (problem if broken else warning)(
        "bandwidth", seen, **values,
        means="a ring or rotation goes at the pace of its slowest pair" if slow else
        "pairs share a link: alone they are fast, in a collective they are not",
        fix="slow pairs: nvlink, pcie and other_processes above, then nvidia-smi topo -m; a shared link: order ranks "
        "so that neighbours do not cross it, or compute more per byte",
    )  # fmt: skip


def _rates(found: Bandwidth, best: PairRate, slow: list[PairRate], rotation: PairRate | None) -> str:
    pairs = f"{len(found.pairs)} pairs, best {best.source} → {best.target} {best.gb_per_s:.0f} GB/s"
    below = and_so_on(f"{p.source} → {p.target} {p.gb_per_s:.0f}" for p in slow)
    at_once = f", all at once {rotation.gb_per_s:.0f}" if rotation is not None else ""
    return f"{pairs}{at_once}" + (f"; below {SLOW_PAIR:.0%}: {below}" if slow else ", none below 90 %")


def _rdma(readings: Readings) -> tuple[RdmaPort, ...]:
    return (readings.system.rdma or ()) if readings.system else ()


def nics(readings: Readings) -> Check:
    """Check for network ports that are down, differ from similar ones in rate or firmware, or run RoCE at low MTU."""
    ports = _rdma(readings)
    if not ports:
        return _no_nics(readings)
    if not any(port.state == "ACTIVE" for port in ports):
        faults = [f"none of {len(ports)} ports is active"]
    else:
        by_board: dict[str | None, list[RdmaPort]] = defaultdict(list)
        for port in ports:
            by_board[port.board].append(port)
        faults = [text for alike in by_board.values() for text in _odd_ones(alike)]
        faults += [
            f"{p.device}: MTU {p.mtu}"
            for p in ports
            if p.link_layer == "Ethernet" and p.state == "ACTIVE" and p.mtu is not None and p.mtu < MIN_ROCE_MTU
        ]
    if faults:
        return warning(
            "nics", and_so_on(faults), faults=len(faults), ports=len(ports),
            means="collectives between machines stripe over all ports and go at the pace of the slowest",
            fix="down: cable and switch port (ibstat); rate: speed of cable and port; firmware: the same on all "
            "(mlxfwmanager); MTU: ip link set dev NAME mtu 9000, on the switch too",
        )  # fmt: skip
    kinds = Counter(f"{port.link_layer or 'RDMA'} {port.rate_gbit_per_s or 0:.0f} Gbit/s" for port in ports)
    firmware = and_so_on(sorted({port.firmware for port in ports if port.firmware}), 3)
    seen = and_so_on(f"{count} × {kind}" for kind, count in kinds.items())
    return fine("nics", seen + (f", firmware {firmware}" if firmware else ""), ports=len(ports))


def _no_nics(readings: Readings) -> Check:
    if readings.system is None or readings.system.rdma is None:
        return not_seen("nics", "/sys/class is not visible here")
    net = and_so_on(
        f"{port.name} {port.state}, MTU {port.mtu}"
        + (f", {port.speed_gbit_per_s:g} Gbit/s" if port.speed_gbit_per_s else "")
        for port in readings.system.net or ()
    )  # fmt: skip
    return not_seen(
        "nics", "no RDMA port: other machines are reached over TCP, or not at all" + (f" ({net})" if net else "")
    )


def _odd_ones(alike: list[RdmaPort]) -> list[str]:
    """Return a text per port that is down, or differs in rate or firmware from ports on the same kind of board."""
    up = [port for port in alike if port.state == "ACTIVE"]
    if not up:
        return []  # this machine does not use ports of this kind
    faults = [f"{port.device}: port {port.port} is {port.state}" for port in alike if port.state != "ACTIVE"]
    rates, firmwares = Counter(port.rate_gbit_per_s for port in up), Counter(port.firmware for port in alike)
    fastest = max((rate for rate in rates if rate is not None), default=0.0)
    faults += [
        f"{p.device}: {p.rate_gbit_per_s:g} of {fastest:g} Gbit/s"
        for p in up
        if (p.rate_gbit_per_s or fastest) < fastest
    ]
    usual = firmwares.most_common(1)[0][0]
    return faults + [f"{p.device}: firmware {p.firmware}, others {usual}" for p in alike if p.firmware != usual]


def gpudirect(readings: Readings) -> Check:
    """Check that NICs can read and write GPU memory without copies through the host (GPUDirect RDMA)."""
    if not _rdma(readings) or readings.system is None:
        return not_seen("gpudirect", "no RDMA port")
    modules = readings.system.modules
    loaded = [name for name in _PEER_MODULES if name in (modules or ())]
    if loaded:
        return fine("gpudirect", f"kernel module {loaded[0]}")
    devices = readings.devices
    if readings.system.open_driver and devices and all(device.dma_buf for device in devices):
        return fine("gpudirect", "DMA-BUF, by the open kernel module")
    if modules is None or readings.cuda is None:
        return not_seen("gpudirect", "kernel modules or the CUDA driver are not visible here")
    return problem(
        "gpudirect", "neither nvidia_peermem nor DMA-BUF",
        means="all traffic to other machines is copied through host memory: slower, and it takes the copy engines",
        fix="modprobe nvidia_peermem, or NVIDIA's open kernel module with Linux 5.12 or later",
    )  # fmt: skip


def iommu(readings: Readings) -> Check:
    """Check that neither IOMMU nor PCI bridges send peer traffic up to the CPU."""
    system = readings.system
    if readings.nvml is None and readings.cuda is None:
        return not_seen("iommu", "no GPU")
    if system is None or (system.gpu_iommu is None and system.acs_redirects is None):
        return not_seen("iommu", "/sys/bus/pci is not visible here")
    translated = sorted(name for name, kind in (system.gpu_iommu or {}).items() if kind.startswith("DMA"))
    bridges = system.acs_redirects or ()
    over_pcie = bool(_rdma(readings)) or not readings.has_nvlink
    faults = [f"the IOMMU translates for GPU {name}" for name in translated]
    faults += [f"{len(bridges)} PCI bridges redirect by ACS, such as {bridges[0]}"] if bridges else []
    if faults and over_pcie:
        return warning(
            "iommu", and_so_on(faults), translated=len(translated), bridges=len(bridges),
            means="traffic over PCIe between GPUs, and from GPU to NIC, takes the way through the CPU's root complex",
            fix="boot with iommu=pt (or off); switch ACS off in the firmware's setup or by setpci (not inside a VM)",
        )  # fmt: skip
    unseen = " (ACS of the bridges: only root may look)" if system.acs_redirects is None else ""
    return fine(
        "iommu", (and_so_on(faults) + ", but nothing here goes over PCIe" if faults else "not in the way") + unseen
    )


LINK_CHECKS = (
    peer_access, copy_engines, stream_memory_ops, fabric, nvlink, pcie, bandwidth, nics, gpudirect, iommu
)  # fmt: skip
