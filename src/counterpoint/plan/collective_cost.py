"""How long a collective takes on a cluster: by the algorithm and the protocol that NCCL would take.

    T = base + (H^j + X^j)^(1/j) + O + fill · √(base · X)      H hops, X links, O the own shard (`network.py`)

NCCL chooses by the least time in a model of its own (src/graph/tuning.cc), with j = 1 and neither O nor fill. Here each
protocol is priced by the figures of the network at hand, fitted ones where something was measured, but chosen by NCCL's
(`collective_choice.py`). Algorithms that NCCL does not offer are priced beside: `alternatives` says where another one
would win.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.algorithms import ALGORITHMS, Schedule, offered, own_share, schedule
from counterpoint.plan.cluster import Level
from counterpoint.plan.collective_choice import Way, taken
from counterpoint.plan.congestion import shares_gb_per_s
from counterpoint.plan.groups import Group
from counterpoint.plan.network import OPERATIONS, Network, Protocol
from counterpoint.plan.reach import Reach, reach
from counterpoint.records.base import Record

__all__ = ["Alternative", "CollectiveEstimate", "LevelTerm", "bus_factor", "estimate"]


class LevelTerm(Record, frozen=True, kw_only=True):
    """What one phase does at one level: `latency_us` = hops · hop_us, `bandwidth_us` = share · S / gb_per_s."""

    level: str
    hops: float
    hop_us: float
    latency_us: float
    share: float
    gb_per_s: float
    bandwidth_us: float


class Alternative(Record, frozen=True, kw_only=True):
    """The same collective by another algorithm."""

    algorithm: str
    us: float
    offered: bool
    """NCCL has it."""


class CollectiveEstimate(Record, frozen=True, kw_only=True):
    """One collective. us = latency_us + bandwidth_us + own_us + joint_us; latency_us = base_us + Σ of the terms'.

    Args:
        us: time of the collective.
        algorithm, protocol: by which; "" for one rank.
        base_us: to begin and to end.
        latency_us: base + H.
        bandwidth_us: X; the sum over phases of their slowest level.
        own_us: O.
        joint_us: the rest: what pipelines need to fill, less what hops and bytes hide of each other; what the way that
            is taken for fewer bytes cost at its end, if that was more.
        bus_gb_per_s: as nccl-tests counts it.
        level: that has the largest part of X.
        terms: by phase and level.
        alternatives: other algorithms, fastest first.
        error: largest error on rows held out of the fit; None: not validated here.
        validated: by what, or why not.
        source: of the protocol's figures.
    """

    operation: str
    num_bytes: float
    ranks: int
    us: float
    algorithm: str
    protocol: str
    base_us: float
    latency_us: float
    bandwidth_us: float
    own_us: float
    joint_us: float
    bus_gb_per_s: float
    level: str
    terms: tuple[LevelTerm, ...]
    alternatives: tuple[Alternative, ...]
    error: float | None
    validated: str
    source: str

    @property
    def better(self) -> Alternative | None:
        """The fastest alternative, if it would win."""
        return self.alternatives[0] if self.alternatives and self.alternatives[0].us < self.us else None

    def explain(self) -> str:
        """The figures behind `us`, line by line."""
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
    operation: str,
    num_bytes: float,
    group: Group,
    network: Network,
    *,
    algorithm: str | None = None,
    active: float = 1.0,
) -> CollectiveEstimate:
    """The time of one collective, all groups of its kind at once.

    Args:
        operation: PyTorch's name.
        num_bytes: of the full array S: what all_gather returns, what reduce_scatter takes, what all_reduce and
            broadcast hold, what each rank gives to all_to_all, what each rank sends to the next in send_recv.
        group: its ranks.
        network: where.
        algorithm: this one, as NCCL_ALGO would have it; None: what NCCL believes to be the fastest that it offers.
        active: part of all GPUs that send through oversubscribed levels at once.

    Raises:
        Misconfigured: an unknown operation or algorithm, one that does not offer this, fewer than 0 bytes, a group
            larger than the cluster.
    """
    _check(operation, num_bytes, algorithm)
    at = reach(group, network.cluster)
    if at.ranks == 1:
        return _nothing(operation, num_bytes)
    levels = network.cluster.levels
    gb_per_s = shares_gb_per_s(levels, active)
    kind = levels[at.crossed[-1]].kind
    nccl = offered(operation, at, network.nccl)
    chosen = (algorithm,) if algorithm else nccl
    ways: dict[str, tuple[Way, ...]] = {}
    for name in ALGORITHMS:
        if plan := schedule(operation, name, at):
            protocols = network.protocols_for(operation, name, kind)
            own = own_share(operation, name, at) * num_bytes / 1e3
            ways[name] = tuple(_ways(name, plan, protocols, num_bytes, own, at, levels, gb_per_s))
    if algorithm and algorithm not in ways:
        raise Misconfigured(
            f"algorithm = {algorithm!r} does not offer {operation} to {at.ranks} ranks "
            f"below one {levels[at.crossed[-1]].name}; choose from: {', '.join(ways)}"
        )
    best = taken([way for name in chosen for way in ways[name]])
    others = sorted((taken(ways[name]).us, name) for name in ways if name != best.algorithm)
    alternatives = tuple(Alternative(algorithm=name, us=us, offered=name in nccl) for us, name in others)
    return _explained(operation, num_bytes, at, best, network, gb_per_s, alternatives)


def _check(operation: str, num_bytes: float, algorithm: str | None) -> None:
    if operation not in OPERATIONS:
        raise Misconfigured(f"operation = {printable(operation)!r}: choose from: {', '.join(OPERATIONS)}")
    if not 0 <= num_bytes < float("inf"):
        raise Misconfigured(f"num_bytes = {num_bytes}: give the bytes of the full array, 0 or more")
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise Misconfigured(f"algorithm = {printable(algorithm)!r}: choose from: {', '.join(ALGORITHMS)}")


def _ways(
    name: str,
    plan: Schedule,
    protocols: tuple[tuple[Protocol, Protocol], ...],
    num_bytes: float,
    own: float,
    at: Reach,
    levels: tuple[Level, ...],
    gb_per_s: tuple[float, ...],
) -> Iterator[Way]:
    """One algorithm, by each protocol; `own` is in KB."""
    for protocol, believed in protocols:
        hops, bandwidth = figures = _hops_and_bandwidth(protocol, plan, num_bytes, at, levels, gb_per_s)
        own_us = own / protocol.own_gb_per_s if protocol.own_gb_per_s else 0.0
        if believed is not protocol:
            figures = _hops_and_bandwidth(believed, plan, num_bytes, at, levels, gb_per_s)
        yield Way(
            us=protocol.time_us(hops, bandwidth, own_us),
            hops_us=hops,
            bandwidth_us=bandwidth,
            own_us=own_us,
            believed_latency_us=believed.base_us + figures[0],
            believed_bandwidth_us=figures[1],
            most=believed.most_bytes / num_bytes if believed.most_bytes and num_bytes else inf,
            algorithm=name,
            protocol=protocol,
        )


def _hops_and_bandwidth(
    protocol: Protocol,
    plan: Schedule,
    num_bytes: float,
    at: Reach,
    levels: tuple[Level, ...],
    gb_per_s: tuple[float, ...],
) -> tuple[float, float]:
    """H and X in µs."""
    hops, bandwidth = 0.0, 0.0
    for phase in plan:
        slowest = 0.0
        for i, steps, share in phase:
            hops += steps * hop_us(protocol, levels[i])
            slowest = max(slowest, share / reached_gb_per_s(protocol, levels[i], gb_per_s[i], at, i))
        bandwidth += slowest
    return hops, bandwidth * num_bytes / 1e3


def hop_us(protocol: Protocol, level: Level) -> float:
    """One step over a level."""
    return protocol.hop_us[level.kind] + level.latency_us


def reached_gb_per_s(protocol: Protocol, level: Level, gb_per_s: float, at: Reach, index: int) -> float:
    """Of one GPU in the limit of much to move."""
    reached = gb_per_s * protocol.efficiency[level.kind]
    ceiling = protocol.ceiling_gb_per_s.get(level.kind)
    return reached if ceiling is None else min(reached, ceiling / at.members(index))


def bus_factor(operation: str, ranks: int) -> float:
    """Bus bandwidth over S / time, as nccl-tests counts it (doc/PERFORMANCE.md there)."""
    if operation in ("broadcast", "send_recv"):
        return 1.0
    return (2 if operation == "all_reduce" else 1) * (ranks - 1) / ranks


def _explained(
    operation: str,
    num_bytes: float,
    at: Reach,
    best: Way,
    network: Network,
    gb_per_s: tuple[float, ...],
    alternatives: tuple[Alternative, ...],
) -> CollectiveEstimate:
    protocol, terms = best.protocol, _terms(operation, num_bytes, at, best, network.cluster.levels, gb_per_s)
    outside = _outside(operation, num_bytes, at, best, network)
    fit = None if outside else protocol.fit
    error = fit.worst(at.ranks, num_bytes) if fit else None
    return CollectiveEstimate(
        operation=operation,
        num_bytes=num_bytes,
        ranks=at.ranks,
        us=best.us,
        algorithm=best.algorithm,
        protocol=protocol.name,
        base_us=protocol.base_us,
        latency_us=protocol.base_us + best.hops_us,
        bandwidth_us=best.bandwidth_us,
        own_us=best.own_us,
        joint_us=_joint_us(best),
        bus_gb_per_s=num_bytes / best.us / 1e3 * bus_factor(operation, at.ranks) if best.us else 0.0,
        level=max(terms, key=lambda term: term.bandwidth_us).level,
        terms=terms,
        alternatives=alternatives,
        error=error,
        validated=f"validated: {error:.1%} at most on rows held out of {fit.source}"
        if fit and error is not None
        else f"not validated: {outside}",
        source=protocol.source or (protocol.fit.source if protocol.fit else ""),
    )


def _joint_us(way: Way) -> float:
    """What T has beyond its parts; exactly 0 where it is their sum."""
    if way.protocol.join == 1 and not way.protocol.fill and way.protocol.fit is None:
        return 0.0
    return way.us - way.protocol.base_us - way.hops_us - way.bandwidth_us - way.own_us


def _terms(
    operation: str, num_bytes: float, at: Reach, best: Way, levels: tuple[Level, ...], gb_per_s: tuple[float, ...]
) -> tuple[LevelTerm, ...]:
    """The parts of a price, by phase and level."""
    terms = []
    for i, hops, share in (crossing for phase in schedule(operation, best.algorithm, at) or () for crossing in phase):
        each = hop_us(best.protocol, levels[i])
        reached = reached_gb_per_s(best.protocol, levels[i], gb_per_s[i], at, i)
        term = LevelTerm(
            level=levels[i].name,
            hops=hops,
            hop_us=each,
            latency_us=hops * each,
            share=share,
            gb_per_s=reached,
            bandwidth_us=share * num_bytes / reached / 1e3,
        )
        terms.append(term)
    return tuple(terms)


def _outside(operation: str, num_bytes: float, at: Reach, best: Way, network: Network) -> str:
    """Why this is not validated; "" if it is."""
    if best.protocol.fit is None:
        return "nothing like it was measured"
    if not best.protocol.operations:
        return f"{operation} was not measured, others were"
    if best.algorithm not in offered(operation, at, network.nccl):
        return f"NCCL does not run {best.algorithm} here"
    return best.protocol.fit.outside(network.cluster.gpu.name, at.ranks, num_bytes)


def _nothing(operation: str, num_bytes: float) -> CollectiveEstimate:
    return CollectiveEstimate(
        operation=operation,
        num_bytes=num_bytes,
        ranks=1,
        us=0.0,
        algorithm="",
        protocol="",
        base_us=0.0,
        latency_us=0.0,
        bandwidth_us=0.0,
        own_us=0.0,
        joint_us=0.0,
        bus_gb_per_s=0.0,
        level="",
        terms=(),
        alternatives=(),
        error=0.0,
        validated="validated: one rank communicates nothing",
        source="",
    )
