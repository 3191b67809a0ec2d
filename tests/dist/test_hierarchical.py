"""Collectives over several hosts, run as groups of one host."""

import gc
import os
import signal
import sys
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.multihost.hierarchical import HierarchicalCommunicator
from counterpoint.collectives.program.reductions import Reduction
from counterpoint.measurement.session import Session
from tests.dist.collective_programs import SUMMED, Draws, all_right
from tests.support.ranks import PATIENT, TIMEOUT_S, Ranks, error_of, run_once

HEARD = 3  # exit code of a rank that has heard of a death
_GRIDS: dict[tuple[int, int], Any] = {}


def opened(hosts: int, local: int, slice_bytes: int = 4096) -> HierarchicalCommunicator:
    """Groups are made once: torch keeps every one of them until the end."""
    if (hosts, local) not in _GRIDS:
        _GRIDS[hosts, local] = init_device_mesh("cpu", (hosts, local))
    return HierarchicalCommunicator.of_mesh(_GRIDS[hosts, local], timeout_s=TIMEOUT_S, slice_bytes=slice_bytes)


class HostDraws(Draws):
    """Collectives that hosts share, of small whole numbers, which add up exactly in any order and dtype."""

    operations = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "barrier")
    summed = tuple(dtype for dtype in SUMMED if dtype not in (torch.int8, torch.int16))  # gloo adds up no int16

    def inputs(self, dtype: Any, numel: int) -> list[Any]:
        state = torch.Generator().manual_seed(self.random.getrandbits(30))
        return [torch.randint(0, 8, (numel,), generator=state).to(dtype) for _ in range(self.n)]

    def room(self, dtype: Any, numel: int) -> Any:
        """An output, in symmetric memory or not."""
        self.early = False
        return self.comm.empty(numel, dtype=dtype) if self.random.random() < 0.5 else torch.empty(numel, dtype=dtype)

    def _how(self, dtype: Any) -> Reduction:
        return Reduction(op=self.random.choice(("sum", "max", "min")), dtype=str(dtype)[6:])


def random_collectives(session: Session, hosts: int, local: int, seed: int, count: int) -> int:
    """How many of `count` random collectives came out right, up to four under way."""
    with opened(hosts, local) as communicator:
        assert communicator.rank == session.rank
        return all_right(HostDraws(communicator, seed, 1 << 15), count)


def errors_of_scaled_sums(session: Session) -> list[tuple[float, float]]:
    """Largest error against float64 of avg and premul_sum: ours, and that of torch's own float32 sum, scaled."""
    n = session.world_size
    inputs = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(n)]
    plain, exact = sum(inputs[1:], inputs[0]), torch.stack(inputs).double().sum(0)
    found = []
    with opened(2, n // 2) as communicator:
        for op, factor in (("avg", 1 / n), ("premul_sum", 0.3)):
            ours = inputs[session.rank].clone()
            communicator.all_reduce(ours, op, factor=factor if op == "premul_sum" else 1.0)
            error, theirs = (float((each - exact * factor).abs().max()) for each in (ours, plain * factor))
            found.append((error, theirs))
    return found


def same_bits(session: Session) -> bytes:
    tensor = torch.randn(1003, generator=torch.Generator().manual_seed(session.rank)).bfloat16()
    with opened(2, session.world_size // 2) as communicator:
        communicator.all_reduce(tensor)
    return bytes(tensor.view(torch.uint8).tolist())


def threads_left(session: Session) -> int:
    """Of a communicator that was dropped and not closed; other tests may have left one open."""

    def count() -> int:
        return sum(thread.name == "hierarchical" for thread in threading.enumerate())

    before = count()
    opened(2, 2).barrier()
    gc.collect()
    deadline = time.monotonic() + 5
    while count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    return count() - before


def die_in_the_middle(session: Session) -> None:
    """Kill rank 3 in a call; the others end their processes when they have heard of it, on which other hosts wait."""
    communicator, tensor = opened(2, 2), torch.zeros(1000)
    communicator.all_reduce(tensor)
    if session.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    heard = [error_of(call) for call in (partial(communicator.all_reduce, tensor), communicator.barrier)]
    assert len(set(heard)) == 1, heard
    assert heard[0].startswith(("CounterpointError: ", "PeerTimeout: ")), heard
    sys.exit(HEARD)


def said(session: Session, what: str) -> str:
    return error_of(lambda: _wrong(session, what))


def _wrong(session: Session, what: str) -> None:
    opened(2, 2).close()
    mesh = _GRIDS[2, 2]
    with Communicator(mesh.get_group(1), options=PATIENT) as inside:
        if what == "no grid":  # the ranks of a host as if they were hosts
            HierarchicalCommunicator(inside, mesh.get_group(1))
        communicator = HierarchicalCommunicator(inside, mesh.get_group(0))
        tensor = torch.zeros(8)
        if what == "overlap":
            communicator.all_to_all(tensor, tensor)
        if what == "closed":
            communicator.close()
            communicator.barrier()
        if what == "different calls":
            communicator.all_reduce(tensor if session.rank % 2 else tensor[:4])


@pytest.mark.parametrize(("hosts", "local", "count"), [(2, 2, 300), (4, 1, 60), (1, 4, 60)])
def test_random_collectives_are_right(four_ranks: Ranks, hosts: int, local: int, count: int) -> None:
    assert four_ranks.run(random_collectives, hosts, local, 7, count) == [count] * 4


@pytest.mark.parametrize(("hosts", "local"), [(2, 3), (3, 2)])
def test_random_collectives_of_six_ranks_are_right(hosts: int, local: int) -> None:
    assert run_once(6, random_collectives, hosts, local, 8, 100) == [100] * 6


def test_means_and_scaled_sums_are_right(four_ranks: Ranks) -> None:
    for found in four_ranks.run(errors_of_scaled_sums):
        assert all(ours <= 2 * theirs for ours, theirs in found)


def test_all_ranks_get_the_same_bits(four_ranks: Ranks) -> None:
    assert len(set(four_ranks.run(same_bits))) == 1


def test_a_communicator_that_is_dropped_leaves_no_thread(four_ranks: Ranks) -> None:
    assert four_ranks.run(threads_left) == [0] * 4


def test_a_rank_that_dies_ends_the_call_on_all_others() -> None:
    """On its host and on the other one, and for good: no rank waits for its time-out."""
    assert run_once(4, die_in_the_middle) == [HEARD, HEARD, HEARD, -signal.SIGKILL]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no grid", "give groups that make a grid"),
        ("overlap", "give another output"),
        ("closed", "this communicator is closed"),
        ("different calls", "all_reduce"),
    ],
)
def test_what_cannot_work_says_so(four_ranks: Ranks, what: str, message: str) -> None:
    assert all(message in text for text in four_ranks.run(said, what))
