"""The pool: tensors in symmetric memory never overlap, are used again, and lie where they lie on every rank."""

import gc
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.collectives.host.shared_memory import SharedMemory
from counterpoint.collectives.memory import BLOCK_BYTES, Location, Pool, next_region_bytes

REGION = 16 * BLOCK_BYTES


class Heap:
    """A pool over the memory of a group of one."""

    def __init__(self) -> None:
        self.memory = SharedMemory(world_size=1, rank=0, channels=1, max_bytes=1 << 24)
        self.pool = Pool(self.memory, region_bytes=REGION)

    def make(self, num_bytes: int) -> Any:
        return self.pool.empty(num_bytes, dtype=torch.uint8)

    def place(self, tensor: Any) -> Location:
        found = self.memory.locate(tensor.data_ptr(), tensor.nbytes)
        assert found is not None
        return found


@pytest.fixture
def heap() -> Iterator[Heap]:
    heap = Heap()
    yield heap
    heap.memory.close()


def test_tensors_have_the_shape_and_dtype_asked_for_in_aligned_blocks(heap: Heap) -> None:
    tensor = heap.pool.empty(3, 5, dtype=torch.bfloat16).fill_(2)
    assert (tensor.shape, tensor.dtype, float(tensor.sum())) == ((3, 5), torch.bfloat16, 30.0)
    tensors = [heap.make(size) for size in (1, 513, 7)]
    assert [heap.place(tensor).offset % BLOCK_BYTES for tensor in tensors] == [0, 0, 0]


def test_what_was_dropped_is_used_again(heap: Heap) -> None:
    first = heap.make(100)
    where = heap.place(first)
    kept = heap.make(100)
    del first
    assert heap.place(heap.make(100)) == where != heap.place(kept)


def test_a_view_keeps_its_tensor(heap: Heap) -> None:
    """Memory is free when the last view is gone, be it one of numpy."""
    free = []
    view = heap.make(1000)[10:].numpy()
    free.append(heap.pool.free_bytes)
    del view
    gc.collect()
    free.append(heap.pool.free_bytes)
    assert free == [REGION - 1024, REGION]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_the_order_of_dropping_does_not_matter(heap: Heap, order: tuple[int, ...]) -> None:
    """Garbage collectors of different ranks drop the same tensors in different orders."""
    tensors: list[Any] = [heap.make(700) for _ in range(4)]
    for index in order:
        tensors[index] = None
    assert [heap.place(heap.make(size)) for size in (2000, 3000)] == [Location(0, 0), Location(0, 0)]


def test_regions_grow(heap: Heap) -> None:
    tensors = [heap.make(size) for size in (REGION, 1, 5 * REGION)]
    assert [heap.place(tensor).region for tensor in tensors] == [0, 1, 2]


def test_a_large_tensor_makes_no_larger_region_after_it() -> None:
    """Regions grow by their own steps, to 256 MiB: a model's largest layer must not cost three times its memory."""
    sizes = [1 << 22]
    for _ in range(10):
        sizes.append(next_region_bytes(sizes[-1]))
    assert sizes[1:3] == [1 << 23, 1 << 24]
    assert sizes[-1] == 1 << 28
    assert next_region_bytes(1 << 30) == 1 << 30


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 3 * REGION), st.integers(-8, -1)), max_size=40))
def test_tensors_never_overlap(actions: list[int]) -> None:
    """However they are made (positive: bytes) and dropped (negative: which); in the end everything is free again."""
    heap, held, taken = Heap(), list[Any](), 0
    for action in actions:
        if action > 0:
            held.append(heap.make(action))
        elif held:
            del held[action % len(held)]
        blocks = sorted((heap.place(tensor), tensor.nbytes) for tensor in held)
        for (low, size), (high, _) in pairwise(blocks):
            assert low.region < high.region or low.offset + size <= high.offset
        taken = max(taken, heap.pool.free_bytes + sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES for _, size in blocks))
    held.clear()
    assert heap.pool.free_bytes == taken
    heap.memory.close()
