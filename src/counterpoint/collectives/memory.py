"""Define symmetric memory (memory of one rank that all peers have mapped) and pools that make tensors in it.

Programs name memory by buffer and offset. A `Location` says where in a rank's symmetric memory a buffer begins; it
means the same to every rank, while an address is valid in one process only. `Pool` makes the tensors of `empty`;
`ReusePolicy` says when a dead tensor's memory may be used again (CPU: at once; GPU: `StreamOrder.freed`).

`EarlyPool` releases outputs early: peers get the ready signals when a tensor dies, not when the next call begins. Each
of its blocks has its own flag words. While a block is free, `ready` of each peer is 1: "the block of this number may be
written there". A call with such an output begins without a handshake. So all ranks must use the same block, which they
compare by its number, and every rank must push into every other (`Program.pushers`): only these calls are proved. From
that call until the tensor dies, `ready` is 0, as without early release, and a second call on the same tensor begins
with the handshake. A block is never split or joined with others: a peer that was told that it is free may write to it
at any time.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

from counterpoint.errors import Unsupported

_SMALLEST_BYTES, _STEP_BYTES = 1 << 16, 1 << 26  # smallest size of a `GrowableRegion`, and its step when large
_MOST_BYTES = 1 << 28  # largest region that a pool makes if no single tensor needs more
MAX_EARLY_BLOCKS, MAX_EARLY_REGIONS = 256, 32  # most blocks and regions of an `EarlyPool`
BLOCK_BYTES = 512  # divides blocks' sizes and offsets: no two tensors share a cache line or a copy engine's burst


@dataclass(frozen=True, slots=True, order=True)
class Location:
    """Names a byte of a rank's symmetric memory, by a region's number and the byte's offset in that region."""

    region: int
    offset: int

    def __add__(self, num_bytes: int) -> Location:
        return Location(self.region, self.offset + num_bytes)


class SymmetricMemory(Protocol):
    """Makes regions on a device; a region is one allocation of this rank that every peer can write."""

    rank: int
    world_size: int

    def create(self, num_bytes: int) -> int:
        """Make a region of zeros, and return its number."""

    def release(self, region: int) -> None:
        """Free a region that this rank no longer uses; a later region may get the same number."""

    def address(self, rank: int, at: Location, num_bytes: int) -> int:
        """Return the address in this process of `num_bytes` at `at` of `rank`; raise if they lie in no region."""

    def locate(self, address: int, num_bytes: int) -> Location | None:
        """Return the location of the `num_bytes` at `address`; None if they are not in this rank's symmetric memory."""

    def tensor(self, at: Location, num_bytes: int, freed: Callable[[], object]) -> Any:
        """Return bytes at `at` as a flat uint8 tensor; `freed` is called, in any thread, when the last view is gone."""

    def close(self) -> None:
        """Free all regions; memory that tensors still use is freed when they die."""


NotReusable: TypeAlias = Literal["later", "never"]
"""Says that memory is not known to be free yet, so that one has to ask again, or never will be."""


class ReusePolicy(Protocol):
    """Decides when a dead tensor's memory may be reused on a device whose streams run asynchronously to the host."""

    def freed(self, at: Location, num_bytes: int) -> tuple[Any, ...] | NotReusable:
        """Return the work that must end before the freed bytes at `at` are reused; "later" (ask again), or "never"."""

    def taken(self, at: Location, after: tuple[Any, ...]) -> None:
        """Make the next user of the bytes at `at` wait for the work in `after`."""

    def merged(self, one: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the work that must end before a block joined from two free blocks is reused."""


@dataclass(frozen=True, slots=True, order=True)
class _Block:
    at: Location
    num_bytes: int
    after: tuple[Any, ...] = field(default=(), compare=False)


class Pool:
    """Makes tensors in symmetric memory, at the lowest free offset; a tensor's memory is freed when its last view dies.

    A tensor's place depends only on which others are alive, so ranks that make and drop tensors in the same order have
    them at the same offsets. Regions are added as needed and kept: the first has `region_bytes`, further ones are
    larger (`next_region_bytes`). `create` makes one (None: `memory.create` does); `reuse` decides when freed memory may
    be used again (None: at once, as on CPUs, where all work on a tensor has ended when it dies).
    """

    def __init__(
        self,
        memory: SymmetricMemory,
        *,
        region_bytes: int = 1 << 22,
        create: Callable[[int], int] | None = None,
        reuse: ReusePolicy | None = None,
    ) -> None:
        self._memory, self._create = memory, create or memory.create
        self._reuse = reuse
        self._next_bytes = region_bytes
        self._free: list[_Block] = []  # ascending, no two adjacent
        self._lock = threading.Lock()
        self._dropped: deque[_Block] = deque()  # of dead tensors; any thread may append one, even amid `_take`

    def empty(self, *shape: int, dtype: Any) -> Any:
        """Return an uninitialised tensor of one element or more in this pool's memory."""
        num_bytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            block = self._take(-(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES)
            if self._reuse is not None:
                self._reuse.taken(block.at, block.after)
        freed = partial(self._dropped.append, block)  # the tensor keeps this alive, so it does not refer to the pool
        storage = self._memory.tensor(block.at, num_bytes, freed)
        return storage.view(dtype).view(shape)

    def reserve(self) -> None:
        """Allocate the first region now, not at the first tensor; on a GPU all ranks call this together."""
        with self._lock:
            self._grow(0)

    @property
    def free_bytes(self) -> int:
        """Return how many bytes of this pool's regions are not in use."""
        with self._lock:
            self._collect()
            return sum(block.num_bytes for block in self._free)

    def _take(self, num_bytes: int) -> _Block:
        self._collect()
        index = next((i for i, block in enumerate(self._free) if block.num_bytes >= num_bytes), None)
        if index is None:
            self._grow(num_bytes)
            index = next(i for i, block in enumerate(self._free) if block.num_bytes >= num_bytes)
        block = self._free.pop(index)
        if block.num_bytes > num_bytes:
            self._free.insert(index, _Block(block.at + num_bytes, block.num_bytes - num_bytes, block.after))
        return _Block(block.at, num_bytes, block.after)

    def _grow(self, num_bytes: int) -> None:
        size = max(self._next_bytes, num_bytes)
        region = self._create(size)
        self._next_bytes = next_region_bytes(self._next_bytes)
        insort(self._free, _Block(Location(region, 0), size // BLOCK_BYTES * BLOCK_BYTES))

    def _collect(self) -> None:
        """Return the blocks of dead tensors to the free list, and join adjacent free blocks."""
        if not self._dropped:
            return
        for _ in range(len(self._dropped)):
            block = self._dropped.popleft()
            after = () if self._reuse is None else self._reuse.freed(block.at, block.num_bytes)
            if after == "later":
                self._dropped.append(block)
            elif after != "never":
                insort(self._free, _Block(block.at, block.num_bytes, after))
        joined: list[_Block] = []
        for block in self._free:
            last = joined[-1] if joined else None
            if last is not None and last.at + last.num_bytes == block.at:
                after = () if self._reuse is None else self._reuse.merged(last.after, block.after)
                joined[-1] = _Block(last.at, last.num_bytes + block.num_bytes, after)
            else:
                joined.append(block)
        self._free = joined


def next_region_bytes(last: int) -> int:
    """Return the next region's size: twice the last region's, up to 256 MiB, but never less than the last region's.

    A larger tensor gets a region of its own size, which does not count as the last region here: if it did, a model's
    largest layer would cost three times its memory.
    """
    return max(last, min(2 * last, _MOST_BYTES))


class GrowableRegion:
    """Holds one region of symmetric memory, and replaces it by a larger region when a call needs more.

    `release` frees the old region; None: it is kept, since a graph or a prepared call may hold its addresses.
    """

    def __init__(self, create: Callable[[int], int], release: Callable[[int], None] | None = None) -> None:
        self._create, self._release = create, release
        self.region = -1
        self.num_bytes = 0

    def fits(self, num_bytes: int) -> bool:
        """Return whether the region has at least `num_bytes`."""
        return num_bytes <= self.num_bytes

    def grow_to(self, num_bytes: int) -> bool:
        """Make the region at least `num_bytes` large; return True if that took a new region, equally on all ranks."""
        if self.fits(num_bytes):
            return False
        if self.region >= 0 and self._release is not None:
            self._release(self.region)
        self.num_bytes = _grown(num_bytes)
        self.region = self._create(self.num_bytes)
        return True


def _grown(num_bytes: int) -> int:
    """Round `num_bytes` up to a region's size: a power of two up to 64 MiB, above that a multiple of 64 MiB."""
    if num_bytes <= _STEP_BYTES:
        return max(_SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length())
    return -(-num_bytes // _STEP_BYTES) * _STEP_BYTES


_MOST_WASTE = 2  # a free block may be at most this many times as large as the tensor that takes it


@dataclass(eq=False, kw_only=True, slots=True)
class EarlyBlock:
    """Represents a fixed-size block of symmetric memory for one early-release output at a time."""

    number: int  # selects the block's flag words; the same on all ranks
    part: int  # index of the block's region among the pool's regions
    at: Location  # where the block begins
    num_bytes: int  # size of the block
    ready: bool = True  # peers have been told that the block is free; no call has used it since
    uses: Any = None  # work that must end before the block is reused; set by the transport (GPU: `StreamPoint`s)


@dataclass(frozen=True, slots=True)
class EarlyUse:
    """Names an early-release block, and the offset in bytes at which an output begins in it."""

    block: EarlyBlock
    offset: int

    @property
    def handshake(self) -> bool:
        """Return whether the next call needs a handshake: True if a call has used the block since its release."""
        return not self.block.ready

    def __str__(self) -> str:
        """Return the block and offset as text, which must be equal on all ranks."""
        return f" into early-release block {self.block.number} + {self.offset}"


class EarlyPool:
    """Makes output tensors with early release: peers may write a tensor's memory as soon as the tensor dies.

    `create` makes a region (None: `memory.create` does), the first one of `region_bytes`; further regions grow as in
    `Pool`. `release` is called with a block whose tensor has died, in the thread of the next `empty` or `collect`; it
    signals the peers, or returns why it does not. `taken` is called with a block that a new tensor takes.
    """

    def __init__(
        self,
        memory: SymmetricMemory,
        *,
        region_bytes: int = 1 << 22,
        create: Callable[[int], int] | None = None,
        release: Callable[[EarlyBlock], NotReusable | None],
        taken: Callable[[EarlyBlock], None] = lambda block: None,
    ) -> None:
        self._memory, self._create = memory, create or memory.create
        self._release, self._taken = release, taken
        self._next_bytes = region_bytes
        self.regions: list[int] = []
        self._left = 0  # bytes of the last region that belong to no block
        self._top = Location(0, 0)
        self._blocks: dict[int, tuple[list[int], list[EarlyBlock]]] = {}  # region: offsets ascending, their blocks
        self._free: list[EarlyBlock] = []
        self._count = 0
        self._lock = threading.RLock()
        self.dropped: deque[EarlyBlock] = deque()  # of tensors that died; any thread may append one

    def empty(self, *shape: int, dtype: Any) -> Any:
        """Return an uninitialised tensor of one element or more; raise `Unsupported` if no block is left for it."""
        num_bytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            self.collect()
            block = self._take(-(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES)
        freed = partial(self.dropped.append, block)  # the tensor keeps this alive, so it does not refer to the pool
        storage = self._memory.tensor(block.at, num_bytes, freed)
        self._taken(block)
        return storage.view(dtype).view(shape)

    def use(self, at: Location | None) -> EarlyUse | None:
        """Return the block and offset of an output at `at`; None if the output does not lie in this pool."""
        found = None if at is None else self._blocks.get(at.region)
        if at is None or found is None:
            return None
        block = found[1][bisect_right(found[0], at.offset) - 1]
        return EarlyUse(block, at.offset - block.at.offset)

    def collect(self) -> None:
        """Release the block of every tensor that has died; called before each call and each `empty`."""
        if not self.dropped:
            return
        with self._lock:
            for _ in range(len(self.dropped)):
                block = self.dropped.popleft()
                reason = self._release(block)
                if reason != "never":
                    (self.dropped if reason == "later" else self._free).append(block)

    def _take(self, num_bytes: int) -> EarlyBlock:
        fitting = [block for block in self._free if num_bytes <= block.num_bytes <= _MOST_WASTE * num_bytes]
        if fitting:
            block = min(fitting, key=lambda block: (block.num_bytes, block.number))
            self._free.remove(block)
            return block
        if self._count == MAX_EARLY_BLOCKS:
            raise Unsupported(
                f"{num_bytes} bytes with an early release: there are {MAX_EARLY_BLOCKS} blocks, none of about this "
                "size is free, and blocks keep their size; use fewer sizes, or empty() without early_release"
            )
        if self._left < num_bytes:
            self._grow(num_bytes)
        offsets, blocks = self._blocks[self._top.region]
        block = EarlyBlock(number=self._count, part=len(self.regions) - 1, at=self._top, num_bytes=num_bytes)
        offsets.append(block.at.offset)
        blocks.append(block)
        self._count, self._top, self._left = self._count + 1, self._top + num_bytes, self._left - num_bytes
        return block

    def _grow(self, num_bytes: int) -> None:
        if len(self.regions) == MAX_EARLY_REGIONS:
            raise Unsupported(f"{num_bytes} bytes with an early release: all {MAX_EARLY_REGIONS} regions are in use")
        size = max(self._next_bytes, num_bytes)
        region = self._create(size)
        self.regions.append(region)
        self._blocks[region] = [], []
        self._next_bytes = next_region_bytes(self._next_bytes)
        self._left, self._top = size // BLOCK_BYTES * BLOCK_BYTES, Location(region, 0)
