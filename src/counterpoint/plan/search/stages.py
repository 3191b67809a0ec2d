"""Deal layers to stages so that the busiest stage has the least to do, and every stage fits in memory.

Layers go one by one to the stage that has least to do with one more, of those that have room. Where all layers take
equally long, no other way to deal them has a shorter busiest stage (`tests/proof/plan/test_search.py` tries all); where
only some have experts, the mean of all stands for each.
Of equal stages the later one is taken: it has fewer micro-batches in flight.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from counterpoint.plan.compute.roofline import GpuRates
from counterpoint.plan.job.job import Job
from counterpoint.plan.network.estimate import MeshTimes
from counterpoint.plan.step.layer_time import LayerTimes, end_us
from counterpoint.plan.step.step import least_dealt_us, least_division_us


def balanced(layers: int, layer_us: float, ends_us: Sequence[float], room: Sequence[int]) -> tuple[int, ...] | None:
    """Return the layers of each stage; None if there is no room for all of them.

    Args:
        layers: number of layers.
        layer_us: time of one layer.
        ends_us: by stage, the time of what it runs besides layers.
        room: by stage, the most layers that it can have.
    """
    if sum(room) < layers:
        return None
    # no stage ends with less than its share of all layers and the least end, so it has at least these
    level_us = layers * layer_us / len(ends_us) + min(ends_us)
    found = [min(max(int((level_us - end_us) / layer_us), 0), most) for end_us, most in zip(ends_us, room, strict=True)]
    waiting = [
        (end_us + (found[stage] + 1) * layer_us, -stage)
        for stage, end_us in enumerate(ends_us)
        if found[stage] < room[stage]
    ]
    heapq.heapify(waiting)
    for _ in range(layers - sum(found)):
        stage = -waiting[0][1]
        found[stage] += 1
        if found[stage] < room[stage]:
            heapq.heapreplace(waiting, (ends_us[stage] + (found[stage] + 1) * layer_us, -stage))
        else:
            heapq.heappop(waiting)
    return tuple(found)


def balanced_job(
    job: Job, layer_us: float, ends_us: tuple[float, float], totals: Callable[[Job], list[float]]
) -> Job | None:
    """Return the job with balanced stages that fit in memory; None if no way to deal its layers fits.

    A stage that does not fit with n layers fits with n - 1 or fewer only, so its room shrinks until all of them fit.

    Args:
        job: the job.
        layer_us: time of one layer.
        ends_us: time of embedding and of head.
        totals: GiB of every stage of a job.
    """
    ends, virtual = _ends(job, ends_us), job.parallel.virtual
    room = [job.model.layers] * job.parallel.pp
    while (each := balanced(job.model.layers, layer_us, ends, room)) is not None:
        found = replace(job, parallel=replace(job.parallel, ends_count=False, stage_layers=_parts(each, virtual)))
        full = [stage for stage, gib in enumerate(totals(found)) if gib > job.cluster.gpu.memory_gib]
        if not full:
            return found
        for stage in full:
            room[stage] = max(each[stage] - 1, 0)
        if any(each[stage] == 0 for stage in full):
            return None
    return None


def least_of_balanced_us(job: Job, rates: GpuRates, mesh: MeshTimes, layers: LayerTimes) -> float:
    """Return a lower bound of the step µs, however layers are dealt, for a job without zero and recomputation.

    Args:
        job: the job.
        rates: rates of its GPU.
        mesh: times of its collectives.
        layers: times of its layers.
    """
    if 0 < job.model.expert_layers < job.model.layers:  # unequal layers can be dealt more evenly than equal ones
        return least_division_us(job, rates, mesh, layers)
    model, ends_us, layer_us = job.model, _ends(job, end_us(job, rates, layers)), layers.mean_us(job.model)
    each = balanced(model.layers, layer_us, ends_us, [model.layers] * len(ends_us)) or ()
    return least_dealt_us(job, rates, mesh, layers, each, ends_us)


def _ends(job: Job, ends_us: tuple[float, float]) -> list[float]:
    """Return the µs that each stage spends on embedding or head, besides its layers."""
    found = [0.0] * job.parallel.pp
    found[0] += ends_us[0]
    found[-1] += ends_us[1]
    return found


def _parts(stages: Sequence[int], virtual: int) -> tuple[int, ...]:
    """Return the layers of each part, in the model's order; the first parts of a stage have one more if needed."""
    return tuple(layers // virtual + (turn < layers % virtual) for turn in range(virtual) for layers in stages)
