"""Where the ranks of a job should be: the order of least C = Σ d(i, j) · M(i, j), beside what launchers do by default.

1. Starts. The order of the ranks along the tree; the best order of the mesh (`placement_mesh.py`), which is the job's
   or found in the traffic (`placement_axes.py`); recursive bisection of the traffic down the tree
   (`placement_partition.py`), which needs no mesh.
2. The two cheapest are improved: swaps of ranks between hosts and of whole hosts (`placement_swaps.py`), and of GPUs
   inside hosts where that matters (`placement_places.py`).
3. The cheapest of all, the given order included, is the answer: never worse than what it is compared with.

Deterministic. The search sees groups above 65 ranks by a sample of their pairs; every cost printed is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray
from scipy import sparse

from counterpoint.errors import Misconfigured
from counterpoint.plan.placement_axes import with_mesh
from counterpoint.plan.placement_cost import Layout, layout
from counterpoint.plan.placement_mesh import mesh_order
from counterpoint.plan.placement_partition import arrange, arrange_groups, contracted, heavy_groups
from counterpoint.plan.placement_places import improve_places
from counterpoint.plan.placement_small import MAX_SMALL, best_of_many
from counterpoint.plan.placement_swaps import improve, room_for
from counterpoint.plan.topology import Topology
from counterpoint.plan.traffic import Traffic
from counterpoint.records.base import Record

__all__ = ["Placement", "place"]

I64 = NDArray[np.int64]
Csr = Any  # scipy.sparse.csr_array, which has no types
RANDOM_ORDERS = 5  # that "random" is the mean of
MAX_BISECTED = 20_000  # ranks; with a mesh, larger jobs do without bisection
IMPROVED = 2  # starts
CYCLES = 3  # of swapping ranks, then hosts


class Placement(Record, frozen=True, kw_only=True):
    """A rank order and what it saves.

    Args:
        hosts: names, as the topology lists them.
        gpus: of each host.
        slots: of each rank: index of its host · gpus + its GPU there.
        found: cost of these slots.
        compared: the costs of "in order" (as the hosts are listed), "rail-optimised" (in order along the tree, local
            rank k on rail k) and "random" (mean of several).
        steps: what was tried, and what it cost.
    """

    hosts: tuple[str, ...]
    gpus: int
    slots: tuple[int, ...]
    found: Layout
    compared: tuple[Layout, ...]
    steps: tuple[str, ...]

    def host_of(self, rank: int) -> str:
        return self.hosts[self.slots[rank] // self.gpus]

    def saved(self, name: str) -> float:
        """Share of the cost of a compared layout that the found one does without."""
        other = next(each for each in self.compared if each.name == name)
        return 1 - self.found.cost / other.cost if other.cost else 0.0


def place(traffic: Traffic, topology: Topology, *, seed: int = 0) -> Placement:
    """The cheapest placement found, and what it is compared with.

    Args:
        traffic: M; ranks may be fewer than GPUs, the rest of which stay free.
        topology: d.
        seed: of the random orders that it is compared with; the search itself draws nothing from it.

    Raises:
        Misconfigured: more ranks than GPUs.
    """
    ranks, slots = traffic.world_size, topology.num_slots
    if ranks > slots:
        raise Misconfigured(
            f"world_size = {ranks}: the topology has {slots} GPUs ({len(topology.hosts)} hosts of {topology.gpus}); "
            "give more hosts or a smaller job"
        )
    tried = _starts(traffic, topology)
    costs = {name: layout(name, traffic, topology, rows[:ranks]) for name, rows in tried.items()}
    steps = [f"{name}: {each.cost:.6g}" for name, each in costs.items()]
    if "bisection" not in tried:
        steps.append(f"no bisection: {slots} GPUs are more than {MAX_BISECTED}, and the mesh is known")
    for name, rows, done in _improved(_padded(traffic.sampled, slots), topology, tried, costs):
        tried[name], costs[name] = rows, layout(name, traffic, topology, rows[:ranks])
        steps.append(f"{name} ({done}): {costs[name].cost:.6g}")
    best = min(costs, key=lambda name: costs[name].cost)
    rows = _by_rank(tried[best], topology) if topology.flat_inside else tried[best]
    return Placement(
        hosts=topology.hosts,
        gpus=topology.gpus,
        slots=tuple(rows[:ranks].tolist()),
        found=structs.replace(costs[best], name="found"),
        compared=(costs["in order"], costs["rail-optimised"], _random(traffic, topology, seed)),
        steps=(*steps, f"taken: {best}"),
    )


def _starts(traffic: Traffic, topology: Topology) -> dict[str, I64]:
    """Slots of every row (ranks, then rows for the free slots) for each way to begin."""
    along = (topology.tree_order[:, None] * topology.gpus + np.arange(topology.gpus)).ravel()
    found = {"in order": np.arange(topology.num_slots), "rail-optimised": along}
    numbered = (traffic, np.arange(traffic.world_size)) if traffic.mesh else with_mesh(traffic)
    order = None if numbered is None else mesh_order(numbered[0], topology)
    if numbered is not None and order is not None:
        found["mesh order"] = _slots_of(numbered[1][order], along)
    if topology.num_slots <= MAX_BISECTED or "mesh order" not in found:
        units = np.repeat(topology.units[:, topology.tree_order], topology.gpus, axis=1)
        hosts = np.repeat(np.arange(len(topology.hosts)), topology.gpus)
        matrix, units = _padded(traffic.sampled, topology.num_slots), np.vstack([hosts, units])
        found["bisection"] = _slots_of(arrange(matrix, units), along)
        groups = heavy_groups(matrix, topology.gpus)
        if groups is not None:
            found["bisection of heavy groups"] = _slots_of(arrange_groups(matrix, units, groups), along)
    return found


def _slots_of(order: I64, along: I64) -> I64:
    """Slots of all rows; rows that the order leaves out get the slots that are left."""
    slots = along.copy()
    slots[order] = along[: len(order)]
    return slots


def _padded(matrix: Csr, size: int) -> Csr:
    """With an empty row and column for each free slot."""
    indptr = np.concatenate([matrix.indptr, np.full(size - matrix.shape[0], matrix.indptr[-1])])
    return sparse.csr_array((matrix.data, matrix.indices, indptr), shape=(size, size))


def _improved(
    matrix: Csr, topology: Topology, tried: Mapping[str, I64], costs: Mapping[str, Layout]
) -> Iterator[tuple[str, I64, str]]:
    """Name, slots and what was done, for what becomes of the cheapest starts."""
    distinct = {costs[name].cost: name for name in reversed(tuple(costs)) if name != "in order"}
    names = [distinct[cost] for cost in sorted(distinct)[:IMPROVED]]
    found = []
    for name in names:
        slots, done = _swapped(matrix, topology, tried[name])
        found.append(slots)
        yield f"{name}, improved", slots, done
    if topology.num_slots <= MAX_SMALL:
        yield "quadratic assignment", best_of_many(matrix, topology, found), "single GPUs, many starts"


def _swapped(matrix: Csr, topology: Topology, slots: I64) -> tuple[I64, str]:
    """Local search from a start, and what it did."""
    hosts, count, done = slots // topology.gpus, len(topology.hosts), []
    if not room_for(len(slots), count):
        done.append(f"no swaps: {len(slots)} ranks on {count} hosts are too many")
    elif count > 1:
        for _ in range(CYCLES):
            hosts, ranks_swapped = improve(matrix, hosts, topology.host_distance)
            to, hosts_swapped = improve(contracted(matrix, hosts, count), np.arange(count), topology.host_distance)
            hosts = to[hosts]
            done.append(f"{ranks_swapped} swaps of ranks, {hosts_swapped} of hosts")
            if not hosts_swapped:
                break
    seated = np.empty_like(hosts)
    seated[np.lexsort([slots % topology.gpus, hosts])] = np.arange(len(hosts))  # whoever came takes what is free
    if not topology.flat_inside:
        seated = improve_places(matrix, topology, seated)
        done.append("places in hosts")
    return seated, "; ".join(done) or "nothing to swap"


def _by_rank(slots: I64, topology: Topology) -> I64:
    """The same hosts, the GPUs of each in the order of its ranks, as launchers count them."""
    seated = np.empty_like(slots)
    seated[np.argsort(slots // topology.gpus, kind="stable")] = np.arange(len(slots))
    return seated


def _random(traffic: Traffic, topology: Topology, seed: int) -> Layout:
    """Mean of several."""
    draw = np.random.default_rng(seed)
    found = [
        layout("random", traffic, topology, draw.permutation(topology.num_slots)[: traffic.world_size])
        for _ in range(RANDOM_ORDERS)
    ]
    levels = tuple(_mean(each) for each in zip(*(one.levels for one in found), strict=True))
    times = [one.time_us for one in found if one.time_us is not None]
    return Layout(
        name="random",
        cost=float(np.mean([one.cost for one in found])),
        levels=levels,
        time_us=float(np.mean(times)) if times else None,
    )


def _mean(levels: Sequence[Any]) -> Any:
    """Of the numbers of one level."""
    names = ("num_bytes", "off_rail_bytes", "busiest_bytes", "cost", "time_us")
    values = {name: [getattr(level, name) for level in levels] for name in names}
    means = {name: None if each[0] is None else float(np.mean(each)) for name, each in values.items()}
    return structs.replace(levels[0], **means)
