"""What the ranks of a test run: each function is called on every rank with its session."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist

from counterpoint.errors import CounterpointError
from counterpoint.measurement.collective import Comm, WrongResult, allocate, elements_of
from counterpoint.measurement.mechanisms import Mechanism
from counterpoint.measurement.pairs import Calibration
from counterpoint.measurement.parts import measure_part
from counterpoint.measurement.session import Session
from counterpoint.parallel.tensor.overlapped import Weight
from counterpoint.records.measurement import Block, Outcome, Plan, Scenario

T = TypeVar("T")


def opened(session: Session, collective: str, size_bytes: int) -> Comm:
    numel = elements_of(size_bytes, session.dtype.itemsize, session.world_size)
    buffers = allocate(
        collective,
        numel=numel,
        rank=session.rank,
        world_size=session.world_size,
        dtype=session.dtype,
        seed=3,
        empty=partial(torch.empty, dtype=session.dtype, device=session.device),
    )
    return Comm(buffers=buffers, group=session.world)


def check_is_quiet(session: Session, collective: str, size_bytes: int) -> str:
    """The check of a correct collective; its text if it complains."""
    try:
        opened(session, collective, size_bytes).check()
    except WrongResult as error:
        return str(error)
    return ""


def check_a_wrong_one(session: Session, collective: str) -> str:
    """The check of a collective whose last element comes out one unit in the last place too large, on rank 1 only."""
    right = Comm.launch

    def wrong(comm: Comm) -> None:
        right(comm)
        if session.rank == 1:
            comm.buffers.recv[-1] *= 1.5

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comm, "launch", wrong)
        return check_is_quiet(session, collective, 4096)


def check_a_missing_write(session: Session) -> str:
    """The check of an all_gather that does nothing after a first good one."""
    comm = opened(session, "all_gather", 4096)
    comm.check()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Comm, "launch", lambda comm: None)
            comm.check()
    except WrongResult as error:
        return str(error)
    return ""


def slow_pair(session: Session, what: str, compute_s: float, comm_s: float) -> dict[str, float]:
    """One trial of a pair that only sleeps."""
    lanes = session.lanes(lambda: time.sleep(compute_s), lambda: time.sleep(comm_s))
    trial = session.stage.run(lanes, what)  # type: ignore[arg-type]
    return {name: value for name, value in dataclasses.asdict(trial).items() if not math.isnan(value)}


def agree(session: Session, values: tuple[str, ...]) -> str:
    """What `agree` says if rank r holds values[r]."""
    try:
        session.check_agreement("the flavour", values[session.rank])
    except CounterpointError as error:
        return str(error)
    return ""


def fail_on(session: Session, rank: int) -> str:
    """What `together` raises on each rank if one of them fails."""

    def action() -> int:
        if session.rank == rank:
            raise ValueError("no room")
        return 1

    try:
        return str(session.raise_together(action))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def scenario(session: Session, asked: Scenario, rounds: int) -> Outcome | str:
    """One measured scenario, or the text of what it raised."""
    plan = Plan(
        suite="test",
        device="cpu",
        world_size=session.world_size,
        parts=(asked,),
        rounds=rounds,
        results="",
        errors="",
    )
    try:
        return measure_part(session, asked, plan, Calibration())
    except CounterpointError as error:
        return f"{type(error).__name__}: {error}"


def block(session: Session, asked: Block) -> Outcome | str:
    """Measured building blocks, or the text of what they raised."""
    plan = Plan(suite="t", device="cpu", world_size=2, parts=(), rounds=5, results="", errors="")
    try:
        return measure_part(session, asked, plan, Calibration())
    except CounterpointError as error:
        return f"{type(error).__name__}: {error}"


def wrong_matmul(session: Session, asked: Block) -> Outcome | str:
    """Measured matmuls whose every element is off, on rank 1 only."""
    right = Weight.multiply

    def wrong(weight: Weight, rows: torch.Tensor, out: torch.Tensor, row_scale: torch.Tensor | None = None) -> None:
        right(weight, rows, out, row_scale)
        if session.rank == 1:
            out.mul_(1.001)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Weight, "multiply", wrong)
        return block(session, asked)


def _old_on_rank_1(session: Session, action: Callable[[], T]) -> T:
    """Runs `action` where no mechanism is available on rank 1."""
    real = Mechanism.why_unavailable
    if session.rank == 1:
        Mechanism.why_unavailable = lambda self, collective: "rank 1 is too old"  # type: ignore[method-assign]
    try:
        return action()
    finally:
        Mechanism.why_unavailable = real  # type: ignore[method-assign]


def scenario_that_rank_1_does_not_offer(session: Session, asked: Scenario) -> Outcome | str:
    return _old_on_rank_1(session, lambda: scenario(session, asked, 5))


def block_not_offered(session: Session, asked: Block) -> Outcome | str:
    return _old_on_rank_1(session, lambda: block(session, asked))


def ranks_seen(session: Session) -> int:
    """Sum of ones over the group: how many ranks really take part."""
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return int(ones)
