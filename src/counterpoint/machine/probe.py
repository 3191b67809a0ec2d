"""`python -m counterpoint.machine.probe NAME`: runs in the child, prints one reading as JSON, or fails with why."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import msgspec

from counterpoint.machine.bandwidth import measure_bandwidth
from counterpoint.machine.blind import Blind, Broken
from counterpoint.machine.child import BLIND, BROKEN
from counterpoint.machine.cuda import read_cuda
from counterpoint.machine.nccl import read_nccl
from counterpoint.machine.nvml import read_nvml
from counterpoint.machine.torch_runtime import read_torch_runtime
from counterpoint.records.base import Record

__all__ = ["PROBES", "main"]

PROBES: dict[str, Callable[[], Record]] = {
    "nvml": read_nvml,
    "cuda": read_cuda,
    "nccl": read_nccl,
    "torch": read_torch_runtime,
    "bandwidth": measure_bandwidth,
}


def main() -> int:
    """Run the probe named by the first argument; what libraries print to standard output goes to stderr."""
    result = os.dup(1)
    os.dup2(2, 1)
    try:
        reading = PROBES[sys.argv[1]]()
    except Blind as reason:
        print(reason, file=sys.stderr)
        return BROKEN if isinstance(reason, Broken) else BLIND
    with os.fdopen(result, "wb") as out:
        out.write(msgspec.json.encode(reading))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
