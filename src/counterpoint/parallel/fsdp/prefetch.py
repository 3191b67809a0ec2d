"""Gather several modules ahead by FSDP2's explicit prefetching, in the order in which the modules were seen to run.

FSDP2 gathers one module ahead by itself, and more if it has lists of modules. The order of registration is only a guess
at the order of the passes, so it is not used. Instead, the first forward pass runs without our prefetching, and its
gathers show the order of the modules; when the first gradients are scattered, that pass is over, and the lists are set.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from counterpoint.errors import Misconfigured
from counterpoint.parallel.fsdp.modules import ShardedModule, is_prefetching

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PrefetchTargets:
    """Lists the modules, by number, that are gathered ahead when `module` runs in the forward or the backward pass."""

    module: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]


def prefetch_targets(order: Sequence[T], depth: int, *, parts: Mapping[T, Collection[object]]) -> list[PrefetchTargets]:
    """Return for each module of `order` the next `depth` modules in the forward and in the backward pass.

    Forward passes begin in the order `order`; `parts` are the modules inside each module. A module's backward pass
    begins before those of the modules inside it, which begin in reverse order. So backward passes begin in the reverse
    of the order in which forward passes end.
    """
    ended: list[int] = []
    running: list[int] = []
    for number, module in enumerate(order):
        while running and module not in parts[order[running[-1]]]:
            ended.append(running.pop())
        running.append(number)
    backward = [*running, *reversed(ended)]
    place = {number: position for position, number in enumerate(backward)}
    count = len(order)
    return [
        PrefetchTargets(
            module=number,
            forward=tuple(range(number + 1, min(number + 1 + depth, count))),
            backward=tuple(backward[place[number] + 1 : place[number] + 1 + depth]),
        )
        for number in range(count)
    ]


class Prefetch:
    """Learns in which order modules run, then tells FSDP2 to gather `depth` modules ahead.

    The hooks of the modules call `gathered` and `scattered`. `Misconfigured` is raised if a module has lists already.
    """

    def __init__(self, depth: int, modules: Sequence[ShardedModule]) -> None:
        for module in modules:
            if is_prefetching(module):
                raise Misconfigured(
                    f"prefetch={depth}, and {module.name} has modules to prefetch already; leave out one of the two"
                )
        self.depth, self._expected = depth, len({module.module for module in modules})
        self._order: dict[FSDPModule, ShardedModule] = {}  # FSDP2 gathers all groups of one together
        self._is_set = False

    def gathered(self, module: ShardedModule) -> None:
        """Record that this module is being gathered, by which the order of modules is learnt."""
        if not self._is_set:
            self._order.setdefault(module.module, module)

    def scattered(self) -> None:
        """Set FSDP2's prefetch lists at the first scatter of gradients, when the forward pass is over."""
        if self._is_set:
            return
        self._is_set = True
        order = list(self._order)
        parts = {module: set(sharded.parts[1:]) for module, sharded in self._order.items()}
        for targets in prefetch_targets(order, self.depth, parts=parts):
            module = order[targets.module]
            module.set_modules_to_forward_prefetch([order[number] for number in targets.forward])
            module.set_modules_to_backward_prefetch([order[number] for number in targets.backward])

    def undo(self) -> None:
        """Clear FSDP2's prefetch lists, so that it uses its own rule again."""
        if self._is_set:
            for module in self._order:
                module.set_modules_to_forward_prefetch([])
                module.set_modules_to_backward_prefetch([])
        self._is_set = True

    def __str__(self) -> str:
        if not self._is_set:
            return f"{self.depth} ahead from the first reduce_scatter on: until then the order is learned"
        return f"{self.depth} ahead, {len(self._order)} of {self._expected} modules, in the order in which they ran"
