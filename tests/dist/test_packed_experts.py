"""Tokens in slabs come and go as with torch's all_to_all_single, bit by bit."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.cuda.call import CudaWork
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.measurement.session import Session
from counterpoint.parallel.call_memory import CallMemory
from counterpoint.parallel.expert.dispatcher import Dispatcher
from counterpoint.parallel.expert.slabs import Slabs
from counterpoint.parallel.group import RankGroup
from counterpoint.parallel.options import ExpertOptions
from tests.dist.communicator_cuda_programs import delays
from tests.support.ranks import PATIENT, Ranks, error_of
from tests.support.software_gpu import SoftwareGpu

HIDDEN, MOST = 16, 12


@dataclass(frozen=True)
class Routing:
    x: Tensor
    ids: Tensor
    weights: Tensor
    grads: Tensor


def routing(draw: random.Random, rank: int, experts: int, top_k: int, dtype: torch.dtype, tokens: int) -> Routing:
    """Uniform, all to one expert, or many of none; each token has each expert once."""
    kind = draw.choice(["uniform", "uniform", "one", "none"])
    only = draw.randrange(experts)
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30) + rank)
    order = torch.stack([torch.randperm(experts, generator=generator) for _ in range(tokens + 1)])[:tokens]
    ids = order[:, :top_k].clone()
    if kind == "one":
        ids[:] = -1
        ids[:, 0] = only
    if kind == "none":
        ids[torch.rand(ids.shape, generator=generator) < 0.5] = -1
    return Routing(
        x=torch.randn(tokens, HIDDEN, generator=generator).to(dtype),
        ids=ids.int() if draw.random() < 0.5 else ids,
        weights=torch.rand(tokens, top_k, generator=generator),
        grads=torch.randn(tokens, HIDDEN, generator=generator).to(dtype),
    )


def run(dispatcher: Dispatcher, case: Routing) -> list[Tensor]:
    """Rows as far as they are used, offsets, sums, and the derivatives of tokens and weights."""
    x, weights = case.x.clone().requires_grad_(), case.weights.clone().requires_grad_()
    rows, offsets, handle = dispatcher.dispatch(x, case.ids, weights)
    made = torch.tanh(rows) * 1.5
    y = dispatcher.combine(made, handle)
    y.backward(case.grads)
    assert x.grad is not None
    assert weights.grad is not None
    return [rows[: int(offsets[-1])].detach(), offsets, y.detach(), x.grad, weights.grad]


def opened(session: Session, experts: int, top_k: int, options: ExpertOptions) -> Dispatcher:
    return Dispatcher(None, experts=experts, top_k=top_k, max_tokens=MOST, hidden=HIDDEN, options=options)


def compared(session: Session, seed: int, calls: int, captured: bool = False) -> list[str]:
    """Return what differs from mechanism `torch`, in any bit; `captured`: with the memory and rounds of a capture."""
    draw, different = random.Random(seed), list[str]()
    n, me = session.world_size, session.rank
    while calls > 0:
        experts, top_k = n * draw.randint(1, 3), draw.randint(1, 3)
        top_k = min(top_k, experts)
        options = ExpertOptions(
            mechanism="slabs",
            capacity_factor=draw.choice([None, None, 0.2, 1.0, 3.0]),
            pad_multiple=draw.choice([1, 1, 4]),
            wire_dtype=draw.choice([None, None, torch.float8_e4m3fn]),
            zero_tail=draw.random() < 0.5,
            communicator=PATIENT,
        )
        reference = replace(options, mechanism="torch", capacity_factor=None)
        dtype = draw.choice([torch.float32, torch.bfloat16])
        both = [opened(session, experts, top_k, one) for one in (options, reference)]
        for _ in range(10):
            tokens = [draw.choice([0, 1, draw.randint(0, MOST), MOST]) for _ in range(n)]
            case = routing(draw, me, experts, top_k, dtype, tokens[me])
            with patch.object(CallMemory, "is_capturing", lambda _: True) if captured else nullcontext():
                found = run(both[0], case)
            wanted = run(both[1], case)
            names = ("rows", "offsets", "sums", "x.grad", "weights.grad")
            for name, one, other in zip(names, found, wanted, strict=True):
                if not torch.equal(one, other):
                    different.append(f"{name}: {one} is not {other}; {options}, {case}")
        assert both[0].dropped() == 0
        assert {row.path for row in both[0].report().calls} == {"slabs"}
        for dispatcher in both:
            dispatcher.close()
        calls -= 10
    return different[:3]


@contextmanager
def host_waits(gpu: SoftwareGpu) -> Iterator[None]:
    """Let the host wait with every stream: torch's memory and operations on CPUs know no streams."""
    waits = CudaWork.wait

    def wait(self: CudaWork, timeout_s: float | None = None) -> bool:
        inputs = self.keep  # a wait drops them
        done = waits(self, timeout_s)
        gpu.synchronize()
        while not self.is_completed():
            time.sleep(1e-4)
        del inputs
        return done

    with patch.object(CudaWork, "wait", wait):
        yield


def on_software_gpus(session: Session, seed: int, calls: int) -> list[str]:
    draw, different = random.Random(seed), list[str]()
    gpu = SoftwareGpu(delays(seed, session.rank))
    gpu.use(gpu.new_stream())
    n, me = session.world_size, session.rank
    experts, top_k = 2 * n, 2

    def on_gpu(group: Any, _: Any, given: CommunicatorOptions) -> Communicator:
        return Communicator(group, device=gpu, options=given)

    options = ExpertOptions(mechanism="torch", capacity_factor=1.0)
    dispatchers = [opened(session, experts, top_k, options) for _ in range(2)]
    ranks = RankGroup(dist.group.WORLD, tuple(range(n)), opened=on_gpu)
    ranks.join(dispatchers[0], PATIENT)
    ranks.open()
    dispatchers[0]._ranks, dispatchers[0]._mechanism = ranks, Slabs(ranks, dispatchers[0].layout, options)
    for _ in range(calls):
        tokens = [draw.choice([0, 1, draw.randint(0, MOST), MOST]) for _ in range(n)]
        case = routing(draw, me, experts, top_k, torch.float32, tokens[me])
        with host_waits(gpu):
            found = run(dispatchers[0], case)
        wanted = run(dispatchers[1], case)
        different += [
            f"{one} is not {other}" for one, other in zip(found, wanted, strict=True) if not torch.equal(one, other)
        ]
    ranks.check()
    for dispatcher in dispatchers:
        dispatcher.close()
    return different


def overflown(session: Session, overflow: Any) -> tuple[list[str], int, list[bool]]:
    """All choices of rank 0 are for one expert, with room for one row.

    Return the errors of the next call, of the one after it, and of `close`, how many choices were dropped, and of each
    token of this rank whether its sum is there.
    """
    n = session.world_size
    options = ExpertOptions(mechanism="slabs", overflow=overflow, capacity_factor=n / MOST, communicator=PATIENT)
    dispatcher = opened(session, n, 1, options)
    x = torch.ones(MOST, HIDDEN)
    ids = torch.zeros(MOST, 1, dtype=torch.int32) if session.rank == 0 else torch.full((MOST, 1), -1)
    rows, _, handle = dispatcher.dispatch(x, ids, torch.ones(MOST, 1))
    y = dispatcher.combine(rows, handle)
    said = []
    for call in (*[lambda: dispatcher.dispatch(x, ids, torch.ones(MOST, 1))] * 2, dispatcher.close):
        dropped = dispatcher.dropped()
        said.append(error_of(call))
    return said, dropped, (y == 1).all(1).tolist()


@pytest.mark.parametrize("captured", [False, True])
def test_random_routings(three_ranks: Ranks, captured: bool) -> None:
    """Ranks and experts without tokens, one expert for all, any room in the first round, float8, bfloat16."""
    assert three_ranks.run(compared, 1, 60, captured) == [[]] * 3


def test_streams(two_ranks: Ranks) -> None:
    assert two_ranks.run(on_software_gpus, 4, 30) == [[]] * 2


def test_no_room_raises_at_the_next_call_and_at_the_end(two_ranks: Ranks) -> None:
    """On all ranks, also those whose own choices had room; it says what to give."""
    first, second = two_ranks.run(overflown, "raise")
    for found in (first, second):
        following, after_it, end = found[0]
        assert all("no room for 11 rows" in said for said in (following, end))
        assert all("give a larger one" in said for said in (following, end))
        assert after_it == "nothing", "what was told is not told again"
    assert (first[1], second[1]) == (22, 0)


@pytest.mark.parametrize(
    ("overflow", "dropped", "there"), [("drop", 33, [True] + [False] * 11), ("second_round", 0, [True] * 12)]
)
def test_choices_without_room_are_dropped_or_sent_later(
    two_ranks: Ranks, overflow: str, dropped: int, there: list[bool]
) -> None:
    first, second = two_ranks.run(overflown, overflow)
    assert first == (["nothing"] * 3, dropped, there)
    assert second == (["nothing"] * 3, 0, [False] * 12)
