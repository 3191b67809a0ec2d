"""The fastest way to divide a job that fits in memory: every combination of degrees is priced, none guessed.

Choices: tp and cp up to a node, pp, virtual parts, schedule, zero, micro-batch, recomputation and ep, for the GPUs and
the batch of the job. What cannot be divided so, or does not fit, is counted and left out; memory is looked at first.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nsmallest
from itertools import product

import msgspec

from counterpoint.errors import Misconfigured
from counterpoint.plan.compute_cost import Machine
from counterpoint.plan.job import Job
from counterpoint.plan.memory import memory
from counterpoint.plan.networks import network_of
from counterpoint.plan.parallel import Parallel, Training
from counterpoint.plan.prices import Prices
from counterpoint.plan.step import Step, step
from counterpoint.records.base import Record

__all__ = ["Found", "Searched", "search"]

MICRO_BATCHES = (1, 2, 4, 8)
RECOMPUTE = ("none", "selective", "full")
VIRTUAL = (1, 2, 4)
TP_BEYOND = 8  # ranks of tensor parallelism, at most a node's


class Found(Record, frozen=True, kw_only=True):
    """One way to divide the job, and its step."""

    job: Job
    step: Step


class Searched(Record, frozen=True, kw_only=True):
    """What a search has seen.

    Args:
        best: fastest first.
        priced: jobs whose step was computed.
        too_large: that do not fit in memory.
        impossible: that cannot be divided so.
    """

    best: tuple[Found, ...]
    priced: int
    too_large: int
    impossible: int

    @property
    def considered(self) -> int:
        return self.priced + self.too_large + self.impossible


def search(job: Job, *, best: int = 10) -> Searched:
    """All combinations for this job's model, batch, GPUs and mechanism.

    Args:
        job: its degrees, micro-batch and recomputation are the ones that are sought.
        best: how many to keep.

    Raises:
        Misconfigured: no combination fits, and what the closest lacks.
    """
    machine, prices = Machine.of(job.cluster.gpu, job.training.precision), Prices(network_of(job.cluster))
    impossible, too_large, smallest = 0, 0, float("inf")
    found: list[Found] = []
    priced = 0
    for candidate in _candidates(job):
        if candidate is None:
            impossible += 1
            continue
        need = memory(candidate)
        if not need.fits:
            too_large, smallest = too_large + 1, min(smallest, need.total_gib)
            continue
        try:
            found.append(Found(job=candidate, step=step(candidate, prices=prices, machine=machine)))
            priced += 1
        except Misconfigured:
            impossible += 1
        if len(found) > 64 * best:
            found = nsmallest(best, found, key=_us)
    if not found:
        raise Misconfigured(
            f"none of {too_large + impossible} ways to divide the job fits: the smallest takes {smallest:.1f} of "
            f"{job.cluster.gpu.memory_gib:g} GiB; give more GPUs, a smaller micro_batch or GPUs with more memory"
        )
    return Searched(
        best=tuple(nsmallest(best, found, key=_us)), priced=priced, too_large=too_large, impossible=impossible
    )


def _us(found: Found) -> float:
    return found.step.step_us


def _candidates(job: Job) -> Iterator[Job | None]:
    """Every job of the search; None where the model or batch cannot be divided so."""
    ranks, node = job.parallel.world_size, job.cluster.levels[0].size
    inside = [n for n in _divisors(ranks) if n <= min(node, TP_BEYOND)]
    experts = _divisors(job.model.experts.count) if job.model.experts else [1]
    for tp, cp, pp in product(inside, [n for n in _divisors(ranks) if n <= node], _divisors(ranks)):
        if ranks % (tp * cp * pp) or pp > job.model.layers:
            continue
        dp = ranks // (tp * cp * pp)
        for (virtual, schedule), zero, micro, recompute, ep in product(
            _schedules(pp), (0, 1, 2, 3) if dp * cp > 1 else (0,), MICRO_BATCHES, RECOMPUTE, experts
        ):
            if (dp * cp) % ep:
                continue
            degrees = {"dp": dp, "tp": tp, "cp": cp, "pp": pp, "ep": ep, "zero": zero, "shard": None}
            yield _changed(job, degrees | {"virtual": virtual, "schedule": schedule}, micro, recompute)


def _schedules(pp: int) -> list[tuple[int, str]]:
    if pp == 1:
        return [(1, "1f1b")]
    return [(1, "1f1b"), (1, "zero_bubble"), *((virtual, "interleaved") for virtual in VIRTUAL if virtual > 1)]


def _changed(job: Job, degrees: dict[str, object], micro_batch: int, recompute: str) -> Job | None:
    try:
        parallel: Parallel = msgspec.structs.replace(job.parallel, **degrees)
        training: Training = msgspec.structs.replace(job.training, micro_batch=micro_batch, recompute=recompute)
        return msgspec.structs.replace(job, parallel=parallel, training=training)
    except Misconfigured:
        return None


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
