"""What the ranks of a torch process group tell each other before they share memory: every function is called by all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from counterpoint.errors import Misconfigured, Unsupported

__all__ = ["agree", "gathered", "membership", "together"]

T = TypeVar("T")


def membership(group: Any) -> tuple[int, int]:
    """This process's rank in the group, and the number of its ranks.

    Raises:
        Misconfigured: it has none, or there is no group.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise Misconfigured("there is no process group: call torch.distributed.init_process_group first")
    rank = dist.get_rank(group)
    if rank < 0:
        raise Misconfigured("this process is not in the group: only its ranks make a communicator")
    return rank, dist.get_world_size(group)


def gathered(group: Any, value: T) -> list[T]:
    """The values of all ranks, in their order."""
    import torch.distributed as dist

    values: list[Any] = [None] * membership(group)[1]
    dist.all_gather_object(values, value, group=group)
    return values


def agree(group: Any, options: dict[str, object]) -> None:
    """Raises Misconfigured on every rank if `options` are not the same on all of them."""
    everyone = gathered(group, options)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise Misconfigured(
                f"the ranks do not match: {everyone[0]} on rank 0, {theirs} on rank {rank}; give all the same"
            )


def together(group: Any, action: Callable[[], T]) -> T:
    """What `action` returns; if it raises on any rank, every rank raises, so that nobody waits for ever.

    Raises:
        Unsupported: it raised on another rank.
    """
    error: Exception | None = None
    try:
        result = action()
    except Exception as raised:
        error = raised
    texts = gathered(group, None if error is None else str(error))
    if error is not None:
        raise error
    failed = next((f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None), None)
    if failed is not None:
        raise Unsupported(failed)
    return result
