"""Choose NCCL's algorithm and protocol for a collective: the pair that is fastest in NCCL's own model.

In that model the time of each candidate, an algorithm with a protocol, is a line over the bytes S, latency + rate · S,
and NCCL takes the lowest line. The time predicted is that of the network's figures, fitted ones where something was
measured, and jumps where NCCL changes its choice. It would fall there if NCCL changed too late. Such a fall was never
measured and is not modelled: the prediction is never less than what a former choice cost at the last of its sizes.

Where figures were fitted, NCCL's choice is that on the links that were measured, for each size, also where a job has
other links: at which size NCCL changes there was not measured. So more bandwidth or less latency never takes longer.

Bandwidth of one GPU at a level is min(1, 1 / (oversubscription · active)) of the level's, with `active` the part of the
GPUs that send up there at once: all groups of an axis (1, the usual case) or only some stages. Traffic to higher levels
takes the links below, too, so no level is faster than a network below it. Not modelled: flows that hash onto the same
uplink while another is idle; the efficiency of `network` has their mean in it.

Where a node has lost NICs, all wait for it. A group of all its GPUs spreads over the NICs that are left, as NCCL's
channels do: (GPUs - lost) / GPUs of the bandwidth. A group of some of its GPUs has their NICs, and whoever has lost one
shares that of another GPU: 1 / ceil(GPUs / NICs left). So says NCCL's search for paths; it was not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from operator import attrgetter
from typing import NamedTuple

from msgspec.structs import replace

from counterpoint.errors import Misconfigured
from counterpoint.plan.job.cluster import Level
from counterpoint.plan.network.algorithms import Schedule, own_share, schedule
from counterpoint.plan.network.group import Reach
from counterpoint.plan.network.protocols import Kind, Network, Protocol

STAND_IN_GB_PER_S = 25.0  # assumed for a kind of link that was not measured: PCIe 4.0


class Candidate(NamedTuple):
    """Holds the time of one algorithm with one protocol, for a given number of bytes."""

    us: float  # T of `protocols.py`
    hops_us: float  # H
    bandwidth_us: float  # X
    own_us: float  # O
    nccl_latency_us: float  # in NCCL's own model
    nccl_bandwidth_us: float  # in NCCL's own model
    most: float
    """Largest part of the bytes for which NCCL takes this protocol; 1 or more: it takes it for all of them."""
    algorithm: str
    protocol: Protocol

    @property
    def nccl_us(self) -> float:
        """Return the µs by NCCL's own model."""
        return self.nccl_latency_us + self.nccl_bandwidth_us


class Links(NamedTuple):
    """Holds the network levels that a group crosses, with the bandwidth of one GPU at each."""

    at: Reach
    levels: tuple[Level, ...]
    gb_per_s: tuple[float, ...]

    def measured(self, gb_per_s: Mapping[Kind, float]) -> Links:
        """Return these links with the given GB/s by kind of level, and without latency of the levels."""
        if not gb_per_s:
            return self
        rates = (gb_per_s.get(level.kind, STAND_IN_GB_PER_S) for level in self.levels)
        levels = (replace(level, latency_us=0.0) for level in self.levels)
        return Links(self.at, tuple(levels), tuple(rates))

    def hop_us(self, protocol: Protocol, level: int) -> float:
        """Return the µs of one hop of the algorithm over this network level."""
        return protocol.hop_us[self.levels[level].kind] + self.levels[level].latency_us

    def reached_gb_per_s(self, protocol: Protocol, level: int) -> float:
        """Return the GB/s that one GPU reaches at this network level with very large arrays."""
        kind = self.levels[level].kind
        reached = self.gb_per_s[level] * protocol.efficiency[kind]
        ceiling = protocol.ceiling_gb_per_s.get(kind)
        return reached if ceiling is None else min(reached, ceiling / self.at.members(level))

    def hops_and_bandwidth_us(self, protocol: Protocol, phases: Schedule, num_bytes: float) -> tuple[float, float]:
        """Return H, the µs of all hops (`protocols.py`), and X, the µs of the bytes over the slowest links."""
        hops, bandwidth = 0.0, 0.0
        for phase in phases:
            slowest = 0.0
            for level, steps, share in phase:
                hops += steps * self.hop_us(protocol, level)
                slowest = max(slowest, share / self.reached_gb_per_s(protocol, level))
            bandwidth += slowest
        return hops, bandwidth * num_bytes / 1e3


def shared_gb_per_s(levels: Sequence[Level], active: float = 1.0) -> tuple[float, ...]:
    """Return one GPU's GB/s per direction at each level, while the fraction `active` of all GPUs sends over it."""
    if not 0 < active <= 1:
        raise Misconfigured(f"active = {active}: give the part of GPUs that send at once, above 0 and at most 1")
    shares: list[float] = []
    below = inf
    for level in levels:
        share = level.gb_per_s / max(1.0, level.oversubscription * active)
        if level.kind == "network":
            share = below = min(share, below)
        shares.append(share)
    return tuple(shares)


def group_gb_per_s(at: Reach, levels: Sequence[Level], active: float = 1.0) -> tuple[float, ...]:
    """Return one GPU's GB/s at each level for a group: `shared_gb_per_s`, reduced by failed NICs."""
    node, rates = levels[0].size, []
    for level, rate in zip(levels, shared_gb_per_s(levels, active), strict=True):
        left = node - level.failed_nics
        spread = at.members(1) >= node if len(levels) > 1 else False
        rates.append(rate if level.kind != "network" else rate * left / node if spread else rate / -(-node // left))
    return tuple(rates)


def candidates(
    operation: str, num_bytes: float, algorithms: Sequence[str], links: Links, network: Network
) -> list[Candidate]:
    """Return a candidate for each of these algorithms with each protocol that can run the operation."""
    kind = links.levels[links.at.crossed[-1]].kind
    compared = links.measured(network.measured_gb_per_s(operation, kind))
    found = []
    for algorithm in algorithms:
        phases = schedule(operation, algorithm, links.at) or ()
        own_kb = own_share(operation, algorithm, links.at) * num_bytes / 1e3
        found += [
            _candidate(algorithm, phases, pair, num_bytes, own_kb, (links, compared))
            for pair in network.protocols_for(operation, algorithm, kind)
        ]
    return found


def _candidate(
    algorithm: str,
    phases: Schedule,
    protocols: tuple[Protocol, Protocol],
    num_bytes: float,
    own_kb: float,
    links: tuple[Links, Links],
) -> Candidate:
    """Return the candidate with its time on the first links, and by NCCL's own model on the second links."""
    protocol, compared = protocols
    hops, bandwidth = compared_us = links[0].hops_and_bandwidth_us(protocol, phases, num_bytes)
    own_us = own_kb / protocol.own_gb_per_s if protocol.own_gb_per_s else 0.0
    if compared is not protocol or links[0] is not links[1]:
        compared_us = links[1].hops_and_bandwidth_us(compared, phases, num_bytes)
    return Candidate(
        us=protocol.time_us(hops, bandwidth, own_us),
        hops_us=hops,
        bandwidth_us=bandwidth,
        own_us=own_us,
        nccl_latency_us=compared.base_us + compared_us[0],
        nccl_bandwidth_us=compared_us[1] / protocol.believed,
        most=compared.most_bytes / num_bytes if compared.most_bytes and num_bytes else inf,
        algorithm=algorithm,
        protocol=protocol,
    )


def nccl_choice(offered: Sequence[Candidate]) -> Candidate:
    """Return the candidate that NCCL chooses, with a time not below that of its choice for fewer bytes."""
    best = min((each for each in offered if each.most >= 1), key=attrgetter("nccl_us"))
    us = best.us
    if any(each.protocol.fit for each in offered):  # NCCL's own figures have no jump where its choice changes
        for each in offered:
            if _start(each, offered) < (end := _end(each, offered)) < 1:
                us = max(us, each.protocol.time_us(each.hops_us, each.bandwidth_us * end, each.own_us))
    return best._replace(us=us)


def _start(candidate: Candidate, offered: Sequence[Candidate]) -> float:
    """Return the fraction of the bytes from which no candidate of lower latency is faster; ∞: never."""
    before = (other for other in offered if other.nccl_latency_us < candidate.nccl_latency_us)
    return max((min(_crossing(other, candidate), other.most) for other in before), default=0.0)


def _end(candidate: Candidate, offered: Sequence[Candidate]) -> float:
    """Return the fraction of the bytes up to which no candidate of higher bandwidth is faster; 0 or less: never."""
    after = (other for other in offered if other.nccl_bandwidth_us < candidate.nccl_bandwidth_us)
    return min([candidate.most, *(_crossing(candidate, other) for other in after)])


def _crossing(first: Candidate, then: Candidate) -> float:
    """Return the fraction of the bytes above which `then` is faster than `first`; ∞: never."""
    spared = first.nccl_bandwidth_us - then.nccl_bandwidth_us
    return (then.nccl_latency_us - first.nccl_latency_us) / spared if spared > 0 else inf
