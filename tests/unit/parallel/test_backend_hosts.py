"""On which hosts the ranks of a group lie, and which calls are taken there."""

import pytest

from counterpoint.collectives.multihost.phases import Grid, best_slice_bytes
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.parallel.backend.hosts import crossovers_over_hosts, grid_of_hosts
from counterpoint.torch_backend import BackendOptions

MIB = 1 << 20


@pytest.mark.parametrize(("hosts", "grid"), [("a", (1, 1)), ("aaa", (1, 3)), ("aabb", (2, 2)), ("bbbaaaccc", (3, 3))])
def test_ranks_make_a_grid(hosts: str, grid: tuple[int, int]) -> None:
    assert grid_of_hosts(list(hosts)) == Grid(hosts=grid[0], local=grid[1])


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ("aab", "2 ranks on the host of rank 0, 1 on that of rank 2; start as many on every host"),
        ("abb", "1 ranks on the host of rank 0, 2 on that of rank 1"),
        ("abba", "ranks 0, 3 are on one host, and others between them are not; number the ranks host by host"),
        ("abc", "one rank on each host"),
    ],
)
def test_ranks_that_make_none_are_left_to_torch(hosts: str, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        grid_of_hosts(list(hosts))


def test_the_part_inside_a_host_has_to_reach_the_crossover() -> None:
    """Of the blocks of one host, or of the whole array; what the user gave is for the whole call."""
    measured = {"all_gather": 32, "reduce_scatter": 128, "all_reduce": 256, "all_to_all": 32, "broadcast": 0}
    grid = Grid(hosts=4, local=8)
    assert crossovers_over_hosts(measured, None, grid) == {
        "all_gather": 128, "reduce_scatter": 512, "all_reduce": 256, "all_to_all": 128, "broadcast": 0
    }  # fmt: skip
    given = measured | {"all_gather": 5}
    assert crossovers_over_hosts(given, {"all_gather": 5}, grid)["all_gather"] == 5
    assert crossovers_over_hosts(measured, None, Grid(hosts=1, local=8)) == measured


@pytest.mark.parametrize(
    ("num_bytes", "slices"),
    [(0, 0), (1, 1), (31 * MIB, 1), (64 * MIB, 2), (256 * MIB, 2), (512 * MIB, 4), (2048 * MIB, 4)],
)
def test_slices_grow_with_the_call(num_bytes: int, slices: int) -> None:
    assert -(-num_bytes // best_slice_bytes(num_bytes)) == slices


def test_no_host_has_less_than_a_rank() -> None:
    with pytest.raises(Misconfigured, match="ranks_per_host=0: give 1 or more, or None"):
        BackendOptions(ranks_per_host=0)
