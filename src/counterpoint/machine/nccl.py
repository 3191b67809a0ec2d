"""Find the libnccl that torch would load, without importing torch, and ask its version. Runs in a child process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from counterpoint.machine.blind import Blind
from counterpoint.machine.readings import Nccl

__all__ = ["loaded_nccl", "read_nccl"]

_NAME = "libnccl.so.2"


def read_nccl() -> Nccl:
    """The first libnccl in the order in which torch finds it: preloaded, by its RPATH, then by the loader's search.

    Raises:
        Blind: there is none, or it does not load.
    """
    for path, found_by in _candidates():
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        where = loaded_nccl() or path  # with links resolved
        code = ctypes.c_int()
        library.ncclGetVersion(ctypes.byref(code))
        has_window = hasattr(library, "ncclCommWindowRegister")
        return Nccl(path=where, found_by=found_by, version=version_of(code.value), has_window_register=has_window)
    raise Blind(f"no {_NAME} that loads: neither beside torch nor where the dynamic loader looks")


def _candidates() -> Iterator[tuple[str, str]]:
    for preloaded in os.environ.get("LD_PRELOAD", "").replace(":", " ").split():
        if "nccl" in Path(preloaded).name:
            yield preloaded, "LD_PRELOAD"
    torch = find_spec("torch")  # looks for it, does not run it
    if torch is not None and torch.origin is not None:
        package = Path(torch.origin).parent
        yield str(package.parent / "nvidia" / "nccl" / "lib" / _NAME), "nvidia-nccl wheel"
        yield str(package / "lib" / _NAME), "torch/lib"
    yield _NAME, "dynamic loader"


def version_of(code: int) -> tuple[int, int, int]:
    """NCCL_VERSION_CODE: 22809 is 2.28.9; up to 2.8 it had one digit for the minor version."""
    if code < 10000:
        return code // 1000, code % 1000 // 100, code % 100
    return code // 10000, code % 10000 // 100, code % 100


def loaded_nccl() -> str | None:
    """Path of the libnccl mapped into this process; None if there is none."""
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        path = line.split(maxsplit=5)[5:]
        if path and Path(path[0]).name.startswith("libnccl.so"):
            return path[0]
    return None
