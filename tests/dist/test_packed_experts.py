"""Tokens in slabs come and go as with torch's all_to_all_single, bit by bit."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

from counterpoint.measurement.session import Session
from counterpoint.parallel.call_memory import CallMemory
from counterpoint.parallel.expert.token_mechanism import ExpertLayout
from tests.dist import expert_programs as programs
from tests.dist.tensor_programs import on_software_gpu
from tests.support.ranks import Ranks

MOST = 12


def as_captured(rank: int) -> Any:
    """Calls have the memory and the rounds that they have in a capture."""
    return patch.object(CallMemory, "is_capturing", lambda _: True)


def compared(session: Session, seed: int, sizes: int, how: Callable[[int], Any]) -> list[str]:
    """Return what differs from mechanism `torch`, in any bit; calls of slabs are made within `how` of the rank."""
    draw, n = random.Random(seed), session.world_size
    for number in range(sizes):
        experts = n * draw.randint(1, 3)
        layout = ExpertLayout(
            rank=session.rank, world_size=n, experts=experts, top_k=min(draw.randint(1, 3), experts), max_tokens=MOST,
            hidden=16,
        )  # fmt: skip
        common = {"pad_multiple": draw.choice([1, 1, 4]), "wire_dtype": draw.choice([None, None, torch.float8_e4m3fn])}
        common["zero_tail"] = draw.random() < 0.5
        room = draw.choice([None, None, 0.2, 1.0, 3.0])
        with (
            how(session.rank),
            programs.opened(layout, mechanism="slabs", capacity_factor=room, **common) as ours,
            programs.opened(layout, mechanism="torch", **common) as torchs,
        ):
            for call in range(10):
                case = programs.drawn(draw, 1000 * number + call, layout)
                if different := unequal(programs.run(ours, case), programs.run(torchs, case)):
                    return [f"{different}; {room}, {common}, {case}"]
            assert ours.dropped() == 0
            assert {row.path for row in ours.report().calls} == {"slabs"}
    return []


def unequal(found: programs.Found, wanted: programs.Found) -> list[str]:
    return [name for name, one in vars(found).items() if not torch.equal(one, vars(wanted)[name])]


def overflown(session: Session, overflow: Any) -> tuple[int, list[bool]]:
    """All choices of rank 0 are for one expert, with room for one row.

    Return how many choices were dropped, and of each token of this rank whether its sum is there.
    """
    n = session.world_size
    layout = ExpertLayout(rank=session.rank, world_size=n, experts=n, top_k=1, max_tokens=MOST, hidden=16)
    with programs.opened(layout, mechanism="slabs", overflow=overflow, capacity_factor=n / MOST) as dispatcher:
        x = torch.ones(MOST, 16)
        ids = torch.zeros(MOST, 1, dtype=torch.int32) if session.rank == 0 else torch.full((MOST, 1), -1)
        for _ in range(3):
            rows, _, handle = dispatcher.dispatch(x, ids, torch.ones(MOST, 1))
            y = dispatcher.combine(rows, handle)
        return dispatcher.dropped(), (y == 1).all(1).tolist()


@pytest.mark.parametrize("how", [nullcontext, as_captured, on_software_gpu])
def test_random_routings(three_ranks: Ranks, how: Callable[[int], Any]) -> None:
    """Ranks and experts without tokens, one expert for all, any room in the first round, float8, bfloat16."""
    assert three_ranks.run(compared, 1, 6, how) == [[]] * 3


@pytest.mark.parametrize(
    ("overflow", "dropped", "there"), [("drop", 33, [True] + [False] * 11), ("second_round", 0, [True] * 12)]
)
def test_choices_without_room_are_dropped_or_sent_later(
    two_ranks: Ranks, overflow: str, dropped: int, there: list[bool]
) -> None:
    assert two_ranks.run(overflown, overflow) == [(dropped, there), (0, [False] * 12)]
