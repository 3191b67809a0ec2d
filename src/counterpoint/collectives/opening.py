"""From a process group to a transport: all ranks agree on what they want, and on whether they can have it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from counterpoint.collectives.cpu import CpuTransport
from counterpoint.collectives.cpu_channel import BeforeStep
from counterpoint.collectives.group import agree, gathered, membership, together
from counterpoint.collectives.program import Tuning
from counterpoint.collectives.shared_memory import Card, SharedMemory, why_not
from counterpoint.collectives.transport import Transport
from counterpoint.collectives.watchdog import Watchdog
from counterpoint.errors import Misconfigured, Unsupported

if TYPE_CHECKING:
    from counterpoint.collectives.gpu import Gpu

__all__ = ["Options", "available", "open_transport"]

_BOARDS_BYTES = 1 << 16  # of shared memory on the host, where that is for boards alone


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a communicator was asked for; see there."""

    channels: int
    timeout_s: float
    debug: bool = False
    max_bytes: int | None = None
    chunk_bytes: int | None = None
    staging_bytes: int | None = None
    reserve_bytes: int | None = None
    graphs: bool | None = None
    sum_sms: int | None = None
    crossover_bytes: Mapping[str, int] = field(default_factory=dict)
    before_step: BeforeStep | None = None

    def __post_init__(self) -> None:
        if self.channels < 1 or not self.timeout_s > 0:
            raise Misconfigured(
                f"channels={self.channels}, timeout_s={self.timeout_s}: give one channel or more, and a time above 0"
            )
        for name, value in (("reserve_bytes", self.reserve_bytes), ("sum_sms", self.sum_sms)):
            if value is not None and value < 1:
                raise Misconfigured(f"{name}={value}: give 1 or more, or None")
        Tuning(chunk_bytes=self.chunk_bytes, staging_bytes=self.staging_bytes)  # raises if it cannot be one

    def shared(self, on_gpu: bool) -> dict[str, object]:
        """What has to be the same on all ranks: first what programs depend on, then what regions do."""
        same: dict[str, object] = {
            "channels": self.channels,
            "chunk_bytes": self.chunk_bytes,
            "staging_bytes": self.staging_bytes,
            "debug": self.debug,
        }
        if any(self.crossover_bytes.values()):
            same["crossover_bytes"] = dict(self.crossover_bytes)
        if on_gpu:
            same |= {"max_bytes": self.max_bytes, "reserve_bytes": self.reserve_bytes}
        return same


def available(group: Any = None, *, device: Any = None) -> str | None:
    """Why the ranks of `group` cannot have a `Communicator`; None if they can. All ranks call it and get the same
    answer.

    Args:
        group: torch process group; None: the default one.
        device: as of `Communicator`.
    """
    reason = why_not(gathered(group, Card.of_this_process()))
    gpu = _gpu(group, device)
    return reason if reason is not None or gpu is None else gpu.why_not(group)


def open_transport(group: Any, device: Any, options: Options) -> Transport:
    """What will carry out the calls of this rank; all ranks of the group open theirs together.

    Raises:
        Unsupported: this group cannot share memory, and why.
        Misconfigured: options that differ or cannot take effect, or this process is not in the group.
    """
    gpu = _gpu(group, device)
    for name, value in (("graphs", options.graphs), ("sum_sms", options.sum_sms)):
        if gpu is None and value is not None:
            raise Misconfigured(f"{name}={value} on a CPU: there are none; leave it out")
    if gpu is not None and options.before_step is not None:
        raise Misconfigured("before_step on a GPU: its steps run without the host; leave it out")
    agree(group, options.shared(gpu is not None))
    reason = available(group, device=device)
    if reason is not None:
        raise Unsupported(reason)
    if gpu is None:
        return _on_cpu(group, options)
    return _on_gpu(group, gpu, options)


def _gpu(group: Any, device: Any) -> Gpu | None:
    """The GPU that is meant, if one is; something that is no torch.device stands in for one."""
    import torch
    import torch.distributed as dist

    membership(group)  # raises if there is no group
    if device is not None and not isinstance(device, (str, int, torch.device)):
        gpu: Gpu = device
        return gpu
    if device is None:
        device = "cuda" if "nccl" in str(dist.get_backend_config(group)) else "cpu"
    chosen = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if chosen.type == "cpu":
        return None
    if chosen.type != "cuda":
        raise Misconfigured(f"device={device}: allowed are cpu and cuda devices")
    from counterpoint.collectives.gpu import Gpu

    return Gpu(chosen)


def _on_cpu(group: Any, options: Options) -> Transport:
    most = _eighth_of_memory() if options.max_bytes is None else options.max_bytes
    memory, watchdog = _joined(group, options.channels, most, options.timeout_s)
    try:
        return CpuTransport(
            memory,
            watchdog,
            channels=options.channels,
            chunk_bytes=options.chunk_bytes,
            staging_bytes=options.staging_bytes,
            reserve_bytes=options.reserve_bytes,
            before_step=options.before_step,
        )
    except BaseException:
        watchdog.close()
        memory.close()
        raise


def _on_gpu(group: Any, gpu: Gpu, options: Options) -> Transport:
    """Boards on the host, one channel more than asked for: there the ranks meet before symmetric memory grows."""
    from counterpoint.collectives.cuda_transport import CudaTransport

    boards, watchdog = _joined(group, options.channels + 1, _BOARDS_BYTES, options.timeout_s)
    try:
        transport = together(group, lambda: CudaTransport(gpu, gpu.memory(group), boards, watchdog, options))
    except BaseException:
        watchdog.close()
        boards.close()
        raise
    gathered(group, None)  # every rank's words rest before any rank writes one
    return transport


def _eighth_of_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8


def _joined(group: Any, channels: int, max_bytes: int, timeout_s: float) -> tuple[SharedMemory, Watchdog]:
    """Memory that all ranks of the group have mapped, and an eye on their processes."""
    rank, world_size = membership(group)
    memory = together(
        group, lambda: SharedMemory(world_size=world_size, rank=rank, channels=channels, max_bytes=max_bytes)
    )
    cards = gathered(group, memory.card())

    def join() -> Watchdog:
        memory.join(cards)
        return Watchdog(memory.boards, rank=rank, pids=[card.pid for card in cards], timeout_s=timeout_s)

    try:
        return memory, together(group, join)
    except BaseException:
        memory.close()
        raise
