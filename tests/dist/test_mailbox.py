"""Messages through mailboxes between real processes, on software GPUs."""

from __future__ import annotations

import signal

import pytest

from tests.dist import mailbox_programs as programs
from tests.support.ranks import SOON_S, Ranks, run_once


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_messages_in_any_order_arrive(three_ranks: Ranks, seed: int) -> None:
    """Every rank in an order of its own, of any size and dtype, blocking or not: the n-th receive has the n-th send."""
    assert sum(three_ranks.run(programs.random_messages, seed, 300)) == 300


def test_sends_run_ahead_of_the_receives(two_ranks: Ranks) -> None:
    """200 on both sides before the first receive: nothing waits on the host."""
    assert two_ranks.run(programs.far_ahead, 200) == [[float(k) for k in range(200)]] * 2


def test_messages_and_collectives_do_not_wait_for_each_other(three_ranks: Ranks) -> None:
    sums = [float(3 * number + 3) for number in range(5)]
    wanted = [[*sums, float((rank - 1) % 3), float((rank - 1) % 3 + 100)] for rank in range(3)]
    assert three_ranks.run(programs.beside_calls, 5) == wanted


def test_messages_can_be_captured(two_ranks: Ranks) -> None:
    assert two_ranks.run(programs.captured) == [[11.0, 21.0, 31.0], [10.0, 20.0, 30.0]]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("what", "theirs"), [("size", "8000 bytes of float32"), ("dtype", "400 bytes of int32")])
def test_a_message_that_does_not_fit_is_named(two_ranks: Ranks, what: str, theirs: str, first: int) -> None:
    """Whoever comes last says what both ranks have called; the other learns it from there."""
    told = two_ranks.run(programs.different, what, first)
    mismatch = next(text for text in told if text.startswith("Misconfigured"))
    assert "message of 400 bytes of float32 from rank 0 to rank 1" in mismatch
    assert theirs in mismatch
    assert all("the ranks do not match" in text for text in told)


def test_a_sender_may_leave_before_its_messages_are_received(two_ranks: Ranks) -> None:
    assert two_ranks.run(programs.leaves_early) == [[0.0, 1.0, 2.0, 3.0]] * 2


@pytest.mark.parametrize("what", ["message", "slot"])
def test_a_dead_peer_is_named(what: str) -> None:
    first, killed, last = run_once(3, programs.waits_for_the_dead, what)
    assert killed == -signal.SIGKILL
    for kind, ranks, seconds in (first, last):
        assert (kind, ranks, seconds < SOON_S) == ("PeerTimeout", (1,), True)
