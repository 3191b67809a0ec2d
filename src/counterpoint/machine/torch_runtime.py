"""Import torch in a child process and see what it really loaded: `doctor --device-checks`."""

from __future__ import annotations

import importlib
from typing import Any

from counterpoint.machine.blind import Blind
from counterpoint.machine.nccl import loaded_nccl
from counterpoint.machine.readings import TorchRuntime

__all__ = ["read_torch_runtime"]


def read_torch_runtime() -> TorchRuntime:
    """Devices that torch can use and the NCCL that it loaded. The only place of this room where torch is imported.

    Raises:
        Blind: torch is not installed or does not start.
    """
    try:
        torch: Any = importlib.import_module("torch")
        devices = torch.cuda.device_count()
        version = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    except Exception as error:
        raise Blind(f"torch does not start: {type(error).__name__}: {error}") from None
    return TorchRuntime(device_count=devices, nccl_version=version, nccl_path=loaded_nccl())
