"""What collectives take from each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import Misconfigured
from counterpoint.plan.cluster import Cluster, Level
from counterpoint.plan.collective_cost import CollectiveEstimate, estimate
from counterpoint.plan.congestion import shares_gb_per_s, together_us
from counterpoint.plan.gpus import find_gpu
from counterpoint.plan.groups import Group
from counterpoint.plan.networks import levels, network_of

ROCE = network_of(Cluster(gpu=find_gpu("H100"), levels=levels("h100-roce-400", 4096)))
sizes = st.lists(st.floats(1e3, 1e9), min_size=2, max_size=4)


def gathers(num_bytes: list[float], *, stride: int = 8) -> list[CollectiveEstimate]:
    return [estimate("all_gather", each, Group(ranks=8, stride=stride), ROCE) for each in num_bytes]


def test_two_equal_ones_take_twice_their_bytes() -> None:
    """Sharing a level, each of two equal collectives is late by the other's bytes."""
    one, other = gathers([1e9, 1e9])
    assert together_us([one, other]) == pytest.approx([one.us + one.bandwidth_us] * 2)


def test_the_longer_one_waits_for_the_shorter_one_only() -> None:
    """With equal shares the short one takes twice its bytes, the long one its own and the short one's."""
    short, long = gathers([1e8, 1e9])
    assert together_us([short, long]) == pytest.approx([short.us + short.bandwidth_us, long.us + short.bandwidth_us])


def test_different_levels_do_not_meet() -> None:
    """A gather inside the node and one between nodes take nothing from each other."""
    inside = estimate("all_gather", 1e9, Group(ranks=8), ROCE)
    (between,) = gathers([1e9])
    assert together_us([inside, between]) == (inside.us, between.us)


@given(num_bytes=sizes)
def test_together_is_between_alone_and_one_after_another(num_bytes: list[float]) -> None:
    """No collective gains from others, and none ends later than if all went before it."""
    estimates = gathers(num_bytes)
    total = sum(each.us for each in estimates)
    both = together_us(estimates)
    assert all(each.us <= us <= total * (1 + 1e-12) for each, us in zip(estimates, both, strict=True))


def test_one_rank_takes_nothing_from_others() -> None:
    """A group of one uses no level."""
    (gather,) = gathers([1e9])
    nothing = estimate("all_gather", 1e9, Group(ranks=1), ROCE)
    assert together_us([gather, nothing]) == (gather.us, 0.0)


def network_level(name: str, size: int, gb_per_s: float, oversubscription: float = 1.0) -> Level:
    return Level(
        name=name, kind="network", size=size, gb_per_s=gb_per_s, latency_us=1.0, oversubscription=oversubscription
    )


def test_a_spine_is_no_faster_than_the_way_to_it() -> None:
    """What goes further up takes the links below: the least bandwidth on the way counts."""
    assert shares_gb_per_s([network_level("rail", 8, 50.0, 2.0), network_level("spine", 64, 50.0)]) == (25.0, 25.0)


def test_few_senders_fill_their_own_links() -> None:
    """A seventh of the GPUs through 7 : 1 get their NICs' bandwidth."""
    assert shares_gb_per_s([network_level("pod", 8, 50.0, 7.0)], 1 / 7) == (50.0,)


@pytest.mark.parametrize("active", [0.0, -1.0, 1.5, float("nan")])
def test_a_part_is_a_part(active: float) -> None:
    """`active` outside of 0 to 1 is refused."""
    with pytest.raises(Misconfigured, match="give the part of GPUs that send at once"):
        shares_gb_per_s([network_level("pod", 8, 50.0)], active)
