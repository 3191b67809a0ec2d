"""Messages through mailboxes between real processes, on software GPUs."""

import os
import random
import signal
import time
from collections import Counter
from itertools import permutations
from typing import Any

import pytest
import torch

from counterpoint.collectives.communicator import Communicator
from counterpoint.measurement.session import Session
from tests.dist.collective_programs import joined
from tests.dist.communicator_cuda_programs import delays
from tests.support.ranks import SOON_S, TIMEOUT_S, Ranks, patient, run_once, said
from tests.support.software_gpu import SoftwareGpu

ROOM = 4 * 1024  # bytes of a mailbox for each rank: slots of 1 KiB
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)


def content(line: tuple[int, int], number: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    start = 31 * line[0] + 17 * line[1] + 7 * number
    return ((torch.arange(numel) + start) % 120).to(dtype)


def random_messages(session: Session, seed: int, count: int) -> int:
    """How many of this rank's receives brought what was sent, of messages in orders of each rank's own.

    Half are asynchronous; a send is blocking only where slots suffice whatever the receiver does.
    """
    shared, mine = random.Random(seed), random.Random(f"{seed} {session.rank}")
    gpu, right, pending = SoftwareGpu(delays(seed, session.rank)), 0, list[Any]()
    with Communicator(device=gpu, options=patient(mailbox_bytes=ROOM)) as communicator:
        rank, lines = communicator.rank, dict[tuple[int, int], list[tuple[int, torch.dtype]]]()
        for _ in range(count):
            line = shared.choice(list(permutations(range(communicator.world_size), 2)))
            numel = shared.choice((0, 1, 3, 500, shared.randrange(1, 3000)))
            lines.setdefault(line, []).append((numel, shared.choice(DTYPES)))
        order = [line for line, messages in lines.items() if rank in line for _ in messages]
        mine.shuffle(order)
        numbers, filled = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        for line in order:
            numel, dtype = lines[line][numbers[line]]
            wanted = content(line, numbers[line], numel, dtype)
            numbers[line] += 1
            filled[line] += max(1, -(-wanted.nbytes // (ROOM // 4)))
            if line[0] == rank:
                async_op = filled[line] > 4 or mine.random() < 0.5
                work = communicator.send(wanted, line[1], async_op=async_op)
                pending.append((work, wanted, None))
            else:
                output = torch.zeros_like(wanted)
                pending.append((communicator.recv(output, line[0], async_op=True), output, wanted))
        for work, tensor, expected in pending:
            if work is not None:
                work.wait(TIMEOUT_S)
            gpu.synchronize()
            if expected is not None:
                assert torch.equal(tensor, expected)
                right += 1
        communicator.check()
        assert right == sum(len(messages) for (_, target), messages in lines.items() if target == rank)
        communicator.barrier()
        gpu.synchronize()
    return right


def far_ahead(session: Session, count: int) -> list[float]:
    """Both ranks begin `count` sends, more than a status has records for, before they receive any."""
    gpu = SoftwareGpu()
    with Communicator(device=gpu, options=patient(mailbox_bytes=ROOM)) as communicator:
        peer = 1 - communicator.rank
        sends = [communicator.send(torch.full((100,), float(k)), peer, async_op=True) for k in range(count)]
        outputs = [torch.zeros(100) for _ in range(count)]
        works = [communicator.recv(output, peer, async_op=True) for output in outputs]
        for work in (*sends, *works):
            assert work is not None
            work.wait(TIMEOUT_S)
        joined(communicator, gpu)
        return [output.mean().item() for output in outputs]


def beside_calls(session: Session, rounds: int) -> list[float]:
    """Collectives and messages in turn, with a receive that waits all the time: neither holds up the other."""
    gpu = SoftwareGpu()
    with Communicator(device=gpu, options=patient(mailbox_bytes=ROOM)) as communicator:
        rank, n = communicator.rank, communicator.world_size
        last, held, sums = torch.zeros(10), torch.zeros(10), list[float]()
        held_work = communicator.recv(held, (rank - 1) % n, async_op=True)
        for number in range(rounds):
            total = torch.full((50,), float(number + rank))
            communicator.all_reduce(total)
            gpu.synchronize()
            sums.append(total.mean().item())
        # alive until they were read
        sent = [torch.full((10,), float(rank)), torch.full((10,), float(rank + 100))]
        for tensor in sent:
            communicator.send(tensor, (rank + 1) % n)
        communicator.recv(last, (rank - 1) % n)
        assert held_work is not None
        held_work.wait(TIMEOUT_S)
        joined(communicator, gpu)
        return [*sums, held.mean().item(), last.mean().item()]


def captured(session: Session) -> list[float]:
    gpu, seen = SoftwareGpu(), list[float]()
    with Communicator(device=gpu, options=patient(mailbox_bytes=ROOM)) as communicator:
        rank, stream = communicator.rank, gpu.new_stream()
        gpu.use(stream)
        sent, received = torch.full((600,), float(rank)), torch.zeros(600)
        gpu.driver.cuStreamBeginCapture(stream, 2)
        gpu.kernel(lambda: sent.add_(10))
        going = communicator.send(sent, 1 - rank, async_op=True)
        communicator.recv(received, 1 - rank)
        gpu.kernel(lambda: seen.append(received.mean().item()))
        assert going is not None
        going.wait()
        graph = gpu.driver.cuStreamEndCapture(stream)[1]
        for _ in range(3):
            gpu.driver.cuGraphLaunch(graph, stream)
        joined(communicator, gpu)
    return seen


def different(session: Session, what: str, first: int) -> str:
    """The error of a rank whose message is not what the other one expects; rank `first` makes its call first."""
    gpu = SoftwareGpu()
    with Communicator(device=gpu, options=patient(mailbox_bytes=ROOM)) as communicator:

        def call() -> None:
            if communicator.rank == 0:
                communicator.send(torch.zeros(100), 1)
            else:
                other = torch.zeros(2000) if what == "size" else torch.zeros(100, dtype=torch.int32)
                communicator.recv(other, 0)
            communicator.barrier()  # the sender may be done with its message, and learns it here
            joined(communicator, gpu)

        time.sleep(0.3 if communicator.rank != first else 0.0)
        return said(call)[0]


def leaves_early(session: Session) -> list[float]:
    """Rank 0 sends what slots hold and closes its communicator, long before rank 1 asks for it."""
    gpu, tensors = SoftwareGpu(), [torch.full((200,), float(k)) for k in range(4)]
    with Communicator(device=gpu, options=patient(mailbox_bytes=ROOM)) as communicator:
        for tensor in tensors if communicator.rank == 0 else []:
            communicator.send(tensor, 1)
        if communicator.rank == 1:
            time.sleep(1.0)
            tensors = [torch.zeros(200) for _ in tensors]
            for tensor in tensors:
                communicator.recv(tensor, 0)
        joined(communicator, gpu)
    return [tensor.mean().item() for tensor in tensors]


def waits_for_the_dead(session: Session, what: str) -> tuple[str, tuple[int, ...], float]:
    """Rank 1 dies while the others wait for its message, or for slots of its mailbox."""
    gpu = SoftwareGpu()
    communicator = Communicator(device=gpu, options=patient(mailbox_bytes=ROOM))
    communicator.barrier()
    gpu.synchronize()
    if communicator.rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)

    def call() -> None:
        if what == "message":
            work = communicator.recv(torch.zeros(10), 1, async_op=True)
        else:
            work = communicator.send(torch.zeros(10_000), 1, async_op=True)
        assert work is not None
        work.wait(TIMEOUT_S)

    return said(call)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_messages_in_any_order_arrive(three_ranks: Ranks, seed: int) -> None:
    """Every rank in an order of its own, of any size and dtype, blocking or not: the n-th receive has the n-th send."""
    assert sum(three_ranks.run(random_messages, seed, 300)) == 300


def test_sends_run_ahead_of_the_receives(two_ranks: Ranks) -> None:
    assert two_ranks.run(far_ahead, 200) == [[float(k) for k in range(200)]] * 2


def test_messages_and_collectives_do_not_wait_for_each_other(three_ranks: Ranks) -> None:
    sums = [float(3 * number + 3) for number in range(5)]
    wanted = [[*sums, float((rank - 1) % 3), float((rank - 1) % 3 + 100)] for rank in range(3)]
    assert three_ranks.run(beside_calls, 5) == wanted


def test_messages_can_be_captured(two_ranks: Ranks) -> None:
    assert two_ranks.run(captured) == [[11.0, 21.0, 31.0], [10.0, 20.0, 30.0]]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("what", "theirs"), [("size", "8000 bytes of float32"), ("dtype", "400 bytes of int32")])
def test_a_message_that_does_not_fit_is_named(two_ranks: Ranks, what: str, theirs: str, first: int) -> None:
    told = two_ranks.run(different, what, first)
    mismatch = next(text for text in told if text.startswith("Misconfigured"))
    assert "message of 400 bytes of float32 from rank 0 to rank 1" in mismatch
    assert theirs in mismatch
    assert all("the ranks do not match" in text for text in told)


def test_a_sender_may_leave_before_its_messages_are_received(two_ranks: Ranks) -> None:
    assert two_ranks.run(leaves_early) == [[0.0, 1.0, 2.0, 3.0]] * 2


@pytest.mark.parametrize("what", ["message", "slot"])
def test_a_dead_peer_is_named(what: str) -> None:
    first, killed, last = run_once(3, waits_for_the_dead, what)
    assert killed == -signal.SIGKILL
    for text, ranks, seconds in (first, last):
        assert (text[:11], ranks, seconds < SOON_S) == ("PeerTimeout", (1,), True)
