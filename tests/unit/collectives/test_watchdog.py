"""What a wait that does not end is told, from what the others show."""

from typing import Any

import pytest

from counterpoint.collectives.host.shared_memory import CLOSED, FAILED
from counterpoint.collectives.host.watchdog import MISMATCH_AFTER_S, CurrentCall, PeerStatus, verdict
from counterpoint.errors import Misconfigured, PeerTimeout

DOING = CurrentCall(text="all_gather of 8 bytes", channel=0, line=3, number=7)
FINE = {"latest": 7, "same": DOING.text, "now": "all_gather of 8 bytes, step 2 of 5"}
TIMEOUT_S = 10.0


def told(waited_s: float = 0.0, **rank_1: Any) -> Exception | None:
    """The verdict of rank 0, which waits for rank 1, while rank 2 is in the same call."""
    seen = [PeerStatus(rank=1, **{**FINE, **rank_1}), PeerStatus(rank=2, **FINE)]  # type: ignore[arg-type]
    return verdict(DOING, seen, waiting_for=1, waited_s=waited_s, timeout_s=TIMEOUT_S)


ABSENT: dict[str, Any] = {"latest": 6, "same": None, "now": "barrier, which ended"}


@pytest.mark.parametrize("shown", [{}, ABSENT], ids=["come", "absent"])
def test_a_wait_within_its_time_goes_on(shown: dict[str, Any]) -> None:
    assert told(TIMEOUT_S, **shown) is None


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ({"alive": False}, "rank 1 is dead; it was in all_gather of 8 bytes, step 2 of 5"),
        ({"state": CLOSED}, "rank 1 has closed its communicator"),
        ({"state": FAILED, "reason": "no disk"}, "rank 1 gave up: no disk"),
    ],
)
def test_who_cannot_come_is_told_at_once(shown: dict[str, Any], said: str) -> None:
    error = told(**shown)
    assert isinstance(error, PeerTimeout)
    assert (said in str(error), error.ranks) == (True, (1,))


def test_who_gave_up_because_of_another_names_that_one() -> None:
    for alive in (True, False):
        error = told(state=FAILED, culprits=(2,), alive=alive)
        assert isinstance(error, PeerTimeout)
        assert error.ranks == (2,)


def test_who_closed_and_ended_is_not_called_dead() -> None:
    """It made fewer calls than the others, and came to its end."""
    assert "rank 1 has closed its communicator" in str(told(state=CLOSED, alive=False))


def test_another_rank_that_died_does_not_end_this_wait() -> None:
    seen = [PeerStatus(rank=1, **FINE), PeerStatus(rank=2, alive=False, **FINE)]  # type: ignore[arg-type]
    assert verdict(DOING, seen, waiting_for=1, waited_s=1.0, timeout_s=TIMEOUT_S) is None


def test_the_absent_are_named_not_those_that_wait_for_them() -> None:
    seen = [PeerStatus(rank=1, **FINE), PeerStatus(rank=2, **ABSENT)]  # type: ignore[arg-type]
    error = verdict(DOING, seen, waiting_for=1, waited_s=TIMEOUT_S + 1, timeout_s=TIMEOUT_S)
    assert isinstance(error, PeerTimeout)
    assert (error.ranks, "rank 2 (has not come, it shows barrier" in str(error)) == ((2,), True)


def test_if_all_have_come_the_one_waited_for_is_named() -> None:
    error = told(TIMEOUT_S + 1)
    assert "waiting for rank 1 (has come, it shows all_gather of 8 bytes, step 2 of 5)" in str(error)


def test_another_call_is_told_at_once() -> None:
    error = told(same="all_gather of 9 bytes")
    assert isinstance(error, Misconfigured)
    assert "this one is in all_gather of 8 bytes (call 7 on channel 0), rank 1 in all_gather of 9 bytes" in str(error)


def test_two_ranks_that_wait_for_each_other_are_told_soon() -> None:
    crossed: dict[str, Any] = {**ABSENT, "crossed": True, "now": "send_recv of 4 bytes, step 1 of 2"}
    assert told(MISMATCH_AFTER_S - 1, **crossed) is None
    assert "rank 1 in send_recv of 4 bytes" in str(told(MISMATCH_AFTER_S + 1, **crossed))
