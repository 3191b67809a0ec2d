"""Blocks that are released early: whole for ever, and their peers are told once for each use."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from counterpoint.collectives.host.shared_memory import SharedMemory
from counterpoint.collectives.memory import BLOCK_BYTES, MAX_EARLY_BLOCKS, EarlyBlock, EarlyPool, Location, NotReusable
from counterpoint.errors import Unsupported


class Heap:
    """A pool over the memory of a group of one, and what it released."""

    def __init__(self) -> None:
        self.memory = SharedMemory(world_size=1, rank=0, channels=1, max_bytes=1 << 24)
        self.released = list[int]()
        self.reason: NotReusable | None = None
        self.pool = EarlyPool(self.memory, region_bytes=16 * BLOCK_BYTES, release=self._release)

    def _release(self, block: EarlyBlock) -> NotReusable | None:
        if self.reason is None:
            self.released.append(block.number)
            block.ready = True
        return self.reason

    def make(self, num_bytes: int) -> Any:
        return self.pool.empty(num_bytes, dtype=torch.uint8)

    def block(self, tensor: Any) -> EarlyBlock:
        use = self.pool.use(self.memory.locate(tensor.data_ptr(), tensor.nbytes))
        assert use is not None
        return use.block


@pytest.fixture
def heap() -> Iterator[Heap]:
    heap = Heap()
    yield heap
    heap.memory.close()


def test_a_dead_tensor_is_released_by_the_next_call(heap: Heap) -> None:
    tensor = heap.make(100)
    number = heap.block(tensor).number
    del tensor
    before = list(heap.released)
    heap.pool.collect()
    heap.pool.collect()
    assert (before, heap.released) == ([], [number])


def test_what_cannot_be_released_now_is_released_later(heap: Heap) -> None:
    tensor = heap.make(100)
    del tensor
    heap.reason = "later"
    other = heap.make(100)
    before = list(heap.released)
    heap.reason = None
    heap.pool.collect()
    assert (before, heap.released, heap.block(other).number) == ([], [0], 1)


def test_what_is_never_released_is_not_asked_for_again(heap: Heap) -> None:
    """Each call would ask for every block that a graph has, else."""
    tensor = heap.make(100)
    del tensor
    heap.reason = "never"
    heap.pool.collect()
    heap.reason = None
    heap.pool.collect()
    assert heap.released == []


def test_a_block_is_used_again_by_its_like(heap: Heap) -> None:
    tensor = heap.make(2000)
    block = heap.block(tensor)
    del tensor
    assert heap.block(heap.make(1100)) is block


@pytest.mark.parametrize("num_bytes", [500, 3000])
def test_a_block_is_neither_cut_nor_joined(heap: Heap, num_bytes: int) -> None:
    """What is much smaller, or larger than it, gets a block of its own: a peer may write the old one at any time."""
    tensors = [heap.make(2000) for _ in range(2)]
    blocks = {heap.block(tensor).number for tensor in tensors}
    tensors.clear()
    assert heap.block(heap.make(num_bytes)).number not in blocks


def test_the_second_use_begins_with_the_handshake(heap: Heap) -> None:
    tensor = heap.make(100)
    at = heap.memory.locate(tensor.data_ptr(), tensor.nbytes)
    seen = []
    for ready in (True, False):
        heap.block(tensor).ready = ready
        use = heap.pool.use(at)
        seen.append(None if use is None else use.handshake)
    assert seen == [False, True]


def test_a_view_says_where_in_its_block_it_is(heap: Heap) -> None:
    tensors = [heap.make(10), heap.make(100)]
    view = tensors[1][30:]
    assert str(heap.pool.use(heap.memory.locate(view.data_ptr(), 70))) == " into early-release block 1 + 30"


def test_other_memory_has_no_early_release(heap: Heap) -> None:
    heap.make(10)
    assert [heap.pool.use(at) for at in (None, Location(7, 0))] == [None, None]


def test_there_are_no_more_blocks_than_words(heap: Heap) -> None:
    held = [heap.make(1) for _ in range(MAX_EARLY_BLOCKS)]
    with pytest.raises(Unsupported, match="use fewer sizes"):
        heap.make(len(held))
