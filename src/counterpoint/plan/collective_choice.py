"""Which way of a collective NCCL takes: the one that is fastest in its own model, whatever the machine does.

There each way, an algorithm by a protocol, is a line over the bytes S, latency + rate · S, and each is taken from where
it crosses the one before to where the next crosses it. What a way really costs was perhaps measured (`collective_fit`)
and jumps where NCCL changes. It may fall there: NCCL has changed too late. Such a fall is not modelled, since none was
seen: beyond its end a way stands for no less than what it cost there.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import attrgetter
from typing import NamedTuple

from counterpoint.plan.network import Protocol

__all__ = ["Way", "taken"]


class Way(NamedTuple):
    """One algorithm by one protocol, for some number of bytes."""

    us: float
    hops_us: float
    bandwidth_us: float
    own_us: float
    believed_latency_us: float
    believed_bandwidth_us: float
    most: float
    """Part of the bytes for which NCCL takes it at most; 1 or more: for all of them."""
    algorithm: str
    protocol: Protocol

    @property
    def believed_us(self) -> float:
        """Its time in NCCL's own model."""
        return self.believed_latency_us + self.believed_bandwidth_us


def taken(ways: Sequence[Way]) -> Way:
    """What NCCL takes, with a time that is no less than that of what it takes for fewer bytes."""
    best = min((way for way in ways if way.most >= 1), key=attrgetter("believed_us"))
    us = best.us
    if any(way.protocol.fit for way in ways):  # NCCL's own figures meet where it changes
        ends = ((way, _end(way, ways)) for way in ways)
        us = max([us, *(_at_its_end(way, end) for way, end in ends if _start(way, ways) < end < 1)])
    return best._replace(us=us)


def _at_its_end(way: Way, end: float) -> float:
    return way.protocol.time_us(way.hops_us, way.bandwidth_us * end, way.own_us)


def _start(way: Way, ways: Sequence[Way]) -> float:
    """Part of the bytes from which nothing with less latency is faster; ∞: never."""
    before = (other for other in ways if other.believed_latency_us < way.believed_latency_us)
    return max((min(_crossing(other, way), other.most) for other in before), default=0.0)


def _end(way: Way, ways: Sequence[Way]) -> float:
    """Part of the bytes up to which nothing with more bandwidth is faster; 0 or less: never."""
    after = (other for other in ways if other.believed_bandwidth_us < way.believed_bandwidth_us)
    return min([way.most, *(_crossing(way, other) for other in after)])


def _crossing(first: Way, then: Way) -> float:
    """Part of the bytes from which `then` is faster; ∞: never."""
    spared = first.believed_bandwidth_us - then.believed_bandwidth_us
    return (then.believed_latency_us - first.believed_latency_us) / spared if spared > 0 else inf
