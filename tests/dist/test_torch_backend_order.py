"""Which way a call of backend `counterpoint` goes, and in which order calls come: the same on all ranks."""

import copy
import threading
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import counterpoint.torch_backend as backend
from counterpoint.machine.profile import default_profile
from counterpoint.measurement.session import Session
from counterpoint.parallel import background
from counterpoint.parallel.background import BackgroundCall
from counterpoint.parallel.ddp import HookState, hook
from counterpoint.parallel.group import CHANNELS
from tests.dist.test_collectives_failures import SLOWER
from tests.dist.torch_backend_programs import EVERYTHING, OPERATIONS, groups, made, started
from tests.dist.torch_messages_programs import on_software_gpus
from tests.support.ranks import PATIENT, Ranks, error_of, finding, patient
from tests.support.torch_training import drawn, learned

BUCKET = (5 << 20) // 4  # elements: as much as a bucket, less than any crossover


def called_with(_: Session, options: tuple[dict[str, Any], dict[str, Any]]) -> str:
    """What is said to this rank's first call in a group whose ranks have other options."""
    given = dict(options[dist.get_rank()])
    of_communicator = patient(profile=given.pop("profile", None))
    mine = backend.BackendOptions(**given, communicator=of_communicator)
    group = dist.new_group(backend="counterpoint", pg_options=mine)
    said = error_of(lambda: dist.all_reduce(torch.ones(1000), group=group))
    dist.destroy_process_group(group)
    return said


def messages_with(_: Session, name: str) -> str:
    """What is said to this rank's first message, if the two ranks have other options."""
    rank = dist.get_rank()
    given: Any = {"mailbox_bytes": {"mailbox_bytes": 1 << 20 if rank else 1 << 16}, "ranks_per_host": {}}[name]
    given = given or {"ranks_per_host": 1 + rank, "mailbox_bytes": 1 << 16}
    with on_software_gpus(backend.BackendOptions(**given, communicator=PATIENT)) as (group, _gpu):
        peer = {"group_dst": 1} if rank == 0 else {"group_src": 0}
        return error_of(lambda: (dist.send if rank == 0 else dist.recv)(torch.ones(3), group=group, **peer))


def measured_group(has_symmetric_memory: bool) -> Any:
    """A group with the crossovers of H200, which has left `symmetric_memory` (GPUs have that) or not."""
    group: Any = dist.new_group(backend="counterpoint", pg_options=backend.BackendOptions(communicator=PATIENT))
    if has_symmetric_memory:
        group.take_buckets()
    return group


def paths(group: Any) -> set[str]:
    """Which ways large all_reduces went."""
    rows = backend.report(group).calls
    return {row.path for row in rows if row.operation == "all_reduce" and row.size_class != "below 1 MiB"}


def elsewhere(_: Session, has_symmetric_memory: bool) -> tuple[str, float]:
    """The way of an all_reduce that rank 0 makes of symmetric memory in a backward pass, and its sum."""
    group = measured_group(has_symmetric_memory)
    communicator = group.rank_group.open()
    if dist.get_rank() == 0:
        tensor = communicator.empty(BUCKET, dtype=torch.float32).fill_(1)
        weight = torch.ones(1, requires_grad=True)

        def reduce(_: torch.Tensor) -> None:
            dist.all_reduce(tensor, group=group, async_op=True).wait()

        weight.register_hook(reduce)
        (weight * 2).backward()
    else:
        tensor = torch.ones(BUCKET)
        dist.all_reduce(tensor, group=group, async_op=True).wait()
    (path,), total = paths(group), tensor.mean().item()
    dist.destroy_process_group(group)
    return path, total


def joined(_: Session) -> tuple[list[float], list[float], set[str]]:
    """Losses of DDP with uneven inputs on ours, with buckets copied to symmetric memory in backward, and on gloo."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1024, 1400)
    ours, gloo = measured_group(True), groups()[1]
    communicator = ours.rank_group.open()

    def in_symmetric_memory(_: object, bucket: Any) -> Any:
        values = bucket.buffer()
        if torch._C._current_graph_task_id() != -1:
            values = communicator.empty(values.numel(), dtype=torch.float32).copy_(values)
        work: Any = dist.all_reduce(values, group=ours, async_op=True)
        return work.get_future().then(lambda done: done.value()[0] / 2)

    in_symmetric_memory.__annotations__ |= {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}
    found = []
    for group in (ours, gloo):
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        if group is ours:
            ddp.register_comm_hook(None, in_symmetric_memory)
        found.append(_uneven(ddp))
    ways = paths(ours)
    dist.destroy_process_group(ours)
    return found[0], found[1], ways


def _uneven(ddp: Any) -> list[float]:
    rank = dist.get_rank()
    with Join([ddp]):
        return learned(ddp, ((drawn(10 * step + rank, 4, 1024),) for step in range(2 + 2 * rank)))


class _Bucket:
    def __init__(self, number: int, values: torch.Tensor) -> None:
        self._number, self._values = number, values

    def index(self) -> int:
        return self._number

    def buffer(self) -> torch.Tensor:
        return self._values


def channels_of_buckets(_: Session) -> list[int]:
    """On which channels `overlap`'s hook reduces buckets that lie in symmetric memory on rank 0 only."""
    state = HookState()
    empty = state.communicator.empty if dist.get_rank() == 0 else torch.empty
    seen = []
    start = background.Background.start

    def noted(self: Any, run: Any, channel: int, value: Any) -> Any:
        seen.append(channel)
        return start(self, run, channel, value)

    with patch.object(background.Background, "start", noted):
        for number in range(4):
            bucket: Any = _Bucket(number, empty(1000, dtype=torch.float32).fill_(1))
            hook(state, bucket).wait()
    state.close()
    return seen


def strided_on_one(_: Session, operation: str, async_op: bool) -> tuple[bool, int]:
    """A call whose output has strides on rank 1: whether it is gloo's, and how many calls ours took."""
    ours, gloo = groups()
    rank, size, before = dist.get_rank(), dist.get_world_size(), ours.report().taken
    full = torch.arange(24.0).view(4, 6) + 100 * rank
    found = []
    for group in (ours, gloo):
        rows = {"all_gather": 4 * size, "reduce_scatter": 4 // size}.get(operation, 4)
        output = torch.zeros(rows, 6)
        if group is ours and rank == 1:
            output = torch.zeros(6, rows).t() if rows > 4 else torch.zeros(rows, 12)[:, ::2]
        work = started(operation, output, full, group, async_op)
        if work is not None:
            work.wait()
        found.append(output)
    return torch.equal(*found), ours.report().taken - before


def in_pieces(_: Session) -> list[int]:
    """Into how many calls one of three times the largest piece is cut: blocking, asynchronous, and coalesced."""
    ours, _gloo = groups()
    communicator, counts = ours.rank_group.open(), list[int]()
    make = type(communicator).all_reduce
    with (
        patch.object(background, "PIECE_BYTES", 4000),
        patch.object(type(communicator), "all_reduce", autospec=True, side_effect=make) as made,
    ):
        for how in ("blocking", "asynchronous", "coalesced"):
            before = made.call_count
            tensor = torch.ones(3, 1000)
            if how == "coalesced":
                ours.allreduce_coalesced([tensor]).wait()
            else:
                work = dist.all_reduce(tensor, group=ours, async_op=how == "asynchronous")
                assert work is None or work.wait()
            assert tensor.eq(dist.get_world_size()).all()
            counts.append(made.call_count - before)
    return counts


def called_in_callbacks(_: Session, operation: str, rounds: int) -> list[float]:
    """Sums of calls that torch makes: in callbacks, which are late on rank 0, and right behind the call of these."""
    group, sums = made(crossover_bytes=EVERYTHING | {"broadcast": 100}), list[float]()

    def by_torch(value: float) -> float:
        tensor = torch.full((1,), value if dist.get_rank() == 0 else 0.0)
        dist.broadcast(tensor, 0, group)
        return 2 * tensor.item()

    def callback(_: Any) -> float:
        time.sleep(0.1 * (1 - dist.get_rank()))
        return by_torch(101.0)

    for _round in range(rounds):
        output, full = torch.ones(2000 if operation == "all_gather" else 1000), torch.ones(1000)
        if operation == "reduce_scatter":
            output = torch.ones(500)
        future = started(operation, output, full, group, True).get_future().then(callback)
        behind = by_torch(1.0)
        sums += [future.wait(), behind]
    dist.destroy_process_group(group)
    return sums


def repeated_on_one(_: Session) -> list[float]:
    """Sums of a coalesced all_reduce of two tensors, which on rank 0 are one."""
    ours, _gloo = groups()
    tensors = [torch.ones(1000) for _ in range(2)]
    if dist.get_rank() == 0:
        tensors[1] = tensors[0]
    ours.allreduce_coalesced(tensors).wait()
    return [tensor.max().item() for tensor in tensors]


def opened_by_two_threads(_: Session, rounds: int) -> set[float]:
    """Sums of the first calls of new groups, each made by two threads at the same time."""
    sums = set[float]()
    for _round in range(rounds):
        group = made()
        start = threading.Barrier(2)

        def call(group: Any = group, start: threading.Barrier = start) -> None:
            tensor = torch.ones(1000)
            start.wait()
            dist.all_reduce(tensor, group=group, async_op=True).wait()
            sums.add(tensor.mean().item())

        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        dist.destroy_process_group(group)
    return sums


def ended_before_a_callback(_: Session) -> str:
    """What is said to a call in a callback on rank 0, whose group ends before rank 1 has made any of the two."""
    group = made()
    dist.all_reduce(torch.ones(1000), group=group)
    said = "no callback"
    if dist.get_rank() == 0:
        under_way, is_asked = threading.Event(), threading.Event()

        def callback(_: Any) -> str:
            under_way.set()
            while not group.rank_group.has_ended:
                time.sleep(0.001)
            return error_of(lambda: dist.all_reduce(torch.ones(10), group=group))

        # the future is not there before the callback: this thread would run it
        call = group.rank_group.background().start(lambda _channel: is_asked.wait(), 0, None).future.then(callback)
        is_asked.set()
        under_way.wait()
        group.shutdown()
        said = call.wait()
    dist.barrier()
    dist.destroy_process_group(group)
    return said


def powersgd(_: Session) -> tuple[list[float], list[float], int]:
    """Losses with torch's hook on ours and on gloo, and how many calls ours took."""
    torch.manual_seed(0)
    model, (ours, gloo) = torch.nn.Linear(64, 64), groups()
    before, found = ours.report().taken, list[list[float]]()
    for group in (ours, gloo):
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        found.append(learned(ddp, ((drawn(step, 4, 64),) for step in range(4))))
    return found[0], found[1], ours.report().taken - before


def waited_for_by_a_barrier(_: Session) -> int:
    """How many of three asynchronous calls, that nobody has kept, a barrier waits for."""
    ours, _gloo = groups()
    dist.barrier(ours)  # those of other tests
    with (
        patch.object(BackgroundCall, "is_completed", lambda _: False),  # as on a GPU, where they are queued only
        patch.object(BackgroundCall, "wait", autospec=True, return_value=True) as waited,
    ):
        for _call in range(3):
            dist.all_reduce(torch.ones(1000), group=ours, async_op=True)
        dist.barrier(ours)
        return waited.call_count


DIFFER = [
    ({"crossover_bytes": {"all_reduce": 1}}, {"crossover_bytes": {"all_reduce": 1 << 40}}, "crossover_bytes"),
    ({"profile": default_profile()}, {"profile": SLOWER}, "profile"),
    ({"mailbox_bytes": 1 << 20}, {"mailbox_bytes": None}, "mailbox_bytes"),
    ({"ranks_per_host": 1}, {"ranks_per_host": 2}, "ranks_per_host"),
]


@pytest.mark.parametrize(("first", "second", "name"), DIFFER, ids=[name for *_, name in DIFFER])
def test_options_that_differ_are_told_to_all(
    two_ranks: Ranks, first: dict[str, Any], second: dict[str, Any], name: str
) -> None:
    for said in two_ranks.run(called_with, (first, second)):
        assert said.startswith("Misconfigured"), said
        assert [other for *_, other in DIFFER if other in said] == [name], said


@pytest.mark.parametrize("name", ["mailbox_bytes", "ranks_per_host"])
def test_options_that_differ_are_told_to_both_ends_of_a_message(two_ranks: Ranks, name: str) -> None:
    """Before one goes to a mailbox and the other to NCCL."""
    for rank, said in enumerate(two_ranks.run(messages_with, name)):
        assert said.startswith(f"Misconfigured: messages of ranks {rank} and {1 - rank}: "), said
        assert f"{name}=1" in said


def test_memory_and_the_backward_pass_decide_nothing(two_ranks: Ranks) -> None:
    """The same call of a bucket's size in symmetric memory and in a backward pass, and of plain memory outside."""
    assert two_ranks.run(elsewhere, False) == [("torch", 2.0)] * 2
    assert two_ranks.run(elsewhere, True) == [("zero_sm", 2.0)] * 2


def test_uneven_inputs_with_buckets_in_symmetric_memory(two_ranks: Ranks) -> None:
    """Under torch's `Join` the rank that has ended reduces zeros in plain memory, outside of a backward pass."""
    for ours, gloo, taken in two_ranks.run(joined):
        assert ours == gloo
        assert taken == {"zero_sm"}


def test_a_hook_on_uneven_inputs_has_the_channels_of_its_buckets(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(channels_of_buckets)
    assert first == second == [*CHANNELS["buckets"]] * 2


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "asynchronous"])
@pytest.mark.parametrize("operation", OPERATIONS[:5])
def test_the_layout_of_one_rank_decides_nothing(two_ranks: Ranks, operation: str, async_op: bool) -> None:
    """Its output is a view with strides: it gets what gloo gives, and on both ranks the backend takes the call."""
    assert two_ranks.run(strided_on_one, operation, async_op) == [(True, 1)] * 2


test_what_ranks_find = finding({
    "large calls go in pieces wherever they lie": (2, in_pieces, (), [3, 3, 3]),
    "a tensor that comes twice on one rank decides nothing": (2, repeated_on_one, (), [2.0, 2.0]),
    "two threads may use a group first at the same time": (2, opened_by_two_threads, (10,), {2.0}),
    "a barrier waits for calls that nobody has waited for": (2, waited_for_by_a_barrier, (), 3),
})  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS[:5])
def test_calls_in_callbacks_have_one_order_with_those_that_torch_makes(two_ranks: Ranks, operation: str) -> None:
    """A rank whose callback is late does not let its next call go first."""
    assert two_ranks.run(called_in_callbacks, operation, 5) == [[202.0, 2.0] * 5] * 2


def test_a_callback_of_a_group_that_has_ended_is_told(two_ranks: Ranks) -> None:
    """Torch does not make its call either, which would wait for the other ranks."""
    said, _ = two_ranks.run(ended_before_a_callback)
    assert said == "Misconfigured: allreduce on a process group that was destroyed or aborted; make a new one"


def test_powersgd_trains_as_on_gloo(two_ranks: Ranks) -> None:
    """Torch's own hook, which makes collectives in callbacks of others, and waits for them there."""
    for ours, gloo, taken in two_ranks.run(powersgd):
        assert ours == pytest.approx(gloo, rel=1e-5)
        assert taken > 0
