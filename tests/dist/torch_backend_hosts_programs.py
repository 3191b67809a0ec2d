"""What four ranks run to test backend `counterpoint` over two hosts, which are one machine's halves."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import counterpoint.torch_backend as backend
from counterpoint.errors import CounterpointError
from counterpoint.measurement.session import Session
from counterpoint.parallel import ddp
from counterpoint.parallel.backend import hosts
from tests.dist import torch_backend_programs as programs
from tests.support.ranks import PATIENT, TIMEOUT_S

_GROUPS: dict[str, Any] = {}
_PREMUL_SUM: Any = vars(dist)["_make_nccl_premul_sum"]  # without a stub


def made(**options: Any) -> Any:
    """A group of two hosts that takes every call that it can, unless the options say something else."""
    given = {"crossover_bytes": programs.EVERYTHING, "ranks_per_host": 2, **options}
    return dist.new_group(
        backend="counterpoint",
        pg_options=backend.BackendOptions(**given, communicator=PATIENT),
        timeout=timedelta(seconds=TIMEOUT_S),
    )


def groups() -> tuple[Any, Any]:
    """A group of two hosts, and one of gloo; made once."""
    if not _GROUPS:
        _GROUPS["ours"], _GROUPS["gloo"] = made(), dist.new_group(backend="gloo")
    return _GROUPS["ours"], _GROUPS["gloo"]


def random_calls(_: Session, seed: int, count: int) -> tuple[int, int]:
    """Random calls of both groups with equal tensors; how many were equal, and how many ours took."""
    return programs.compared(*groups(), seed, count)


def paths(_: Session) -> list[tuple[str, str, str]]:
    """Operation, path and reason of one call of each kind."""
    ours = made()
    full = torch.ones(64)
    for call in programs.CALLS:
        call(full.clone(), dist.get_world_size(), ours, False)
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


def ddp_errors(_: Session) -> tuple[float, float, int]:
    """Largest error of losses and parameters of DDP against float64: ours and gloo's; how many calls ours took."""
    return programs.errors_of_ddp(*groups())


def ddp_hook_errors(_: Session) -> tuple[float, float, int]:
    """The same with the hook of `counterpoint.parallel.ddp`; how many bytes it has reduced."""
    ours, gloo = groups()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    state = ddp.HookState(ours)
    exact = programs.trained(copy.deepcopy(model).double(), gloo)
    plain = programs.trained(copy.deepcopy(model), gloo)
    hooked = programs.trained(copy.deepcopy(model), ours, lambda made: made.register_comm_hook(state, ddp.hook))
    mine, theirs = (max(abs(a - b) for a, b in zip(losses, exact, strict=True)) for losses in (hooked, plain))
    return mine, theirs, state.report().taken


def futures(_: Session) -> list[float]:
    """A call's future, and what is chained to it."""
    work = dist.all_reduce(torch.ones(100), group=groups()[0], async_op=True)
    chained = work.get_future().then(lambda done: done.value()[0] / dist.get_world_size())
    value: list[float] = chained.wait()[:2].tolist()
    return value


def on_hosts(_: Session, names: str) -> tuple[list[float], set[tuple[str, str]]]:
    """An all_reduce of ranks on hosts of these names, and the paths and reasons that it reports."""
    rank = dist.get_rank()
    card = SimpleNamespace(of_this_process=lambda: SimpleNamespace(host=names[rank]))
    ours = made(ranks_per_host=None)
    tensor = torch.full((8,), float(rank))
    with mock.patch.object(hosts, "ProcessCard", card):
        dist.all_reduce(tensor, group=ours)
    rows = ours.report().calls
    dist.destroy_process_group(ours)
    return tensor[:2].tolist(), {(row.path, row.why) for row in rows}


def counted(_: Session, ranks_per_host: int | None) -> set[tuple[str, str]]:
    """The paths and reasons of an all_reduce with so many ranks on a host."""
    ours = made(ranks_per_host=ranks_per_host)
    dist.all_reduce(torch.ones(8), group=ours)
    rows = ours.report().calls
    dist.destroy_process_group(ours)
    return {(row.path, row.why) for row in rows}


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
            heard[0] = _error(work.wait)

        waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.0 if everyone else 0.3)
    start = time.monotonic()
    if how == "abort":
        ours.abort()
    dist.destroy_process_group(ours)
    waiting.join()
    return heard[0], time.monotonic() - start


def _error(action: Callable[[], object]) -> str:
    try:
        action()
    except CounterpointError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def die(_: Session) -> tuple[str, float]:
    """Rank 3 does; the error of the others, and after how many seconds they heard it."""
    ours = made()
    dist.all_reduce(torch.ones(8), group=ours)
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    said = _error(lambda: dist.all_reduce(torch.ones(1 << 16), group=ours))
    seconds = time.monotonic() - start
    again = _error(lambda: dist.all_reduce(torch.ones(8), group=ours))
    assert again == said, f"then {again}"
    ours.abort()
    return said, seconds
