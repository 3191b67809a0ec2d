"""Symmetric memory: bytes of this rank that its peers have mapped, too; and a pool that makes tensors of it.

Programs name memory by role and offset. A `Location` says where in a rank's symmetric memory a role begins; it means
the same to every rank, while an address has a meaning in one process only.
"""

from __future__ import annotations

import math
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

_SMALLEST_BYTES, _STEP_BYTES = 1 << 16, 1 << 26  # of a growable region
_MOST_BYTES = 1 << 28  # of a region that nobody asked for
BLOCK_BYTES = 512  # of a block's size and place: no two tensors share a cache line or a copy engine's burst


@dataclass(frozen=True, slots=True, order=True)
class Location:
    """Names a byte of a rank's symmetric memory."""

    region: int
    offset: int

    def __add__(self, num_bytes: int) -> Location:
        return Location(self.region, self.offset + num_bytes)


class SymmetricMemory(Protocol):
    """Makes regions on a device: each is one piece of memory of this rank that every peer can write."""

    rank: int
    world_size: int

    def create(self, num_bytes: int) -> int:
        """Make a region of zeros, and return its number."""

    def release(self, region: int) -> None:
        """Give up a region that this rank no longer uses; its number may come again."""

    def address(self, rank: int, at: Location, num_bytes: int) -> int:
        """Return where bytes of `rank` are mapped here; raise `Misconfigured` if they are not within a region of it."""

    def locate(self, address: int, num_bytes: int) -> Location | None:
        """Return where own bytes are; None if they are not in symmetric memory."""

    def tensor(self, at: Location, num_bytes: int, freed: Callable[[], object]) -> Any:
        """Return own bytes as a flat uint8 tensor; `freed` is called, in any thread, when its storage dies."""

    def close(self) -> None:
        """Give all regions back; what tensors still use stays until they die."""


class ReusePolicy(Protocol):
    """Says when memory that was given back may be used again, on a device that is behind the host."""

    def freed(self, at: Location, num_bytes: int) -> tuple[Any, ...] | None:
        """Return what has to end before these bytes are used again; None: that is never known, so keep them."""

    def taken(self, at: Location, after: tuple[Any, ...]) -> None:
        """Let the next user of bytes at `at` wait for `after`."""

    def merged(self, one: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return what has to end before the bytes of both are used again."""


class _ReuseAtOnce:
    """Serves CPUs, where all that uses a tensor has ended when it dies."""

    def freed(self, at: Location, num_bytes: int) -> tuple[Any, ...] | None:
        return ()

    def taken(self, at: Location, after: tuple[Any, ...]) -> None:
        """Nothing to wait for."""

    def merged(self, one: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
        return ()


@dataclass(frozen=True, slots=True, order=True)
class _Block:
    at: Location
    num_bytes: int
    after: tuple[Any, ...] = field(default=(), compare=False)


class Pool:
    """Makes tensors in symmetric memory, at the lowest free place; it is free again when their last view has died.

    The place of a tensor depends on which are alive and on nothing else, so ranks that make and drop theirs in the same
    order have them at the same offsets. Regions are added as needed and kept: the first one of `region_bytes`; further
    ones grow, but not with what is asked for (`next_region_bytes`). `create` makes one (None: `memory.create` does);
    `reuse` says when memory may be used again (None: at once).
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
        self._reuse = _ReuseAtOnce() if reuse is None else reuse
        self._next_bytes = region_bytes
        self._free: list[_Block] = []  # ascending, no two adjacent
        self._lock = threading.Lock()
        self._dropped: deque[_Block] = deque()  # storages die in any thread, between any two lines of `_take`

    def empty(self, *shape: int, dtype: Any) -> Any:
        """Return an uninitialised tensor; none of its sizes is 0, or there would be nothing to map."""
        num_bytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            block = self._take(-(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES)
            self._reuse.taken(block.at, block.after)
        freed = partial(self._dropped.append, block)  # what it refers to lives as long as the tensor
        storage = self._memory.tensor(block.at, num_bytes, freed)
        return storage.view(dtype).view(shape)

    def reserve(self) -> None:
        """Make the first region now; all ranks do, where regions are made together."""
        with self._lock:
            self._grow(0)

    @property
    def free_bytes(self) -> int:
        """The bytes in regions of this pool that are not in use."""
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
        """Put what was dropped back among the free blocks, joined with its neighbours."""
        if not self._dropped:
            return
        while self._dropped:
            block = self._dropped.popleft()
            after = self._reuse.freed(block.at, block.num_bytes)
            if after is not None:
                insort(self._free, _Block(block.at, block.num_bytes, after))
        joined: list[_Block] = []
        for block in self._free:
            last = joined[-1] if joined else None
            if last is not None and last.at + last.num_bytes == block.at:
                after = self._reuse.merged(last.after, block.after)
                joined[-1] = _Block(last.at, last.num_bytes + block.num_bytes, after)
            else:
                joined.append(block)
        self._free = joined


def next_region_bytes(last: int) -> int:
    """Return twice the last size up to 256 MiB, or the last one.

    A tensor that is larger has a region of its own size: were the next one twice as large as that, a model's largest
    layer would cost three times its memory.
    """
    return max(last, min(2 * last, _MOST_BYTES))


class GrowableRegion:
    """Holds a region that grows: a new one takes the place of the last when that is too small.

    `release` gives the last one back; None: it stays, since something may hold its addresses.
    """

    def __init__(self, create: Callable[[int], int], release: Callable[[int], None] | None = None) -> None:
        self._create, self._release = create, release
        self.region = -1
        self.num_bytes = 0

    def fits(self, num_bytes: int) -> bool:
        """Return whether there is room for `num_bytes`."""
        return num_bytes <= self.num_bytes

    def grow_to(self, num_bytes: int) -> bool:
        """Make room for `num_bytes`; return whether that took a new region, which follows from the sizes alone."""
        if self.fits(num_bytes):
            return False
        if self.region >= 0 and self._release is not None:
            self._release(self.region)
        self.num_bytes = _grown(num_bytes)
        self.region = self._create(self.num_bytes)
        return True


def _grown(num_bytes: int) -> int:
    """Return a power of two while that is small, else a multiple of a step."""
    if num_bytes <= _STEP_BYTES:
        return max(_SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length())
    return -(-num_bytes // _STEP_BYTES) * _STEP_BYTES
