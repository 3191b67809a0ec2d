"""Pools of ranks: one for each world size, started when a test first asks for it and used by all."""

from collections.abc import Iterator

import pytest

from tests.support.ranks import Ranks, end_operations


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    yield from _ranks(2)


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[Ranks]:
    """An odd number: rotations and shards have no symmetry to hide behind."""
    yield from _ranks(3)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Two axes of two."""
    yield from _ranks(4)


@pytest.fixture(scope="session")
def eight_ranks() -> Iterator[Ranks]:
    """Meshes of several axes, as jobs lay them over a host."""
    yield from _ranks(8)


_POOLS: list[Ranks] = []


def _ranks(world_size: int) -> Iterator[Ranks]:
    ranks = Ranks(world_size)
    _POOLS.append(ranks)
    yield ranks
    _POOLS.remove(ranks)
    ranks.close()


@pytest.fixture(scope="module", autouse=True)
def operations_end_with_their_file() -> Iterator[None]:
    """The communicator of a pool's ranks is free for another file, which may want other options."""
    yield
    for ranks in _POOLS:
        ranks.run(end_operations)
