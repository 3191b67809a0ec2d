"""Backend `counterpoint` over two hosts of two ranks, which are halves of this machine, beside gloo."""

from __future__ import annotations

import pytest

from tests.dist import torch_backend_hosts_programs as programs
from tests.support.ranks import SOON_S, Ranks, run_once


def test_random_calls_are_those_of_gloo(four_ranks: Ranks) -> None:
    """Every bit, for every operation and dtype, waited for at once or later."""
    for count, taken in four_ranks.run(programs.random_calls, 6, 120):
        assert 0.5 * count < taken < 0.95 * count


def test_the_report_names_the_way_over_hosts(four_ranks: Ranks) -> None:
    """Of each operation; calls with split sizes and lists go to torch."""
    for rows in four_ranks.run(programs.paths):
        hosts = [(operation, why) for operation, path, why in rows if path == "hosts"]
        assert [operation for operation, _ in hosts] == [
            "all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter"
        ]  # fmt: skip
        assert {why for _, why in hosts} == {"copied from its landing"}
        assert ("all_to_all", "torch", "split sizes") in rows


def test_means_and_scaled_sums_are_right(four_ranks: Ranks) -> None:
    """At most twice the error of gloo's sum in the same dtype."""
    for found in four_ranks.run(programs.errors_of_scaled_sums):
        assert all(ours <= 2 * theirs for ours, theirs in found)


def test_ddp_trains_as_with_gloo(four_ranks: Ranks) -> None:
    """Sums of four come in another order: at most twice gloo's error against float64."""
    for ours, gloo, taken in four_ranks.run(programs.ddp_errors):
        assert 0 < ours <= 2 * gloo
        assert taken >= 4


def test_the_hook_of_ddp_works_over_hosts(four_ranks: Ranks) -> None:
    for ours, gloo, taken in four_ranks.run(programs.ddp_hook_errors):
        assert 0 < ours <= 2 * gloo
        assert taken > 1


def test_futures_complete_and_chain(four_ranks: Ranks) -> None:
    assert four_ranks.run(programs.futures) == [[1.0, 1.0]] * 4


@pytest.mark.parametrize(
    ("names", "path", "why"),
    [
        ("aabb", "hosts", "copied from its landing"),
        ("aaaa", "zero_sm", "copied from its landing"),
        ("abcd", "torch", "one rank on each host"),
        ("aaab", "torch", "3 ranks on the host of rank 0, 1 on that of rank 3; start as many on every host"),
        (
            "abab",
            "torch",
            "ranks 0, 2 are on one host, and others between them are not; number the ranks host by host",
        ),
    ],
)
def test_hosts_are_found(four_ranks: Ranks, names: str, path: str, why: str) -> None:
    """By the machines of the ranks; where these make no grid, torch makes all calls, and the report says why."""
    assert four_ranks.run(programs.on_hosts, names) == [([6.0, 6.0], {(path, why)})] * 4


@pytest.mark.parametrize(
    ("ranks_per_host", "path"), [(None, "zero_sm"), (1, "torch"), (2, "hosts"), (3, "torch"), (4, "zero_sm")]
)
def test_ranks_of_a_host_can_be_given(four_ranks: Ranks, ranks_per_host: int | None, path: str) -> None:
    for rows in four_ranks.run(programs.counted, ranks_per_host):
        assert [found for found, _ in rows] == [path]


def test_groups_that_are_destroyed_leave_no_thread(four_ranks: Ranks) -> None:
    """Neither of ours nor of gloo's."""
    assert max(four_ranks.run(programs.made_and_destroyed, 20)) <= 0


@pytest.mark.parametrize("how", ["destroy", "abort"])
def test_a_group_may_end_while_a_call_is_under_way(four_ranks: Ranks, how: str) -> None:
    """That one rank has not made: who waits for it hears it soon, and no thread is left."""
    found = four_ranks.run(programs.ended_under_way, how, False)
    for heard, seconds, left in found[:3]:
        own, peers = "CounterpointError: ", "has closed its communicator"  # whichever it sees first
        assert own in heard or peers in heard
        assert seconds < SOON_S
        assert left <= 0
    assert found[3][0] == "nothing"


def test_a_group_may_end_while_a_call_of_all_ranks_is_under_way(four_ranks: Ranks) -> None:
    """It ends well or with an error, as it happens, and soon."""
    for _ in range(5):
        for _heard, seconds, left in four_ranks.run(programs.ended_under_way, "destroy", True):
            assert seconds < SOON_S
            assert left <= 0


def test_a_rank_that_dies_is_an_error_on_all_others() -> None:
    """On its host and on the other one, in every later call, too."""
    found = run_once(4, programs.die)
    assert found[3] == -9
    for said, seconds in found[:3]:
        assert "nothing" not in said
        assert seconds < SOON_S  # gloo's timeout is 20: nobody waits for it
    assert "a rank of another host may be gone" in found[1][0]
