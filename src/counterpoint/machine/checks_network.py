"""Checks of the way out of the machine: network ports, GPUDirect, and what stands between a NIC and a GPU on PCIe."""

from __future__ import annotations

from collections import Counter, defaultdict

from counterpoint.machine.readings import RdmaPort, Readings
from counterpoint.machine.verdict import and_so_on, fine, not_seen, problem, warning
from counterpoint.records.machine import Check

__all__ = ["NETWORK_CHECKS"]

MIN_ROCE_MTU = 4200  # bytes on the interface, for packets of 4096 bytes with their headers
_PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")


def _rdma(readings: Readings) -> tuple[RdmaPort, ...]:
    return (readings.system.rdma or ()) if readings.system else ()


def nics(readings: Readings) -> Check:
    """Ports that are down, slower, or of other firmware than their like; RoCE with small packets."""
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
    """Ports that differ from the others on the same kind of board."""
    up = [port for port in alike if port.state == "ACTIVE"]
    if not up:
        return []  # a kind of port that this machine does not use
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
    """NICs read and write GPU memory without the host."""
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
    """An IOMMU that translates, and bridges that redirect, send peer traffic up to the CPU."""
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


NETWORK_CHECKS = (nics, gpudirect, iommu)
