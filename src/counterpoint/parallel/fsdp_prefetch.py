"""Gather several modules ahead: FSDP2's explicit prefetching, in the order in which the modules were seen to run.

FSDP2 gathers one module ahead by itself, and more if it is told which. The order of registration is a guess at that, so
nothing is guessed: the first forward pass runs as it would without prefetching, its gathers come in the order of the
modules, and when the first gradients are scattered that pass is over and the lists are set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from counterpoint.errors import Misconfigured
from counterpoint.parallel.fsdp_modules import ShardedModule, is_prefetching

__all__ = ["Ahead", "Prefetch", "ahead"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """What one module, by its number, has gathered ahead of the others, by theirs."""

    module: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]


def ahead(order: Sequence[T], depth: int, *, inside: Callable[[T, T], bool]) -> list[Ahead]:
    """For each of `order` the next `depth`: in the forward pass, and in the backward pass.

    A module's backward pass begins before those of the modules inside it, which come in reverse; so that order is the
    reverse of the one in which forward passes end.

    Args:
        order: in which forward passes begin.
        depth: how many to gather ahead.
        inside: whether the first is a part of the second.
    """
    ended: list[int] = []
    running: list[int] = []
    for number, module in enumerate(order):
        while running and not inside(module, order[running[-1]]):
            ended.append(running.pop())
        running.append(number)
    backward = [*running, *reversed(ended)]
    place = {number: position for position, number in enumerate(backward)}
    count = len(order)
    return [
        Ahead(
            module=number,
            forward=tuple(range(number + 1, min(number + 1 + depth, count))),
            backward=tuple(backward[place[number] + 1 : place[number] + 1 + depth]),
        )
        for number in range(count)
    ]


class Prefetch:
    """Learns the order, then sets the lists; `undo` empties them.

    Args:
        depth: how many modules to gather ahead, at least one.
        modules: whose hooks call `gathered` and `scattered`.

    Raises:
        Misconfigured: a module has lists already.
    """

    def __init__(self, depth: int, modules: Sequence[ShardedModule]) -> None:
        for module in modules:
            if is_prefetching(module):
                raise Misconfigured(
                    f"prefetch={depth}, and {module.name} has modules to prefetch already; leave out one of the two"
                )
        self.depth, self._expected = depth, len(modules)
        self._order: dict[ShardedModule, None] = {}
        self._set = False

    def gathered(self, module: ShardedModule) -> None:
        """Called at every gather."""
        if not self._set:
            self._order.setdefault(module)

    def scattered(self) -> None:
        """Called at every scatter: at the first of all the forward pass is over."""
        if self._set:
            return
        self._set = True
        order = list(self._order)
        parts = {module: set(module.module.modules()) for module in order}
        for one in ahead(order, self.depth, inside=lambda part, whole: part.module in parts[whole]):
            module = order[one.module].module
            module.set_modules_to_forward_prefetch([order[number].module for number in one.forward])
            module.set_modules_to_backward_prefetch([order[number].module for number in one.backward])

    def undo(self) -> None:
        """FSDP2 prefetches as it does by itself."""
        if self._set:
            for module in self._order:
                module.module.set_modules_to_forward_prefetch([])
                module.module.set_modules_to_backward_prefetch([])
        self._set = True

    def __str__(self) -> str:
        if not self._set:
            return f"{self.depth} ahead from the first reduce_scatter on: until then the order is learned"
        return f"{self.depth} ahead, {len(self._order)} of {self._expected} modules, in the order in which they ran"
