"""Number and address the symmetric memory of GPUs, which torch allocates and maps in all processes of the host.

We use `torch.distributed._symmetric_memory`, private but in torch 2.11 to 2.13: it makes memory with `cuMemCreate`,
passes file descriptors between the processes of one host, and maps every peer's memory. We never use multicast.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from counterpoint.collectives.host.status import MAX_CHUNKS, MAX_EARLY_BLOCKS
from counterpoint.collectives.memory.pool import Location, SymmetricMemory
from counterpoint.collectives.program.steps import flag_words
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.rehearsed import host_id

_ENVIRONMENT = {  # torch reads them at every rendezvous; what the user has set stays
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",  # torch compares indices, equal if each rank sees only its GPU
}
_WORD_BYTES, _LINE_BYTES = 4, 128
_MOST_LOCATED = 4096
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
        """Return the card of this process with its GPU."""
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
    """Return why these ranks cannot share GPU memory, the same on all; None if the cards show no obstacle.

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
    """Return why torch has no usable symmetric memory here; None if it has."""
    try:
        from torch._C._distributed_c10d import _SymmetricMemory
    except ImportError:
        return "this torch has no symmetric memory; install torch >= 2.11 with CUDA"
    missing = [name for name in ("empty_strided_p2p", "rendezvous") if not hasattr(_SymmetricMemory, name)]
    if missing:
        return f"torch's symmetric memory has no {missing[0]}; use torch 2.11 to 2.13"
    try:
        _prepare_process(device)
    except Unsupported as error:
        return str(error)
    return None


def _prepare_process(device: int) -> None:
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
    if not hasattr(_SymmetricMemory, "set_backend"):
        return  # this torch has no other backend
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Region:
    """Holds one allocation: this rank's tensor, torch's handle that keeps peers' memory mapped, each rank's address.

    A region of a memory pool has no tensor.
    """

    owner: Any
    handle: Any
    addresses: tuple[int, ...]
    num_bytes: int


class CudaMemory:
    """Holds regions of GPU memory, each mapped by all ranks of a torch process group, which make this together."""

    def __init__(self, group: Any, device: int) -> None:
        from counterpoint.collectives.cuda.meeting import Meeting

        self._meeting = Meeting(group)
        self.rank: int = group.rank()
        self.world_size: int = group.size()
        self.device = device
        self._regions: dict[int, _Region] = {}
        self._located: dict[tuple[int, int], Location | None] = {}  # answers of `locate`, as long as regions stay
        _prepare_process(device)

    def create(self, num_bytes: int) -> int:
        """Return the number of a new region of zeros. All ranks call it together, with the same size.

        It takes some ms, waits for the current stream, and takes a multiple of 2 MiB of device memory.

        Raises:
            Unsupported: torch could not allocate, exchange or map it.
        """
        import torch
        from torch._C._distributed_c10d import _SymmetricMemory

        device = torch.device("cuda", self.device)
        try:
            owner = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        except RuntimeError as error:
            raise Unsupported(f"no {num_bytes} bytes of symmetric memory: {error}") from error
        owner.zero_()
        torch.cuda.current_stream(device).synchronize()  # it is zero before any peer has it mapped
        return self._map(owner, owner=owner)

    def register(self, address: int, num_bytes: int) -> int:
        """Return the number of a new region, of memory that torch's symmetric allocator has given to a memory pool.

        All ranks call it together, with the same size. The region stays valid when the tensors in it have died: torch
        reuses the memory for later tensors of that pool.

        Raises:
            Unsupported: torch could not exchange or map it.
        """
        import torch

        view = torch.as_tensor(_Bytes(address, num_bytes, None), device=torch.device("cuda", self.device))
        return self._map(view, owner=None)

    def _map(self, tensor: Any, *, owner: Any) -> int:
        """Let all ranks map the memory of this rank's `tensor`, and return the number of the region that it is."""
        from torch._C._distributed_c10d import _SymmetricMemory

        try:
            handle = _SymmetricMemory.rendezvous(tensor, self._meeting.name)
        except RuntimeError as error:
            raise Unsupported(
                f"no {tensor.nbytes} bytes of symmetric memory for a group of {self.world_size}: {error}; all ranks "
                "must be on one host, with peer access between their GPUs, and ask for the same size"
            ) from error
        region = next(number for number in range(len(self._regions) + 1) if number not in self._regions)
        addresses = _addresses(tuple(handle.buffer_ptrs), self.rank, tensor.data_ptr())
        self._located.clear()
        self._regions[region] = _Region(owner=owner, handle=handle, addresses=addresses, num_bytes=tensor.nbytes)
        return region

    def release(self, region: int) -> None:
        """Drop a region; its memory is freed when no tensor and no peer uses it. Torch waits for the device then."""
        self._located.clear()
        del self._regions[region]

    def close(self) -> None:
        """Drop every region."""
        for region in list(self._regions):
            self.release(region)
        self._meeting.end()

    def address(self, rank: int, at: Location, num_bytes: int) -> int:
        """Return the address here of bytes of a rank; raise if they do not lie within a region of that rank."""
        region = self._regions.get(at.region)
        size = 0 if region is None else region.num_bytes
        if region is None or at.offset < 0 or at.offset + num_bytes > size:
            raise Misconfigured(
                f"bytes {at.offset} to {at.offset + num_bytes} of region {at.region} of rank {rank}, which has {size}; "
                f"make the same call on every rank"
            )
        return region.addresses[rank] + at.offset

    def locate(self, address: int, num_bytes: int) -> Location | None:
        """Return the location of this rank's bytes at `address`; None if they are not in a region."""
        key = address, num_bytes
        if key not in self._located:
            if len(self._located) >= _MOST_LOCATED:
                self._located.clear()
            self._located[key] = self._searched(address, num_bytes)
        return self._located[key]

    def _searched(self, address: int, num_bytes: int) -> Location | None:
        for number, region in self._regions.items():
            offset = address - region.addresses[self.rank]
            if offset >= 0 and offset + num_bytes <= region.num_bytes:
                return Location(number, offset)
        return None

    def tensor(self, at: Location, num_bytes: int, freed: Callable[[], object]) -> Any:
        """Return own bytes as a flat uint8 tensor; `freed` is called when its storage and all views of it are gone.

        Streams may still use the bytes then: the caller has to wait for that work, as no events are recorded here.
        """
        import torch

        bytes_ = _Bytes(self.address(self.rank, at, num_bytes), num_bytes, self._regions[at.region], freed)
        return torch.as_tensor(bytes_, device=torch.device("cuda", self.device))


class _Bytes:
    """Describes device memory by `__cuda_array_interface__`, as numba and CuPy do; torch wraps it without a copy.

    Only the tensor's storage keeps this object alive: `freed` is called when it dies.
    """

    def __init__(
        self, address: int, num_bytes: int, region: _Region | None, freed: Callable[[], object] = lambda: None
    ) -> None:
        self._region, self._freed = region, freed  # the region is alive as long as a tensor is
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }

    def __del__(self) -> None:
        self._freed()


def _addresses(bases: tuple[int, ...], rank: int, own: int) -> tuple[int, ...]:
    """Return the address of each rank's region, given those of the allocations (`bases`) and of this rank's region.

    Torch may put data before a region, of the same size on every rank.

    Raises:
        Unsupported: a peer's memory is not mapped, or this rank's region lies before its allocation.
    """
    offset = own - bases[rank]
    if offset < 0 or not all(bases):
        peers = [peer for peer, base in enumerate(bases) if not base]
        raise Unsupported(
            f"torch mapped no memory of rank {peers[0]} here; ranks need peer access on one host"
            if peers
            else f"torch mapped the own region at {bases[rank]:#x}, which lies at {own:#x}; use torch 2.11 to 2.13"
        )
    return tuple(base + offset for base in bases)


class FlagLayout:
    """Says where the flag words of a GPU lie: in one region, with the same layout on every rank.

    First come the flags of output and of staging for each channel, then those of the mailbox, if it has slots, and of
    each early-release block. Between calls `ready` of staging, of slots and of free blocks is 1, all other flags are 0.
    All ranks make this together; a peer may write flags only when all ranks have made theirs.
    """

    def __init__(self, memory: SymmetricMemory, channels: int, slots: int = 0) -> None:
        words = flag_words(memory.world_size, max_chunks=MAX_CHUNKS)
        self._stride = -(-words * _WORD_BYTES // _LINE_BYTES) * _LINE_BYTES
        self._channels, slot_words = channels, 2 * slots * memory.world_size
        self._blocks = 2 * channels + -(-slot_words * _WORD_BYTES // self._stride)  # rows before those of blocks
        self.num_bytes = (self._blocks + MAX_EARLY_BLOCKS) * self._stride
        self.region = memory.create(self.num_bytes)
        tensor = self._tensor(memory)
        tensor.zero_()
        tensor[1 : 2 * channels : 2, : memory.world_size] = 1
        of_slots = tensor[2 * channels : self._blocks].flatten()[:slot_words].view(slots, 2, memory.world_size)
        of_slots[:, 0] = 1
        tensor[self._blocks :, : memory.world_size] = 1

    def of_channel(self, index: int) -> Location:
        """Return where the flags of outputs of calls on this channel begin."""
        return Location(self.region, 2 * index * self._stride)

    def of_staging(self, index: int) -> Location:
        """Return where the flags of this channel's staging begin."""
        return Location(self.region, (2 * index + 1) * self._stride)

    def of_block(self, number: int) -> Location:
        """Return where the flags of an early-release block begin."""
        return Location(self.region, (self._blocks + number) * self._stride)

    @property
    def of_mailbox(self) -> Location:
        """Return where the flags of the mailbox begin."""
        return Location(self.region, 2 * self._channels * self._stride)

    @property
    def captured_bytes(self) -> int:
        """Return the bytes of the flags of all channels and of the mailbox, with which the region begins."""
        return self._blocks * self._stride

    def _tensor(self, memory: SymmetricMemory) -> Any:
        import torch

        whole = memory.tensor(Location(self.region, 0), self.num_bytes, lambda: None)
        return whole.view(torch.int32).view(-1, self._stride // _WORD_BYTES)
