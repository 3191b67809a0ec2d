"""Lets Triton compile for a GPU on a machine without one, and reads the result."""

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget


class OfflineDriver:
    """Stands for Triton's driver on a machine that has none: as much of it as compiling asks for."""

    def __init__(self, capability: int = 90) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps the kernels of a device by its number

    def get_current_stream(self, device: int) -> int:
        return device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def spilled_bytes(binary: bytes) -> int:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(binary)
        said = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return sum(int(size) for size in re.findall(r"STACK:(\d+)", said))
