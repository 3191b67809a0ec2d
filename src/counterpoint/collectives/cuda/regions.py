"""Make, number and address regions of GPUs' symmetric memory; all ranks of a host make each region together.

We use `torch.distributed._symmetric_memory`, private but in torch 2.11 to 2.13: it makes memory with `cuMemCreate`,
passes file descriptors between the processes of one host, and maps every peer's memory. We never use multicast.

Torch numbers the rendezvous of a process, over all its groups, and writes the number into the keys by which
ranks find each other in the group's store (`StoreExchange`, torch 2.11 to 2.13). Ranks that have met in different
groups before have different numbers, and would wait for each other until the store gives up: hence `NumberedStore`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from counterpoint.collectives.cuda.driver import EventPool, in_context
from counterpoint.collectives.cuda.lower import WORD_BYTES
from counterpoint.collectives.host.announce import Announcer
from counterpoint.collectives.host.shared_memory import MAX_CHUNKS
from counterpoint.collectives.memory import MAX_EARLY_BLOCKS, Location, SymmetricMemory
from counterpoint.collectives.program.steps import flag_words
from counterpoint.collectives.submit.submission import Submission
from counterpoint.errors import Misconfigured, Unsupported

_LINE_BYTES = 128
_MOST_LOCATED = 4096
c10d: Any = _distributed_c10d  # its stubs lack half of it
_NUMBER = re.compile(r"/(\d+)")
_POOLS: list[Any] = []  # torch's memory pools, which live as long as the process


class NumberedStore(c10d.Store):  # type: ignore[misc]
    """Wraps a store: replaces torch's rendezvous numbers in keys by 0, 1, ... in order of use."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store, self._numbers = store, dict[str, int]()

    def set(self, key: str, value: bytes) -> None:
        """Set the value of a key."""
        self._store.set(self._own(key), value)

    def get(self, key: str) -> bytes:
        """Return the value of a key, after waiting for it."""
        found: bytes = self._store.get(self._own(key))
        return found

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the counter `key`, and return the new count."""
        return int(self._store.add(self._own(key), amount))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have a value."""
        return bool(self._store.check([self._own(key) for key in keys]))

    def wait(self, keys: list[str], *timeout: Any) -> None:
        """Wait until all keys have a value."""
        self._store.wait([self._own(key) for key in keys], *timeout)

    def _own(self, key: str) -> str:
        return _NUMBER.sub(lambda found: f"/{self._numbers.setdefault(found[1], len(self._numbers))}", key, count=1)


class Meeting:
    """Replaces a process group when torch exchanges symmetric memory: it has the same ranks, but a `NumberedStore`.

    All ranks of the group make it together; if they make several, they make them in the same order.
    """

    def __init__(self, group: Any) -> None:
        ranks = "_".join(map(str, dist.get_process_group_ranks(group)))
        whole = distributed_c10d._get_process_group_store(group)
        parent: Any = c10d.PrefixStore(f"symmetric memory {ranks}", whole)
        number = parent.add(f"made by {group.rank()}", 1)
        self._store = NumberedStore(c10d.PrefixStore(f"{number}", parent))  # dies with its last Python reference
        self._group: Any = c10d.ProcessGroup(self._store, group.rank(), group.size())
        self.name = f"{distributed_c10d._get_process_group_name(group)}: memory {number}"
        c10d._register_process_group(self.name, self._group)

    def end(self) -> None:
        """Unregister this meeting's process group from torch."""
        c10d._unregister_process_group(self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Region:
    """Holds one region: this rank's tensor, torch's handle that keeps peers' memory mapped, each rank's address.

    A region of a memory pool has no tensor.
    """

    owner: Any
    handle: Any
    addresses: tuple[int, ...]
    num_bytes: int


class CudaMemory:
    """Holds the regions of GPU memory that all ranks of a torch process group have mapped; all make this together."""

    def __init__(self, group: Any, device: int) -> None:
        self._meeting = Meeting(group)
        self.rank: int = group.rank()
        self.world_size: int = group.size()
        self.device = device
        self._regions: dict[int, _Region] = {}
        self._located: dict[tuple[int, int], Location | None] = {}  # answers of `locate`, as long as regions stay

    def create(self, num_bytes: int) -> int:
        """Return the number of a new region, made of `num_bytes` zeros; all ranks call this together, with equal sizes.

        It takes some ms, waits for the current stream, and takes a multiple of 2 MiB of device memory.

        Raises:
            Unsupported: torch could not allocate, exchange or map it.
        """
        device = torch.device("cuda", self.device)
        try:
            owner = c10d._SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        except RuntimeError as error:
            raise Unsupported(f"no {num_bytes} bytes of symmetric memory: {error}") from error
        owner.zero_()
        torch.cuda.current_stream(device).synchronize()  # it is zero before any peer has it mapped
        return self._map(owner, owner=owner)

    def register(self, address: int, num_bytes: int) -> int:
        """Return the number of a region newly made of memory that torch's symmetric allocator gave to a memory pool.

        All ranks call it together, with the same size. The region stays valid when the tensors in it have died: torch
        reuses the memory for later tensors of that pool.

        Raises:
            Unsupported: torch could not exchange or map it.
        """
        view = torch.as_tensor(_Bytes(address, num_bytes, None), device=torch.device("cuda", self.device))
        return self._map(view, owner=None)

    def _map(self, tensor: Any, *, owner: Any) -> int:
        """Map the memory of every rank's `tensor` on all ranks, as a new region; return the region's number."""
        try:
            handle = c10d._SymmetricMemory.rendezvous(tensor, self._meeting.name)
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
        """Drop a region; torch waits for the device and frees the memory once no tensor and no peer uses it."""
        self._located.clear()
        del self._regions[region]

    def close(self) -> None:
        """Drop every region, and the process group by which torch mapped the regions."""
        for region in list(self._regions):
            self.release(region)
        self._meeting.end()

    def address(self, rank: int, at: Location, num_bytes: int) -> int:
        """Return the address in this process of `num_bytes` at `at` of `rank`; raise if they lie in no region."""
        region = self._regions.get(at.region)
        size = 0 if region is None else region.num_bytes
        if region is None or at.offset < 0 or at.offset + num_bytes > size:
            raise Misconfigured(
                f"bytes {at.offset} to {at.offset + num_bytes} of region {at.region} of rank {rank}, which has {size}; "
                f"make the same call on every rank"
            )
        return region.addresses[rank] + at.offset

    def locate(self, address: int, num_bytes: int) -> Location | None:
        """Return the location of the `num_bytes` at `address` in this rank's regions; None if they lie in none."""
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
        """Return this rank's bytes at `at` as a flat uint8 tensor; `freed` is called when the last view is gone.

        Streams may still use the bytes then: the caller has to wait for that work, as no events are recorded here.
        """
        bytes_ = _Bytes(self.address(self.rank, at, num_bytes), num_bytes, self._regions[at.region], freed)
        return torch.as_tensor(bytes_, device=torch.device("cuda", self.device))


class _Bytes:
    """Describes device memory by `__cuda_array_interface__`, as numba and CuPy do; torch wraps it without a copy.

    Only the tensor's storage keeps this object alive: `freed` is called when the storage dies.
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
    """Return each rank's region address, from all allocations' addresses `bases` and this rank's region address `own`.

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

    First come the flags of output and of staging for each channel, then flags of the mailbox, if it has slots, and of
    each early-release block. Between calls `ready` of staging, of slots and of free blocks is 1, all other flags are 0.
    All ranks make this together; a peer may write flags only when all ranks have made theirs.
    """

    def __init__(self, memory: SymmetricMemory, channels: int, slots: int = 0) -> None:
        words = flag_words(memory.world_size, max_chunks=MAX_CHUNKS)
        self._stride = -(-words * WORD_BYTES // _LINE_BYTES) * _LINE_BYTES
        self._channels, slot_words = channels, 2 * slots * memory.world_size
        self._blocks = 2 * channels + -(-slot_words * WORD_BYTES // self._stride)  # rows before early blocks
        self.num_bytes = (self._blocks + MAX_EARLY_BLOCKS) * self._stride
        self.region = memory.create(self.num_bytes)
        tensor = self._tensor(memory)
        tensor.zero_()
        tensor[1 : 2 * channels : 2, : memory.world_size] = 1
        of_slots = tensor[2 * channels : self._blocks].flatten()[:slot_words].view(slots, 2, memory.world_size)
        of_slots[:, 0] = 1
        tensor[self._blocks :, : memory.world_size] = 1

    def of_channel(self, index: int) -> Location:
        """Return where the output flags of channel `index` begin."""
        return Location(self.region, 2 * index * self._stride)

    def of_staging(self, index: int) -> Location:
        """Return where the staging flags of channel `index` begin."""
        return Location(self.region, (2 * index + 1) * self._stride)

    def of_block(self, number: int) -> Location:
        """Return where the flags of early-release block `number` begin."""
        return Location(self.region, (self._blocks + number) * self._stride)

    @property
    def of_mailbox(self) -> Location:
        """Return where the flags of the mailbox begin."""
        return Location(self.region, 2 * self._channels * self._stride)

    @property
    def captured_bytes(self) -> int:
        """Return how many bytes, from the region's start, hold the flags of channels and mailbox."""
        return self._blocks * self._stride

    def _tensor(self, memory: SymmetricMemory) -> Any:
        whole = memory.tensor(Location(self.region, 0), self.num_bytes, lambda: None)
        return whole.view(torch.int32).view(-1, self._stride // WORD_BYTES)


class Growth:
    """Makes regions of symmetric memory; all ranks meet first, so that an error can name a missing rank.

    The ranks meet on the channel of `announcer`, which serves nothing else. A rank may take up to `max_bytes`; None: no
    limit.
    """

    def __init__(
        self, gpu: Any, memory: SymmetricMemory, events: EventPool, announcer: Announcer, *, max_bytes: int | None
    ) -> None:
        self._gpu, self._memory, self._events, self._announcer = gpu, memory, events, announcer
        self._max_bytes, self._bytes, self._count = max_bytes, 0, 0
        self.created = 0  # regions so far: after a new one an address may mean something else

    @in_context
    def create(self, what: str, num_bytes: int, make: Callable[[], int] | None = None) -> int:
        """Return the number of a region newly made by all ranks together; raise if a rank is missing or disagrees.

        `what` says what the region is for, in the same words on all ranks; `make` makes it (None: `memory.create`). In
        a graph capture the region is made beside the capture, and is no part of the graph.

        Raises:
            Unsupported: this rank would have more than `max_bytes`.
        """
        if self._max_bytes is not None and self._bytes + num_bytes > self._max_bytes:
            raise Unsupported(
                f"{what}: {num_bytes} bytes of symmetric memory, with {self._bytes} in use; allowed are "
                f"{self._max_bytes}: drop tensors that are no longer used, or give a larger max_bytes"
            )
        self._count += 1
        text = f"growing {what} by {num_bytes} bytes"
        submission = Submission(text=text, channel=self._announcer.channel, line=self._memory.world_size)
        record = self._announcer.announce(submission, self._count)
        self._announcer.met(submission, self._count)
        captured = self._gpu.capture_of(self._events.handles[self._gpu.current_stream()])
        with self._gpu.beside_capture() if captured else nullcontext():
            region = self._memory.create(num_bytes) if make is None else make()
        self.created += 1
        self._bytes += num_bytes
        record.step = record.steps
        return region


@contextmanager
def torch_pool(memory: CudaMemory, growth: Growth) -> Iterator[None]:
    """Put CUDA tensors made by this thread in the `with` block into memory that all ranks map at the block's end.

    Each use has a `torch.cuda.MemPool` of its own, since torch picks the memory that it reuses by address, which
    differs between ranks. The pool lives as long as the process, since its tensors may outlive the communicator.
    """
    from torch.distributed._symmetric_memory import get_mempool_allocator

    torch.cuda.empty_cache()  # torch gives no memory of its cache to another allocator
    allocator = get_mempool_allocator(torch.device("cuda", memory.device))
    pool = torch.cuda.MemPool(allocator, use_on_oom=False, no_split=True)  # torch maps whole segments only
    with allocation_trace(memory.device) as trace:
        with torch.cuda.use_mem_pool(pool, device=memory.device):
            yield
        segments = living_segments(pool.snapshot(), trace())
    if segments:
        _POOLS.append(pool)
    for segment in segments:
        growth.create("memory pool", segment[1], partial(memory.register, *segment))


@contextmanager
def allocation_trace(device: int) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Make torch record its allocator's actions; yield a function that returns the records, oldest first."""
    was_enabled = torch._C._cuda_isHistoryEnabled()  # by the user, whose records go on
    if not was_enabled:
        torch.cuda.memory._record_memory_history("all", context=None)
    try:
        yield lambda: torch.cuda.memory._snapshot(device)["device_traces"][device]
    finally:
        if not was_enabled:
            torch.cuda.memory._record_memory_history(None)


def living_segments(snapshot: list[dict[str, Any]], trace: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return the segments (address, bytes) that hold a tensor, in the order in which these tensors were made.

    The pool of the `snapshot` splits no segment. Tensors whose record the `trace` lost come first.
    """
    made = {int(one["addr"]): at for at, one in enumerate(trace) if one["action"] == "alloc"}
    living = [one for one in snapshot if any(block["state"] == "active_allocated" for block in one["blocks"])]
    segments = [(int(one["address"]), int(one["total_size"])) for one in living]
    return sorted(segments, key=lambda segment: (made.get(segment[0], -1), segment[1], segment[0]))
