"""Where GPUs are: hosts, the units of network above them, and how far two GPUs are from each other.

    d(a, b) = distance of the lowest level that has both, or `off_rail` of it where their places in the host differ
            = inside[a, b]      both in one host of which the links are known (`nvidia-smi topo -m`)
            = matrix[a, b]      between hosts of which distances were measured

The unit of d is whatever the distances were given in. Without any, d counts what a byte crosses: 2, 4, 6 links over
one, two, three tiers of switches, and NVLink as 0.13 of a link of 400 Gb/s (50 GB/s against 390 GB/s measured with
copy engines on 8 × H200, 2026-11-20). From a `Cluster`, d is nanoseconds per byte: oversubscription / GB/s; where the
network does not block, all of its levels are then equally far.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.cluster import Cluster
from counterpoint.plan.model import positive
from counterpoint.records.base import Record

__all__ = ["MAX_HOSTS", "MAX_SLOTS", "Topology", "TopologyLevel"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
MAX_HOSTS = 65_536
MAX_SLOTS = 131_072
HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,252}")
NVLINK_LINKS = 50 / 390  # GB/s of a 400 Gb/s NIC over NVLink's: see above


class TopologyLevel(Record, frozen=True, kw_only=True):
    """One level, inside out; the first is the host.

    Args:
        name: "host", "leaf", "spine"; "tier 3" where a file does not say.
        distance: between GPUs that this level joins and no lower one does.
        off_rail: the same for GPUs at different places in their hosts, where each place has a switch of its own
            (rails); None: no difference.
        gb_per_s: of one GPU at this level, each direction; None: unknown, and no times are predicted.
    """

    name: str
    distance: float
    off_rail: float | None = None
    gb_per_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("distance", self.distance), ("off_rail", self.off_rail)):
            if value is not None and not 0 <= value < math.inf:
                raise Misconfigured(f"level {printable(self.name)}: {name} = {value}: give a number, 0 or more")
        if self.off_rail is not None and self.off_rail < self.distance:
            raise Misconfigured(
                f"level {printable(self.name)}: off_rail = {self.off_rail} is below distance = {self.distance}: "
                "another rail cannot be closer than the own"
            )
        if self.gb_per_s is not None:
            positive(f"level {printable(self.name)}: gb_per_s", self.gb_per_s)


@dataclass(frozen=True, eq=False, kw_only=True)
class Topology:
    """Equal hosts below a tree of units, or below a measured matrix. A slot is one GPU: host · gpus + place.

    Args:
        hosts: names, in the order in which a launcher would fill them.
        gpus: of each host.
        levels: inside out; the first is the host, the last joins everything.
        units: `[levels - 1, hosts]`, the unit of each host at each level above the host.
        inside: `[gpus, gpus]` distances inside a host; None: `levels[0].distance` for every pair.
        matrix: `[hosts, hosts]` measured distances, symmetric; None: those of the levels.

    Raises:
        Misconfigured: names that occur twice, units that are not nested, a matrix that is not square or symmetric.
    """

    hosts: tuple[str, ...]
    gpus: int
    levels: tuple[TopologyLevel, ...]
    units: I64
    inside: F64 | None = None
    matrix: F64 | None = None

    def __post_init__(self) -> None:
        positive("topology.gpus", self.gpus)
        _check_hosts(self.hosts, self.gpus)
        _check_units(self.units, self.levels, len(self.hosts))
        for name, found, size in (("inside", self.inside, self.gpus), ("matrix", self.matrix, len(self.hosts))):
            if found is not None:
                check_distances(f"topology.{name}", found, size)

    @property
    def num_slots(self) -> int:
        return len(self.hosts) * self.gpus

    @cached_property
    def tree_order(self) -> I64:
        """Hosts unit by unit, larger units first: the same for every listing of equal hosts, but for their names."""
        keys: list[I64] = [np.arange(len(self.hosts))]
        for row in self.units:
            keys += [row, -np.bincount(row)[row]]
        return np.lexsort(keys)

    @cached_property
    def host_distance(self) -> NDArray[np.float32]:
        """`[hosts, hosts]`, of GPUs on the same rail; the diagonal is the mean inside a host."""
        if self.matrix is not None:
            found = self.matrix.astype(np.float32)
        else:
            shape = (len(self.hosts), len(self.hosts))
            found = np.full(shape, self.levels[-1].distance, dtype=np.float32)
            for row, level in reversed(list(zip(self.units[:-1], self.levels[1:-1], strict=True))):
                found[np.equal.outer(row, row)] = level.distance
        np.fill_diagonal(found, self.inside_mean)
        return found

    def slot_distance(self) -> NDArray[np.float32]:
        """`[slots, slots]`: d itself; for few GPUs only."""
        host, place = np.divmod(np.arange(self.num_slots), self.gpus)
        found = self.host_distance[np.ix_(host, host)]
        units = np.stack([np.arange(len(self.hosts)), *self.units])
        apart = (units[:, host][:, :, None] != units[:, host][:, None, :]).sum(axis=0)
        for index, level in enumerate(self.levels[1:], start=1):
            if level.off_rail is not None:
                found[(apart == index) & np.not_equal.outer(place, place)] = level.off_rail
        if self.inside is not None:
            found = np.where(apart == 0, self.inside[np.ix_(place, place)], found)
        np.fill_diagonal(found, 0.0)
        return np.asarray(found, dtype=np.float32)

    @property
    def inside_mean(self) -> float:
        """Mean distance of two GPUs of a host."""
        if self.inside is None or self.gpus == 1:
            return self.levels[0].distance
        return float(self.inside.sum() / (self.gpus * (self.gpus - 1)))

    @property
    def flat_inside(self) -> bool:
        """It does not matter which GPU of a host a rank gets."""
        rails = any(level.off_rail not in (None, level.distance) for level in self.levels[1:])
        return self.gpus == 1 or not (rails or self.inside is not None)

    def with_inside(self, inside: F64) -> Topology:
        """The same hosts with the links that `nvidia-smi topo -m` told of one of them."""
        if len(inside) != self.gpus:
            raise Misconfigured(f"inside: {len(inside)} GPUs, but topology.gpus = {self.gpus}: give those of one host")
        return replace(self, inside=inside)

    def only(self, hosts: Sequence[str]) -> Topology:
        """The hosts of one allocation, in that order.

        Raises:
            Misconfigured: a host that the topology does not have.
        """
        where = {name: index for index, name in enumerate(self.hosts)}
        missing = [name for name in hosts if name not in where]
        if missing:
            named = ", ".join(printable(name, 80) for name in missing[:5])
            raise Misconfigured(f"{len(missing)} hosts are not in the topology: {named}; it has {len(where)} others")
        take = np.array([where[name] for name in hosts], dtype=np.int64)
        matrix = None if self.matrix is None else self.matrix[np.ix_(take, take)]
        return replace(self, hosts=tuple(hosts), units=dense(self.units[:, take]), matrix=matrix)

    @classmethod
    def regular(
        cls, sizes: Sequence[int], *, names: Sequence[str] | None = None, distances: Sequence[float] | None = None
    ) -> Topology:
        """A fat tree of equal units.

        Args:
            sizes: GPUs of a host, hosts of a leaf, leaves of a spine, ...
            names: of the levels.
            distances: of the levels.
        """
        hosts = math.prod(sizes[1:])
        index = np.arange(hosts)
        units = [index // math.prod(sizes[1 : k + 1]) for k in range(1, len(sizes))]
        return cls.of_units([f"host{i}" for i in index], np.array(units), sizes[0], names=names, distances=distances)

    @classmethod
    def of_units(
        cls,
        hosts: Sequence[str],
        units: I64,
        gpus: int,
        *,
        names: Sequence[str] | None = None,
        distances: Sequence[float] | None = None,
    ) -> Topology:
        """A tree; distances are counted in links unless given."""
        if not len(units):
            units = np.zeros((1, len(hosts)), dtype=np.int64)
        count = len(units) + 1
        names = tier_names(count) if names is None else names
        distances = [NVLINK_LINKS, *(2.0 * k for k in range(1, count))] if distances is None else distances
        if not len(names) == len(distances) == count:
            raise Misconfigured(
                f"{len(names)} names and {len(distances)} distances for {count} levels: give one of each per level"
            )
        levels = tuple(TopologyLevel(name=n, distance=float(d)) for n, d in zip(names, distances, strict=True))
        return cls(hosts=tuple(hosts), gpus=gpus, levels=levels, units=dense(units))

    @classmethod
    def of_cluster(cls, cluster: Cluster) -> Topology:
        """The tree of a plan; d in ns per byte: oversubscription / (GB/s of a GPU at that level)."""
        sizes = [level.size for level in cluster.levels]
        if len(sizes) == 1:
            sizes.append(sizes[0])  # a single host still needs the level that joins everything
        steps = [sizes[0], *(above // below for below, above in pairwise(sizes))]
        found = cls.regular(steps)
        given = [*cluster.levels, *cluster.levels[-1:]][: len(steps)]
        rates = [level.gb_per_s / level.oversubscription for level in given]
        levels = tuple(
            TopologyLevel(name=level.name, distance=1 / rate, gb_per_s=rate)
            for level, rate in zip(given, rates, strict=True)
        )
        return replace(found, levels=levels)

    def rated(self, cluster: Cluster) -> Topology:
        """The same distances, with bandwidths of a cluster, so that times can be told.

        A level gets the rate of the first level of the cluster that has room for its largest unit.
        """
        sizes = [self.gpus, *(int(np.bincount(row).max()) * self.gpus for row in self.units)]
        levels = []
        for size, level in zip(sizes, self.levels, strict=True):
            like = next((each for each in cluster.levels if each.size >= size), cluster.levels[-1])
            levels.append(structs.replace(level, gb_per_s=like.gb_per_s / like.oversubscription))
        return replace(self, levels=tuple(levels))

    def with_rails(self) -> Topology:
        """The first level above the host as one switch per place in the host: other places are a level further away."""
        if len(self.levels) < 2 or self.gpus == 1:
            raise Misconfigured(f"rails: {self.gpus} GPUs per host, {len(self.levels)} levels: give 2 or more of each")
        rail = self.levels[1]
        above = self.levels[2].distance if len(self.levels) > 2 else 2 * rail.distance
        return replace(
            self, levels=(self.levels[0], structs.replace(rail, off_rail=max(above, rail.distance)), *self.levels[2:])
        )


def tier_names(count: int) -> list[str]:
    """Names where a file gives none."""
    return ["host", "leaf", "spine", "core", *(f"tier {k}" for k in range(4, count))][:count]


def dense(units: I64) -> I64:
    """Each row's labels as 0, 1, 2, ..."""
    return np.array([np.unique(row, return_inverse=True)[1] for row in units], dtype=np.int64)


def check_distances(name: str, found: F64, size: int) -> None:
    """Raises Misconfigured unless `[size, size]`, symmetric, finite and not negative."""
    if found.shape != (size, size):
        raise Misconfigured(f"{name} is {' x '.join(map(str, found.shape))}: give {size} x {size}, one row per name")
    if not np.isfinite(found).all() or found.min(initial=0.0) < 0:
        raise Misconfigured(f"{name} has a value that is negative or no number: give distances of 0 or more")
    if not np.allclose(found, found.T):
        raise Misconfigured(f"{name} is not symmetric: give the distance of a pair once, or the mean of both ways")


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
