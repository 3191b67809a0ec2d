"""Open a transport for a process group, once all ranks agree on the options and can share memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from counterpoint.collectives.cpu.call import BeforeStep
from counterpoint.collectives.cpu.transport import CpuTransport
from counterpoint.collectives.host.group import check_agreement, gather_values, membership, raise_together
from counterpoint.collectives.host.shared_memory import ProcessCard, SharedMemory, why_not
from counterpoint.collectives.host.watchdog import Watchdog
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.collectives.submit.submission import Transport
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.machine.profile import Profile, profile_of
from counterpoint.rehearsed import is_rehearsal

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    Device: TypeAlias = "torch.device | str | int | GpuStandIn | None"


class GpuStandIn(Protocol):
    """Describes an object that tests pass as `device` in place of a `Gpu`, with all methods of `Gpu`."""

    device: torch.device
    driver: Any


_BOARDS_BYTES = 1 << 16  # most shared host memory beside the statuses of a GPU communicator, whose data is on the GPU


def available(group: ProcessGroup | None = None, *, device: Device = None, share_gpu: bool | None = None) -> str | None:
    """Return why the ranks of `group` cannot make a `Communicator`; None if they can.

    All ranks call it together and get the same answer. The arguments mean what they mean for `Communicator`.
    """
    reason = why_not(gather_values(group, ProcessCard.of_this_process()))
    gpu = _gpu(group, device)
    if reason is not None or gpu is None:
        return reason
    found: str | None = gpu.why_not(group, share_gpu=is_rehearsal() if share_gpu is None else share_gpu)
    return found


def device_profile(group: ProcessGroup | None, device: Device, profile: Profile | str | Path | None) -> Profile:
    """Return the `Profile` (measured rates) with which a communicator plans calls; all ranks call this together.

    `profile` is a profile, or the path of one; None: the file that COUNTERPOINT_PROFILE names, else the profile shipped
    for this GPU. An error on one rank, such as a profile of another GPU, is raised on all.
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
    before_step: BeforeStep | None = None,
    names: Sequence[int] | None = None,
) -> Transport:
    """Return the transport that runs the calls of this rank; all ranks of the group call this together.

    The arguments mean what they mean for `Communicator`; `profile` has the measured figures of the machine.

    Raises:
        Unsupported: the ranks of this group cannot share memory; the message says why.
        Misconfigured: an option has no effect on this device, or the ranks' options differ.
    """
    gpu = _gpu(group, device)
    if gpu is not None and before_step is not None:
        raise Misconfigured("before_step on a GPU: its steps run without the host; leave it out")
    of_gpus = {name: getattr(options, name) for name in ("graphs", "sum_sms", "mailbox_bytes", "share_gpu")}
    unused = of_gpus if gpu is None else {}
    shared = options.shared(on_gpu=gpu is not None, profile=profile)
    check_agreement(group, shared | unused)
    for name, value in unused.items():
        if value is not None:
            raise Misconfigured(f"{name}={value} on a CPU: there are none; leave it out")
    reason = available(group, device=device, share_gpu=options.share_gpu)
    if reason is not None:
        raise Unsupported(reason)
    if gpu is None:
        return _on_cpu(group, options, before_step, names)
    return _on_gpu(group, gpu, options, profile, names)


def _gpu(group: ProcessGroup | None, device: Device) -> Any:
    """Return the `Gpu` that `device` names, or `device` itself if it is a `GpuStandIn`; None for the CPU."""
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


def _on_cpu(
    group: ProcessGroup | None,
    options: CommunicatorOptions,
    before_step: BeforeStep | None,
    names: Sequence[int] | None,
) -> Transport:
    most = options.max_bytes
    if most is None:
        most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8
    with _joined(group, options.channels, most, options.timeout_s, names) as (memory, watchdog):
        return CpuTransport(memory, watchdog, options, before_step=before_step)


def _on_gpu(
    group: ProcessGroup | None, gpu: Any, options: CommunicatorOptions, profile: Profile, names: Sequence[int] | None
) -> Transport:
    """Open the GPU transport, with extra channels: one to meet before memory grows, two to count messages."""
    from counterpoint.collectives.cuda.transport import CudaTransport

    channels = options.channels + (1 if options.mailbox_bytes is None else 3)
    with _joined(group, channels, _BOARDS_BYTES, options.timeout_s, names) as (boards, watchdog), gpu.current():
        transport = raise_together(
            group, lambda: CudaTransport(gpu, gpu.memory(group), boards, watchdog, options, profile)
        )
    gather_values(group, None)  # wait until every rank has initialised its flags; only then may a peer write one
    return transport


@contextmanager
def _joined(
    group: ProcessGroup | None, channels: int, max_bytes: int, timeout_s: float, names: Sequence[int] | None
) -> Iterator[tuple[SharedMemory, Watchdog]]:
    """Yield shared memory mapped by all ranks and a watchdog of the ranks' processes; close both on an error."""
    rank, world_size = membership(group)
    memory = raise_together(
        group, lambda: SharedMemory(world_size=world_size, rank=rank, channels=channels, max_bytes=max_bytes)
    )
    cards = gather_values(group, memory.card())

    def join() -> Watchdog:
        memory.join(cards)
        pids = [card.pid for card in cards]
        return Watchdog(memory.statuses, rank=rank, pids=pids, timeout_s=timeout_s, names=names)

    with ExitStack() as undo:
        undo.callback(memory.close)
        watchdog = raise_together(group, join)
        undo.callback(watchdog.close)
        yield memory, watchdog
        undo.pop_all()
