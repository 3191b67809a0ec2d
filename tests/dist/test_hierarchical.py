"""Collectives over several hosts, run as groups of one host, beside gloo over all ranks."""

from __future__ import annotations

import re

import pytest

from tests.dist import hierarchical_programs as programs
from tests.support.ranks import Ranks, run_once


@pytest.mark.parametrize(("hosts", "local", "count"), [(2, 2, 300), (4, 1, 60), (1, 4, 60)])
def test_random_collectives_are_those_of_gloo(four_ranks: Ranks, hosts: int, local: int, count: int) -> None:
    """Every bit, for random operations, dtypes, sizes and memory, in place or not, some under way at once."""
    assert four_ranks.run(programs.random_collectives, hosts, local, 7, count) == [count] * 4


@pytest.mark.parametrize(("hosts", "local"), [(2, 3), (3, 2)])
def test_random_collectives_of_six_ranks_are_those_of_gloo(hosts: int, local: int) -> None:
    """The same where hosts and local ranks differ in number."""
    assert run_once(6, programs.random_collectives, hosts, local, 8, 100) == [100] * 6


def test_means_and_scaled_sums_are_right(four_ranks: Ranks) -> None:
    """Scaled before they leave the host: at most twice the error of torch's sum in the same dtype."""
    for found in four_ranks.run(programs.errors_of_scaled_sums):
        assert all(ours <= 2 * theirs for ours, theirs in found)


def test_all_ranks_get_the_same_bits(four_ranks: Ranks) -> None:
    """Also of the few elements that cannot be split over the rails."""
    assert len(set(four_ranks.run(programs.same_bits))) == 1


def test_a_communicator_that_is_dropped_leaves_no_thread(four_ranks: Ranks) -> None:
    """Closed or not."""
    assert four_ranks.run(programs.threads_left) == [0] * 4


def test_a_rank_that_dies_ends_the_call_on_all_others() -> None:
    """On its host and on the other one, and for good: no rank waits for its time-out."""
    with pytest.raises(AssertionError) as heard:
        run_once(4, programs.die_in_the_middle)
    texts = str(heard.value)
    assert set(re.findall(r"rank (\d): Traceback", texts)) == {"0", "1", "2"}
    assert "did not fail alike" not in texts


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no grid", "give groups that make a grid"),
        ("overlap", "give another output"),
        ("closed", "this communicator is closed"),
        ("different calls", "all_reduce"),
    ],
)
def test_what_cannot_work_says_so(four_ranks: Ranks, what: str, message: str) -> None:
    """On every rank, with what to do."""
    assert all(message in text for text in four_ranks.run(programs.said, what))
