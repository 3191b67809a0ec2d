"""What ranks do with an all_to_all whose sizes are known late: each function runs on every rank."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import torch

from counterpoint.collectives.communicator import Communicator
from counterpoint.errors import CounterpointError
from counterpoint.measurement.session import Session
from tests.dist.communicator_cuda_programs import WAIT_S, delays, view
from tests.support.software_gpu import SoftwareGpu

__all__ = ["beyond", "captured", "killed", "pushed", "pushed_in_stream_order", "refused"]

HIDDEN = 8


def drawn(seed: int, n: int, room: int) -> list[list[int]]:
    """Rows that each rank sends to each, among them none and all that there is room for."""
    draw = random.Random(seed)
    return [[draw.choice([0, 0, 1, draw.randint(0, room), room]) for _ in range(n)] for _ in range(n)]


def table_of(counts: list[list[int]], me: int, room: int) -> torch.Tensor:
    """This rank's blocks: they lie one after the other here, and in a slot of each receiver there."""
    starts = [sum(counts[me][:peer]) for peer in range(len(counts))]
    return torch.tensor([[starts[peer], me * room, counts[me][peer]] for peer in range(len(counts))])


def rows_of(number: int, source: int, target: int, count: int) -> torch.Tensor:
    """What a rank sends to another in a call."""
    first = float(1000 * number + 100 * source + 10 * target)
    return (first + torch.arange(count))[:, None].expand(count, HIDDEN)


def input_of(number: int, counts: list[list[int]], me: int) -> torch.Tensor:
    blocks = [rows_of(number, me, peer, count) for peer, count in enumerate(counts[me])]
    return torch.cat([*blocks, torch.full((1, HIDDEN), -1.0)])


def wrong_in(output: torch.Tensor, number: int, counts: list[list[int]], me: int, room: int) -> list[str]:
    return [
        f"call {number}: rows of {peer}"
        for peer, row in enumerate(counts)
        if peer != me
        and not torch.equal(output[peer * room : peer * room + row[me]], rows_of(number, peer, me, row[me]))
    ]


def pushed(session: Session, seed: int, calls: int) -> list[str]:
    """Return what arrived wrongly on CPUs, in calls of random sizes beside others."""
    late, wrong = random.Random(seed + session.rank + 1), list[str]()
    with Communicator(channels=2, timeout_s=WAIT_S) as communicator:
        n, me = communicator.world_size, communicator.rank
        for number in range(calls):
            room = 1 + number % 7
            counts = drawn(seed + number, n, room)
            output = communicator.empty(n * room, HIDDEN, early_release=True)
            time.sleep(late.choice([0, 0, 0.003]))
            table = table_of(counts, me, room)
            work = communicator.all_to_all_vdev(output, input_of(number, counts, me), table, channel=number % 2)
            communicator.barrier(channel=1 - number % 2)
            work.wait()
            wrong += wrong_in(output, number, counts, me, room)
            del output, work
    return wrong


def pushed_in_stream_order(session: Session, seed: int, calls: int) -> list[str]:
    """Return what kernels on software GPUs read that they should not: tables and rows are written late by kernels.

    The host makes all calls before the first kernel has run, so that every wait is queued before its pushes.
    """
    gpu, wrong = SoftwareGpu(delays(seed, session.rank)), list[str]()
    gpu.use(gpu.new_stream())
    with Communicator(device=gpu, timeout_s=WAIT_S, channels=2) as communicator:
        n, me = communicator.world_size, communicator.rank
        kept: list[Any] = []
        for number in range(calls):
            room = 1 + number % 7
            counts = drawn(seed + number, n, room)
            output = communicator.empty(n * room, HIDDEN, early_release=True)
            ready = input_of(number, counts, me)
            table, rows = torch.full((n, 3), -1), torch.zeros_like(ready)
            kept.append((table, rows))

            def write(
                table: Any = table, rows: Any = rows, ready: Any = ready, counts: Any = counts, room: int = room
            ) -> None:
                time.sleep(2e-3)
                rows.copy_(ready)
                table.copy_(table_of(counts, me, room))

            gpu.kernel(write)
            work = communicator.all_to_all_vdev(output, rows, table, channel=number % 2)
            work.wait()
            seen = view(output)

            def check(number: int = number, counts: Any = counts, room: int = room, seen: Any = seen) -> None:
                wrong.extend(wrong_in(seen, number, counts, me, room))

            gpu.kernel(check)
            del output, work
        gpu.synchronize()
        communicator.check()
    return wrong


def captured(session: Session) -> str:
    """Return what is said in a capture."""
    gpu = SoftwareGpu()
    gpu.use(gpu.new_stream())
    with Communicator(device=gpu, timeout_s=WAIT_S) as communicator:
        n = communicator.world_size
        output = communicator.empty(n, HIDDEN, early_release=True)
        gpu.driver.cuStreamBeginCapture(gpu.current_stream(), 2)
        try:
            communicator.all_to_all_vdev(output, torch.zeros(n, HIDDEN), torch.zeros(n, 3, dtype=torch.int64))
            said = "nothing"
        except CounterpointError as error:
            said = str(error)
        gpu.driver.cuStreamEndCapture(gpu.current_stream())
        return said


def refused(session: Session, on_gpu: bool) -> list[str]:
    """Return the errors of calls that do not fit."""
    gpu = SoftwareGpu() if on_gpu else None
    if gpu is not None:
        gpu.use(gpu.new_stream())
    said = []
    with Communicator(device=gpu, timeout_s=WAIT_S) as communicator:
        n = communicator.world_size
        rows, table = torch.zeros(n, HIDDEN), torch.zeros(n, 3, dtype=torch.int64)

        def new() -> torch.Tensor:
            return communicator.empty(n, HIDDEN, early_release=True)

        twice = new()
        communicator.all_to_all_vdev(twice, rows, table).wait()
        for output, input, blocks in (
            (twice, rows, table),
            (communicator.empty(n, HIDDEN), rows, table),
            (new(), communicator.empty(n, HIDDEN), table),
            (new(), torch.zeros(n, 2 * HIDDEN), table),
            (new(), rows, table[:1]),
            (new(), rows, table.int()),
        ):
            try:
                communicator.all_to_all_vdev(output, input, blocks)
                said.append("nothing")
            except CounterpointError as error:
                said.append(str(error))
        communicator.barrier()
        if gpu is not None:
            gpu.synchronize()
    return said


def beyond(session: Session, on_gpu: bool) -> str:
    """Return the error of a table that names rows beyond the input."""
    gpu = SoftwareGpu() if on_gpu else None
    if gpu is not None:
        gpu.use(gpu.new_stream())
    communicator = Communicator(device=gpu, timeout_s=WAIT_S)
    n = communicator.world_size
    try:
        output = communicator.empty(n, HIDDEN, early_release=True)
        table = torch.tensor([[0, 0, 2]] * n)
        communicator.all_to_all_vdev(output, torch.zeros(1, HIDDEN), table).wait(10)
        said = "nothing"
    except CounterpointError as error:
        said = str(error)
    communicator.close()
    return said


def killed(session: Session, on_gpu: bool) -> str:
    """Rank 1 dies before its call; return what rank 0 is told."""
    gpu = SoftwareGpu() if on_gpu else None
    if gpu is not None:
        gpu.use(gpu.new_stream())
    communicator = Communicator(device=gpu, timeout_s=WAIT_S)
    n = communicator.world_size
    output = communicator.empty(n, HIDDEN, early_release=True)
    communicator.barrier()
    if gpu is not None:
        gpu.synchronize()
    if session.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        table = torch.tensor([[0, session.rank, 1]] * n)
        work = communicator.all_to_all_vdev(output, torch.zeros(1, HIDDEN), table)
        work.wait(20)
        communicator.check()
        said = "nothing"
    except CounterpointError as error:
        said = str(error)
    communicator.close()
    return said
