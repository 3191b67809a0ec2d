"""Backend `counterpoint` over two hosts of two ranks, which are halves of this machine, beside gloo."""

import gc
import os
import signal
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from counterpoint.measurement.session import Session
from counterpoint.parallel.backend import hosts
from tests.dist import torch_backend_programs as programs
from tests.support.ranks import SOON_S, Ranks, error_of, run_once

_PREMUL_SUM: Any = vars(dist)["_make_nccl_premul_sum"]  # without a stub


def made(**options: Any) -> Any:
    """A group of two hosts that takes every call that it can, unless the options say something else."""
    return programs.made(**{"ranks_per_host": 2, **options})


def groups() -> tuple[Any, Any]:
    return programs.groups(2)


def paths(_: Session) -> list[tuple[str, str, str]]:
    """Operation, path and reason of one call of each kind."""
    ours = made()
    full = torch.ones(64)
    for operation in programs.OPERATIONS:
        programs.called(operation, full.clone(), ours, False)
    rows = ours.report().calls
    dist.destroy_process_group(ours)
    return sorted((row.operation, row.path, row.why) for row in rows)


def errors_of_scaled_sums(_: Session) -> list[tuple[float, float]]:
    """Largest error against float64 of AVG and PREMUL_SUM: ours, and that of gloo's sum, scaled."""
    ours, gloo = groups()
    mine = torch.randn(5000, generator=torch.Generator().manual_seed(dist.get_rank()))
    plain, exact = mine.clone(), mine.double()
    dist.all_reduce(plain, group=gloo)
    dist.all_reduce(exact, group=gloo)
    found = []
    for op, factor in ((dist.ReduceOp.AVG, 0.25), (_PREMUL_SUM(0.3), 0.3)):
        tensor = mine.clone()
        dist.all_reduce(tensor, op, group=ours)
        error, theirs = (float((one - exact * factor).abs().max()) for one in (tensor, plain * factor))
        found.append((error, theirs))
    return found


def on_hosts(
    _: Session, names: str | None, ranks_per_host: int | None = None
) -> tuple[list[float], set[tuple[str, str]]]:
    """An all_reduce of ranks on hosts of these names, or of this machine, and the paths and reasons that it reports."""
    rank = dist.get_rank()
    card = SimpleNamespace(of_this_process=lambda: SimpleNamespace(host=(names or "")[rank]))
    ours = made(ranks_per_host=ranks_per_host)
    tensor = torch.full((8,), float(rank))
    with mock.patch.object(hosts, "ProcessCard", card) if names else nullcontext():
        dist.all_reduce(tensor, group=ours)
    rows = ours.report().calls
    dist.destroy_process_group(ours)
    return tensor[:2].tolist(), {(row.path, row.why) for row in rows}


def threads() -> int:
    """Threads of this process, those of torch's libraries, too."""
    return len(list(Path("/proc/self/task").iterdir()))


def threads_left(before: int, seconds: float = 10.0) -> int:
    """How many threads more there are than before, after some time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        gc.collect()
        if threads() <= before:
            break
        time.sleep(0.02)
    return threads() - before


def made_and_destroyed(_: Session, count: int) -> int:
    """How many threads `count` groups with communicators leave."""
    _made_and_used()  # torch starts some of its own at the first
    threads_left(0, 1.0)
    before = threads()
    for _time in range(count):
        _made_and_used()
    return threads_left(before)


def _made_and_used() -> None:
    group = made()
    dist.all_reduce(torch.ones(10), group=group)
    assert {row.path for row in group.report().calls} == {"hosts"}
    dist.destroy_process_group(group)


def ended_under_way(_: Session, how: str, everyone: bool) -> tuple[str, float, int]:
    """Destroy or abort a group whose all_reduce is under way, without its last rank unless `everyone` made the call.

    What a thread that waits for it heard, how long that took, and how many threads are left.
    """
    dist.barrier(groups()[1])
    before = threads()
    heard = _ended_under_way(how, everyone)
    dist.barrier(groups()[1])
    return *heard, threads_left(before)


def _ended_under_way(how: str, everyone: bool) -> tuple[str, float]:
    ours = made()
    dist.all_reduce(torch.ones(8), group=ours)
    heard = ["nothing"]
    waiting = threading.Thread(target=lambda: None)
    if everyone or dist.get_rank() < dist.get_world_size() - 1:
        work = dist.all_reduce(torch.ones(1 << 18), group=ours, async_op=True)

        def wait() -> None:
            heard[0] = error_of(work.wait)

        waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.0 if everyone else 0.3)
    start = time.monotonic()
    if how == "abort":
        ours.abort()
    dist.destroy_process_group(ours)
    waiting.join()
    return heard[0], time.monotonic() - start


def die(_: Session) -> tuple[str, float]:
    ours = made()
    dist.all_reduce(torch.ones(8), group=ours)
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    said = error_of(lambda: dist.all_reduce(torch.ones(1 << 16), group=ours))
    seconds = time.monotonic() - start
    again = error_of(lambda: dist.all_reduce(torch.ones(8), group=ours))
    assert again == said, f"then {again}"
    ours.abort()
    return said, seconds


def test_the_report_names_the_way_over_hosts(four_ranks: Ranks) -> None:
    """Of each operation; calls with split sizes and lists go to torch."""
    for rows in four_ranks.run(paths):
        hosts = [(operation, why) for operation, path, why in rows if path == "hosts"]
        assert [operation for operation, _ in hosts] == [
            "all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter"
        ]  # fmt: skip
        assert {why for _, why in hosts} == {"copied from its landing"}
        assert ("all_to_all", "torch", "split sizes") in rows


def test_means_and_scaled_sums_are_right(four_ranks: Ranks) -> None:
    for found in four_ranks.run(errors_of_scaled_sums):
        assert all(ours <= 2 * theirs for ours, theirs in found)


def test_the_hook_of_ddp_works_over_hosts(four_ranks: Ranks) -> None:
    for ours, gloo, taken in four_ranks.run(programs.ddp_errors, 2, True):
        assert 0 < ours <= 2 * gloo
        assert taken > 1


@pytest.mark.parametrize(
    ("names", "path", "why"),
    [
        ("aabb", "hosts", "copied from its landing"),
        ("aaaa", "zero_sm", "copied from its landing"),
        ("abcd", "torch", "one rank on each host"),
        ("aaab", "torch", "3 ranks on the host of rank 0, 1 on that of rank 3; start as many on every host"),
        ("abab", "torch", "ranks 0, 2 are on one host, and others between them are not; number the ranks host by host"),
    ],
)
def test_hosts_are_found(four_ranks: Ranks, names: str, path: str, why: str) -> None:
    """By the machines of the ranks; where these make no grid, torch makes all calls, and the report says why."""
    assert four_ranks.run(on_hosts, names) == [([6.0, 6.0], {(path, why)})] * 4


@pytest.mark.parametrize(
    ("ranks_per_host", "path"), [(None, "zero_sm"), (1, "torch"), (2, "hosts"), (3, "torch"), (4, "zero_sm")]
)
def test_ranks_of_a_host_can_be_given(four_ranks: Ranks, ranks_per_host: int | None, path: str) -> None:
    for sums, rows in four_ranks.run(on_hosts, None, ranks_per_host):
        assert (sums, [found for found, _ in rows]) == ([6.0, 6.0], [path])


def test_groups_that_are_destroyed_leave_no_thread(four_ranks: Ranks) -> None:
    assert max(four_ranks.run(made_and_destroyed, 20)) <= 0


@pytest.mark.parametrize("how", ["destroy", "abort"])
def test_a_group_may_end_while_a_call_is_under_way(four_ranks: Ranks, how: str) -> None:
    """That one rank has not made: who waits for it hears it soon, and no thread is left."""
    found = four_ranks.run(ended_under_way, how, False)
    for heard, seconds, left in found[:3]:
        own, peers = "CounterpointError: ", "has closed its communicator"  # whichever it sees first
        assert own in heard or peers in heard
        assert seconds < SOON_S
        assert left <= 0
    assert found[3][0] == "nothing"


def test_a_group_may_end_while_a_call_of_all_ranks_is_under_way(four_ranks: Ranks) -> None:
    """It ends well or with an error, as it happens, and soon."""
    for _ in range(5):
        for _heard, seconds, left in four_ranks.run(ended_under_way, "destroy", True):
            assert seconds < SOON_S
            assert left <= 0


def test_a_rank_that_dies_is_an_error_on_all_others() -> None:
    found = run_once(4, die)
    assert found[3] == -9
    for said, seconds in found[:3]:
        assert "nothing" not in said
        assert seconds < SOON_S  # gloo's timeout is 20: nobody waits for it
    assert "a rank of another host may be gone" in found[1][0]
