"""Tell whether this process is a rank of `counterpoint rehearse`, and which pretended host it is on. No torch.

Several ranks of a rehearsal share a GPU: values, order, graphs and errors are as on as many GPUs, times are not.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

_HOST, _LOCAL_RANK = "COUNTERPOINT_REHEARSED_HOST", "COUNTERPOINT_REHEARSED_LOCAL_RANK"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NO_TIMES = "ranks of a rehearsal share a GPU, so times would be wrong"


def is_rehearsal() -> bool:
    """Return whether this process is a rank of a rehearsal."""
    return _HOST in os.environ


def local_rank() -> str:
    """Return this rank's number on its host, "" if not set; in a rehearsal LOCAL_RANK is a GPU's index instead."""
    return os.environ.get(_LOCAL_RANK) or os.environ.get("LOCAL_RANK", "")


def host_id() -> str:
    """Return a text that identifies this host, or, in a rehearsal, the pretended host of this rank."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else platform.node()
    return f"{boot}, rehearsed host {os.environ[_HOST]}" if is_rehearsal() else boot


def rank_variables(rank: int, *, ranks_per_host: int, gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment variables that make a process a rank of a rehearsal; set them before torch is imported.

    NCCL refuses two ranks of one host on one GPU, so it takes each rank for a host of its own and sends over loopback.
    `gpus` are entries of CUDA_VISIBLE_DEVICES that the ranks are dealt out to in turn; empty: the ranks run on CPUs.
    """
    host, local = divmod(rank, ranks_per_host)
    place = {_HOST: str(host), _LOCAL_RANK: str(local), "LOCAL_WORLD_SIZE": str(ranks_per_host)}
    if not gpus:
        return {**place, "LOCAL_RANK": str(local), "CUDA_VISIBLE_DEVICES": ""}
    return {
        **place,
        "LOCAL_RANK": "0",
        "CUDA_VISIBLE_DEVICES": gpus[rank % len(gpus)],
        "NCCL_HOSTID": f"counterpoint-rehearsal-{rank}",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }


def visible_devices(count: int) -> tuple[str, ...]:
    """Return the entries of CUDA_VISIBLE_DEVICES for the first `count` GPUs that this process sees."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = [str(index) for index in range(count)] if listed is None else listed.split(",")
    return tuple(name.strip() for name in named[:count])
