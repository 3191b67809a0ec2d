"""Tell whether the GPUs of a group's ranks can share memory, and prepare this process's symmetric memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from counterpoint.errors import Unsupported
from counterpoint.rehearsed import host_id

_ENVIRONMENT = {  # torch reads them at every rendezvous; what the user has set stays
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",  # torch compares indices, equal if each rank sees only its GPU
}
_BACKEND = "CUDA"  # NVSHMEM and NCCL hand out memory of their own kinds, some of it multicast


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaCard:
    """Describes a rank's GPU; the ranks exchange cards through their process group before they share memory."""

    host: str  # `host_id`
    gpu: str  # UUID
    no_access: tuple[str, ...] = ()  # UUIDs of visible GPUs that this one cannot reach
    lacks: str | None = None  # why this process has no symmetric memory, whatever its peers have; None: it has

    @classmethod
    def of(cls, device: int) -> CudaCard:
        """Return the `CudaCard` of this process, which uses the GPU with the index `device`."""
        import torch

        reach = torch.cuda.can_device_access_peer
        others = [other for other in range(torch.cuda.device_count()) if other != device]
        return cls(
            host=host_id(),
            gpu=_uuid(device),
            no_access=tuple(_uuid(other) for other in others if not reach(device, other)),
            lacks=_lacking(device),
        )


def why_not(cards: Sequence[CudaCard], *, share_gpu: bool) -> str | None:
    """Return why the ranks with these cards cannot share GPU memory, in equal words on all ranks; None if they can.

    Two ranks of one GPU are an obstacle without `share_gpu`.
    """
    for rank, card in enumerate(cards):
        if card.lacks is not None:
            return f"rank {rank}: {card.lacks}"
        if card.host != cards[0].host:
            return f"ranks 0 and {rank} are on different hosts; use one group for the ranks of each host"
        for peer, other in enumerate(cards[:rank]):
            if card.gpu == other.gpu and not share_gpu:
                return (
                    f"ranks {peer} and {rank} use the same GPU; give each rank a GPU of its own, or run "
                    "the script by counterpoint rehearse, which lets ranks share one"
                )
            if other.gpu in card.no_access or card.gpu in other.no_access:
                return f"the GPUs of ranks {peer} and {rank} have no peer access to each other (no NVLink or PCIe P2P)"
    return None


def _uuid(device: int) -> str:
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


def _lacking(device: int) -> str | None:
    """Return why torch has no usable symmetric memory in this process; None if it has."""
    try:
        from torch._C._distributed_c10d import _SymmetricMemory  # noqa: F401
    except ImportError:
        return "this torch has no symmetric memory; install torch >= 2.11 with CUDA"
    try:
        prepare_process(device)
    except Unsupported as error:
        return str(error)
    return None


def prepare_process(device: int) -> None:
    """Make CUDA the backend of this process's symmetric memory, without multicast unless the environment asks for it.

    Torch prefers NVSHMEM if that is installed. Its check of device indices is off: `why_not` compares UUIDs. Variables
    are set when the first communicator opens, and never later, when threads of NCCL or the user may read them.

    Raises:
        Unsupported: the process already has symmetric memory of another backend.
    """
    import torch
    from torch._C._distributed_c10d import _SymmetricMemory

    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    current = _SymmetricMemory.get_backend(torch.device("cuda", device))
    if current == _BACKEND:
        return
    try:
        _SymmetricMemory.set_backend(_BACKEND)
    except RuntimeError as error:
        raise Unsupported(
            f"symmetric memory of this process comes from {current}, and has to come from {_BACKEND}: {error}; "
            f"set TORCH_SYMMMEM={_BACKEND} before torch is imported"
        ) from error
