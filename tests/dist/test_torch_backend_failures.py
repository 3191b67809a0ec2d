"""Groups of backend `counterpoint` end cleanly or say who did what: killed ranks, other calls, `abort`, `destroy`."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from counterpoint.machine import profile as profiles
from tests.dist import torch_backend_failures_programs as programs
from tests.support.ranks import SOON_S, Ranks, run_once


@pytest.mark.parametrize("how", ["in calls", "in futures", "before the first call"])
@pytest.mark.parametrize("turn", range(20))
def test_a_killed_rank_ends_the_others(how: str, turn: int) -> None:
    """Each is told so long before the time-out, by us or by gloo, and can destroy the group after that."""
    first, killed, last = run_once(3, programs.one_is_killed, how, 0.1 + 0.03 * turn)
    assert killed == -signal.SIGKILL
    expected = "RuntimeError" if how == "before the first call" else "PeerTimeout"
    for text, seconds, at_the_end in (first, last):
        assert (text.partition(":")[0], seconds < SOON_S, at_the_end) == (expected, True, ""), text
        assert "rank 1 is dead" in text or expected == "RuntimeError", text


MISMATCHES = [
    ("all_reduce", "broadcast"),
    ("all_reduce", "shorter all_reduce"),
    ("all_reduce", "int32 all_reduce"),
    ("all_reduce", "max all_reduce"),
    ("all_reduce", "all_gather"),
    ("asynchronous all_gather", "broadcast"),
]


@pytest.mark.parametrize("names", MISMATCHES)
@pytest.mark.parametrize("turn", range(20))
def test_calls_that_do_not_match_are_told_to_both(two_ranks: Ranks, names: tuple[str, str], turn: int) -> None:
    """Each is told the other's rank, call, size and dtype; the group is of no use then, and can be destroyed."""
    del turn
    for rank, (text, seconds, again) in enumerate(two_ranks.run(programs.each_its_own, names)):
        assert text.startswith("Misconfigured: the ranks do not match: this one is in "), text
        assert f"rank {1 - rank} in {names[1 - rank].split()[-1]} of " in text, text
        assert "bytes of float32" in text
        assert again == text
        assert seconds < SOON_S


def test_sizes_that_do_not_fit_are_refused_and_the_group_works_on(two_ranks: Ranks) -> None:
    names = ("all_gather into too much",) * 2
    for text, _, again in two_ranks.run(programs.each_its_own, names):
        assert "all_gather with output and input of (516, 256) bytes on rank" in text
        assert again == ""


def test_a_call_that_torch_takes_on_another_rank_is_told(two_ranks: Ranks) -> None:
    """Each at its own time-out: ours names the rank, that of the other is gloo's."""
    first, second = run_once(2, programs.one_calls_torch)
    assert first.startswith("PeerTimeout: all_reduce of 256 bytes of float32"), first
    assert "waiting for rank 1" in first
    assert second.startswith("RuntimeError"), second


def is_well_or_closed(text: str) -> bool:
    """Whether a call ended well, or says that this rank or the other has closed its communicator."""
    mine = "Misconfigured: this communicator was closed; make a new one"
    return text in ("", mine) or (text.startswith("PeerTimeout") and "has closed its communicator" in text)


@pytest.mark.parametrize("times", [2, 20])
@pytest.mark.parametrize("ranks", [[0, 1], [0]], ids=["all", "one"])
def test_abort_under_load(two_ranks: Ranks, ranks: list[int], times: int) -> None:
    """Works and later calls raise on who aborts, and on who is left, which is told who has gone."""
    for rank, turns in enumerate(two_ranks.run(programs.under_load, "abort", ranks, times)):
        for told, seconds in turns:
            assert seconds < SOON_S
            if rank in ranks:
                ended, *works, call, barrier = told
                assert ended == ""
                assert all(map(is_well_or_closed, works)), works
                assert "allreduce on a process group that was destroyed or aborted; make a new one" in call
                assert "barrier on a process group that was destroyed or aborted; make a new one" in barrier
            else:
                assert "rank 0 has closed its communicator" in told[-2], told


@pytest.mark.parametrize("times", [2, 20])
@pytest.mark.parametrize("ranks", [[0, 1], [0]], ids=["all", "one"])
def test_destroy_with_work_under_way(two_ranks: Ranks, ranks: list[int], times: int) -> None:
    """It ends at once, and a work either has ended well or says which communicator is closed."""
    for turns in two_ranks.run(programs.under_load, "destroy", ranks, times):
        for told, seconds in turns:
            assert seconds < SOON_S
            assert all(map(is_well_or_closed, told)), told


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("turn", range(5))
def test_groups_leave_nothing(two_ranks: Ranks, is_open: bool, turn: int) -> None:
    """In all, 1,000 with a communicator and 1,000 without, made and destroyed by the same processes."""
    count = 200 if turn else 20
    for left in two_ranks.run(programs.left_behind, count, is_open):
        kib = left.pop("kib")
        assert max(left.values()) <= 0, left
        assert kib < 8192, kib


def test_the_timeout_of_torch_is_ours(tmp_path: Path) -> None:
    """Where no options are given; and `COUNTERPOINT_PROFILE` says which calls are taken."""
    shipped = json.loads((Path(profiles.__file__).parent / "profiles" / "h200.json").read_text())
    shipped["nccl"]["crossover_bytes"] = dict.fromkeys(shipped["nccl"]["crossover_bytes"], 1)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(shipped))
    (text, seconds, taken), _ = run_once(2, programs.timeout_of_torch, str(path))
    assert text.startswith("PeerTimeout")
    assert 1.5 < seconds < SOON_S
    assert taken == 2
