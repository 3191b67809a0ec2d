"""Gather all readings of this machine: drivers in child processes with a time limit, files directly."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from counterpoint.machine import child
from counterpoint.machine.readings import Bandwidth, Cuda, Nccl, Nvml, Readings, TorchRuntime
from counterpoint.machine.software import read_software
from counterpoint.machine.system import read_system
from counterpoint.records.base import Record

__all__ = ["VARIABLES", "look"]

VARIABLES = ("CUDA_", "NCCL_", "NVSHMEM_", "PYTORCH_", "TORCH_")  # the environment that matters starts with these
_NOT_FOR_PROBES = ("CUDA_LAUNCH_BLOCKING",)  # it would be measured, and it has a check of its own

R = TypeVar("R", bound=Record)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asker:
    limit_s: float
    tell: Callable[[str], None]
    blind: dict[str, str] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def ask(self, probe: str, kind: type[R]) -> R | None:
        self.tell(f"asking {probe}")
        answer = child.ask(probe, limit_s=self.limit_s, without=_NOT_FOR_PROBES)
        if answer.output is not None:
            try:
                return msgspec.json.decode(answer.output, type=kind)
            except msgspec.DecodeError as error:  # something ended the process, or its answer cannot be
                self.blind[probe] = f"the probe's answer is not a reading: {error}"
                self.broken.append(probe)
                return None
        self.blind[probe] = answer.reason or "no reason given"
        self.broken.extend([probe] if answer.broken else [])
        return None


def look(
    *,
    bandwidth: bool = True,
    torch: bool = False,
    limit_s: float = 60.0,
    tell: Callable[[str], None] = lambda what: None,
) -> Readings:
    """Read this machine. NVML is asked first, so that our own processes are not among those it lists.

    Args:
        bandwidth: copy between GPUs, some seconds; 512 MiB of memory on each.
        torch: import torch in a child process, too.
        limit_s: for each child.
        tell: is called with what is being asked.
    """
    asker = _Asker(limit_s=limit_s, tell=tell)
    nvml, cuda, nccl = asker.ask("nvml", Nvml), asker.ask("cuda", Cuda), asker.ask("nccl", Nccl)
    rates = None
    if not bandwidth:
        asker.blind["bandwidth"] = "not asked for (--no-bandwidth)"
    elif cuda is None or len(cuda.devices) < 2:
        asker.blind["bandwidth"] = "it takes two GPUs that CUDA shows"
    else:
        rates = asker.ask("bandwidth", Bandwidth)
    return Readings(
        host=socket.gethostname(),
        nvml=nvml,
        cuda=cuda,
        nccl=nccl,
        software=read_software(),
        torch_runtime=asker.ask("torch", TorchRuntime) if torch else None,
        system=read_system(),
        bandwidth=rates,
        environment=_variables(os.environ),
        blind=asker.blind,
        broken=tuple(asker.broken),
    )


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in sorted(environment.items()) if name.startswith(VARIABLES)}
