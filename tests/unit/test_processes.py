"""Which of several ranks' endings is the cause, and when a wait for processes ends."""

from contextlib import nullcontext

import pytest

from counterpoint import processes
from counterpoint.errors import Misconfigured, PeerTimeout
from counterpoint.processes import Remains, died, hung
from counterpoint.records.measurement import RankFailure

RUNS = Remains(rank=0, code=None)
KILLED = Remains(rank=1, code=-9)
ABORTED = Remains(rank=2, code=-6)


def told(rank: int, kind: str, text: str = "t") -> Remains:
    return Remains(rank=rank, code=1, failure=RankFailure(rank=rank, kind=kind, text=text, scenario="s"))


LOST = told(0, "RuntimeError", "Connection closed by peer")
CASES = {
    "a peer's lost connection is not the cause": ((LOST, KILLED), "^rank 1 was killed by SIGKILL"),
    "even if that one only raised": ((LOST, told(1, "ValueError")), "^rank 1 failed in scenario 's': ValueError: t"),
    "nor is a rank that runs": ((RUNS, KILLED), "^rank 1 was killed by SIGKILL"),
    "all that were killed alike are named": ((KILLED, Remains(rank=3, code=-9)), "^ranks 1, 3 were killed by"),
    "an exception is said where no signal came": ((RUNS, LOST), "^rank 0 failed in scenario 's': RuntimeError: Conn"),
    "a signal without a name has its number": ((Remains(rank=0, code=-40),), "killed by signal 40"),
    "a rank that left nothing": ((RUNS, Remains(rank=1, code=7)), "^rank 1 exited with 7 d: it left no word"),
    "control characters of a log stay out": (
        (Remains(rank=0, code=1, log="a\x1b[31m\n\n"),),
        r"exited with 1 d: a\\x1b\[31m; log: /logs/rank0.log",
    ),
    "a rank that was told to stop is not the cause": (
        (told(0, "PeerFailed", "rank 1: t"), told(1, "WrongResult")),
        r"^rank 1 failed in scenario 's': WrongResult: t;",
    ),
}


@pytest.mark.parametrize(("ranks", "text"), CASES.values(), ids=CASES)
def test_the_cause_is_found(ranks: tuple[Remains, ...], text: str) -> None:
    with pytest.raises(PeerTimeout, match=text):
        raise died(ranks, during="d", logs="/logs")


def test_our_own_error_comes_before_what_others_felt() -> None:
    """A rank that said what is wrong is believed before one that NCCL aborted for it."""
    with pytest.raises(Misconfigured, match=r"^too big \(rank 1 in scenario 's'\)$"):
        raise died((LOST, told(1, "Misconfigured", "too big"), ABORTED), during="d", logs="/logs")


def test_the_ranks_can_be_read_from_the_error() -> None:
    error = died((LOST, KILLED), during="d", logs="/logs")
    assert isinstance(error, PeerTimeout)
    assert error.ranks == (1,)


def test_the_rank_that_did_not_answer_is_named_first() -> None:
    """Among many that wait for it, whatever its number."""
    stack = 'Fatal Python error: Aborted\n  File "counterpoint/x.py", line 3 in gather\n'
    waiting = [Remains(rank=rank, code=-6, log=stack) for rank in range(7)]
    error = hung([*waiting, Remains(rank=7, code=None)], reason="no progress for 5 s d", logs="/logs")
    assert str(error).startswith("no progress for 5 s d: rank 7 did not answer")


@pytest.mark.parametrize(("limit_s", "hangs"), [(600.0, False), (0.0, True)])
def test_only_processes_without_progress_hang(monkeypatch: pytest.MonkeyPatch, limit_s: float, hangs: bool) -> None:
    """The process ends well at the third look."""
    codes = iter([None, None, 0])
    monkeypatch.setattr(processes, "exit_code", lambda _: next(codes))
    errors = {"died": lambda: Misconfigured("died"), "hung": lambda: PeerTimeout("hung")}
    with pytest.raises(PeerTimeout, match="hung") if hangs else nullcontext():
        processes.watch([None], progress=lambda: 0, timeout_s=limit_s, startup_s=0.0, **errors)  # type: ignore[list-item]
