"""Make a process group of torch's own backends: NCCL for CUDA tensors, gloo for CPU tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from counterpoint.errors import Misconfigured

c10d: Any = _distributed_c10d  # the type stubs lack half of its names
_WORLD: Any = distributed_c10d._world
_CREATE_WRAPPER: Any = distributed_c10d._create_process_group_wrapper  # it compares the calls of all ranks


class InnerGroup:
    """Holds a process group of torch's own backends; after `register`, torch finds it by name.

    If torch is set to compare the calls of all ranks, these backends compare them, too, and have to run all calls:
    `why_alone` then names the setting.

    Args:
        options: what torch hands to a backend: store, rank, size, timeout, name and ranks.
        nccl: options of NCCL; None: its defaults.
        name: name of this group within the group that `options` describe.
        ranks: its ranks, counted in the group that `options` describe; None: all.
        with_nccl: take NCCL for CUDA tensors, if torch has NCCL and there is a GPU.
    """

    def __init__(
        self,
        options: Any,
        nccl: Any = None,
        *,
        name: str = "torch",
        ranks: list[int] | None = None,
        with_nccl: bool = True,
    ) -> None:
        everyone = list(range(options.group_size)) if ranks is None else ranks
        rank, size = everyone.index(options.group_rank), len(everyone)
        known: list[int] = list(options.global_ranks_in_group)  # empty: the ranks of the default group
        self.options, self._nccl = options, nccl
        self.ranks = tuple(known[one] if known else one for one in everyone)
        self.name = f"{options.group_id}:{name}"
        self.why_alone = "TORCH_DISTRIBUTED_DEBUG=DETAIL" if c10d.get_debug_level() == c10d.DebugLevel.DETAIL else None
        self._store = c10d.PrefixStore(f"{name}/", options.store)
        self.group: Any = c10d.ProcessGroup(self._store, rank, size)
        self._with_nccl = with_nccl
        self.backends = self._backends(options, nccl, rank, size)
        for device, (kind, backend) in self.backends.items():
            self.group._register_backend(torch.device(device), kind, backend)
        self.group._set_default_backend(next(iter(self.backends.values()))[0])
        self._is_registered = False

    def part(self, name: str, ranks: list[int], *, with_nccl: bool = True) -> InnerGroup:
        """Return a new subgroup of `ranks`, which call this together."""
        return InnerGroup(self.options, self._nccl, name=name, ranks=ranks, with_nccl=with_nccl)

    def _backends(self, options: Any, nccl: Any, rank: int, size: int) -> Mapping[str, tuple[Any, Any]]:
        """Return, for each type of device, the kind of backend and the backend, the default device first."""
        found: dict[str, tuple[Any, Any]] = {}
        kinds = dist.ProcessGroup.BackendType
        if self._with_nccl and torch.cuda.is_available() and dist.is_nccl_available():
            nccl = copy.copy(nccl) if nccl else dist.ProcessGroupNCCL.Options()  # a group writes its name in them
            nccl._timeout = options.timeout
            nccl.global_ranks_in_group = list(self.ranks)
            nccl.group_name = self.name
            store = c10d.PrefixStore("nccl/", self._store)
            found["cuda"] = kinds.NCCL, dist.ProcessGroupNCCL(store, rank, size, nccl)
        store = c10d.PrefixStore("gloo/", self._store)
        found["cpu"] = kinds.GLOO, dist.ProcessGroupGloo(store, rank, size, timeout=options.timeout)
        for device, (kind, backend) in found.items():
            backend._set_sequence_number_for_group()
            if self.why_alone:
                prefix = f"{self.name}:{device}"
                wrapped = _CREATE_WRAPPER(backend, prefix, self._store, rank, size, options.timeout)
                found[device] = kind, wrapped
        return found

    def register(self) -> None:
        """Enter the group in torch's tables, where symmetric memory and the calls of `torch.distributed` look it up."""
        if self._is_registered:
            return
        self._is_registered = True
        _WORLD.pg_map[self.group] = ("undefined", self._store)
        _WORLD.pg_names[self.group] = self.name
        _WORLD.pg_group_ranks[self.group] = {one: number for number, one in enumerate(self.ranks)}
        kinds = {device: kind.name.lower() for device, (kind, _) in self.backends.items()}
        config = ",".join(f"{device}:{kind}" for device, kind in kinds.items())
        _WORLD.pg_backend_config[self.group] = config
        _WORLD.pg_to_tag[self.group] = None
        c10d._register_process_group(self.name, self.group)

    def unregister(self) -> None:
        """Remove the group from torch's tables, unless torch has emptied them."""
        if not self._is_registered:
            return
        self._is_registered = False
        known = self.group in _WORLD.pg_map
        for table in (
            _WORLD.pg_map,
            _WORLD.pg_names,
            _WORLD.pg_group_ranks,
            _WORLD.pg_backend_config,
            _WORLD.pg_to_tag,
        ):
            table.pop(self.group, None)
        if known:
            c10d._unregister_process_group(self.name)

    def end(self, how: Literal["shutdown", "abort"]) -> None:
        """Shut down or abort the group, and make its later calls raise an error, since gloo does not."""
        group, self.group = self.group, EndedGroup()
        getattr(group, how)()


class EndedGroup:
    """Replaces a process group that has ended, and raises an error in every call but `shutdown` and `abort`."""

    def shutdown(self) -> None:
        """Do nothing, since the group has ended."""

    def abort(self) -> None:
        """Do nothing, since the group has ended."""

    def __getattr__(self, name: str) -> Any:
        raise Misconfigured(f"{name} on a process group that was destroyed or aborted; make a new one")
