"""Read the system around the GPUs: /sys, /proc and /etc, and which torch and NCCL this Python has.

`read_system`: kernel modules, IOMMU, PCI bridges, network ports. Containers hide some of them. Every text comes from
outside: reads are bounded, and what does not parse is None. `read_software` reads torch's files; `read_nccl` and
`read_torch_runtime` load the libraries, in child processes.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import struct
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from counterpoint.doctor.readings import InstalledTorch, Nccl, NetPort, RdmaPort, System, TorchRuntime
from counterpoint.machine.driver import ProbeUnavailable

_MAX_BYTES = 64 << 10
_NVIDIA = "0x10de"
_BRIDGE = "0x0604"
_ACS = 0x000D  # PCI Express extended capability: access control services
_REDIRECTS = 0x4 | 0x8  # ACS control: request redirect, completion redirect
_LIBNCCL = "libnccl.so.2"
_FEATURES = {  # feature: file below torch/, and what it must contain
    "symmetric_memory": ("distributed/_symmetric_memory/__init__.py", "def rendezvous"),
    "green_contexts": ("cuda/green_contexts.py", "class GreenContext"),
    "fsdp_custom_all_gather": ("distributed/fsdp/_fully_shard/_fully_shard.py", "def set_custom_all_gather"),
    "fsdp_custom_reduce_scatter": ("distributed/fsdp/_fully_shard/_fully_shard.py", "def set_custom_reduce_scatter"),
}
_ASSIGNED = re.compile(r"""^(__version__|cuda|hip)\b[^=\n]*= *["']([^"'\n]*)["']""", re.MULTILINE)


def read_system(root: Path = Path("/")) -> System:
    """Return facts on drivers, PCI and network from files below `root`; never raise: an unreadable fact is None."""
    sys = root / "sys"
    driver = _read(root / "proc/driver/nvidia/version")
    modules = tuple(sorted(path.name for path in _list(sys / "module"))) if _is_there(sys / "module") else None
    pci = sys / "bus/pci/devices"
    return System(
        modules=modules,
        open_driver=None if driver is None else "Open Kernel Module" in driver,
        gpu_iommu=_gpu_iommu(pci) if _is_there(pci) else None,
        acs_redirects=_redirecting(pci),
        rdma=tuple(
            _port(device, port) for device in _list(sys / "class/infiniband") for port in _list(device / "ports")
        )
        if _is_there(sys / "class")
        else None,
        net=tuple(_net(sys / "class/net")) if _is_there(sys / "class/net") else None,
        nccl_conf=parse_conf(_read(root / "etc/nccl.conf") or ""),
    )


def parse_conf(text: str) -> dict[str, str]:
    """Parse the `NAME=VALUE` lines of an nccl.conf, where # starts a comment."""
    lines = (line.partition("#")[0] for line in text.splitlines())
    pairs = (line.partition("=") for line in lines if "=" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def acs_redirects(config: bytes) -> bool | None:
    """Return whether a PCI bridge with this configuration space redirects peer-to-peer requests to the root complex.

    Return None if the extended part, which only root may read, is missing. Source: PCI Express base specification, 7.7.
    """
    if len(config) < 4096:
        return None
    at, seen = 0x100, set[int]()
    while 0x100 <= at <= 4088 and at not in seen:
        seen.add(at)
        (header,) = struct.unpack_from("<I", config, at)
        if header & 0xFFFF == _ACS:
            (control,) = struct.unpack_from("<H", config, at + 6)
            return bool(control & _REDIRECTS)
        at = header >> 20
    return False


def _bytes(path: Path, most: int) -> bytes | None:
    """Return at most `most` bytes of a file, or None if the file cannot be read; never block, not even on a pipe."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            return file.read(most)
    except OSError:
        return None


def _read(path: Path) -> str | None:
    found = _bytes(path, _MAX_BYTES)
    return None if found is None else found.decode(errors="replace").strip()


def _is_there(path: Path) -> bool:
    """Return whether `path` exists and is visible to this process."""
    try:
        path.stat()
    except OSError:
        return False
    return True


def _list(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def _number(text: str | None) -> float | None:
    """Return the first word of `text` as a number; None for no number, and for -1, which is "unknown" in /sys."""
    try:
        value = float((text or "").split()[0])
    except (IndexError, ValueError):
        return None
    return value if 0 <= value < 1e9 else None


def _gpu_iommu(pci: Path) -> dict[str, str]:
    gpus = (d for d in _list(pci) if _read(d / "vendor") == _NVIDIA and (_read(d / "class") or "").startswith("0x03"))
    types = ((gpu.name, _read(gpu / "iommu_group/type")) for gpu in gpus)
    return {name: kind for name, kind in types if kind is not None}


def _redirecting(pci: Path) -> tuple[str, ...] | None:
    """Return the PCI bridges that redirect peer traffic by ACS; None if no bridge could be read."""
    bridges = [device for device in _list(pci) if (_read(device / "class") or "").startswith(_BRIDGE)]
    configs = {bridge.name: _bytes(bridge / "config", 4096) for bridge in bridges}
    answers = {name: None if config is None else acs_redirects(config) for name, config in configs.items()}
    if all(answer is None for answer in answers.values()):
        return None
    return tuple(name for name, redirects in answers.items() if redirects)


def _port(device: Path, port: Path) -> RdmaPort:
    state = _read(port / "state")  # "4: ACTIVE"
    mtus = (_number(_read(interface / "mtu")) for interface in _list(device / "device/net"))
    mtu = next((int(value) for value in mtus if value is not None), None)
    return RdmaPort(
        device=device.name,
        port=port.name,
        link_layer=_read(port / "link_layer"),
        state=None if state is None else state.rpartition(":")[2].strip(),
        rate_gbit_per_s=_number(_read(port / "rate")),  # "400 Gb/sec (4X NDR)"
        firmware=_read(device / "fw_ver"),
        board=_read(device / "board_id"),
        mtu=mtu,
    )


def _net(folder: Path) -> list[NetPort]:
    """Return the network interfaces that have hardware: no bridges, tunnels or loopback."""
    ports = []
    for interface in _list(folder):
        if _is_there(interface / "device"):
            speed, mtu = _number(_read(interface / "speed")), _number(_read(interface / "mtu"))
            ports.append(
                NetPort(
                    name=interface.name,
                    state=_read(interface / "operstate"),
                    speed_gbit_per_s=None if speed is None else speed / 1000,
                    mtu=None if mtu is None else int(mtu),
                )
            )
    return ports


def read_software() -> InstalledTorch:
    """Return the version and features of the torch that this Python would import, read from files without importing."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return InstalledTorch()
    return read_torch_files(Path(spec.origin).parent)


def read_torch_files(folder: Path) -> InstalledTorch:
    """Read torch's version from `version.py` in `folder`, and whether torch's files have the features we use."""
    assigned = dict(_ASSIGNED.findall(_whole(folder / "version.py")))
    features = {name: mark in _whole(folder / path) for name, (path, mark) in _FEATURES.items()}
    return InstalledTorch(
        torch=assigned.get("__version__"),
        torch_cuda=assigned.get("cuda"),
        torch_hip=assigned.get("hip"),
        features=features,
    )


def _whole(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def read_nccl() -> Nccl:
    """Load and describe the libnccl that torch would find; raise `ProbeUnavailable` if none loads."""
    for path, found_by in _candidates():
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        where = _loaded_nccl() or path  # with links resolved
        code = ctypes.c_int()
        library.ncclGetVersion(ctypes.byref(code))
        has_window = hasattr(library, "ncclCommWindowRegister")
        return Nccl(path=where, found_by=found_by, version=nccl_version(code.value), has_window_register=has_window)
    raise ProbeUnavailable(f"no {_LIBNCCL} that loads: neither next to torch nor where the dynamic loader looks")


def _candidates() -> Iterator[tuple[str, str]]:
    for preloaded in os.environ.get("LD_PRELOAD", "").replace(":", " ").split():
        if "nccl" in Path(preloaded).name:
            yield preloaded, "LD_PRELOAD"
    torch = find_spec("torch")  # looks for it, does not run it
    if torch is not None and torch.origin is not None:
        package = Path(torch.origin).parent
        yield str(package.parent / "nvidia" / "nccl" / "lib" / _LIBNCCL), "nvidia-nccl wheel"
        yield str(package / "lib" / _LIBNCCL), "torch/lib"
    yield _LIBNCCL, "dynamic loader"


def nccl_version(code: int) -> tuple[int, int, int]:
    """Return (major, minor, patch) of an NCCL_VERSION_CODE: 22809 is 2.28.9; codes up to 2.8 have fewer digits."""
    if code < 10000:
        return code // 1000, code % 1000 // 100, code % 100
    return code // 10000, code % 10000 // 100, code % 100


def _loaded_nccl() -> str | None:
    """Return the path of the libnccl mapped into this process; None if none is mapped."""
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        path = line.split(maxsplit=5)[5:]
        if path and Path(path[0]).name.startswith("libnccl.so"):
            return path[0]
    return None


def read_torch_runtime() -> TorchRuntime:
    """Import torch, return its number of devices and loaded NCCL; raise `ProbeUnavailable` if torch does not start."""
    try:
        torch: Any = importlib.import_module("torch")
        devices = torch.cuda.device_count()
        version = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    except Exception as error:
        raise ProbeUnavailable(f"torch does not start: {type(error).__name__}: {error}") from None
    return TorchRuntime(device_count=devices, nccl_version=version, nccl_path=_loaded_nccl())
