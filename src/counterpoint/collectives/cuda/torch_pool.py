"""Give torch's caching allocator a memory pool in symmetric memory, so that peers can write any code's tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from counterpoint.collectives.cuda.context import Growth
from counterpoint.collectives.cuda.memory import CudaMemory


class TorchPool:
    """Holds a `torch.cuda.MemPool` of symmetric memory, whose segments become regions that all ranks have mapped.

    The pool lives as long as the process, since tensors in it may outlive the communicator.
    """

    _KEPT: list[Any] = []  # noqa: RUF012 - of the class on purpose

    def __init__(self, memory: CudaMemory, growth: Growth) -> None:
        import torch
        from torch.distributed._symmetric_memory import get_mempool_allocator

        self._memory, self._growth = memory, growth
        allocator = get_mempool_allocator(torch.device("cuda", memory.device))
        self._pool = torch.cuda.MemPool(allocator, use_on_oom=False, no_split=True)  # torch maps whole segments only
        self._KEPT.append(self._pool)
        self._known: set[tuple[int, int]] = set()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Put tensors that this thread makes inside into the pool; at the end all ranks map its new segments."""
        import torch

        torch.cuda.empty_cache()  # torch gives no memory of its cache to another allocator
        with torch.cuda.use_mem_pool(self._pool, device=self._memory.device):
            yield
        for segment in self._pool.snapshot():
            place = int(segment["address"]), int(segment["total_size"])
            if place not in self._known:
                self._known.add(place)
                self._growth.create("memory pool", place[1], partial(self._memory.register, *place))
