"""Symmetric memory: bytes of this rank that its peers have mapped, too; and a pool that makes tensors of it.

Programs name memory by role and offset. A `Location` says where in a rank's symmetric memory a role begins; it means
the same to every rank, where an address means something to one process only.
"""

from __future__ import annotations

import math
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Location", "Pool", "SymmetricMemory"]

BLOCK_BYTES = 512  # of a block's size and place: no two tensors share a cache line or a copy engine's burst


@dataclass(frozen=True, slots=True, order=True)
class Location:
    """A byte of some rank's symmetric memory."""

    region: int
    offset: int

    def __add__(self, num_bytes: int) -> Location:
        return Location(self.region, self.offset + num_bytes)


class SymmetricMemory(Protocol):
    """What a device has to offer: regions, each one piece of memory of this rank that every peer can write."""

    rank: int
    world_size: int

    def create(self, num_bytes: int) -> int:
        """A new region of zeros; its number."""

    def release(self, region: int) -> None:
        """The region is no longer used by this rank; its number may come again."""

    def address(self, rank: int, at: Location, num_bytes: int) -> int:
        """Where `num_bytes` at `at` of `rank` are mapped here.

        Raises:
            Misconfigured: they do not lie within a region of that rank.
        """

    def locate(self, address: int, num_bytes: int) -> Location | None:
        """Where own bytes are; None if they are not in symmetric memory."""

    def tensor(self, at: Location, num_bytes: int, freed: Callable[[], object]) -> Any:
        """Own bytes as a flat uint8 tensor; `freed` is called, in any thread, when its storage dies."""


@dataclass(frozen=True, slots=True, order=True)
class _Block:
    at: Location
    num_bytes: int


class Pool:
    """Tensors in symmetric memory: taken from the lowest place that is free, given back when the last view of them
    dies.

    The place of a tensor depends on which are alive and on nothing else, so ranks that make and drop theirs in the same
    order have them at the same offsets. Regions are added as needed and kept.

    Args:
        memory: where regions come from.
        region_bytes: size of the first region; every further one is twice as large as the last.
    """

    def __init__(self, memory: SymmetricMemory, *, region_bytes: int = 1 << 22) -> None:
        self._memory = memory
        self._next_bytes = region_bytes
        self._free: list[_Block] = []  # ascending, no two adjacent
        self._lock = threading.Lock()
        self._dropped: deque[_Block] = deque()  # storages die in any thread, between any two lines of `_take`

    def empty(self, *shape: int, dtype: Any) -> Any:
        """An uninitialised tensor; of zero elements, one in plain memory, since there is nothing to map.

        Args:
            shape: its sizes.
            dtype: torch.dtype of its elements.
        """
        import torch

        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        with self._lock:
            block = self._take(-(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES)
        storage = self._memory.tensor(block.at, num_bytes, lambda: self._dropped.append(block))
        return storage.view(dtype).view(shape)

    @property
    def free_bytes(self) -> int:
        """In regions of this pool and not in use."""
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
            self._free.insert(index, _Block(block.at + num_bytes, block.num_bytes - num_bytes))
        return _Block(block.at, num_bytes)

    def _grow(self, num_bytes: int) -> None:
        size = max(self._next_bytes, num_bytes)
        region = self._memory.create(size)
        self._next_bytes = 2 * size
        insort(self._free, _Block(Location(region, 0), size // BLOCK_BYTES * BLOCK_BYTES))

    def _collect(self) -> None:
        """Puts what was dropped back among the free blocks, joined with its neighbours."""
        if not self._dropped:
            return
        while self._dropped:
            insort(self._free, self._dropped.popleft())
        joined: list[_Block] = []
        for block in self._free:
            if joined and joined[-1].at + joined[-1].num_bytes == block.at:
                joined[-1] = _Block(joined[-1].at, joined[-1].num_bytes + block.num_bytes)
            else:
                joined.append(block)
        self._free = joined
