"""Which algorithm and protocol NCCL takes for a collective: the fastest pair in its own model, whatever is measured.

In that model each candidate, an algorithm by a protocol, is a line over the bytes S, latency + rate · S, and is taken
from where it crosses the one before to where the next crosses it. The time that a candidate really takes is that of the
network's figures, fitted ones where something was measured, and jumps where NCCL changes. It may fall there: NCCL has
changed too late. Such a fall was never measured and is not modelled: beyond its end a candidate stands for no less than
what it cost there.

Bandwidth of one GPU at a level is min(1, 1 / (oversubscription · active)) of the level's, with `active` the part of the
GPUs that send up there at once: all groups of an axis (1, the usual case) or only some stages. Traffic to higher levels
takes the links below, too, so no level is faster than a network below it. Not modelled: flows that hash onto the same
uplink while another is idle; the efficiency of `network` has their mean in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import attrgetter
from typing import NamedTuple

from counterpoint.errors import Misconfigured
from counterpoint.plan.job.cluster import Level
from counterpoint.plan.network.algorithms import ALGORITHMS, Schedule, own_share, schedule
from counterpoint.plan.network.group import Reach
from counterpoint.plan.network.protocols import Network, Protocol


class Candidate(NamedTuple):
    """Holds the time of one algorithm by one protocol, for some number of bytes."""

    us: float
    hops_us: float
    bandwidth_us: float
    own_us: float
    nccl_latency_us: float
    nccl_bandwidth_us: float
    most: float
    """Part of the bytes for which NCCL takes it at most; 1 or more: for all of them."""
    algorithm: str
    protocol: Protocol

    @property
    def nccl_us(self) -> float:
        """Its time in NCCL's own model."""
        return self.nccl_latency_us + self.nccl_bandwidth_us


class Links(NamedTuple):
    """Describes the links of a group: the levels it crosses, and the bandwidth of one GPU at each level."""

    at: Reach
    levels: tuple[Level, ...]
    gb_per_s: tuple[float, ...]

    def hop_us(self, protocol: Protocol, level: int) -> float:
        """Return the time of one step over a level."""
        return protocol.hop_us[self.levels[level].kind] + self.levels[level].latency_us

    def reached_gb_per_s(self, protocol: Protocol, level: int) -> float:
        """Return what one GPU reaches at a level in the limit of large arrays."""
        kind = self.levels[level].kind
        reached = self.gb_per_s[level] * protocol.efficiency[kind]
        ceiling = protocol.ceiling_gb_per_s.get(kind)
        return reached if ceiling is None else min(reached, ceiling / self.at.members(level))

    def hops_and_bandwidth_us(self, protocol: Protocol, phases: Schedule, num_bytes: float) -> tuple[float, float]:
        """Return H and X of `protocols.py`."""
        hops, bandwidth = 0.0, 0.0
        for phase in phases:
            slowest = 0.0
            for level, steps, share in phase:
                hops += steps * self.hop_us(protocol, level)
                slowest = max(slowest, share / self.reached_gb_per_s(protocol, level))
            bandwidth += slowest
        return hops, bandwidth * num_bytes / 1e3


def shared_gb_per_s(levels: Sequence[Level], active: float = 1.0) -> tuple[float, ...]:
    """Return GB/s of one GPU, each direction, at each level while the part `active` of all GPUs sends there."""
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


def candidates(operation: str, num_bytes: float, links: Links, network: Network) -> dict[str, tuple[Candidate, ...]]:
    """Return every algorithm that can run the operation, by each protocol that serves it."""
    kind = links.levels[links.at.crossed[-1]].kind
    found = {}
    for algorithm in ALGORITHMS:
        if phases := schedule(operation, algorithm, links.at):
            own_kb = own_share(operation, algorithm, links.at) * num_bytes / 1e3
            found[algorithm] = tuple(
                _candidate(algorithm, phases, pair, num_bytes, own_kb, links)
                for pair in network.protocols_for(operation, algorithm, kind)
            )
    return found


def _candidate(
    algorithm: str,
    phases: Schedule,
    protocols: tuple[Protocol, Protocol],
    num_bytes: float,
    own_kb: float,
    links: Links,
) -> Candidate:
    protocol, compared = protocols
    hops, bandwidth = compared_us = links.hops_and_bandwidth_us(protocol, phases, num_bytes)
    own_us = own_kb / protocol.own_gb_per_s if protocol.own_gb_per_s else 0.0
    if compared is not protocol:
        compared_us = links.hops_and_bandwidth_us(compared, phases, num_bytes)
    return Candidate(
        us=protocol.time_us(hops, bandwidth, own_us),
        hops_us=hops,
        bandwidth_us=bandwidth,
        own_us=own_us,
        nccl_latency_us=compared.base_us + compared_us[0],
        nccl_bandwidth_us=compared_us[1],
        most=compared.most_bytes / num_bytes if compared.most_bytes and num_bytes else inf,
        algorithm=algorithm,
        protocol=protocol,
    )


def nccl_choice(offered: Sequence[Candidate]) -> Candidate:
    """Return what NCCL takes, with a time that is no less than that of what it takes for fewer bytes."""
    best = min((each for each in offered if each.most >= 1), key=attrgetter("nccl_us"))
    us = best.us
    if any(each.protocol.fit for each in offered):  # NCCL's own figures meet where it changes
        for each in offered:
            if _start(each, offered) < (end := _end(each, offered)) < 1:
                us = max(us, each.protocol.time_us(each.hops_us, each.bandwidth_us * end, each.own_us))
    return best._replace(us=us)


def _start(candidate: Candidate, offered: Sequence[Candidate]) -> float:
    """Return the part of the bytes from which nothing with less latency is faster; ∞: never."""
    before = (other for other in offered if other.nccl_latency_us < candidate.nccl_latency_us)
    return max((min(_crossing(other, candidate), other.most) for other in before), default=0.0)


def _end(candidate: Candidate, offered: Sequence[Candidate]) -> float:
    """Return the part of the bytes up to which nothing with more bandwidth is faster; 0 or less: never."""
    after = (other for other in offered if other.nccl_bandwidth_us < candidate.nccl_bandwidth_us)
    return min([candidate.most, *(_crossing(candidate, other) for other in after)])


def _crossing(first: Candidate, then: Candidate) -> float:
    """Return the part of the bytes from which `then` is faster; ∞: never."""
    spared = first.nccl_bandwidth_us - then.nccl_bandwidth_us
    return (then.nccl_latency_us - first.nccl_latency_us) / spared if spared > 0 else inf
