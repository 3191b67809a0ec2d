"""Release outputs early: peers get the ready signals when a tensor dies, not when the next call begins.

Each block has its own flag words. While a block is free, `ready` of each peer is 1: "the block of this number may be
written there". A call with such an output begins without a handshake. So all ranks must use the same block, which they
compare by its number, and every rank must push into every other (`Program.pushers`): only these calls are proved. From
that call until the tensor dies, `ready` is 0, as without early release, and a second call on the same tensor begins
with the handshake.

A block is never split or joined with others: a peer that was told that it is free may write to it at any time.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from counterpoint.collectives.host.shared_status import MAX_EARLY_BLOCKS, MAX_EARLY_REGIONS
from counterpoint.collectives.memory.pool import BLOCK_BYTES, Location, NotReusable, SymmetricMemory, next_region_bytes
from counterpoint.errors import Unsupported

_MOST_WASTE = 2  # a free block may be at most this many times as large as the tensor that takes it


@dataclass(eq=False, kw_only=True, slots=True)
class EarlyBlock:
    """Represents a block of symmetric memory of fixed size, which holds one output at a time."""

    number: int  # selects its flag words; the same on all ranks
    part: int  # index of its region among those of the pool
    at: Location  # where it begins
    num_bytes: int  # its size
    ready: bool = True  # peers have been told that it is free; no call has used it since
    uses: Any = None  # work that must end before it is used again; the transport sets it (GPU: `StreamPoint`s)


@dataclass(frozen=True, slots=True)
class EarlyUse:
    """Names an early-release block, and the offset in bytes at which an output begins in it."""

    block: EarlyBlock
    offset: int

    @property
    def handshake(self) -> bool:
        """Return whether the next call needs a handshake, since a call has used the block after its last release."""
        return not self.block.ready

    def __str__(self) -> str:
        """Return the block and offset in words, which have to be equal on all ranks."""
        return f" into early-release block {self.block.number} + {self.offset}"


class EarlyPool:
    """Makes tensors whose memory peers may write as soon as the tensors die.

    `create` makes a region (None: `memory.create` does), the first one of `region_bytes`; further ones grow as those of
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
