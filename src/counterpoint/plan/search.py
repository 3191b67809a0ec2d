"""Find the fastest way to divide a job that fits in memory, by a prediction for every combination of degrees.

Choices: tp and cp up to a node, pp, virtual parts, schedule, zero, micro-batch, recomputation and ep, for the GPUs and
the batch of the job. A combination that is impossible, or does not fit in memory, is counted and left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nsmallest
from itertools import product

import msgspec

from counterpoint.errors import Misconfigured
from counterpoint.plan.compute.memory import memory
from counterpoint.plan.compute.roofline import GpuRates
from counterpoint.plan.confidence import fits_in_memory, step_interval, too_close
from counterpoint.plan.job.job import Job
from counterpoint.plan.job.parallel import Parallel, Training
from counterpoint.plan.network.estimate import CollectiveTimes
from counterpoint.plan.network.protocols import network_of
from counterpoint.plan.step.step import PredictedStep, predict_step
from counterpoint.records.prediction import Choice, SearchResult

MICRO_BATCHES = (1, 2, 4, 8)
RECOMPUTE = ("none", "selective", "full")
VIRTUAL = (2, 4)  # parts per stage, with interleaving
ADVICE = "give more GPUs, a smaller micro_batch or GPUs with more memory"
MAX_TP = 8  # at most a node's GPUs


def search(job: Job, *, best: int = 10) -> SearchResult:
    """Return the `best` fastest of all combinations of degrees for this job's model, batch, GPUs and mechanism."""
    rates, prices = GpuRates.of(job.cluster.gpu, job.training.precision), CollectiveTimes(network_of(job.cluster))
    impossible, too_large, priced, smallest = 0, 0, 0, float("inf")
    found: list[tuple[Job, PredictedStep]] = []
    for candidate in _candidates(job):
        if candidate is None:
            impossible += 1
            continue
        if not (need := memory(candidate)).fits:
            too_large, smallest = too_large + 1, min(smallest, need.total_gib)
            continue
        try:
            found.append((candidate, predict_step(candidate, prices=prices, rates=rates)))
            priced += 1
        except Misconfigured:
            impossible += 1
        if len(found) > 64 * best:
            found = nsmallest(best, found, key=_us)
    if not found:
        ways, gib = too_large + impossible, f"{smallest:.1f} of {job.cluster.gpu.memory_gib:g} GiB"
        raise Misconfigured(f"none of {ways} ways to divide the job fits: the smallest takes {gib}; {ADVICE}")
    fastest = nsmallest(best, found, key=_us)
    return SearchResult(
        considered=priced + too_large + impossible,
        priced=priced,
        too_large=too_large,
        impossible=impossible,
        choices=tuple(_choice(*each, fastest_us=_us(fastest[0])) for each in fastest),
    )


def _us(found: tuple[Job, PredictedStep]) -> float:
    return found[1].step_us


def _choice(job: Job, step: PredictedStep, fastest_us: float) -> Choice:
    degrees = ("dp", "tp", "pp", "virtual", "schedule", "cp", "ep", "zero")
    settings = {f"parallel.{name}": getattr(job.parallel, name) for name in degrees}
    settings |= {"training.micro_batch": job.training.micro_batch, "training.recompute": job.training.recompute}
    interval = step_interval(job, step)
    return Choice(
        settings=settings,
        step_us=step.step_us,
        low_us=interval.low_us,
        high_us=interval.high_us,
        mfu=step.mfu,
        memory_gib=step.memory.total_gib,
        fits_probability=fits_in_memory(step),
        too_close=too_close(step.step_us, fastest_us),
    )


def _candidates(job: Job) -> Iterator[Job | None]:
    """Yield every job of the search; None where the model or batch cannot be divided so."""
    ranks, node = job.parallel.world_size, job.cluster.gpus_per_node
    inside = [n for n in _divisors(ranks) if n <= min(node, MAX_TP)]
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
    return [(1, "1f1b"), (1, "zero_bubble"), *((virtual, "interleaved") for virtual in VIRTUAL)]


def _changed(job: Job, degrees: dict[str, object], micro_batch: int, recompute: str) -> Job | None:
    try:
        parallel: Parallel = msgspec.structs.replace(job.parallel, **degrees)
        training: Training = msgspec.structs.replace(job.training, micro_batch=micro_batch, recompute=recompute)
        return msgspec.structs.replace(job, parallel=parallel, training=training)
    except Misconfigured:
        return None


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
