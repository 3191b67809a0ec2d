"""From a process group to a transport: all ranks agree on what they want, and on whether they can have it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from counterpoint.collectives.cpu.channel import BeforeStep
from counterpoint.collectives.cpu.transport import CpuTransport
from counterpoint.collectives.host.group import check_agreement, gather_values, membership, raise_together
from counterpoint.collectives.host.shared_memory import ProcessCard, SharedMemory, why_not
from counterpoint.collectives.host.watchdog import Watchdog
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.collectives.submit.submission import Transport
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.machine.profile import Profile, profile_of

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    Device: TypeAlias = "torch.device | str | int | GpuStandIn | None"


class GpuStandIn(Protocol):
    """Describes what can be used in the place of a `Gpu`."""

    device: torch.device
    driver: Any


_BOARDS_BYTES = 1 << 16  # of shared memory on the host, where that is for boards alone


def available(group: ProcessGroup | None = None, *, device: Device = None) -> str | None:
    """Return why the ranks of `group` cannot have a `Communicator`; None if they can.

    All ranks call it and get the same answer. `group` and `device` are as of `Communicator`.
    """
    reason = why_not(gather_values(group, ProcessCard.of_this_process()))
    gpu = _gpu(group, device)
    return reason if reason is not None or gpu is None else gpu.why_not(group)


def device_profile(group: ProcessGroup | None, device: Device, profile: Profile | str | Path | None) -> Profile:
    """Return the machine's figures that a communicator goes by. All ranks call it.

    `profile` is the figures, or a file of them; None: as COUNTERPOINT_PROFILE says, else the shipped ones of the GPU.
    An error on one rank, such as a file that is of another GPU, is raised on all.
    """

    def chosen() -> Profile:
        if isinstance(profile, Profile):
            return profile
        gpu = _gpu(group, device)
        return profile_of(None if gpu is None else gpu.name, profile)

    return raise_together(group, chosen)


def open_transport(
    group: ProcessGroup | None,
    device: Device,
    options: CommunicatorOptions,
    *,
    profile: Profile,
    crossover_bytes: Mapping[str, int],
    before_step: BeforeStep | None = None,
) -> Transport:
    """Return what will carry out the calls of this rank; all ranks of the group open theirs together.

    Args:
        group: None: the default one.
        device: as of `Communicator`.
        options: what was asked for.
        profile: figures of the machine.
        crossover_bytes: by operation, below which torch takes a call.
        before_step: on CPUs, called before every step.

    Returns:
        The transport of this kind of device.

    Raises:
        Unsupported: this group cannot share memory, and why.
        Misconfigured: options that cannot take effect.
    """
    gpu = _gpu(group, device)
    for name, value in (("graphs", options.graphs), ("sum_sms", options.sum_sms)):
        if gpu is None and value is not None:
            raise Misconfigured(f"{name}={value} on a CPU: there are none; leave it out")
    if gpu is not None and before_step is not None:
        raise Misconfigured("before_step on a GPU: its steps run without the host; leave it out")
    check_agreement(group, options.shared(on_gpu=gpu is not None, crossover_bytes=crossover_bytes, profile=profile))
    reason = available(group, device=device)
    if reason is not None:
        raise Unsupported(reason)
    if gpu is None:
        return _on_cpu(group, options, before_step)
    return _on_gpu(group, gpu, options, profile)


def _gpu(group: ProcessGroup | None, device: Device) -> Any:
    """Return the GPU that is meant, or what stands in for one: anything that is no torch.device; None: the CPU."""
    import torch
    import torch.distributed as dist

    membership(group)  # raises if there is no group
    if device is not None and not isinstance(device, (str, int, torch.device)):
        return device
    if device is None:
        device = "cuda" if "nccl" in str(dist.get_backend_config(group)) else "cpu"
    chosen = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if chosen.type == "cpu":
        return None
    if chosen.type != "cuda":
        raise Misconfigured(f"device={device}: allowed are cpu and cuda devices")
    from counterpoint.collectives.cuda.device import Gpu

    return Gpu(chosen)


def _on_cpu(group: ProcessGroup | None, options: CommunicatorOptions, before_step: BeforeStep | None) -> Transport:
    most = options.max_bytes
    if most is None:
        most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8
    with _joined(group, options.channels, most, options.timeout_s) as (memory, watchdog):
        return CpuTransport(memory, watchdog, options, before_step=before_step)


def _on_gpu(group: ProcessGroup | None, gpu: Any, options: CommunicatorOptions, profile: Profile) -> Transport:
    """Open it with a status on the host that has one channel more: there the ranks meet before memory grows."""
    from counterpoint.collectives.cuda.transport import CudaTransport

    with _joined(group, options.channels + 1, _BOARDS_BYTES, options.timeout_s) as (boards, watchdog):
        transport = raise_together(
            group, lambda: CudaTransport(gpu, gpu.memory(group), boards, watchdog, options, profile)
        )
    gather_values(group, None)  # every rank's words rest before any rank writes one
    return transport


@contextmanager
def _joined(
    group: ProcessGroup | None, channels: int, max_bytes: int, timeout_s: float
) -> Iterator[tuple[SharedMemory, Watchdog]]:
    """Yield memory that all ranks of the group have mapped, and a watchdog of their processes; an error closes both."""
    rank, world_size = membership(group)
    memory = raise_together(
        group, lambda: SharedMemory(world_size=world_size, rank=rank, channels=channels, max_bytes=max_bytes)
    )
    cards = gather_values(group, memory.card())

    def join() -> Watchdog:
        memory.join(cards)
        return Watchdog(memory.statuses, rank=rank, pids=[card.pid for card in cards], timeout_s=timeout_s)

    with ExitStack() as undo:
        undo.callback(memory.close)
        watchdog = raise_together(group, join)
        undo.callback(watchdog.close)
        yield memory, watchdog
        undo.pop_all()
