"""Collect all readings of this machine, and run every check on them in the order of the report.

Drivers are asked in child processes with a time limit, files are read directly.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from counterpoint.doctor.check_gpus import check_gpus
from counterpoint.doctor.check_links import LINK_CHECKS
from counterpoint.doctor.check_software import SOFTWARE_CHECKS, answers, environment, torch_runtime
from counterpoint.doctor.probe import ask_probe
from counterpoint.doctor.readings import Bandwidth, Cuda, Nccl, Nvml, Readings, TorchRuntime, fine, not_seen
from counterpoint.doctor.system import read_software, read_system
from counterpoint.machine.profile import Profile, shipped_profile
from counterpoint.records import Record
from counterpoint.records.doctor import Check, Checkup

_VARIABLES = ("CUDA_", "NCCL_", "NVSHMEM_", "PYTORCH_", "TORCH_")  # prefixes of the variables that are read
_NOT_FOR_PROBES = ("CUDA_LAUNCH_BLOCKING",)  # it would make probes slower, and a check of its own reports it
_NO_GPU = "no GPU whose figures could be looked up"

R = TypeVar("R", bound=Record)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Probing:
    """Runs probes, and keeps the reason for each probe that gave no reading."""

    limit_s: float
    tell: Callable[[str], None]
    unavailable: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def ask(self, probe: str, kind: type[R]) -> R | None:
        self.tell(f"asking {probe}")
        answer = ask_probe(probe, limit_s=self.limit_s, without=_NOT_FOR_PROBES)
        if answer.output is not None:
            try:
                return msgspec.json.decode(answer.output, type=kind)
            except msgspec.DecodeError as error:  # the process was ended while it wrote, or wrote no valid answer
                self.unavailable[probe] = f"the probe's answer is not a reading: {error}"
                self.failed.append(probe)
                return None
        self.unavailable[probe] = answer.reason or "no reason given"
        self.failed.extend([probe] if answer.failed else [])
        return None


def collect_readings(
    *,
    bandwidth: bool = True,
    torch: bool = False,
    limit_s: float = 60.0,
    tell: Callable[[str], None] = lambda what: None,
) -> Readings:
    """Return all readings of this machine; ask NVML first, so that no probe of ours is in NVML's list of processes.

    With `bandwidth`, copies between GPUs are measured, which takes some seconds and 512 MiB of memory on each; with
    `torch`, torch is imported in a child process, too. Each child may take `limit_s` seconds; before each, `tell` gets
    a text such as "asking nvml".
    """
    probing = _Probing(limit_s=limit_s, tell=tell)
    nvml, cuda, nccl = probing.ask("nvml", Nvml), probing.ask("cuda", Cuda), probing.ask("nccl", Nccl)
    rates = None
    if not bandwidth:
        probing.unavailable["bandwidth"] = "not asked for (--no-bandwidth)"
    elif cuda is None or len(cuda.devices) < 2:
        probing.unavailable["bandwidth"] = "it takes two GPUs that CUDA shows"
    else:
        rates = probing.ask("bandwidth", Bandwidth)
    return Readings(
        host=socket.gethostname(),
        nvml=nvml,
        cuda=cuda,
        nccl=nccl,
        software=read_software(),
        torch_runtime=probing.ask("torch", TorchRuntime) if torch else None,
        system=read_system(),
        bandwidth=rates,
        environment={name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
        unavailable=probing.unavailable,
        failed=tuple(probing.failed),
    )


def examine(readings: Readings, *, torch: bool = False, profile: Profile | None = None) -> Checkup:
    """Return all checks of a machine, with `torch_runtime` if `torch`; profile None: the shipped profile of the GPU."""
    names = [seen.name for seen in readings.gpus or readings.devices]
    known = profile or shipped_profile(names[0] if names else None)
    checks = [check(readings) for check in (*LINK_CHECKS, *SOFTWARE_CHECKS)]
    checks += [torch_runtime(readings)] if torch else []
    checks += [_profile(known) if names or profile else not_seen("profile", _NO_GPU)]
    return Checkup(
        host=readings.host,
        gpus=tuple(names),
        driver=readings.nvml.driver if readings.nvml else None,
        checks=(*answers(readings), *check_gpus(readings), *checks, *environment(readings, known)),
    )


def _profile(profile: Profile) -> Check:
    """Return a check, always ok, that says which of the profile's figures were measured on this GPU model, and when."""
    return fine("profile", str(profile), digest=profile.digest)


def exit_code(checks: tuple[Check, ...], *, strict: bool = False) -> int:
    """Return exit code 1 if any check is a problem or, with `strict`, a warning; else 0, also for `not_seen`."""
    wrong = {"problem", "warning"} if strict else {"problem"}
    return int(any(check.status in wrong for check in checks))
