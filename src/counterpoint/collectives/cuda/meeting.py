"""Let the ranks of a group meet for symmetric memory, whatever other groups some of them have met in before.

Torch numbers the meetings of a process, those of all its groups together, and writes the number into the keys by which
ranks find each other in the group's store (`StoreExchange`, torch 2.11 to 2.13). Ranks that have met in different
groups before have different numbers, and would wait for each other until the store gives up.
"""

from __future__ import annotations

import re
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

c10d: Any = _distributed_c10d  # its stubs lack half of it
_NUMBER = re.compile(r"/(\d+)")


class NumberedStore(c10d.Store):  # type: ignore[misc]
    """Passes keys on to a store, with torch's numbers of meetings replaced by their order here.

    Args:
        store: gets the keys.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store, self._numbers = store, dict[str, int]()

    def set(self, key: str, value: bytes) -> None:
        """Set the value of a key."""
        self._store.set(self._own(key), value)

    def get(self, key: str) -> bytes:
        """Return the value of a key, after waiting for it."""
        found: bytes = self._store.get(self._own(key))
        return found

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it."""
        return int(self._store.add(self._own(key), amount))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have a value."""
        return bool(self._store.check([self._own(key) for key in keys]))

    def wait(self, keys: list[str], *timeout: Any) -> None:
        """Wait until all keys have a value."""
        self._store.wait([self._own(key) for key in keys], *timeout)

    def _own(self, key: str) -> str:
        return _NUMBER.sub(lambda found: f"/{self._numbers.setdefault(found[1], len(self._numbers))}", key, count=1)


class Meeting:
    """Stands for a group where torch exchanges symmetric memory: a group of the same ranks with a `NumberedStore`.

    All ranks of the group make it together, those of one memory after those of another in the same order.

    Args:
        group: torch process group.
    """

    def __init__(self, group: Any) -> None:
        ranks = "_".join(map(str, dist.get_process_group_ranks(group)))
        whole = distributed_c10d._get_process_group_store(group)
        parent: Any = c10d.PrefixStore(f"symmetric memory {ranks}", whole)
        number = parent.add(f"made by {group.rank()}", 1)
        self._store = NumberedStore(c10d.PrefixStore(f"{number}", parent))  # dies with its last Python reference
        self._group: Any = c10d.ProcessGroup(self._store, group.rank(), group.size())
        self.name = f"{distributed_c10d._get_process_group_name(group)}: memory {number}"
        c10d._register_process_group(self.name, self._group)

    def end(self) -> None:
        """Let torch forget the group."""
        c10d._unregister_process_group(self.name)
