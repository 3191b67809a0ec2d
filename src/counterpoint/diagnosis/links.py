"""Say what the links between the GPUs of a group can carry, where that is known."""

from __future__ import annotations

from counterpoint.diagnosis.job import TracedJob
from counterpoint.machine.gpus import link_gb_per_s
from counterpoint.machine.profile import own_profile_of_traces


def link_of_group(job: TracedJob, members: tuple[int, ...] | None) -> float | None:
    """Return the GB/s into one GPU of a group, by the user's machine profile, else by its data sheet.

    None: the GPU is unknown or has no link of its own, or the group is not known to be on one host.
    """
    device = job.digests[0].device
    if any(d.device.name != device.name for d in job.digests) or not _on_one_host(job, members):
        return None
    own = own_profile_of_traces(device.name) if device.name else None
    return own.rates.link_gb_per_s if own else link_gb_per_s(device.name)


def _on_one_host(job: TracedJob, members: tuple[int, ...] | None) -> bool:
    """Return whether ranks fill hosts one after the other, as the recorded ones do, and a group lies in one of them.

    `members` None: all ranks.
    """
    gpus = job.digests[0].device.host_gpus
    if gpus is None or any(d.device.host_gpus != gpus or d.device.index != d.rank % gpus for d in job.digests):
        return False
    if job.world_size % gpus:  # part of the GPUs of one host, or of each of several
        return len(job.ranks) == job.world_size < gpus
    group = members or tuple(range(job.world_size))
    return group[0] // gpus == group[-1] // gpus
