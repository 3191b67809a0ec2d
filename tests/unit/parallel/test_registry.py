"""What is kept for a process group ends with it."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from counterpoint.errors import Misconfigured
from counterpoint.parallel.group import Registry


class Kept:
    """Counts how often it was closed."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    """A default group of one rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_group_and_key_have_one_value() -> None:
    registry: Registry[Kept] = Registry(Kept.close)
    first = registry.get(dist.group.WORLD, Kept, key=1)
    assert registry.get(dist.group.WORLD, Kept, key=1) is first
    assert registry.get(dist.group.WORLD, Kept, key=2) is not first


def test_destroying_a_group_closes_what_it_had() -> None:
    registry: Registry[Kept] = Registry(Kept.close)
    group = dist.new_group([0])
    ours, others = registry.get(group, Kept), registry.get(dist.group.WORLD, Kept)
    dist.destroy_process_group(group)
    assert (ours.closed, others.closed) == (1, 0)


def test_destroying_all_groups_closes_everything() -> None:
    registry: Registry[Kept] = Registry(Kept.close)
    kept = [registry.get(group, Kept) for group in (dist.group.WORLD, dist.new_group([0]))]
    dist.destroy_process_group()
    assert [one.closed for one in kept] == [1, 1]


def test_a_group_whose_store_lives_on_is_closed_when_the_next_one_comes() -> None:
    registry: Registry[Kept] = Registry(Kept.close)
    group = dist.new_group([0])
    store = dist.distributed_c10d._get_process_group_store(group)
    kept = registry.get(group, Kept)
    dist.destroy_process_group(group)
    registry.get(dist.group.WORLD, Kept)
    assert (kept.closed, store is None) == (1, False)


def test_a_destroyed_group_is_refused() -> None:
    registry: Registry[Kept] = Registry(Kept.close)
    group = dist.new_group([0])
    dist.destroy_process_group(group)
    with pytest.raises(Misconfigured, match="was destroyed"):
        registry.get(group, Kept)


def test_what_was_closed_by_hand_is_closed_once() -> None:
    registry: Registry[Kept] = Registry(Kept.close)
    kept = registry.get(dist.group.WORLD, Kept)
    registry.close(dist.group.WORLD)
    dist.destroy_process_group()
    assert kept.closed == 1
