"""A call of a GPU's communicator that comes again is not worked out anew, and notices what has changed meanwhile."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from counterpoint.collectives.communicator import Communicator
from counterpoint.measurement.session import Session
from tests.dist.communicator_cuda_programs import delays
from tests.support.ranks import PATIENT, TIMEOUT_S, Ranks, finding, patient
from tests.support.software_gpu import SoftwareGpu


def known_to_one_rank(session: Session) -> list[bool]:
    """Whether sums and gathers of plain tensors are right, always the same on rank 0 and new ones on rank 1: before
    staging and landing are replaced, and after it."""
    gpu, right, kept = SoftwareGpu(), list[bool](), list[Any]()
    with Communicator(device=gpu, options=PATIENT) as communicator:
        n, rank = communicator.world_size, communicator.rank

        def both() -> None:
            for _ in range(3):
                if rank == 1 or not kept:
                    kept.append((torch.zeros(100), torch.zeros(n, 100), torch.zeros(100)))
                total, shards, one = kept[-1]
                mine = [10 * len(right) + peer for peer in range(n)]
                communicator.all_reduce(total.fill_(mine[rank]))
                communicator.all_gather(shards, one.fill_(mine[rank]))
                gpu.synchronize()
                right.append(bool((total == sum(mine)).all()) and shards[:, 0].tolist() == mine)

        large, larger = torch.zeros(1 << 16), torch.zeros(n, 1 << 15)
        both()
        communicator.all_reduce(large)
        both()
        communicator.all_gather(larger, large[: 1 << 15])
        both()
    return right


def the_same_again_released_or_not(session: Session) -> list[bool]:
    """Whether gathers are right into an early block: a new one, the same again, its next tensor, on another stream."""
    gpu, right = SoftwareGpu(delays(2, session.rank)), list[bool]()
    streams = [gpu.new_stream() for _ in range(2)]
    with Communicator(device=gpu, options=PATIENT) as communicator:
        n, rank = communicator.world_size, communicator.rank
        for step in range(12):
            gpu.use(streams[step // 3 % 2])
            shards = communicator.empty(n, 100, early_release=True)
            for again in range(1 + step % 2):
                number = 10 * step + again
                shards[rank] = number + rank
                communicator.all_gather(shards, shards[rank])
                gpu.synchronize()
                right.append(shards[:, 0].tolist() == [number + peer for peer in range(n)])
            del shards
    return right


def told_to_the_order_of_streams(session: Session) -> list[bool]:
    """Of tensors at the same place, one after the other: whether it is known that the channel's stream uses it."""
    gpu, told = SoftwareGpu(), list[bool]()
    with Communicator(device=gpu, options=PATIENT) as communicator:
        transport: Any = communicator._transport
        for _ in range(3):
            shards = communicator.empty(communicator.world_size, 100)
            work = communicator.all_gather(shards, shards[communicator.rank], async_op=True)
            assert work is not None
            work.wait(TIMEOUT_S)
            told.append(transport.channels[0].stream in transport.context.order._uses[transport.locate(shards)])
            del shards, work
            transport.watch.drain()
    return told


class Again:
    """A few calls on the same tensors, again and again with other numbers in them; each says whether it was right.

    Symmetric tensors are made once; rank 1 takes new plain ones from time to time, so that calls which it does not know
    meet calls that are known on the other ranks.
    """

    def __init__(self, communicator: Communicator, gpu: SoftwareGpu, dice: random.Random) -> None:
        self.comm, self.gpu, self.dice = communicator, gpu, dice
        self.n, self.rank = communicator.world_size, communicator.rank
        self.shards, self.others = (communicator.empty(self.n, 64, dtype=torch.int32) for _ in range(2))
        self.total = communicator.empty(64 * self.n, dtype=torch.int32)
        self.grown, self.kept = 1 << 12, list[Any]()
        self.renew()

    def renew(self) -> None:
        self.one, self.all = torch.zeros(64, dtype=torch.int32), torch.zeros(self.n, 64, dtype=torch.int32)
        self.kept += [self.one, self.all]

    def step(self, number: int) -> bool:
        self.options: dict[str, Any] = {"channel": self.dice.randrange(2), "async_op": self.dice.random() < 0.5}
        name = self.dice.choice(
            ("gather", "plain_gather", "early_gather", "scatter", "reduce", "exchange", "broadcast")
        )
        if self.dice.random() < 0.05:
            self.grown *= 2
            large = torch.ones(min(self.grown, 1 << 17))
            self.done(self.comm.all_reduce(large, **self.options))
        if self.dice.random() < 0.1 and self.rank == 1:
            self.renew()
        right: Callable[[int], bool] = getattr(self, name)
        return right(10 * number)

    def done(self, work: Any) -> None:
        if work is not None:
            work.wait()
        self.gpu.synchronize()

    def gathered(self, shards: Any, number: int) -> bool:
        return bool((shards == torch.arange(number, number + self.n)[:, None]).all())

    def gather(self, number: int) -> bool:
        self.shards[self.rank] = number + self.rank
        self.done(self.comm.all_gather(self.shards, self.shards[self.rank], **self.options))
        return self.gathered(self.shards, number)

    def plain_gather(self, number: int) -> bool:
        self.done(self.comm.all_gather(self.all, self.one.fill_(number + self.rank), **self.options))
        return self.gathered(self.all, number)

    def early_gather(self, number: int) -> bool:
        shards, right = self.comm.empty(self.n, 64, dtype=torch.int32, early_release=True), True
        for again in range(number, number + self.dice.randrange(1, 4)):
            shards[self.rank] = again + self.rank
            self.done(self.comm.all_gather(shards, shards[self.rank], **self.options))
            right &= self.gathered(shards, again)
        return right

    def scatter(self, number: int) -> bool:
        source = self.dice.choice((self.all, self.others))
        self.done(self.comm.reduce_scatter(self.one, source.fill_(number + self.rank), **self.options))
        return bool((self.one == self.n * number + sum(range(self.n))).all())

    def reduce(self, number: int) -> bool:
        tensor = self.dice.choice((self.all, self.total))
        self.done(
            self.comm.all_reduce(tensor.fill_(number + self.rank), self.dice.choice(("sum", "max")), **self.options)
        )
        return bool((tensor == tensor.view(-1)[0]).all()) and int(tensor.view(-1)[0]) in (
            self.n * number + sum(range(self.n)),
            number + self.n - 1,
        )

    def exchange(self, number: int) -> bool:
        self.done(self.comm.all_to_all(self.others, self.all.fill_(number + self.rank), **self.options))
        return self.gathered(self.others, number)

    def broadcast(self, number: int) -> bool:
        src = self.dice.randrange(self.n)
        self.done(self.comm.broadcast(self.total.fill_(number + self.rank), src, **self.options))
        return bool((self.total == number + src).all())


def random_calls_that_come_again(session: Session, seed: int, count: int) -> int:
    gpu, dice = SoftwareGpu(delays(seed, session.rank)), random.Random(seed)
    streams = [gpu.new_stream() for _ in range(2)]
    with Communicator(device=gpu, options=patient(debug=seed % 3 == 1, graphs=seed % 3 != 2)) as communicator:
        again, right = Again(communicator, gpu, dice), 0
        for number in range(count):
            gpu.use(dice.choice(streams))
            right += again.step(number)
            communicator.check()
        return right


@pytest.mark.parametrize("seed", range(4))
def test_calls_that_come_again_are_right(three_ranks: Ranks, seed: int) -> None:
    assert three_ranks.run(random_calls_that_come_again, seed, 200) == [200] * 3


test_what_ranks_find = finding({
    "memory was replaced, new tensors on one rank": (2, known_to_one_rank, (), [True] * 9),
    "how its block rests": (2, the_same_again_released_or_not, (), [True] * 18),
    "its memory was taken back, used on the channel's stream": (2, told_to_the_order_of_streams, (), [True] * 3),
})  # fmt: skip
