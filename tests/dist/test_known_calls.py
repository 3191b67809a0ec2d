"""A call of a GPU's communicator that comes again is not worked out anew, and notices what has changed meanwhile."""

from __future__ import annotations

import pytest

from tests.dist import known_call_programs as programs
from tests.support.ranks import Ranks


@pytest.mark.parametrize("seed", range(4))
def test_calls_that_come_again_are_right(three_ranks: Ranks, seed: int) -> None:
    """Few tensors and many calls, on any stream and channel, while memory grows and some ranks know a call others do
    not."""
    assert three_ranks.run(programs.random_calls_that_come_again, seed, 200) == [200] * 3


def test_a_known_call_notices_that_memory_was_replaced(two_ranks: Ranks) -> None:
    """Although its tensors are the same, it uses the new staging and landing, as do ranks that did not know it."""
    assert two_ranks.run(programs.known_to_one_rank) == [[True] * 9] * 2


def test_a_known_call_notices_how_its_block_rests(two_ranks: Ranks) -> None:
    """The same addresses again: with the handshake after a call, without it after the release."""
    assert two_ranks.run(programs.the_same_again_released_or_not) == [[True] * 18] * 2


def test_a_known_call_notices_that_its_memory_was_taken_back(two_ranks: Ranks) -> None:
    """The next tensor at the same place is used on the channel's stream, too, and that has to be known again."""
    assert two_ranks.run(programs.told_to_the_order_of_streams) == [[True] * 3] * 2
