"""What ranks run to test messages of backend `counterpoint` under torch's own calls, on software GPUs.

Tensors are on the CPU, where software GPUs have theirs, so gloo's groups give the same answers.
"""

import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import permutations
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

import counterpoint.torch_backend as backend
from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.cuda.call import CudaWork
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.measurement.session import Session
from counterpoint.parallel.backend import messages
from counterpoint.parallel.backend.inner import InnerGroup
from tests.support.ranks import PATIENT, TIMEOUT_S, error_of, said
from tests.support.software_gpu import SoftwareGpu
from tests.support.torch_training import pipelined

ROOM = 4096  # bytes of a mailbox: slots of 1 KiB
OPTIONS = backend.BackendOptions(mailbox_bytes=ROOM, communicator=PATIENT)


GLOO_END = InnerGroup.end


def end_as_nccl(group: Any, how: Any) -> None:
    """End a group of torch's as NCCL shuts a connection down, which returns when both ranks have called it."""
    if how == "shutdown" and ":line from" in group.name:
        started = time.monotonic()
        group._store.add("ending", 1)
        while group._store.add("ending", 0) < len(group.ranks):
            assert time.monotonic() < started + TIMEOUT_S, f"the other rank does not end {group.name}"
            time.sleep(0.001)
    GLOO_END(group, how)


@contextmanager
def on_software_gpus(
    options: backend.BackendOptions = OPTIONS, *, of_mesh: bool = False
) -> Iterator[tuple[Any, SoftwareGpu]]:
    """A new group, or that of a new mesh, whose messages go through mailboxes of software GPUs."""
    gpu = SoftwareGpu()

    def made(group: Any, device: torch.device, names: Any, options: Any) -> Communicator:
        return Communicator(group, device=gpu, names=names, options=options)

    with (
        patch.object(messages, "Communicator", made),
        patch.object(messages.MessagePairs, "device_type", "cpu"),
        patch.object(InnerGroup, "end", end_as_nccl),
    ):
        if of_mesh:
            override: Any = {"pp": ("counterpoint", options)}
            shape, names = (dist.get_world_size(),), ("pp",)
            group: Any = init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override=override).get_group()
        else:
            group = dist.new_group(backend="counterpoint", pg_options=options)
        try:
            yield group, gpu
        finally:
            dist.destroy_process_group(group)


def ring(_: Session, first: str, rounds: int, mailbox_bytes: int | None = ROOM) -> tuple[list[float], int]:
    """Everyone begins with the same kind of call, which is a deadlock of blocking sends without room for them."""
    options = backend.BackendOptions(mailbox_bytes=mailbox_bytes, communicator=PATIENT)
    with on_software_gpus(options) as (group, gpu):
        rank, size = dist.get_rank(), dist.get_world_size()
        seen = []
        for number in range(rounds):
            mine, theirs = torch.full((200,), float(10 * number + rank)), torch.zeros(200)
            operations = [
                dist.P2POp(dist.isend, mine, group=group, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, theirs, group=group, group_peer=(rank - 1) % size),
            ]
            if first == "blocking sends":
                dist.send(mine, group=group, group_dst=(rank + 1) % size)
                dist.recv(theirs, group=group, group_src=(rank - 1) % size)
            else:
                for work in dist.batch_isend_irecv(operations if first == "sends" else operations[::-1]):
                    work.wait()
            gpu.synchronize()
            seen.append(theirs.mean().item())
        return seen, backend.report(group).taken


def unmatched(_: Session, seed: int, count: int, queues: str = "32") -> int:
    shared, mine = random.Random(seed), random.Random(f"{seed} {dist.get_rank()}")
    with on_software_gpus() as (group, gpu), patch.dict(os.environ, {"CUDA_DEVICE_MAX_CONNECTIONS": queues}):
        rank, right = dist.get_rank(), 0
        lines = list(permutations(range(dist.get_world_size()), 2))
        drawn = [(shared.choice(lines), shared.choice((1, 50, 3000))) for _ in range(count)]
        by_line = {line: [(n, size) for n, (one, size) in enumerate(drawn) if one == line] for line in lines}
        order = [line for line in lines if rank in line for _ in by_line[line]]
        mine.shuffle(order)
        running = []
        for line in order:
            number, size = by_line[line].pop(0)
            tensor = torch.full((size,), float(number)) if line[0] == rank else torch.zeros(size)
            call: Callable[..., Any] = dist.isend if line[0] == rank else dist.irecv
            peer = {"group_dst" if line[0] == rank else "group_src": sum(line) - rank}
            running.append((call(tensor, group=group, **peer), tensor, float(number)))
        for work, tensor, wanted in running:
            work.wait()
            gpu.synchronize()
            right += bool((tensor == wanted).all())
        assert right == len(order)
        return right


def to_itself(_: Session, first: str) -> list[float]:
    with on_software_gpus() as (group, _gpu):
        rank = dist.get_rank()
        sent, received = [torch.full((5,), 10.0 * rank + n) for n in range(3)], [torch.zeros(5) for _ in range(3)]
        sends = [dist.P2POp(dist.isend, tensor, group=group, group_peer=rank) for tensor in sent]
        receives = [dist.P2POp(dist.irecv, tensor, group=group, group_peer=rank) for tensor in received]
        works = dist.batch_isend_irecv(sends + receives if first == "sends" else receives + sends)
        for tensor in sent if first == "sends" else []:
            tensor.zero_()  # a copy is on its way
        for work in works:
            work.wait()
        return [tensor.mean().item() for tensor in received]


def one_to_itself(_: Session) -> str:
    """What a receive from this rank itself says that nothing is sent to."""
    with on_software_gpus(
        backend.BackendOptions(mailbox_bytes=ROOM, communicator=CommunicatorOptions(timeout_s=0.2))
    ) as (group, _gpu):
        work: Any = dist.irecv(torch.zeros(3), group=group, group_src=dist.get_rank())
        return error_of(work.wait)


def with_few_queues(session: Session, queues: str) -> list[str]:
    """What Python warns of where a rank exchanges messages with three others, and CUDA has few hardware queues."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        unmatched(session, 2, 60, queues)
    return [str(one.message) for one in told if "streams of messages" in str(one.message)]


def only_two(_: Session) -> list[float]:
    """Two of the group's ranks exchange messages; the others never make one."""
    with on_software_gpus() as (group, gpu):
        tensor = torch.zeros(5)
        if dist.get_rank() == 0:
            dist.send(torch.ones(5), group=group, group_dst=1)
        elif dist.get_rank() == 1:
            dist.recv(tensor, group=group, group_src=0)
        gpu.synchronize()
        return tensor.tolist()


def left_to_torch(_: Session) -> list[tuple[str, ...]]:
    """Messages that do not go through mailboxes, each with its reason."""
    with on_software_gpus() as (group, gpu):
        peer = {"group_dst": 1} if dist.get_rank() == 0 else {"group_src": 0}
        tensor = torch.ones(3) if dist.get_rank() == 0 else torch.zeros(3)
        call: Callable[..., Any] = dist.send if dist.get_rank() == 0 else dist.recv
        call(tensor, group=group, tag=5, **peer)
        gpu.synchronize()
        rows: list[tuple[str, ...]] = [(row.operation, row.path, row.why) for row in backend.report(group).calls]
    for options in (backend.BackendOptions(mailbox_bytes=None), backend.BackendOptions(ranks_per_host=1)):
        with on_software_gpus(options) as (group, _gpu):
            call(tensor, group=group, **peer)
            assert tensor.tolist() == [1.0] * 3
            rows += [(row.operation, row.path, row.why) for row in backend.report(group).calls]
    return rows


def coalesced(_: Session) -> list[float]:
    """Messages within torch's coalescing manager, which has one work for all."""
    with on_software_gpus() as (group, gpu):
        rank = dist.get_rank()
        theirs = torch.zeros(3000)
        mine = torch.full((3000,), float(rank))
        with (
            patch.object(type(group.inner.group), "_start_coalescing", lambda *_: None),
            patch.object(type(group.inner.group), "_end_coalescing", lambda *_: None),  # gloo has none
            distributed_c10d._coalescing_manager(group, torch.device("cpu"), async_ops=True) as manager,
        ):
            dist.isend(mine, group=group, group_dst=1 - rank)
            dist.irecv(theirs, group=group, group_src=1 - rank)
        manager.wait()
        gpu.synchronize()
        return [theirs.mean().item()]


def pipeline(_: Session, schedule: str, microbatches: int) -> tuple[list[float], list[float], int]:
    """A schedule, of two stages a rank but for 1F1B, beside gloo: losses, gradients, and calls through mailboxes.

    A message is read by the host right after its wait, which a GPU's stream would do in its order.
    """
    gloo = dist.new_group(backend="gloo")
    with on_software_gpus(of_mesh=True) as (group, gpu):
        wait = CudaWork.wait

        def to_the_end(self: CudaWork, timeout_s: float | None = None) -> bool:
            done = wait(self, timeout_s)
            gpu.synchronize()
            return done

        with patch.object(CudaWork, "wait", to_the_end):
            found = [
                pipelined(one, schedule, width=40, rows=8 * microbatches, microbatches=microbatches)
                for one in (group, gloo)
            ]
        return found[0], found[1], backend.report(group).taken


def one_dies(_: Session, opened: bool) -> tuple[str, tuple[int, ...], float]:
    """Rank 2 dies; rank 1 waits for its message, once the two have exchanged one before, or not."""
    options = backend.BackendOptions(
        mailbox_bytes=ROOM, communicator=CommunicatorOptions(timeout_s=TIMEOUT_S if opened else 2)
    )
    manager = on_software_gpus(options)  # kept, so that it does not end before the rank
    group, gpu = manager.__enter__()
    rank = dist.get_rank()

    def wait() -> None:
        if opened and rank == 2:
            dist.send(torch.ones(3), group=group, group_dst=1)
        if opened and rank == 1:
            dist.recv(torch.zeros(3), group=group, group_src=2)
        gpu.synchronize()
        if rank == 2:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            work: Any = dist.irecv(torch.zeros(3), group=group, group_src=2)
            until = time.monotonic() + 30
            while work.exception() is None and time.monotonic() < until:
                time.sleep(0.01)
            work.wait()

    return said(wait)


def groups_made_and_destroyed(_: Session, count: int) -> float:
    """Seconds for groups that are made and destroyed without a message."""
    started = time.monotonic()
    for _time in range(count):
        group = dist.new_group(backend="counterpoint")
        dist.barrier(group)  # gloo fails on a rank that still connects to one that has destroyed the group again
        dist.destroy_process_group(group)
    return time.monotonic() - started


def aborted(_: Session) -> str:
    """What is said to a receive that rank 1 never sends for, when rank 0 aborts the group."""
    options, said = backend.BackendOptions(mailbox_bytes=ROOM, communicator=CommunicatorOptions(timeout_s=600)), ""
    with on_software_gpus(options) as (group, gpu):
        peer = {"group_dst": 1} if dist.get_rank() == 0 else {"group_src": 0}
        (dist.send if dist.get_rank() == 0 else dist.recv)(torch.ones(3), group=group, **peer)
        gpu.synchronize()
        dist.barrier()
        if dist.get_rank() == 0:
            work: Any = dist.irecv(torch.zeros(3), group=group, group_src=1)
            group.abort()
            said = error_of(work.wait)
        dist.barrier()
    return said
