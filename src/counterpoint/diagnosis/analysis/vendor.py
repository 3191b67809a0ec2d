"""Find out whose GPUs, collectives and framework a trace shows, so that advice names only settings that they have."""

from __future__ import annotations

import re
from dataclasses import dataclass

from counterpoint.diagnosis.reading.traced_job import TracedJob
from counterpoint.trace.classify import is_nccl
from counterpoint.trace.timeline import Kind

_AMD = re.compile(r"AMD|Radeon|Instinct|\bMI\d{2,3}|gfx\d", re.IGNORECASE)
_NVIDIA = re.compile(r"NVIDIA|Tesla|GeForce|Quadro|\b(?:GB?|[ABHVPTL])\d{2,3}\b", re.IGNORECASE)
_AMD_NAMES = re.compile(r"^hip[A-Z]|^Cijk_")
_NVIDIA_NAMES = re.compile(r"^cuda[A-Z]|^cu[A-Z]|cublas|cudnn|nvjet|cutlass|sm\d{2,3}_")
_FSDP = re.compile(r"fsdp|fully_shard", re.IGNORECASE)
_FSDP2 = re.compile(r"^FSDP::|^fsdp::|chunk_cat_cuda_kernel")  # ranges, operators and a kernel that FSDP1 lacks


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedStack:
    """Holds which hardware and software a trace shows; False and None: not seen."""

    vendor: str | None  # nvidia | amd | cpu
    nccl: bool  # kernels of NCCL or RCCL
    fsdp: bool
    fsdp2: bool

    @property
    def nvidia_nccl(self) -> bool:
        """Return whether NCCL's own knobs apply: RCCL and gloo do not have them."""
        return self.nccl and self.vendor == "nvidia"

    @property
    def overlaps(self) -> bool:
        """Return whether `counterpoint.overlap(model)` can replace the collectives."""
        return self.fsdp2 and self.nvidia_nccl


def traced_stack(job: TracedJob) -> TracedStack:
    """Return the hardware and software that the traces of a job show."""
    digests = job.digests
    names = {name for d in digests for name in d.names}
    device = next((d.device.name for d in digests if d.device.name), "") or ""
    communication = {d.names[i] for d in digests for i in set(d.gpu.name[d.gpu.kind == Kind.COMM].tolist())}
    return TracedStack(
        vendor=_vendor(device, names),
        nccl=any(map(is_nccl, communication)) and device != "cpu",
        fsdp=any(map(_FSDP.search, names)),
        fsdp2=any(map(_FSDP2.search, names)),
    )


def _vendor(device: str, names: set[str]) -> str | None:
    if device == "cpu":
        return "cpu"
    if _AMD.search(device):
        return "amd"
    if _NVIDIA.search(device):
        return "nvidia"
    if any(map(_AMD_NAMES.search, names)):
        return "amd"
    return "nvidia" if any(map(_NVIDIA_NAMES.search, names)) else None
