"""Compute a collective's hops and bytes at each network level for each algorithm, and choose one as NCCL does.

n ranks; level i joins u_i units into u_(i+1), f_i = u_i / u_(i+1); m_i = n / u_i ranks share a link into it
(`group.py`). Bytes are parts of S, the full array, per GPU and direction; hops are those of the longest chain.

    all_gather            hops at level i                bytes at level i
    ring                  u_i - u_(i+1)                  (n - 1)/n / m_i               one pipeline over all levels
    recursive_doubling    log2 f_i                       (f_i - 1)/f_i / m_i           as NCCL's PAT, one rank per node

reduce_scatter is the same backwards, all_reduce both: twice the hops, twice the bytes. Further:

    tree                  all_reduce: f_i - 1 over NVLink, log2 f_i above, up and down; 2/m_i bytes (NCCL: chains
                          inside a node, double binary trees above)
    in_network            where switches reduce (SHARP, NVLS), one hop up (and one down), 1/m_i bytes; where they do
                          not, f_i - 1 hops and (f_i - 1)/f_i / m_i bytes
    direct                all_to_all: 1 + (peers - 1)/8 hops and (n - m_i)/n bytes, every rank to every other at once;
                          peers = m_(i+1) - m_i are met at level i; bytes to higher levels take the NIC, too, but no
                          NVLink: there, they are peers/n
    broadcast             ring: a chain, 1/m_i bytes: every link into a unit carries a part
    send_recv             direct: one hop, S bytes, at the highest level that is crossed

Sources: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005) for ring and
recursive doubling; NCCL's src/graph/tuning.cc for steps of ring and tree; NCCL runs 8 point-to-point operations of a
channel at once (NCCL_MAX_DEV_WORK_P2P_PER_BATCH).

In NCCL's own model the time of each candidate, an algorithm with a protocol, is a line over the bytes S, latency +
rate · S, and NCCL takes the lowest line. The predicted time follows from the network's figures, fitted
where something was measured, and jumps where NCCL changes its choice. It would fall there if NCCL changed too late. No
such fall was ever measured, and none is modelled: the prediction is never less than the time of an earlier choice at
the largest size for which NCCL takes it.

Where figures were fitted, NCCL's choice for each size is its choice on the measured links, even if a job has other
links: where NCCL changes its choice on those was not measured. So more bandwidth or less latency never takes longer.

Bandwidth of one GPU at a level is min(1, 1 / (oversubscription · active)) of the level's, with `active` the part of the
GPUs that send up there at once: all groups of an axis (1, the usual case) or only some stages. Traffic to higher levels
takes the links below, too, so no level is faster than a network below it. Not modelled: flows that hash onto the same
uplink while another is idle; the efficiency of `network` has their mean in it.

Where a node has lost NICs, all wait for it. A group of all its GPUs spreads over the NICs that are left, as NCCL's
channels do: (GPUs - lost) / GPUs of the bandwidth. A group of some of its GPUs uses these GPUs' NICs, and a GPU
that has lost its NIC shares another GPU's: 1 / ceil(GPUs / NICs left), by NCCL's search for paths; not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import inf, log2
from operator import attrgetter
from typing import NamedTuple

from msgspec.structs import replace

from counterpoint.errors import Misconfigured
from counterpoint.plan.job.cluster import Level
from counterpoint.plan.network.group import Reach
from counterpoint.plan.network.network import Kind, Network, Protocol

PEERS_AT_ONCE = 8
PAT_SINCE = (2, 23)  # NCCL: parallel aggregated trees for all_gather and reduce_scatter, one rank per node
STAND_IN_GB_PER_S = 25.0  # assumed for a kind of link that was not measured: PCIe 4.0

Crossing = tuple[int, float, float]
"""Index of a network level, its hops, and the bytes over one GPU's link there as a part of S, the full array."""

Schedule = tuple[tuple[Crossing, ...], ...]
"""Phases, one after the other. Within a phase, levels work at once: the slowest decides; all hops count."""

PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


def _ring(operation: str, at: Reach) -> Schedule | None:
    n = at.ranks
    if operation in PASSES:
        passes, part = PASSES[operation], (n - 1) / n
    elif operation == "broadcast":
        passes, part = 1, 1.0
    else:
        return None
    return (tuple((i, passes * (at.units[i] - at.units[i + 1]), passes * part / at.members(i)) for i in at.crossed),)


def _recursive_doubling(operation: str, at: Reach) -> Schedule | None:
    if operation not in PASSES:
        return None
    passes = PASSES[operation]
    return tuple(((i, passes * log2(at.fan(i)), passes * (1 - 1 / at.fan(i)) / at.members(i)),) for i in at.crossed)


def _direct(operation: str, at: Reach) -> Schedule | None:
    if operation == "send_recv":
        return (((at.crossed[-1], 1.0, 1.0),),)
    if operation != "all_to_all":
        return None
    near = {i: at.members(i + 1) - at.members(i) for i in at.crossed}
    sent = {i: at.ranks - at.members(i) if at.shares_uplink[i] else near[i] for i in at.crossed}
    return (tuple((i, 1 + max(near[i] - 1, 0) / PEERS_AT_ONCE, sent[i] / at.ranks) for i in at.crossed),)


def _tree(operation: str, at: Reach) -> Schedule | None:
    if operation != "all_reduce":
        return None
    hops = {i: log2(at.fan(i)) if at.shares_uplink[i] else at.fan(i) - 1 for i in at.crossed}
    return (tuple((i, 2 * hops[i], 2 / at.members(i)) for i in at.crossed),)


def _in_network(operation: str, at: Reach) -> Schedule | None:
    if operation not in ("all_reduce", "reduce_scatter") or not any(at.reduces_in_network[i] for i in at.crossed):
        return None
    passes = PASSES[operation]
    return tuple(
        ((i, passes, 1 / at.members(i)),)
        if at.reduces_in_network[i]
        else ((i, passes * (at.fan(i) - 1), passes * (1 - 1 / at.fan(i)) / at.members(i)),)
        for i in at.crossed
    )


ALGORITHMS: dict[str, Callable[[str, Reach], Schedule | None]] = {
    "ring": _ring,
    "tree": _tree,
    "direct": _direct,
    "in_network": _in_network,
    "recursive_doubling": _recursive_doubling,
}


@lru_cache(maxsize=65536)
def schedule(operation: str, algorithm: str, at: Reach) -> Schedule | None:
    """Return an algorithm's hops and bytes by phase, in a group of two or more ranks; None if it cannot run there."""
    return ALGORITHMS[algorithm](operation, at)


def own_share(operation: str, algorithm: str, at: Reach) -> float:
    """Return the fraction of the full array that a rank copies or adds, but does not send: in a ring, one shard."""
    return 1 / at.ranks if algorithm == "ring" and operation in PASSES else 0.0


@lru_cache(maxsize=65536)
def nccl_algorithms(operation: str, at: Reach, nccl: tuple[int, int]) -> tuple[str, ...]:
    """Return the algorithms from which this version of NCCL chooses for an operation in a group."""
    if operation in ("all_to_all", "send_recv"):
        return ("direct",)
    names = ["ring"]
    if operation == "all_reduce":
        names.append("tree")
    if schedule(operation, "in_network", at) is not None:
        names.append("in_network")
    one_per_node = all(at.shares_uplink[i] for i in at.crossed)
    if operation in ("all_gather", "reduce_scatter") and one_per_node and nccl >= PAT_SINCE:
        names.append("recursive_doubling")
    return tuple(names)


class Candidate(NamedTuple):
    """Holds the time of one algorithm with one protocol, for a given number of bytes."""

    us: float  # T of `network.py`
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
        """Return the collective's µs by NCCL's own model."""
        return self.nccl_latency_us + self.nccl_bandwidth_us


class Links(NamedTuple):
    """Holds the network levels that a group crosses, with the bandwidth of one GPU at each."""

    at: Reach
    levels: tuple[Level, ...]
    gb_per_s: tuple[float, ...]

    def measured(self, gb_per_s: Mapping[Kind, float]) -> Links:
        """Return these links with the given GB/s for each kind of level, and no latency at any level."""
        if not gb_per_s:
            return self
        rates = (gb_per_s.get(level.kind, STAND_IN_GB_PER_S) for level in self.levels)
        levels = (replace(level, latency_us=0.0) for level in self.levels)
        return Links(self.at, tuple(levels), tuple(rates))

    def hop_us(self, protocol: Protocol, level: int) -> float:
        """Return the µs of one hop of a protocol's message over this network level."""
        return protocol.hop_us[self.levels[level].kind] + self.levels[level].latency_us

    def reached_gb_per_s(self, protocol: Protocol, level: int) -> float:
        """Return the GB/s that one GPU reaches at this network level with very large arrays."""
        kind = self.levels[level].kind
        reached = self.gb_per_s[level] * protocol.efficiency[kind]
        ceiling = protocol.ceiling_gb_per_s.get(kind)
        return reached if ceiling is None else min(reached, ceiling / self.at.members(level))

    def hops_and_bandwidth_us(self, protocol: Protocol, phases: Schedule, num_bytes: float) -> tuple[float, float]:
        """Return H, the µs of all hops (`network.py`), and X, the µs of the bytes over the slowest links."""
        hops, bandwidth = 0.0, 0.0
        for phase in phases:
            slowest = 0.0
            for level, steps, share in phase:
                hops += steps * self.hop_us(protocol, level)
                slowest = max(slowest, share / self.reached_gb_per_s(protocol, level))
            bandwidth += slowest
        return hops, bandwidth * num_bytes / 1e3


def shared_gb_per_s(levels: Sequence[Level], active: float = 1.0) -> tuple[float, ...]:
    """Return one GPU's GB/s per direction at each level, while the fraction `active` of all GPUs sends at once."""
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
    """Return a candidate with its predicted time on `links[0]`, and its time by NCCL's own model on `links[1]`."""
    protocol, compared = protocols
    hops, bandwidth = compared_us = links[0].hops_and_bandwidth_us(protocol, phases, num_bytes)
    own_us = own_kb / protocol.own_gb_per_s if protocol.own_gb_per_s else 0.0
    if compared is not protocol or links[0] is not links[1]:
        compared_us = links[1].hops_and_bandwidth_us(compared, phases, num_bytes)
    return Candidate(
        us=protocol.time_us(hops, bandwidth, own_us), hops_us=hops, bandwidth_us=bandwidth, own_us=own_us,
        nccl_latency_us=compared.base_us + compared_us[0], nccl_bandwidth_us=compared_us[1] / protocol.believed,
        most=compared.most_bytes / num_bytes if compared.most_bytes and num_bytes else inf, algorithm=algorithm,
        protocol=protocol,
    )  # fmt: skip


def nccl_choice(offered: Sequence[Candidate]) -> Candidate:
    """Return the candidate that NCCL chooses; its time is raised if NCCL's choice for fewer bytes takes longer."""
    best = min((each for each in offered if each.most >= 1), key=attrgetter("nccl_us"))
    us = best.us
    if any(each.protocol.fit for each in offered):  # NCCL's own figures have no jump where its choice changes
        for each in offered:
            if _start(each, offered) < (end := _end(each, offered)) < 1:
                us = max(us, each.protocol.time_us(each.hops_us, each.bandwidth_us * end, each.own_us))
    return best._replace(us=us)


def _start(candidate: Candidate, offered: Sequence[Candidate]) -> float:
    """Return the fraction of the bytes from which on this candidate beats all of lower latency; ∞: it never does."""
    before = (other for other in offered if other.nccl_latency_us < candidate.nccl_latency_us)
    return max((min(_crossing(other, candidate), other.most) for other in before), default=0.0)


def _end(candidate: Candidate, offered: Sequence[Candidate]) -> float:
    """Return the fraction of the bytes up to which this candidate beats all of higher bandwidth; 0 or less: never."""
    after = (other for other in offered if other.nccl_bandwidth_us < candidate.nccl_bandwidth_us)
    return min([candidate.most, *(_crossing(candidate, other) for other in after)])


def _crossing(first: Candidate, then: Candidate) -> float:
    """Return the fraction of the bytes above which `then` is faster than `first`; ∞: never."""
    spared = first.nccl_bandwidth_us - then.nccl_bandwidth_us
    return (then.nccl_latency_us - first.nccl_latency_us) / spared if spared > 0 else inf
