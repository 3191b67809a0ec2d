"""What NCCL takes: by its own lines over bytes, priced by other figures."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest

from counterpoint.plan.cluster import Cluster
from counterpoint.plan.collective_choice import Way, taken
from counterpoint.plan.collective_cost import estimate
from counterpoint.plan.gpus import find_gpu
from counterpoint.plan.groups import Group
from counterpoint.plan.network import OPERATIONS, Fit, Protocol
from counterpoint.plan.networks import levels, network_of

FIT = Fit(source="made up", gpu="H200", rows=1, held_out="nothing", spans=())
HOST = network_of(Cluster(gpu=find_gpu("H200"), levels=levels("nvlink-h100", 8)))


def way(name: str, base_us: float, bandwidth_us: float, *, latency: float, rate: float, most: float = inf) -> Way:
    """Costs base_us + bandwidth_us; NCCL believes in latency + rate."""
    return Way(
        us=base_us + bandwidth_us,
        hops_us=0.0,
        bandwidth_us=bandwidth_us,
        own_us=0.0,
        believed_latency_us=latency,
        believed_bandwidth_us=rate,
        most=most,
        algorithm="ring",
        protocol=Protocol(name=name, base_us=base_us, hop_us={}, efficiency={}, fit=FIT),
    )


def test_what_nccl_believes_in_is_taken() -> None:
    """The slower way, since NCCL believes it to be faster."""
    found = taken([way("LL", 10.0, 5.0, latency=30.0, rate=20.0), way("Simple", 20.0, 2.0, latency=40.0, rate=2.0)])
    assert (found.protocol.name, found.us) == ("Simple", 22.0)


def test_nothing_is_faster_than_what_is_taken_for_fewer_bytes() -> None:
    """LL is left at half of the bytes, where it costs 10 + 40 / 2: Simple, faster there, counts as 30."""
    found = taken([way("LL", 10.0, 40.0, latency=1.0, rate=22.0), way("Simple", 12.0, 2.0, latency=11.0, rate=2.0)])
    assert (found.protocol.name, found.us) == ("Simple", 30.0)


def test_what_is_never_taken_does_not_count() -> None:
    """LL128, slow in truth, is nowhere the fastest in NCCL's model: it raises nothing."""
    ways = [
        way("LL", 10.0, 4.0, latency=1.0, rate=22.0),
        way("LL128", 90.0, 4.0, latency=20.0, rate=10.0),
        way("Simple", 12.0, 2.0, latency=11.0, rate=2.0),
    ]
    assert taken(ways).us == 14.0


def test_a_way_ends_where_nccl_stops_to_offer_it() -> None:
    """Taken for a quarter of the bytes at most, LL is not taken for all of them, however fast."""
    found = taken(
        [way("LL", 1.0, 4.0, latency=1.0, rate=1.0, most=0.25), way("Simple", 12.0, 2.0, latency=11.0, rate=0.5)]
    )
    assert (found.protocol.name, found.us) == ("Simple", 14.0)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_time_never_falls_where_protocols_change(operation: str) -> None:
    """Over 2 to 8 H200, from 1 KiB to 1 GiB in steps of 3 %."""
    for ranks in range(2, 9):
        times = [estimate(operation, 2 ** (step / 20), Group(ranks=ranks), HOST).us for step in range(200, 601)]
        assert all(few <= many * (1 + 1e-12) for few, many in pairwise(times))
