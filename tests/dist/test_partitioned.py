"""Calls in partitions between processes: what has arrived is right when it is said to have arrived."""

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.collectives.work import PartitionedWork
from counterpoint.errors import CounterpointError
from counterpoint.measurement.session import Session
from tests.dist.collective_programs import joined
from tests.dist.communicator_cuda_programs import delays, view
from tests.support.ranks import PATIENT, Ranks, error_of, finding, patient
from tests.support.software_gpu import SoftwareGpu


def rows_of(partition: Any, chunk_rows: int, rows: int) -> slice:
    """Rows of a partition within a rank's flat block."""
    low = partition.chunk * chunk_rows
    return slice(low, min(low + chunk_rows, rows))


def shape_of(draw: random.Random) -> tuple[int, int, int, int]:
    batch, rows, columns = draw.choice([1, 1, 2, 3]), draw.randint(1, 9), 8 * draw.randint(1, 4)
    return batch, rows, columns, draw.randint(1, batch * rows + 2)


def gathered(session: Session, seed: int, calls: int) -> None:
    """Rows that have arrived are right at that moment, in the order said; own rows are not touched."""
    draw, late = random.Random(seed), random.Random(seed + session.rank + 1)
    with Communicator(options=CommunicatorOptions(channels=2)) as communicator:
        n, me = communicator.world_size, communicator.rank
        for number in range(calls):
            batch, rows, columns, chunk_rows = shape_of(draw)
            inputs = [
                torch.randn(batch, rows, columns, generator=torch.Generator().manual_seed(number * n + r))
                for r in range(n)
            ]
            output = communicator.empty(batch, n * rows, columns, early_release=draw.random() < 0.7)
            blocks = output.view(batch, n, rows, columns)
            blocks[:, me] = -1.0
            time.sleep(late.choice([0, 0, 0.003]))
            work = communicator.partitioned_all_gather(
                output, inputs[me], dim=1, chunk_rows=chunk_rows, channel=draw.randrange(2)
            )
            chunks = -(-batch * rows // chunk_rows)
            order = [((me - distance) % n, chunk) for distance in range(1, n) for chunk in range(chunks)]
            assert [(one.peer, one.chunk) for one in work.received] == order
            found = output
            for count in range(late.choice([1, len(order) + 1]), len(order) + 1, late.choice([1, 2])):
                work.arrived(count)
                for partition in work.received[:count]:
                    part = rows_of(partition, chunk_rows, batch * rows)
                    found = blocks[:, partition.peer].reshape(-1, columns)[part]
                    assert torch.equal(found, inputs[partition.peer].view(-1, columns)[part])
            work.finish()
            for peer in range(n):
                assert torch.equal(blocks[:, peer], inputs[peer] if peer != me else torch.full_like(inputs[0], -1.0))
            del found, blocks, output  # views of it, which not every rank has, would keep it alive


def scattered(session: Session, seed: int, calls: int) -> None:
    """What was supplied late arrives; every block is the one that its rank wrote."""
    draw, late = random.Random(seed), random.Random(seed + session.rank + 1)
    with Communicator() as communicator:
        n, me = communicator.world_size, communicator.rank
        for number in range(calls):
            batch, rows, columns, chunk_rows = shape_of(draw)
            wholes = [
                torch.randn(batch, n, rows, columns, generator=torch.Generator().manual_seed(number * n + r))
                for r in range(n)
            ]
            output = communicator.empty(n, batch, rows, columns, early_release=draw.random() < 0.7)
            input = torch.full((batch, n * rows, columns), float("nan"))
            work = communicator.partitioned_all_to_all(output, input, dim=1, chunk_rows=chunk_rows)
            blocks = input.view(batch, n, rows, columns)
            step = late.choice([1, 2])
            for count in range(step, len(work.sent) + step, step):
                for partition in work.sent[max(0, count - step) : count]:
                    part = rows_of(partition, chunk_rows, batch * rows)
                    flat = blocks[:, partition.peer].reshape(-1, columns).clone()
                    flat[part] = wholes[me][:, partition.peer].reshape(-1, columns)[part]
                    blocks[:, partition.peer] = flat.view(batch, rows, columns)
                time.sleep(late.choice([0, 0, 0.002]))
                work.ready(min(count, len(work.sent)))
            for count in range(1, len(work.received) + 1):
                work.arrived(count)
                partition = work.received[count - 1]
                part = rows_of(partition, chunk_rows, batch * rows)
                found = output[partition.peer].view(-1, columns)[part]
                assert torch.equal(found, wholes[partition.peer][:, me].reshape(-1, columns)[part])
            work.finish()
            del found, output


def mixed_up(session: Session) -> list[str]:
    with Communicator() as communicator:
        n = communicator.world_size
        input, output = torch.zeros(4, 8), communicator.empty(4 * n, 8)
        made: list[Callable[[], object]] = [
            lambda: communicator.partitioned_all_gather(torch.zeros(4 * n, 8), input, chunk_rows=4),
            lambda: communicator.partitioned_all_gather(output, input, chunk_rows=0),
            lambda: communicator.partitioned_all_gather(output, input, dim=2, chunk_rows=4),
            lambda: communicator.partitioned_all_gather(communicator.empty(4 * n, 1), torch.zeros(4, 1), chunk_rows=1),
            lambda: communicator.partitioned_all_to_all(
                communicator.empty(n, 4, 8), torch.zeros(8, 4 * n).t(), chunk_rows=4
            ),
            lambda: communicator.partitioned_all_gather(
                communicator.empty(400 * n, 8), torch.zeros(400, 8), chunk_rows=1
            ),
        ]
        return [error_of(make) for make in made]


def left_unfinished(session: Session) -> str:
    communicator = Communicator(options=CommunicatorOptions(timeout_s=2.0))
    n = communicator.world_size
    work: PartitionedWork = communicator.partitioned_all_to_all(
        communicator.empty(n, 2, 8), torch.zeros(2 * n, 8), chunk_rows=2
    )
    try:
        if session.rank == 1:
            session.gather(0)
            return ""
        work.ready(len(work.sent))
        work.finish()
    except CounterpointError as error:
        session.gather(0)
        return str(error)
    finally:
        communicator.close()
    return "no error"


def unsupplied(session: Session) -> list[str]:
    """What a wait for arrivals says where rank 1 supplies nothing, and what the communicator then says."""
    said = list[str]()
    with Communicator(options=CommunicatorOptions(timeout_s=2.0)) as communicator:
        n = communicator.world_size
        work = communicator.partitioned_all_to_all(communicator.empty(n, 2, 8), torch.zeros(2 * n, 8), chunk_rows=2)
        if session.rank == 0:
            work.ready(len(work.sent))
            said = [error_of(call) for call in (partial(work.arrived, len(work.received)), communicator.check)]
        session.gather(0)
    return said


class StreamedStep:
    """A gather whose rows a kernel adds up as they come, and a scatter of what it computes, on software GPUs."""

    def __init__(self, communicator: Communicator, gpu: SoftwareGpu, *, early: bool) -> None:
        self.comm, self.gpu, self.early = communicator, gpu, early
        self.n, self.me = communicator.world_size, communicator.rank
        self.shard = torch.zeros(2, 4, 8)
        self.wrong: list[str] = []

    def run(self, number: Any) -> None:
        """Launch everything; `number()` is read by the kernels, so that replays differ."""
        n, me, gpu = self.n, self.me, self.gpu
        shard = view(self.shard)
        gpu.kernel(lambda: shard.fill_(number() + me))
        rows = self.comm.empty(2, n * 4, 8, early_release=self.early)
        parts = self.comm.empty(n, 2, 4, 8, early_release=self.early)
        product = torch.zeros(2, n * 4, 8)
        self.kept = product
        gather = self.comm.partitioned_all_gather(rows, self.shard, dim=1, chunk_rows=3, channel=0)
        scatter = self.comm.partitioned_all_to_all(parts, product, dim=1, chunk_rows=5, channel=1)
        seen, made = view(rows).view(2, n, 4, 8), view(product).view(2, n, 4, 8)
        ends = {one.peer: index + 1 for index, one in enumerate(gather.received)}
        leaves = {one.peer: index + 1 for index, one in enumerate(scatter.sent)}
        for peer in dict.fromkeys(one.peer for one in scatter.sent):
            gather.arrived(ends[peer])

            def multiply(peer: int = peer) -> None:
                if not bool((seen[:, peer] == number() + peer).all()):
                    self.wrong.append(f"rows of {peer}")
                made[:, peer] = number() + 10 * peer + me

            gpu.kernel(multiply)
            scatter.ready(leaves[peer])
        scatter.finish()
        gather.finish()
        found = view(parts)

        def add() -> None:
            for peer in range(n):
                if peer != me and not bool((found[peer] == number() + 10 * me + peer).all()):
                    self.wrong.append(f"parts of {peer}")

        gpu.kernel(add)


def in_stream_order(session: Session, early: bool, steps: int) -> list[str]:
    """Return what kernels read that they should not; tensors die at once, on two streams in turn."""
    gpu = SoftwareGpu(delays(3, session.rank))
    streams = [gpu.new_stream() for _ in range(2)]
    with Communicator(device=gpu, options=patient(channels=2)) as communicator:
        kept, step = [], StreamedStep(communicator, gpu, early=early)
        for number in range(steps):
            gpu.use(streams[number // 7 % 2])
            step.run(lambda number=number: float(100 * number))
            kept.append(step.kept)  # an allocator of a GPU keeps it in stream order
            if number % 7 == 6:
                gpu.synchronize()
                kept.clear()
        communicator.check()
        return step.wrong


def captured(session: Session) -> list[str]:
    """Return what kernels of three replays of a graph read that they should not."""
    gpu, numbers = SoftwareGpu(), [0.0]
    with Communicator(device=gpu, options=patient(channels=2)) as communicator:
        stream = gpu.new_stream()
        gpu.use(stream)
        step = StreamedStep(communicator, gpu, early=False)
        step.run(lambda: numbers[0])
        gpu.synchronize()
        gpu.driver.cuStreamBeginCapture(stream, 2)
        step.run(lambda: numbers[0])
        graph = gpu.driver.cuStreamEndCapture(stream)[1]
        for number in range(3):
            numbers[0] = 1000.0 * (1 + number)
            gpu.driver.cuGraphLaunch(graph, stream)
            joined(communicator, gpu)
        return step.wrong


def behind_another(session: Session, on_gpu: bool) -> tuple[str, bool]:
    """Return the error of a call behind one that is not finished, and whether the same call is right afterwards."""
    gpu = SoftwareGpu() if on_gpu else None
    if gpu is not None:
        gpu.use(gpu.new_stream())
    with Communicator(device=gpu, options=PATIENT) as communicator:
        n, me = communicator.world_size, communicator.rank
        shard = torch.full((2, 8), float(me))
        rows, others = (communicator.empty(2 * n, 8, early_release=True) for _ in range(2))
        first = communicator.partitioned_all_gather(rows, shard, chunk_rows=2)
        said = error_of(lambda: communicator.all_gather(others, shard))
        first.finish()
        communicator.all_gather(others, shard)
        if gpu is not None:
            gpu.synchronize()
        return said, torch.equal(others, torch.arange(n).repeat_interleave(2)[:, None].expand(2 * n, 8).float())


@pytest.mark.parametrize("program", [gathered, scattered], ids=["all_gather", "all_to_all"])
def test_random_calls_of_three_ranks(three_ranks: Ranks, program: object) -> None:
    three_ranks.run(program, 1, 40)  # type: ignore[arg-type]


def test_calls_that_do_not_fit_raise(two_ranks: Ranks) -> None:
    found = two_ranks.run(mixed_up)[0]
    said = ("has to be a tensor of empty()", "give one or more", "give one of them", "multiple of 16 bytes",
            "give a contiguous one", "are allowed")  # fmt: skip
    assert [words in text for words, text in zip(said, found, strict=True)] == [True] * 6


def test_a_rank_that_never_supplies_is_named(two_ranks: Ranks) -> None:
    assert "rank 1" in two_ranks.run(left_unfinished)[0]


def test_a_wait_that_fails_ends_the_communicator(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(unsupplied)[0]
    assert "rank 1" in first
    assert second == first


test_what_ranks_find = finding({
    "streams wait for arrivals, released early": (3, in_stream_order, (True, 60), []),
    "streams wait for arrivals, by handshakes": (3, in_stream_order, (False, 60), []),
    "a captured call is replayed": (2, captured, (), []),
})  # fmt: skip


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
def test_a_call_behind_one_that_is_not_finished_is_refused(two_ranks: Ranks, on_gpu: bool) -> None:
    for said, is_right in two_ranks.run(behind_another, on_gpu):
        assert ("finish it first" in said, is_right) == (True, True), said
