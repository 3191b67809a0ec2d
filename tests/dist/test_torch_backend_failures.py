"""Groups of backend `counterpoint` end cleanly or say who did what: killed ranks, other calls, `abort`, `destroy`."""

import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import counterpoint.torch_backend as backend
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.machine import profile as profiles
from counterpoint.measurement.session import Session
from tests.dist.torch_backend_programs import EVERYTHING, newest
from tests.support.ranks import SOON_S, TIMEOUT_S, Ranks, run_once, said

LARGE = 300_000  # elements: calls that take long enough to be in the way of what ends them


def new_group(timeout_s: float = TIMEOUT_S, *, is_open: bool = True) -> Any:
    """A group that takes every call that it can; `is_open`: it has taken one."""
    options = backend.BackendOptions(crossover_bytes=EVERYTHING, communicator=CommunicatorOptions(timeout_s=timeout_s))
    group = dist.new_group(backend="counterpoint", pg_options=options)
    if is_open:
        dist.all_reduce(torch.ones(3), group=group)
    return group


def started(group: Any, count: int) -> list[Any]:
    return [dist.all_reduce(torch.ones(LARGE), group=group, async_op=True) for _ in range(count)]


def one_is_killed(_: Session, how: str, after_s: float) -> tuple[str, float, str]:
    """What the others are told when rank 1 is killed, from when on, and what ending the group then says."""
    group = new_group(is_open=how != "before the first call")
    if dist.get_rank() == 1:
        if how == "before the first call":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def calls() -> None:
        while True:
            if how == "in futures":
                for future in [work.get_future() for work in started(group, 4)]:
                    future.wait()
            else:
                dist.all_reduce(torch.ones(LARGE), group=group)

    text, _ranks, seconds = said(calls)
    return text, seconds, said(lambda: dist.destroy_process_group(group))[0]


CALLS: dict[str, Callable[[Any], object]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(64), group=group),
    "shorter all_reduce": lambda group: dist.all_reduce(torch.ones(32), group=group),
    "int32 all_reduce": lambda group: dist.all_reduce(torch.ones(64, dtype=torch.int32), group=group),
    "max all_reduce": lambda group: dist.all_reduce(torch.ones(64), dist.ReduceOp.MAX, group),
    "broadcast": lambda group: dist.broadcast(torch.ones(64), 0, group),
    "asynchronous all_gather": lambda group: gathered(64, 32, group, async_op=True).wait(),
    "all_gather": lambda group: gathered(128, 64, group),
    "all_gather into too much": lambda group: gathered(129, 64, group),
    "barrier of torch": dist.barrier,
}


def gathered(output: int, mine: int, group: Any, *, async_op: bool = False) -> Any:
    function = newest("all_gather_single", "all_gather_into_tensor")
    return function(torch.ones(output), torch.ones(mine), group, async_op)


def each_its_own(_: Session, names: tuple[str, str]) -> tuple[str, float, str]:
    """What each of two ranks is told that makes its own call; and of a good call by both after that."""
    group = new_group(timeout_s=TIMEOUT_S)
    text, _ranks, seconds = said(lambda: CALLS[names[dist.get_rank()]](group))
    dist.barrier()
    again = said(lambda: dist.all_reduce(torch.ones(3), group=group))[0]
    dist.barrier()
    dist.destroy_process_group(group)
    return text, seconds, again


def one_calls_torch(_: Session) -> str:
    """What is said to rank 0 when rank 1 makes a call that torch takes; rank 1 waits for it no longer than that."""
    group = new_group(timeout_s=2)
    if dist.get_rank() == 1:
        work = group.recv([torch.ones(8)], 0, 0)
        return said(lambda: work.wait(timedelta(seconds=5)))[0]
    return said(lambda: dist.all_reduce(torch.ones(64), group=group))[0]


def under_load(_: Session, how: str, ranks: list[int], times: int) -> list[tuple[list[str], float]]:
    """What is said to works when these ranks end the group with calls under way, and to calls after that."""
    return [_ended_under_load(how, dist.get_rank() in ranks) for _time in range(times)]


def _ended_under_load(how: str, by_me: bool) -> tuple[list[str], float]:
    group = new_group(timeout_s=TIMEOUT_S)
    dist.barrier()
    works: list[Any] = []
    starts = [said(lambda: works.extend(started(group, 1)))[0] for _ in range(10)]  # the other may have ended by now
    told, begun = [], time.monotonic()
    if by_me:
        told.append(said(group.abort if how == "abort" else lambda: dist.destroy_process_group(group))[0])
    told += [text for text in starts if text] + [said(work.wait)[0] for work in works]
    if how == "abort":
        told.append(said(lambda: dist.all_reduce(torch.ones(3), group=group))[0])
        told.append(said(lambda: dist.barrier(group))[0] if by_me else "")
    seconds = time.monotonic() - begun
    if how == "abort" or not by_me:
        dist.destroy_process_group(group)
    dist.barrier()
    return told, seconds


def left_behind(_: Session, count: int, is_open: bool) -> dict[str, int]:
    """What `count` groups leave: threads, descriptors, mappings, files in shared memory, and KiB of memory."""
    for _time in range(count):  # what grows once only, such as the allocator's pools, is no leak
        _made_and_destroyed(is_open)
    before = _resources()
    for _time in range(count):
        _made_and_destroyed(is_open)
    return {name: size - before[name] for name, size in _resources().items()}


def _made_and_destroyed(is_open: bool) -> None:
    group = new_group(is_open=is_open)
    if not is_open:
        dist.barrier(group)
    assert backend.report(group).taken == is_open
    dist.destroy_process_group(group)


def _resources() -> dict[str, int]:
    gc.collect()
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "mappings": Path("/proc/self/maps").read_text().count("counterpoint"),
        "files": sum("counterpoint" in path.name for path in Path("/dev/shm").iterdir()),
        "kib": int(Path("/proc/self/statm").read_text().split()[1]) * 4,
    }


def timeout_of_torch(_: Session, profile: str) -> tuple[str, float, int]:
    """What rank 0 is told that waits for rank 1 in a group without options, with a profile for all calls."""
    os.environ["COUNTERPOINT_PROFILE"] = profile
    group = dist.new_group(backend="counterpoint", timeout=timedelta(seconds=10))
    dist.all_reduce(torch.ones(3), group=group)
    waited = said(lambda: dist.all_reduce(torch.ones(3), group=group)) if dist.get_rank() == 0 else ("", (), 0.0)
    return waited[0], waited[2], backend.report(group).taken


@pytest.mark.parametrize("how", ["in calls", "in futures", "before the first call"])
@pytest.mark.parametrize("turn", range(20))
def test_a_killed_rank_ends_the_others(how: str, turn: int) -> None:
    first, killed, last = run_once(3, one_is_killed, how, 0.1 + 0.03 * turn)
    assert killed == -signal.SIGKILL
    expected = "RuntimeError" if how == "before the first call" else "PeerTimeout"
    for text, seconds, at_the_end in (first, last):
        assert (text.partition(":")[0], seconds < SOON_S, at_the_end) == (expected, True, ""), text
        assert "rank 1 is dead" in text or expected == "RuntimeError", text


MISMATCHES = [
    ("all_reduce", "broadcast"), ("all_reduce", "shorter all_reduce"), ("all_reduce", "int32 all_reduce"),
    ("all_reduce", "max all_reduce"), ("all_reduce", "all_gather"), ("asynchronous all_gather", "broadcast"),
]  # fmt: skip


@pytest.mark.parametrize("names", MISMATCHES * 4)
def test_calls_that_do_not_match_are_told_to_both(two_ranks: Ranks, names: tuple[str, str]) -> None:
    """Each is told the other's rank, call, size and dtype; the group is of no use then, and can be destroyed."""
    for rank, (text, seconds, again) in enumerate(two_ranks.run(each_its_own, names)):
        assert text.startswith("Misconfigured: the ranks do not match: this one is in "), text
        assert f"rank {1 - rank} in {names[1 - rank].split()[-1]} of " in text, text
        assert "bytes of float32" in text
        assert again == text
        assert seconds < SOON_S


def test_sizes_that_do_not_fit_are_refused_and_the_group_works_on(two_ranks: Ranks) -> None:
    names = ("all_gather into too much",) * 2
    for text, _, again in two_ranks.run(each_its_own, names):
        assert "all_gather with output and input of (516, 256) bytes on rank" in text
        assert again == ""


def test_a_call_that_torch_takes_on_another_rank_is_told(two_ranks: Ranks) -> None:
    """Each at its own time-out: ours names the rank, that of the other is gloo's."""
    first, second = run_once(2, one_calls_torch)
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
    for rank, turns in enumerate(two_ranks.run(under_load, "abort", ranks, times)):
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
    for turns in two_ranks.run(under_load, "destroy", ranks, times):
        for told, seconds in turns:
            assert seconds < SOON_S
            assert all(map(is_well_or_closed, told)), told


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("count", [20, 400])
def test_groups_leave_nothing(two_ranks: Ranks, is_open: bool, count: int) -> None:
    for left in two_ranks.run(left_behind, count, is_open):
        kib = left.pop("kib")
        assert max(left.values()) <= 0, left
        assert kib < 8192, kib


def test_the_timeout_of_torch_is_ours(tmp_path: Path) -> None:
    """Where no options are given; and `COUNTERPOINT_PROFILE` says which calls are taken."""
    shipped = json.loads((Path(profiles.__file__).parent / "profiles" / "h200.json").read_text())
    shipped["nccl"]["crossover_bytes"] = dict.fromkeys(shipped["nccl"]["crossover_bytes"], 1)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(shipped))
    (text, seconds, taken), _ = run_once(2, timeout_of_torch, str(path))
    assert text.startswith("PeerTimeout")
    assert 7.5 < seconds < SOON_S
    assert taken == 2
