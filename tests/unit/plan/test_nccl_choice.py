"""NCCL takes what is fastest in its own model, with the time of other figures; and GPUs share oversubscribed links."""

from __future__ import annotations

from math import inf

import pytest
from msgspec.structs import replace

from counterpoint.errors import Misconfigured
from counterpoint.plan.job.cluster import Cluster, Level, find_gpu
from counterpoint.plan.network.algorithms import Candidate, group_gb_per_s, nccl_choice, shared_gb_per_s
from counterpoint.plan.network.group import Group, reach
from counterpoint.plan.network.network import Fit, Protocol, levels, network_of

FIT = Fit(source="made up", gpu="H200", rows=1, held_out="nothing", gb_per_s={}, spans=())
HOST = network_of(Cluster(gpu=find_gpu("H200"), levels=levels("nvlink-h100", 8)))


def candidate(
    name: str, base_us: float, bandwidth_us: float, *, latency: float, rate: float, most: float = inf
) -> Candidate:
    """Costs base_us + bandwidth_us; in NCCL's model latency + rate."""
    return Candidate(
        us=base_us + bandwidth_us,
        hops_us=0.0,
        bandwidth_us=bandwidth_us,
        own_us=0.0,
        nccl_latency_us=latency,
        nccl_bandwidth_us=rate,
        most=most,
        algorithm="ring",
        protocol=Protocol(name=name, base_us=base_us, hop_us={}, efficiency={}, fit=FIT),
    )


@pytest.mark.parametrize(
    ("ways", "name", "us"),
    [
        # the slower way, since NCCL believes it to be faster
        ([candidate("LL", 10.0, 5.0, latency=30.0, rate=20.0), candidate("Simple", 20.0, 2.0, latency=40.0, rate=2.0)],
         "Simple", 22.0),
        # LL is left at half of the bytes, where it costs 10 + 40 / 2: Simple, faster there, counts as 30
        ([candidate("LL", 10.0, 40.0, latency=1.0, rate=22.0), candidate("Simple", 12.0, 2.0, latency=11.0, rate=2.0)],
         "Simple", 30.0),
        # LL128, slow in truth, is nowhere the fastest in NCCL's model: it raises nothing
        ([candidate("LL", 10.0, 4.0, latency=1.0, rate=22.0), candidate("LL128", 90.0, 4.0, latency=20.0, rate=10.0),
          candidate("Simple", 12.0, 2.0, latency=11.0, rate=2.0)], "Simple", 14.0),
        # taken for a quarter of the bytes at most, LL is not taken for all of them, however fast
        ([candidate("LL", 1.0, 4.0, latency=1.0, rate=1.0, most=0.25),
          candidate("Simple", 12.0, 2.0, latency=11.0, rate=0.5)], "Simple", 14.0),
    ],
)  # fmt: skip
def test_nccl_takes_what_its_own_model_prefers(ways: list[Candidate], name: str, us: float) -> None:
    found = nccl_choice(ways)
    assert (found.protocol.name, found.us) == (name, us)


def network_level(name: str, size: int, gb_per_s: float, oversubscription: float = 1.0) -> Level:
    return Level(
        name=name, kind="network", size=size, gb_per_s=gb_per_s, latency_us=1.0, oversubscription=oversubscription
    )


def test_a_spine_is_no_faster_than_the_way_to_it() -> None:
    """What goes further up takes the links below: the least bandwidth on the way counts."""
    assert shared_gb_per_s([network_level("rail", 8, 50.0, 2.0), network_level("spine", 64, 50.0)]) == (25.0, 25.0)


def test_few_senders_fill_their_own_links() -> None:
    """A seventh of the GPUs through 7 : 1 get their NICs' bandwidth."""
    assert shared_gb_per_s([network_level("pod", 8, 50.0, 7.0)], 1 / 7) == (50.0,)


@pytest.mark.parametrize("active", [0.0, -1.0, 1.5, float("nan")])
def test_a_part_is_a_part(active: float) -> None:
    with pytest.raises(Misconfigured, match="give the part of GPUs that send at once"):
        shared_gb_per_s([network_level("pod", 8, 50.0)], active)


@pytest.mark.parametrize(
    ("group", "lost", "part"),
    [
        (Group(ranks=32), 1, 7 / 8),  # all GPUs of each node: spread over the NICs that are left
        (Group(ranks=32), 4, 4 / 8),
        (Group(ranks=4, stride=8), 1, 1 / 2),  # one of each node: two of them share a NIC
        (Group(ranks=4, stride=8), 4, 1 / 2),
        (Group(ranks=4, stride=8), 5, 1 / 3),
        (Group(ranks=8, stride=4), 2, 1 / 2),
        (Group(ranks=4, stride=8), 0, 1.0),
    ],
)
def test_who_has_lost_a_nic_shares_another(group: Group, lost: int, part: float) -> None:
    whole = levels("h100-ndr-400", 32)
    broken = tuple(replace(each, failed_nics=lost) if each.kind == "network" else each for each in whole)
    at = reach(group, Cluster(gpu=find_gpu("H100"), levels=broken))
    assert group_gb_per_s(at, broken) == pytest.approx((whole[0].gb_per_s, part * whole[1].gb_per_s))


def test_a_node_without_a_network_is_refused() -> None:
    broken = tuple(replace(each, failed_nics=8) for each in levels("h100-ndr-400", 32))
    with pytest.raises(Misconfigured, match="failed_nics = 8 of 8"):
        Cluster(gpu=find_gpu("H100"), levels=broken)
