"""Put the tensors of unmodified code in symmetric memory, so that the backend's calls run in place on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from counterpoint.errors import Unsupported
from counterpoint.parallel.backend.group import group_of_backend
from counterpoint.parallel.ddp import SymmetricBuckets


@contextmanager
def symmetric_memory(group: Any = None) -> Iterator[None]:
    """Allocate CUDA tensors of this thread's `with` block in symmetric memory, so that calls run in place on them.

        with counterpoint.symmetric_memory():
            model = DistributedDataParallel(model)

    `Communicator.memory_pool` says what all ranks have to do. Buckets that DDP rebuilds later also lie in it. From
    then on the communicator runs all_reduces and reduce_scatters of 4 MiB and more, unless `crossover_bytes` has a size
    for them, and other calls of more than 256 MiB, wherever their tensors lie.

    Args:
        group: a group of backend `counterpoint`; None: the default one.

    Raises:
        Misconfigured: the group is of another backend.
        Unsupported: there is no GPU, or the ranks cannot share memory.
    """
    lender = group_of_backend(group)
    try:
        communicator = lender.rank_group.open()
    except Unsupported as error:
        raise Unsupported(f"no symmetric memory for this group: {error}") from error
    models: list[DistributedDataParallel] = []

    def seen(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if isinstance(parent, DistributedDataParallel) and name == "module":
            models.append(parent)

    handle: Any = register_module_module_registration_hook(seen)
    try:
        with communicator.memory_pool():
            yield
    finally:
        handle.remove()
    lender.take_buckets()
    for model in models:
        if model.process_group is lender:
            SymmetricBuckets(model, communicator)
