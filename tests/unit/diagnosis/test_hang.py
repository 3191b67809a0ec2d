"""Who is missing in a hang: verdicts on made-up dumps."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from counterpoint.diagnosis.hang import diagnose_hang
from counterpoint.errors import BadTrace
from counterpoint.records.hang import Hang
from counterpoint.trace.flight_recorder import find_dumps
from tests.support.flight_dump import call, dump, old_dump, write

WORLD = {"0": ("default_pg", range(4))}


def hang(folder: Path, dumps: dict[int, dict[str, Any]], *, json: bool = False) -> Hang:
    return diagnose_hang(find_dumps([str(write(folder / "dumps", dumps, json=json))]))


def calls(last: int, state: str = "scheduled", **more: Any) -> list[dict[str, Any]]:
    """Collectives 1 to `last`, of which the last is in `state`."""
    return [call(seq, **more) for seq in range(1, last)] + [call(last, state=state, **more)]


@pytest.mark.parametrize("json", [False, True], ids=["pickle", "json"])
def test_the_rank_that_has_not_entered_is_named(tmp_path: Path, json: bool) -> None:
    """Three ranks wait in the fifth all_reduce, rank 2 has completed the fourth."""
    dumps = {rank: dump(calls(5), WORLD) for rank in (0, 1, 3)} | {2: dump(calls(4, "completed"), WORLD)}
    found = hang(tmp_path, dumps, json=json)
    assert found.verdict == (
        "Rank 2 has not entered all_reduce #5 of group 0 (default_pg) after all_reduce #4 "
        "(called in train (train.py:31)); ranks 0-1, 3 wait for it."
    )
    assert (found.groups[0].missing, found.groups[0].waiting) == ((2,), (0, 1, 3))
    assert [(s.rank, s.scheduled, s.completed) for s in found.groups[0].states] == [
        (0, 5, 4), (1, 5, 4), (2, 4, 4), (3, 5, 4),
    ]  # fmt: skip


def test_who_waits_elsewhere_is_not_the_cause(tmp_path: Path) -> None:
    """Ranks 0 and 1 wait for 2 and 3 in the world; 2 waits in its pair for 3, which is the one."""
    groups = {"0": ("default_pg", range(4)), "1": ("tp", (2, 3))}
    world = dump(calls(3), groups | {"1": ("tp", (0, 1))})
    two = dump([*calls(2, "completed"), *calls(7, group="1", desc="tp")], groups)
    three = dump([*calls(2, "completed"), *calls(6, "completed", group="1", desc="tp")], groups)
    found = hang(tmp_path, {0: world, 1: world, 2: two, 3: three})
    assert found.verdict.startswith("Rank 3 has not entered all_reduce #3 of group 0")
    assert [(g.name, g.missing) for g in found.groups if g.stuck] == [("0", (2, 3)), ("1", (3,))]


def test_ranks_that_wait_for_each_other(tmp_path: Path) -> None:
    """Two groups entered in opposite orders: nobody is idle."""
    groups = {"a": ("dp", (0, 1)), "b": ("tp", (0, 1))}
    one, other = dump(calls(1, group="a"), groups), dump(calls(1, group="b"), groups)
    assert hang(tmp_path, {0: one, 1: other}).verdict == (
        "Ranks wait for each other, in different groups: rank 0 in all_reduce #1 of group a (dp) for rank 1; "
        "rank 1 in all_reduce #1 of group b (tp) for rank 0."
    )


@pytest.mark.parametrize(
    ("odd", "called", "usual"),
    [
        ({"operation": "broadcast"}, "broadcast", "all_reduce"),
        ({"size": (512,)}, "all_reduce from [512] to [512]", "all_reduce from [1024] to [1024]"),
        ({"dtype": "BFloat16"}, "all_reduce of BFloat16", "all_reduce of Float"),
    ],
    ids=["operation", "size", "dtype"],
)
def test_ranks_that_disagree(tmp_path: Path, odd: dict[str, Any], called: str, usual: str) -> None:
    """One rank calls another operation, size or dtype at the same number."""
    dumps = {rank: dump(calls(5), WORLD) for rank in (0, 2, 3)}
    dumps[1] = dump([*calls(4, "completed"), call(5, state="started", **odd)], WORLD)
    assert hang(tmp_path, dumps).verdict == (
        f"The ranks disagree at #5 of group 0 (default_pg): rank 1 called {called} (train (train.py:31)), "
        f"others {usual}."
    )


@pytest.mark.parametrize(
    ("operation", "size"), [("all_to_all", (8,)), ("all_gather_v", (8,)), ("all_reduce", (32, 32))]
)
def test_differences_that_are_allowed(tmp_path: Path, operation: str, size: tuple[int, ...]) -> None:
    """Uneven exchanges, and other shapes of as many elements, are no mismatch."""
    usual = dump([*calls(4, "completed"), call(5, operation, "scheduled")], WORLD)
    odd = dump([*calls(4, "completed"), call(5, operation, "scheduled", size=size)], WORLD)
    found = hang(tmp_path, {0: usual, 1: odd, 2: usual, 3: usual})
    assert found.groups[0].mismatches == ()
    assert "have entered" in found.verdict


def test_a_rank_without_a_dump(tmp_path: Path) -> None:
    found = hang(tmp_path, {rank: dump(calls(5), WORLD) for rank in (0, 1, 2)})
    assert found.verdict == (
        "All recorded ranks have entered all_reduce #5 of group 0 (default_pg) and wait; rank 3 left no dump: it has "
        "ended, or hangs without a watchdog."
    )
    assert found.missing_dumps == (3,)


def test_a_job_that_does_not_hang(tmp_path: Path) -> None:
    found = hang(tmp_path, {rank: dump(calls(5, "completed"), WORLD) for rank in range(4)})
    assert found.verdict.startswith("Nothing hangs")


def test_overwritten_entries_accuse_nobody(tmp_path: Path) -> None:
    """Of rank 1 only calls of another group are left: whether it has entered is not known."""
    groups = {"0": ("default_pg", range(2)), "1": ("tp", (1,))}
    cut = dump(calls(3, "completed", group="1"), groups)
    for entry in cut["entries"]:
        entry["record_id"] += 4000
    found = hang(tmp_path, {0: dump(calls(5), groups), 1: cut})
    assert next(g for g in found.groups if g.name == "0").missing == ()
    assert any("overwritten on rank 1" in note for note in found.notes)


def test_what_the_group_states_counts_beyond_the_entries(tmp_path: Path) -> None:
    """A dump of the active calls only says by its status that the earlier ones are done."""
    ahead = dump([call(9, state="scheduled")], WORLD)
    status = {"last_enqueued_collective": 8, "last_started_collective": 8, "last_completed_collective": 8}
    behind = dump([call(8)], WORLD, pg_status={"0": status})
    found = hang(tmp_path, {0: ahead, 1: ahead, 2: ahead, 3: behind})
    assert found.groups[0].missing == (3,)


def test_a_receive_that_has_not_ended(tmp_path: Path) -> None:
    receive = call(3, "recv 1<-0", "scheduled", p2p=True)
    found = hang(tmp_path, {0: dump(calls(2, "completed"), WORLD), 1: dump([*calls(2, "completed"), receive], WORLD)})
    assert "rank 1: recv 1<-0 (ranks of group 0) has not ended in train (train.py:31)" in found.verdict


def test_two_dumps_of_a_rank(tmp_path: Path) -> None:
    """Folders of two incidents are not mixed."""
    for name in ("one", "two"):
        write(tmp_path / name, {0: dump(calls(2), WORLD)})
    with pytest.raises(BadTrace, match="rank 0 again"):
        diagnose_hang(find_dumps([str(tmp_path)]))


def test_the_record_survives_json(tmp_path: Path) -> None:
    found = hang(tmp_path, {0: dump(calls(5), WORLD), 1: dump(calls(4), WORLD)})
    assert msgspec.json.decode(msgspec.json.encode(found), type=Hang) == found


def test_dumps_of_torch_2_3(tmp_path: Path) -> None:
    """Groups by number, ranks as a list, one sequence for all calls."""
    dumps = {rank: old_dump(calls(5 - (rank == 2), "scheduled" if rank != 2 else "completed"), {0: range(3)})
             for rank in range(3)}  # fmt: skip
    assert hang(tmp_path, dumps).verdict.startswith("Rank 2 has not entered all_reduce #5 of group 0 after")


def batch(seq: int, state: str, *, p2p: bool, before: int = 0) -> list[dict[str, Any]]:
    """Two calls between which the state of the group is an entry of its own, that does not say whether it is p2p."""
    names = ("send 0->1", "recv 0<-1") if p2p else ("_all_gather_base", "_all_gather_base")
    own = [call(seq, name, "scheduled", p2p=p2p) | ({"collective_seq_id": before} if p2p else {}) for name in names]
    whole = own[0] | {"profiling_name": "nccl:coalesced", "state": state, "is_p2p": False, "input_sizes": []}
    return [*own, whole]


@pytest.mark.parametrize("p2p", [False, True], ids=["collectives", "p2p"])
def test_calls_of_a_batch_have_its_state(tmp_path: Path, p2p: bool) -> None:
    """They are never marked as completed themselves, so that each would seem to hang."""
    groups = {"0": ("default_pg", range(2))}
    first = [call(1), call(2)]
    done = dump([*first, *batch(3, "completed", p2p=p2p, before=2)], groups)
    assert hang(tmp_path / "done", {0: done, 1: done}).verdict.startswith("Nothing hangs")
    hung = dump([*first, *batch(3, "started", p2p=p2p, before=2)], groups)
    found = hang(tmp_path / "hung", {0: hung, 1: hung if p2p else done})
    if p2p:
        assert found.verdict.startswith("No collective hangs; 4 sends or receives have not ended: rank 0: send 0->1")
    else:
        assert (found.groups[0].waiting, found.groups[0].missing) == ((0,), ())
        assert found.groups[0].stuck is not None
        assert found.groups[0].stuck.operation == "_all_gather_base"


def test_a_status_that_counts_sends_is_not_taken_for_collectives(tmp_path: Path) -> None:
    """NCCL's `last_enqueued_collective` is the number of whatever call was last."""
    groups = {"0": ("default_pg", range(2))}
    status = {"0": {"last_enqueued_collective": 9, "last_started_collective": -1, "last_completed_collective": 9}}
    sends = [call(seq, "send 0->1", p2p=True) for seq in range(1, 10)]
    behind = dump([*calls(2, "completed"), *sends], groups, pg_status=status)
    ahead = dump([*calls(3), *sends], groups)
    assert hang(tmp_path, {0: ahead, 1: behind}).verdict.startswith("Rank 1 has not entered all_reduce #3")


PAIR = {"a": ("dp", (0, 1)), "b": ("tp", (0, 1))}


def entered(a: str, b: str) -> dict[str, Any]:
    """A rank that has entered a collective of each group, which are in these states."""
    return dump([*calls(3, a, group="a", desc="dp"), *calls(2, b, group="b", desc="tp")], PAIR)


def test_groups_that_hold_each_other_up_on_the_gpus(tmp_path: Path) -> None:
    """Both ranks have entered both; each runs another one, so that neither kernel finds its peer."""
    verdict = hang(tmp_path, {0: entered("started", "scheduled"), 1: entered("scheduled", "started")}).verdict
    assert verdict.startswith(
        "Two groups hold each other up on the GPUs: all_reduce #3 of group a (dp) runs on rank 0, all_reduce #2 of "
        "group b (tp) on rank 1, and neither starts on the others: SMs or hardware queues run out. "
    )
    assert "NCCL_LAUNCH_ORDER_IMPLICIT=1" in verdict


@pytest.mark.parametrize("a", ["scheduled", "started"])
def test_without_crossing_starts_groups_of_the_same_ranks_are_not_accused(tmp_path: Path, a: str) -> None:
    """A kernel that runs on all ranks, or one that no rank has begun, says nothing of SMs."""
    verdict = hang(tmp_path, {0: entered(a, "scheduled"), 1: entered(a, "scheduled")}).verdict
    assert verdict.startswith("All 2 ranks have entered all_reduce #3 of group a (dp) alike")


def test_groups_of_other_ranks_may_hold_each_other_up(tmp_path: Path) -> None:
    """Which have started was not recorded: it is said as a possibility, with what would tell."""
    groups = {"0": ("default_pg", range(3)), "1": ("tp", (0, 1))}
    both = dump([*calls(3), *calls(2, group="1", desc="tp")], groups)
    verdict = hang(tmp_path, {0: both, 1: both, 2: dump(calls(3), groups)}).verdict
    assert verdict.startswith("All ranks have entered the collectives of 2 groups alike, and none ends: ")
    assert verdict.endswith("TORCH_NCCL_ENABLE_TIMING=1 records which have started.")
