"""Keep values of process groups by key, and close them when torch destroys their group."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

import torch.distributed.distributed_c10d as c10d

from counterpoint.errors import Misconfigured

Value = TypeVar("Value")


class Registry(Generic[Value]):
    """Keeps values by process group and key, and closes a group's values when torch destroys it.

    torch calls nobody when it destroys a group, but it drops the group's store, to which nothing else refers. If
    something else does hold the store, values are closed when the next group is made.
    """

    def __init__(self, close: Callable[[Value], None]) -> None:
        self._close = close
        self._made: dict[Any, dict[Hashable, Value]] = {}

    def get(self, group: Any, make: Callable[[], Value], key: Hashable = None) -> Value:
        """Return the value of a group and key, made at the first call; raise `Misconfigured` for an unknown group."""
        groups: dict[Any, tuple[str, Any]] = c10d._world.pg_map
        if group not in groups:
            raise Misconfigured(f"{group} was destroyed, or torch never made it: give a process group that there is")
        if group not in self._made:
            for ended in self._made.keys() - groups.keys():
                self.close(ended)
            self._made[group] = {}
            weakref.finalize(groups[group][1], self.close, group).atexit = False
        values = self._made[group]
        if key not in values:
            values[key] = make()
        return values[key]

    def close(self, group: Any) -> None:
        """Close all values of a group, the last one first, and forget them."""
        with ExitStack() as stack:
            for value in self._made.pop(group, {}).values():
                stack.callback(self._close, value)
