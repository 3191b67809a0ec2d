"""Read which torch and NCCL this Python has: from files, and in child processes by loading them."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from counterpoint.machine.readings import Nccl, ProbeUnavailable, Software, TorchRuntime

_LIBNCCL = "libnccl.so.2"
_FEATURES = {  # feature: file below torch/, and what it must contain
    "symmetric_memory": ("distributed/_symmetric_memory/__init__.py", "def rendezvous"),
    "green_contexts": ("cuda/green_contexts.py", "class GreenContext"),
    "fsdp_custom_all_gather": ("distributed/fsdp/_fully_shard/_fully_shard.py", "def set_custom_all_gather"),
    "fsdp_custom_reduce_scatter": ("distributed/fsdp/_fully_shard/_fully_shard.py", "def set_custom_reduce_scatter"),
}
_ASSIGNED = re.compile(r"""^(__version__|cuda|hip)\b[^=\n]*= *["']([^"'\n]*)["']""", re.MULTILINE)


def read_software() -> Software:
    """Read from its files which torch the running Python has; do not import it."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return Software()
    return read_torch_files(Path(spec.origin).parent)


def read_torch_files(folder: Path) -> Software:
    """Read what the folder of torch says: `version.py`, and the files that hold the features we use."""
    assigned = dict(_ASSIGNED.findall(_read(folder / "version.py")))
    features = {name: mark in _read(folder / path) for name, (path, mark) in _FEATURES.items()}
    return Software(
        torch=assigned.get("__version__"),
        torch_cuda=assigned.get("cuda"),
        torch_hip=assigned.get("hip"),
        features=features,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def read_nccl() -> Nccl:
    """Load the libnccl that torch would find: preloaded, on its RPATH, or the loader's; `ProbeUnavailable` if none."""
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
    """Decode NCCL_VERSION_CODE: 22809 is 2.28.9; up to 2.8 it had one digit for the minor version."""
    if code < 10000:
        return code // 1000, code % 1000 // 100, code % 100
    return code // 10000, code % 10000 // 100, code % 100


def _loaded_nccl() -> str | None:
    """Return the path of the libnccl mapped into this process; None if there is none."""
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        path = line.split(maxsplit=5)[5:]
        if path and Path(path[0]).name.startswith("libnccl.so"):
            return path[0]
    return None


def read_torch_runtime() -> TorchRuntime:
    """Import torch and ask for its devices and the NCCL that it loaded; raise `ProbeUnavailable` if that fails."""
    try:
        torch: Any = importlib.import_module("torch")
        devices = torch.cuda.device_count()
        version = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    except Exception as error:
        raise ProbeUnavailable(f"torch does not start: {type(error).__name__}: {error}") from None
    return TorchRuntime(device_count=devices, nccl_version=version, nccl_path=_loaded_nccl())
