"""Describe where GPUs are: hosts, the network units above them, and the distance between two GPUs.

    d(a, b) = distance of the lowest level that has both
            = matrix[a, b]      between hosts of which distances were measured

The unit of d is that of the distances given. Without any, d counts what a byte crosses: 2, 4, 6 links over one, two,
three tiers of switches, and NVLink as 0.13 of a link of 400 Gb/s (50 GB/s against 390 GB/s measured with copy engines
on 8 × H200, 2026-11-20).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.job.cluster import Cluster
from counterpoint.plan.job.model import positive
from counterpoint.records import Record

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
MAX_HOSTS = 65_536
MAX_SLOTS = 131_072
MAX_TIERS = 8
HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,252}")
NVLINK_LINKS = 50 / 390  # GB/s of a 400 Gb/s NIC over NVLink's: see above


class TopologyLevel(Record, frozen=True, kw_only=True):
    """Describes one level of a topology; levels are counted from the innermost, and the first is the host."""

    name: str  # "host", "leaf", "spine"; "tier 3" where a file has no names
    distance: float  # distance of GPUs that this level joins and no lower one does
    gb_per_s: float | None = None  # of one GPU, each direction; None: unknown, and no times are predicted

    def __post_init__(self) -> None:
        if not 0 <= self.distance < math.inf:
            raise Misconfigured(f"level {printable(self.name)}: distance = {self.distance}: give a number, 0 or more")
        if self.gb_per_s is not None:
            positive(f"level {printable(self.name)}: gb_per_s", self.gb_per_s)


@dataclass(frozen=True, eq=False, kw_only=True)
class Topology:
    """Describes equal hosts below a tree of units, or below a measured matrix; slot = host · gpus + GPU of the host.

    Raises:
        Misconfigured: names that occur twice, or units that are not nested.
    """

    hosts: tuple[str, ...]  # names, in the order in which a launcher would fill them
    gpus: int  # GPUs of each host
    levels: tuple[TopologyLevel, ...]  # innermost first: the first is the host, the last joins everything
    units: I64  # `[levels - 1, hosts]`, the unit of each host at each level above the host
    matrix: F64 | None = None  # `[hosts, hosts]` measured distances, symmetric; None: those of the levels

    def __post_init__(self) -> None:
        positive("topology.gpus", self.gpus)
        _check_hosts(self.hosts, self.gpus)
        _check_units(self.units, self.levels, len(self.hosts))

    @property
    def num_slots(self) -> int:
        """Return the number of GPUs of all hosts."""
        return len(self.hosts) * self.gpus

    @cached_property
    def tree_order(self) -> I64:
        """Return host indices unit by unit, larger units first; for equal hosts the listed order does not matter.

        With measured distances, each host is followed by the closest remaining host.
        """
        if self.matrix is not None:
            return _nearest_next(self.matrix)
        keys: list[I64] = [np.arange(len(self.hosts))]
        for row in self.units:
            keys += [row, -np.bincount(row)[row]]
        return np.lexsort(keys)

    def packed(self, block: int) -> I64:
        """Return host indices in blocks of `block` hosts, each below the lowest unit of the tree with room for it.

        Hosts that fill no block in their unit are joined to blocks one level above, and so on; hosts in no block come
        last.
        """
        left, blocks = self.tree_order, []
        for row in self.units:
            units = np.split(left, np.flatnonzero(np.diff(row[left])) + 1)
            whole = [len(unit) // block * block for unit in units]
            blocks += [part for unit, end in zip(units, whole, strict=True) for part in unit[:end].reshape(-1, block)]
            left = np.concatenate([unit[end:] for unit, end in zip(units, whole, strict=True)])
        place = np.argsort(self.tree_order)
        return np.concatenate([*sorted(blocks, key=lambda part: int(place[part[0]])), left])

    @cached_property
    def host_distance(self) -> NDArray[np.float32]:
        """Return the distance d between hosts, `[hosts, hosts]`; the diagonal is the distance inside a host."""
        if self.matrix is not None:
            found = self.matrix.astype(np.float32)
        else:
            shape = (len(self.hosts), len(self.hosts))
            found = np.full(shape, self.levels[-1].distance, dtype=np.float32)
            for row, level in reversed(list(zip(self.units[:-1], self.levels[1:-1], strict=True))):
                found[np.equal.outer(row, row)] = level.distance
        np.fill_diagonal(found, self.levels[0].distance)
        return found

    def only(self, hosts: Sequence[str]) -> Topology:
        """Return the topology of some of the hosts, in the given order, with unchanged distances and levels."""
        where = {name: index for index, name in enumerate(self.hosts)}
        missing = [name for name in hosts if name not in where]
        if missing:
            named = ", ".join(printable(name, 80) for name in missing[:5])
            raise Misconfigured(f"{len(missing)} hosts are not in the topology: {named}; it has {len(where)} others")
        take = np.array([where[name] for name in hosts], dtype=np.int64)
        matrix = None if self.matrix is None else self.matrix[np.ix_(take, take)]
        return replace(self, hosts=tuple(hosts), units=_compact_labels(self.units[:, take]), matrix=matrix)

    @classmethod
    def of_units(cls, hosts: Sequence[str], units: I64, gpus: int, *, names: Sequence[str] | None = None) -> Topology:
        """Return the topology of nested units, `[levels - 1, hosts]`, with distances counted in links crossed.

        `[0, hosts]` stands for one level that joins all; `names` of the levels None: host, leaf, spine, core.
        """
        if not len(units):
            units = np.zeros((1, len(hosts)), dtype=np.int64)
        count = len(units) + 1
        names = names or ["host", "leaf", "spine", "core", *(f"tier {k}" for k in range(4, count))][:count]
        distances = [NVLINK_LINKS, *(2.0 * k for k in range(1, count))]
        levels = tuple(TopologyLevel(name=n, distance=d) for n, d in zip(names, distances, strict=True))
        return cls(hosts=tuple(hosts), gpus=gpus, levels=levels, units=_compact_labels(units))

    @classmethod
    def of_paths(cls, paths: Mapping[str, Sequence[str]], gpus: int) -> Topology:
        """Return the topology of hosts, given the switches above each, closest first; each tier becomes a level."""
        if not paths or len(paths) > MAX_HOSTS:
            raise Misconfigured(f"the topology has {len(paths)} hosts: give 1 to {MAX_HOSTS}")
        tiers = max(map(len, paths.values()))
        if not 1 <= tiers <= MAX_TIERS:
            raise Misconfigured(f"the topology has {tiers} tiers of switches: give 1 to {MAX_TIERS}")
        # where one path is shorter, its closest switch counts for the tiers that it lacks
        full = [[path[0]] * (tiers - len(path)) + list(path) if path else [""] * tiers for path in paths.values()]
        names = sorted({name for path in full for name in path})
        index = {name: number for number, name in enumerate(names)}
        units = np.array([[index[name] for name in path] for path in full], dtype=np.int64).T
        return cls.of_units(list(paths), units, gpus)

    @classmethod
    def of_switches(
        cls, children: Mapping[str, Sequence[str]], nodes: Mapping[str, Sequence[str]], gpus: int
    ) -> Topology:
        """Return the topology of a switch tree; `children` lists the switches below each switch, `nodes` its hosts."""
        parents = _parents(children, children.keys() | nodes.keys())
        paths: dict[str, list[str]] = {}
        for switch, hosts in nodes.items():
            path = _path(switch, parents)
            for host in hosts:
                if host in paths:
                    raise Misconfigured(
                        f"host {_quoted(host)} is at {_quoted(paths[host][0])} and at {_quoted(switch)}: name it once"
                    )
                paths[host] = path
        return cls.of_paths(paths, gpus)

    def rated(self, cluster: Cluster) -> Topology:
        """Return the topology with the bandwidths of a cluster, so that times can be predicted.

        A level gets the rate of the first level of the cluster that has room for its largest unit.
        """
        sizes = [self.gpus, *(int(np.bincount(row).max()) * self.gpus for row in self.units)]
        levels = []
        for size, level in zip(sizes, self.levels, strict=True):
            like = next((each for each in cluster.levels if each.size >= size), cluster.levels[-1])
            levels.append(structs.replace(level, gb_per_s=like.gb_per_s / like.oversubscription))
        return replace(self, levels=tuple(levels))


def _compact_labels(units: I64) -> I64:
    """Return the labels of each row renumbered as 0, 1, 2, ..."""
    return np.array([np.unique(row, return_inverse=True)[1] for row in units], dtype=np.int64)


def _nearest_next(matrix: F64) -> I64:
    """Return a nearest-neighbour order of the hosts, which begins with the first host."""
    order, left = [0], np.ones(len(matrix), dtype=bool)
    for _ in range(len(matrix) - 1):
        left[order[-1]] = False
        order.append(int(np.where(left, matrix[order[-1]], np.inf).argmin()))
    return np.array(order, dtype=np.int64)


def _check_hosts(hosts: tuple[str, ...], gpus: int) -> None:
    if not hosts:
        raise Misconfigured("topology.hosts is empty: give at least one host")
    if len(hosts) > MAX_HOSTS or len(hosts) * gpus > MAX_SLOTS:
        raise Misconfigured(
            f"topology: {len(hosts)} hosts of {gpus} GPUs; at most {MAX_HOSTS} hosts and {MAX_SLOTS} GPUs are placed"
        )
    seen: set[str] = set()
    for name in hosts:
        if name in seen:
            raise Misconfigured(f"host {printable(name, 80)} occurs twice: every host needs a name of its own")
        if not HOST_NAME.fullmatch(name):  # they are written into files that launchers read line by line
            raise Misconfigured(f"host {printable(name, 80)!r}: give letters, digits and . _ : - , up to 253")
        seen.add(name)


def _check_units(units: I64, levels: tuple[TopologyLevel, ...], hosts: int) -> None:
    if units.shape != (len(levels) - 1, hosts):
        raise Misconfigured(
            f"topology.units is {units.shape}: give [levels - 1, hosts] = [{len(levels) - 1}, {hosts}], and 2 levels"
        )
    if len(np.unique(units[-1])) > 1:
        raise Misconfigured(f"topology has {len(np.unique(units[-1]))} roots: give the level that joins all of them")
    for below, above in pairwise(units):
        if len(np.unique(below)) != len(np.unique(np.stack([below, above]), axis=1).T):
            raise Misconfigured("topology.units are not nested: a unit lies in two units of the level above it")


def _parents(children: Mapping[str, Sequence[str]], switches: Set[str]) -> dict[str, str]:
    """Return the switch above each switch but the root."""
    above: dict[str, str] = {}
    for parent, below in children.items():
        for child in below:
            if child not in switches:
                raise Misconfigured(
                    f"switch {_quoted(child)} below {_quoted(parent)} is not defined: give it a line of its own"
                )
            if child in above:
                raise Misconfigured(
                    f"switch {_quoted(child)} is below {_quoted(above[child])} and below {_quoted(parent)}: "
                    "a tree has one way up"
                )
            above[child] = parent
    roots = sorted(switches - above.keys())
    if len(roots) != 1:
        named = ", ".join(map(_quoted, roots[:5])) or "none: the switches form a ring"
        raise Misconfigured(f"the topology has {len(roots)} roots ({named}): give one switch that joins all the others")
    return above


def _path(switch: str, parents: Mapping[str, str]) -> list[str]:
    """Return a switch and all switches above it."""
    path = [switch]
    while path[-1] in parents:
        path.append(parents[path[-1]])
        if len(path) > MAX_TIERS:
            raise Misconfigured(
                f"switch {_quoted(switch)} is below more than {MAX_TIERS - 1} others: a ring or a chain is no tree"
            )
    return path


def _quoted(name: str) -> str:
    return f'"{printable(name, 64)}"'
