"""Calls in partitions between processes: what has arrived is right when it is said to have arrived."""

from __future__ import annotations

import pytest

from tests.dist import partitioned_programs as programs
from tests.support.ranks import Ranks


@pytest.mark.parametrize("program", [programs.gathered, programs.scattered], ids=["all_gather", "all_to_all"])
def test_random_calls_of_three_ranks(three_ranks: Ranks, program: object) -> None:
    """Forty calls of random shapes, batches, chunks and delays."""
    three_ranks.run(program, 1, 40)  # type: ignore[arg-type]


@pytest.mark.parametrize("program", [programs.gathered, programs.scattered], ids=["all_gather", "all_to_all"])
def test_random_calls_of_two_ranks(two_ranks: Ranks, program: object) -> None:
    """Forty calls of random shapes, batches, chunks and delays."""
    two_ranks.run(program, 2, 40)  # type: ignore[arg-type]


def test_calls_that_do_not_fit_raise(two_ranks: Ranks) -> None:
    """Each says what is allowed."""
    found = two_ranks.run(programs.mixed_up)[0]
    said = ("has to be a tensor of empty()", "give one or more", "give one of them", "multiple of 16 bytes",
            "give a contiguous one", "are allowed")  # fmt: skip
    assert [words in text for words, text in zip(said, found, strict=True)] == [True] * 6


def test_a_rank_that_never_supplies_is_named(two_ranks: Ranks) -> None:
    """Its peer gets an error that names it, instead of waiting for ever."""
    assert "rank 1" in two_ranks.run(programs.left_unfinished)[0]


def test_a_wait_that_fails_ends_the_communicator(two_ranks: Ranks) -> None:
    """Peers hear why, and not that it was closed, if its rank closes it then."""
    first, second = two_ranks.run(programs.unsupplied)[0]
    assert "rank 1" in first
    assert second == first


@pytest.mark.parametrize("early", [True, False], ids=["early", "handshake"])
def test_streams_wait_for_arrivals(three_ranks: Ranks, early: bool) -> None:
    """On software GPUs with delays: kernels find the rows they waited for, and nobody overwrites what is read."""
    assert three_ranks.run(programs.in_stream_order, early, 60) == [[]] * 3


def test_a_captured_call_is_replayed(two_ranks: Ranks) -> None:
    """Three replays of a graph in which both kinds are under way at once."""
    assert two_ranks.run(programs.captured) == [[]] * 2


def test_a_kernel_polls_arrivals_and_counts_what_may_leave(three_ranks: Ranks) -> None:
    """It reads the words of the call, and streams wait for its counters, while it runs."""
    assert three_ranks.run(programs.counted, 30) == [[]] * 3


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
def test_a_call_behind_one_that_is_not_finished_is_refused(two_ranks: Ranks, on_gpu: bool) -> None:
    """The error says what to do, and the call is right after that."""
    for said, is_right in two_ranks.run(programs.behind_another, on_gpu):
        assert ("finish it first" in said, is_right) == (True, True), said
