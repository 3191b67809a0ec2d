"""Tokens in slabs come and go as with torch's all_to_all_single, bit by bit."""

from __future__ import annotations

import signal

import pytest

from tests.dist import packed_experts_programs as programs
from tests.support.ranks import Ranks, run_once

MECHANISMS = pytest.mark.parametrize("mechanism", ["slabs"])


@MECHANISMS
def test_random_routings_of_three_ranks(three_ranks: Ranks, mechanism: str) -> None:
    """Ranks and experts without tokens, one expert for all, any room in the first round, float8, bfloat16."""
    assert three_ranks.run(programs.compared, 1, 60, mechanism) == [[]] * 3


@MECHANISMS
def test_random_routings_of_two_ranks(two_ranks: Ranks, mechanism: str) -> None:
    """The same between two."""
    assert two_ranks.run(programs.compared, 2, 40, mechanism) == [[]] * 2


def test_slabs_in_a_capture(three_ranks: Ranks) -> None:
    """With its memory, which is used again, and both rounds always."""
    assert three_ranks.run(programs.compared, 3, 40, "slabs", True) == [[]] * 3


def test_streams(two_ranks: Ranks) -> None:
    """On software GPUs, whose copies linger."""
    assert two_ranks.run(programs.on_software_gpus, 4, 30) == [[]] * 2


@MECHANISMS
def test_two_half_batches_under_way(two_ranks: Ranks, mechanism: str) -> None:
    """Second halves come in the order of the first ones."""
    assert two_ranks.run(programs.two_under_way, mechanism) == [[True] * 2] * 2


@MECHANISMS
def test_no_room_raises_at_the_next_call_and_at_the_end(two_ranks: Ranks, mechanism: str) -> None:
    """On all ranks, also those whose own choices had room; it says what to give."""
    first, second = two_ranks.run(programs.overflown, mechanism, "raise")
    for found in (first, second):
        following, after_it, end = found[0]
        assert all("no room for 11 rows" in said for said in (following, end))
        assert all("give a larger one" in said for said in (following, end))
        assert after_it == "nothing", "what was told is not told again"
    assert (first[1], second[1]) == (22, 0)


@MECHANISMS
def test_choices_without_room_are_dropped_and_counted(two_ranks: Ranks, mechanism: str) -> None:
    """The first one has room; three calls are counted."""
    first, second = two_ranks.run(programs.overflown, mechanism, "drop")
    assert first == (["nothing"] * 3, 33, [True] + [False] * 11)
    assert second == (["nothing"] * 3, 0, [False] * 12)


@MECHANISMS
def test_a_second_round_loses_nothing(two_ranks: Ranks, mechanism: str) -> None:
    """It takes what had no room in the first."""
    first, second = two_ranks.run(programs.overflown, mechanism, "second_round")
    assert first == (["nothing"] * 3, 0, [True] * 12)
    assert second == (["nothing"] * 3, 0, [False] * 12)


@MECHANISMS
def test_a_killed_rank_is_named(mechanism: str) -> None:
    """Its peer gets an error instead of waiting for ever."""
    said, killed = run_once(2, programs.killed, mechanism)
    assert killed == -signal.SIGKILL
    assert "rank 1" in said
