"""Estimate how long a collective takes on a cluster, by the algorithm and protocol that NCCL would choose.

    T = base + (H^j + X^j)^(1/j) + O + fill · √(base · X)      H hops, X links, O the own shard (`network.py`)

Each protocol has the figures of the given network, fitted ones where collectives were measured; `algorithms.py` says
which algorithm and protocol NCCL takes.
"""

from __future__ import annotations

from counterpoint.errors import Misconfigured, printable
from counterpoint.machine.bus_bandwidth import bus_factor
from counterpoint.plan.job.parallel import Parallel
from counterpoint.plan.network.algorithms import (
    Candidate,
    Links,
    candidates,
    group_gb_per_s,
    nccl_algorithms,
    nccl_choice,
    schedule,
)
from counterpoint.plan.network.group import Axis, Group, axes, reach
from counterpoint.plan.network.network import OPERATIONS, Network
from counterpoint.records import Record

ROUNDING = 1e-9  # fraction of a time
SAME_LINK = 0.02  # largest relative difference between a link's bandwidth and a measured link's


class LevelTerm(Record, frozen=True, kw_only=True):
    """Describes a collective's phase at one level: `latency_us` = hops · hop_us, `bandwidth_us` = share · S / GB/s."""

    level: str
    hops: float
    hop_us: float
    latency_us: float
    share: float
    gb_per_s: float
    bandwidth_us: float


class CollectiveEstimate(Record, frozen=True, kw_only=True):
    """Holds the time of one collective and its terms: us = latency_us + bandwidth_us + own_us + joint_us.

    `own` is work on the shard that a rank does not send, `joint` what pipelining adds to the other terms or hides.
    """

    operation: str
    num_bytes: float
    ranks: int
    us: float = 0.0  # time of the collective
    algorithm: str = ""  # chosen by NCCL, with `protocol`; "" for one rank
    protocol: str = ""
    base_us: float = 0.0  # time to begin and to end
    latency_us: float = 0.0  # base + H = base_us + Σ latency_us of the terms
    bandwidth_us: float = 0.0  # X, the sum over phases of their slowest level
    own_us: float = 0.0  # O: to copy or add the shard that a rank does not send
    # the rest: time to fill pipelines, less the overlap of hops and bytes; and what NCCL's choice for fewer
    # bytes takes longer at its largest size, if it does
    joint_us: float = 0.0
    bus_gb_per_s: float = 0.0  # bus bandwidth as nccl-tests counts it
    terms: tuple[LevelTerm, ...] = ()  # parts of H and X, by phase and level
    error: float | None  # largest error on rows held out of the fit; None: not validated here
    validated: str  # what validates it, or why nothing does
    source: str = ""  # where the protocol's figures are from

    def explain(self) -> str:
        """Return lines of text with the figures that make up `us`."""
        if not self.algorithm:
            return f"{self.operation} of one rank: nothing to do"
        parts = ((self.own_us, "own shard"), (self.joint_us, "pipeline"))
        shape = "".join(f" {us:+.1f} ({name})" for us, name in parts if us)
        head = f"{self.operation} of {self.num_bytes:.4g} bytes over {self.ranks} ranks: {self.us:.1f} µs"
        return "\n".join(
            [
                f"{head} = {self.latency_us:.1f} (latency) + {self.bandwidth_us:.1f} (bandwidth){shape}",
                f"  {self.algorithm}, {self.protocol}: begins and ends in {self.base_us:.1f} µs",
                *(
                    f"  {term.level}: {term.hops:.3g} hops · {term.hop_us:.3g} µs = {term.latency_us:.1f} µs; "
                    f"{term.share:.4g} of the array / {term.gb_per_s:.4g} GB/s = {term.bandwidth_us:.1f} µs"
                    for term in self.terms
                ),
                f"  figures: {self.source}; {self.validated}",
            ]
        )


def estimate(
    operation: str, num_bytes: float, group: Group, network: Network, *, active: float = 1.0
) -> CollectiveEstimate:
    """Predict the time of one collective while all groups of the same shape run it at the same time.

    Args:
        operation: PyTorch's name of the collective.
        num_bytes: Bytes of the full array S: what all_gather returns, what reduce_scatter takes, what all_reduce and
            broadcast hold, what each rank gives to all_to_all, what each rank sends to the next in send_recv.
        group: The ranks that take part.
        network: The cluster, and what NCCL reaches on it.
        active: Part of all GPUs that send through oversubscribed levels at once.

    Returns:
        The time, its parts, and what validates it.

    Raises:
        Misconfigured: An unknown operation, fewer than 0 bytes, a group larger than the cluster.
    """
    if operation not in OPERATIONS:
        raise Misconfigured(f"operation = {printable(operation)!r}: choose from: {', '.join(OPERATIONS)}")
    if not 0 <= num_bytes < float("inf"):
        raise Misconfigured(f"num_bytes = {num_bytes}: give the bytes of the full array, 0 or more")
    at = reach(group, network.cluster)
    if at.ranks == 1:
        nothing = "validated: one rank communicates nothing"
        return CollectiveEstimate(operation=operation, num_bytes=num_bytes, ranks=1, error=0.0, validated=nothing)
    links = Links(at, network.cluster.levels, group_gb_per_s(at, network.cluster.levels, active))
    best = nccl_choice(candidates(operation, num_bytes, nccl_algorithms(operation, at, network.nccl), links, network))
    return _explained(operation, num_bytes, best, links, network)


def _explained(operation: str, num_bytes: float, best: Candidate, links: Links, network: Network) -> CollectiveEstimate:
    protocol, ranks = best.protocol, links.at.ranks
    rest_us = best.us - protocol.base_us - best.hops_us - best.bandwidth_us - best.own_us
    outside = _outside(operation, num_bytes, links, best, network)
    fit = None if outside else protocol.fit
    error = fit.worst(ranks, num_bytes) if fit else None
    return CollectiveEstimate(
        operation=operation,
        num_bytes=num_bytes,
        ranks=ranks,
        us=best.us,
        algorithm=best.algorithm,
        protocol=protocol.name,
        base_us=protocol.base_us,
        latency_us=protocol.base_us + best.hops_us,
        bandwidth_us=best.bandwidth_us,
        own_us=best.own_us,
        joint_us=rest_us if abs(rest_us) > ROUNDING * best.us else 0.0,
        bus_gb_per_s=num_bytes / best.us / 1e3 * bus_factor(operation, ranks) if best.us else 0.0,
        terms=_terms(operation, num_bytes, best, links),
        error=error,
        validated=f"validated: {error:.1%} at most on rows held out of {fit.source}"
        if fit and error is not None
        else f"not validated: {outside}",
        source=protocol.source or (protocol.fit.source if protocol.fit else ""),
    )


def _terms(operation: str, num_bytes: float, best: Candidate, links: Links) -> tuple[LevelTerm, ...]:
    terms = []
    for phase in schedule(operation, best.algorithm, links.at) or ():
        for level, hops, share in phase:
            hop_us = links.hop_us(best.protocol, level)
            reached = links.reached_gb_per_s(best.protocol, level)
            term = LevelTerm(
                level=links.levels[level].name, hops=hops, hop_us=hop_us, latency_us=hops * hop_us, share=share,
                gb_per_s=reached, bandwidth_us=share * num_bytes / reached / 1e3,
            )  # fmt: skip
            terms.append(term)
    return tuple(terms)


def _outside(operation: str, num_bytes: float, links: Links, best: Candidate, network: Network) -> str:
    """Return why no measurement validates this estimate; "" if one does."""
    fit, at = best.protocol.fit, links.at
    if fit is None:
        return "nothing like it was measured"
    if not best.protocol.operations:
        return f"{operation} was not measured, others were"
    for level in at.crossed:
        name, kind, rate = links.levels[level].name, links.levels[level].kind, links.gb_per_s[level]
        measured = fit.gb_per_s.get(kind)
        if measured is None:
            return f"{name} is {kind}, which was not measured"
        if abs(rate - measured) > SAME_LINK * measured:
            return f"{name} of {rate:.4g} GB/s, measured with {measured:.4g}"
    return fit.outside(network.cluster.gpu.name, at.ranks, num_bytes)


class CollectiveTimes:
    """Caches one network's estimates; share one cache among all jobs of a search, which mostly need equal estimates."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._known: dict[tuple[str, float, Group, float], CollectiveEstimate] = {}

    def find(self, operation: str, num_bytes: float, group: Group, active: float = 1.0) -> CollectiveEstimate:
        """Return the estimate, cached if known; raise Misconfigured if the network is too small for the group."""
        key = (operation, num_bytes, group, active)
        if key not in self._known:
            self._known[key] = estimate(operation, num_bytes, group, self.network, active=active)
        return self._known[key]

    @property
    def asked(self) -> tuple[tuple[Group, CollectiveEstimate], ...]:
        """Return all estimates in the cache, each with its group."""
        return tuple((group, found) for (_, _, group, _), found in self._known.items())


class MeshTimes:
    """Finds the estimates of a job's collectives by mesh axis."""

    def __init__(self, times: CollectiveTimes, parallel: Parallel) -> None:
        self._times = times
        self.groups: dict[Axis, Group] = dict(axes(parallel))
        # pp sends go between neighbours, one after the other, not over the whole axis
        self.groups["pp"] = Group(ranks=min(parallel.pp, 2), stride=self.groups["pp"].stride)
        self._active: dict[Axis, float] = {"pp": 1.0 / parallel.pp}

    def find(self, axis: Axis, operation: str, num_bytes: float) -> CollectiveEstimate:
        """Return the estimate of one collective in the groups of this mesh axis."""
        return self._times.find(operation, num_bytes, self.groups[axis], self._active.get(axis, 1.0))

    def in_node(self, axis: Axis) -> int:
        """Return how many ranks of a group of this axis are on one node; 1 if that number differs between nodes."""
        cluster = self._times.network.cluster
        at = reach(self.groups[axis], cluster)
        members = at.members(1) if cluster.levels[0].kind != "network" else 1.0
        return int(members) if members == int(members) else 1

    def reached(self, axis: Axis) -> tuple[int, int]:
        """Return how many nodes a group of this axis spans, and its ranks per node; 1 node if level 0 is a network."""
        cluster, ranks = self._times.network.cluster, self.groups[axis].ranks
        nodes = 1 if cluster.levels[0].kind == "network" else int(reach(self.groups[axis], cluster).units[1])
        return nodes, -(-ranks // nodes)

    def find_in_node(self, axis: Axis, operation: str, num_bytes: float) -> float:
        """Return the µs of one collective among the ranks of a group of this axis that share a node."""
        return self.between(self.reached(axis)[1], self.groups[axis].stride, operation, round(num_bytes))

    def between(self, ranks: int, stride: int, operation: str, num_bytes: float) -> float:
        """Return the µs of one collective in a group of `ranks` ranks, `stride` apart, of any axis or none."""
        return self._times.find(operation, num_bytes, Group(ranks=ranks, stride=stride)).us
