"""Run large collectives of a group over several hosts: without SMs inside a host, by torch's backends between hosts.

The ranks of a host have consecutive numbers, the same count on each host. For each rank two more groups of torch's own
backends are made, which nothing else uses: one with the ranks of its host, and one (its rail) with the ranks of the
same local index on all hosts.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.host.group import gather_values, raise_together
from counterpoint.collectives.host.shared_memory import ProcessCard
from counterpoint.collectives.multihost.hierarchical import AnyCommunicator, HierarchicalCommunicator
from counterpoint.collectives.multihost.phases import Grid, best_slice_bytes
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.parallel.backend.inner import InnerGroup
from counterpoint.parallel.background import PIECE_BYTES

_HOST_BY_HOST = ("all_gather", "reduce_scatter", "all_to_all")
"""Lists the collectives that run inside a host on the blocks of one host at a time, not on the whole array."""


def grid_of_group(group: Any, ranks_per_host: int | None) -> Grid:
    """Return the grid of hosts and local ranks of a torch process group. All ranks call this together.

    Each `ranks_per_host` consecutive ranks count as a host; None: the ranks of one machine do.

    Raises:
        Misconfigured: `ranks_per_host` differs between ranks.
        Unsupported: the hosts have different numbers of ranks, or one rank each, or ranks that are not consecutive.
    """
    found = gather_values(group, (ProcessCard.of_this_process().host, ranks_per_host))
    given = [number for _, number in found]
    other = next((rank for rank, number in enumerate(given) if number != given[0]), None)
    if other is not None:
        raise Misconfigured(
            f"ranks_per_host={given[0]} on rank 0, {given[other]} on rank {other}; give all ranks the same"
        )
    hosts = [host for host, _ in found]
    return grid_of_hosts(hosts if ranks_per_host is None else [str(r // ranks_per_host) for r in range(len(hosts))])


def grid_of_hosts(hosts: list[str]) -> Grid:
    """Return the grid of hosts and local ranks, given each rank's host; raise `Unsupported` as `grid_of_group` does."""
    local = hosts.count(hosts[0])
    for rank, host in enumerate(hosts):
        if hosts.count(host) != local:
            raise Unsupported(
                f"{local} ranks on the host of rank 0, {hosts.count(host)} on that of rank {rank}; "
                "start as many on every host"
            )
    parts = [host for host, _ in groupby(hosts)]
    if len(parts) > len(set(hosts)):
        split = next(host for host in parts if parts.count(host) > 1)
        ranks = [rank for rank, host in enumerate(hosts) if host == split]
        raise Unsupported(
            f"ranks {', '.join(map(str, ranks))} are on one host, and others between them are not; number the ranks "
            "host by host"
        )
    if local == 1 and len(hosts) > 1:
        raise Unsupported("one rank on each host")
    return Grid(hosts=len(parts), local=local)


def crossovers_over_hosts(found: Mapping[str, int], given: Mapping[str, int] | None, grid: Grid) -> dict[str, int]:
    """Return by operation the fewest bytes for which the communicator runs a call; sizes in `given` stay unchanged.

    The sizes `found` in the profile were measured inside a host, so each call inside a host has to be as large. An
    all_reduce or a broadcast has the whole array inside each host, other collectives have the blocks of one host at a
    time.
    """
    per_host = [name for name in _HOST_BY_HOST if name not in (given or {})]
    return {name: size * (grid.hosts if name in per_host else 1) for name, size in found.items()}


def landing_bytes(grid: Grid, operation: str, num_bytes: int) -> int:
    """Return how many bytes of symmetric memory a call needs to receive an output that lies in plain memory."""
    if operation == "all_reduce":
        return min(num_bytes, PIECE_BYTES)
    if operation == "reduce_scatter":
        return num_bytes // grid.world_size
    if grid.hosts == 1:
        return num_bytes
    return num_bytes // grid.hosts if operation in _HOST_BY_HOST else best_slice_bytes(num_bytes)


def open_communicator(inner: InnerGroup, grid: Grid, device: Any, options: CommunicatorOptions) -> AnyCommunicator:
    """Return a new communicator of all ranks of `inner`, over one host or several; these ranks call this together.

    Raises:
        Unsupported: ranks of one host cannot share memory.
    """
    if grid.hosts == 1:
        return Communicator(inner.group, device=device, options=options)
    return HostsCommunicator(inner, grid, device, options)


class HostsCommunicator(HierarchicalCommunicator):
    """Runs collectives over several hosts by process groups of its own. All ranks of `inner` make it together."""

    def __init__(self, inner: InnerGroup, grid: Grid, device: Any, options: CommunicatorOptions) -> None:
        rank = inner.group.rank()
        host, index = divmod(rank, grid.local)
        local = inner.part(f"host{host}", list(grid.members("inside", rank)))
        rail = inner.part(f"rail{index}", list(grid.members("between", rank)))
        self._groups = [local, rail]  # the list is replaced as a whole, never changed
        for group in self._groups:
            group.register()
        try:
            inside = raise_together(inner.group, lambda: Communicator(local.group, device=device, options=options))
            super().__init__(inside, rail.group)
        except BaseException:
            self._drop_groups()
            raise

    def close(self) -> None:
        """Close this communicator and shut down its process groups; on a GPU, calls under way end first."""
        super().close()
        for group in self._groups:
            group.group.shutdown()
        self._drop_groups()

    def abort(self) -> None:
        """Abort the groups, which ends the calls under way, then abort this communicator."""
        self._abort_groups()
        super().abort()

    def _release_peers(self) -> None:
        """Make all ranks that wait for this rank fail, on other hosts by ending the connections to them."""
        super()._release_peers()
        self._abort_groups()

    def _abort_groups(self) -> None:
        for group in self._groups:
            group.group.abort()
        self._drop_groups()

    def _drop_groups(self) -> None:
        """Unregister the groups and drop all references to them, since only this ends gloo's connections."""
        groups, self._groups, self._group = self._groups, [], None  # at once: the thread of calls drops them, too
        for group in groups:
            group.unregister()
