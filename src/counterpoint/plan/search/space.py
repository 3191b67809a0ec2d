"""List the ways to divide a job: the axes of a search, their values, values that the user fixed, uneven stages.

| axis | values |
|---|---|
| tp | divisors of the GPUs and of the heads, up to a node |
| cp | divisors of the GPUs and of the sequence |
| pp | divisors of the GPUs, up to the layers |
| dp | what is left of the GPUs |
| ep | divisors of dp · cp and of the experts |
| micro_batch | divisors of a replica's samples, up to 64 |
| schedule | 1f1b, interleaved, the job's own; others where they are fixed |
| virtual | with interleaved, divisors of the layers of a stage above 1 |
| stage_layers | equal; ends (`ends_count`); balanced (`balanced_job`): the first two where they divide the layers |
| zero, shard | 0 to 3; shards over all replicas, or over those of a unit of the network, such as a node |
| recompute | none; every set of modules; full; full of the fewest layers of each part that fits |

A fixed value is used even if the list does not have it, such as tp = 16 or zero_bubble.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, product
from typing import Any, NamedTuple, get_type_hints

import msgspec
from msgspec.structs import replace

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.compute.roofline import GpuRates
from counterpoint.plan.job.fields import parse_record, read_value
from counterpoint.plan.job.job import Job
from counterpoint.plan.job.parallel import CORE_ONLY, MAX_PARTS, Parallel, RecomputeModule, Training
from counterpoint.plan.network.estimate import MeshTimes
from counterpoint.plan.step.layer_time import LayerTimes, end_us
from counterpoint.plan.step.step import least_dealt_us, least_division_us
from counterpoint.records import Record

MAX_MICRO_BATCH = 64
LAYOUTS = ("equal", "ends", "balanced")
AXES = {
    **{
        name: f"parallel.{name}"
        for name in ("dp", "tp", "cp", "pp", "virtual", "schedule", "stage_layers", "ep", "zero", "shard")
    },
    **{
        name: f"training.{name}"
        for name in ("micro_batch", "recompute", "recompute_modules", "recompute_method", "recompute_num_layers")
    },
}
Fixed = Mapping[str, tuple[Any, ...]]
"""Values of axes, by the last word of the field; an axis that is not in it is free."""


class Division(NamedTuple):
    """Holds the degrees of parallelism and the micro-batch size."""

    dp: int
    tp: int
    cp: int
    pp: int
    ep: int
    micro_batch: int


class Pipeline(NamedTuple):
    """Describes a schedule and the layers per stage: `layers` is one of LAYOUTS, or each part's number of layers."""

    schedule: str
    virtual: int
    layers: str | tuple[int, ...]


class Sharding(NamedTuple):
    """Holds the zero stage, and the number of ranks over which that stage shards (None: all replicas)."""

    zero: int
    shard: int | None


class Recomputation(NamedTuple):
    """Describes what backward recomputes; `num_layers` = 0: as few layers as let the job fit in memory."""

    recompute: str = "none"
    modules: tuple[RecomputeModule, ...] = CORE_ONLY
    method: str | None = None
    num_layers: int | None = None


def read_fixed(texts: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Return the values in `AXIS=VALUE,VALUE` by axis of the search; a list in brackets, as [7,8,8,7], is one value."""
    found: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals and value):
            raise Misconfigured(f"--fix {printable(text, 120)}: give AXIS=VALUE or AXIS=VALUE,VALUE, as in tp=4,8")
        if name in found:
            raise Misconfigured(f"--fix {printable(name, 80)} comes twice: give all its values at once")
        parts = [value] if value.startswith("[") else value.split(",")
        found[name] = tuple(read_value(part.strip()) for part in parts)
    return found


def check_fixed(given: Mapping[str, tuple[Any, ...]]) -> Fixed:
    """Return the fixed values by axis; raise Misconfigured for an unknown axis or a value its field cannot have."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, values in given.items():
        axis = name.rpartition(".")[2]
        if axis not in AXES or name not in (axis, AXES[axis]):
            raise Misconfigured(
                f"{printable(name)} is no axis of a search: give one of {', '.join(AXES)}; "
                "other fields are set in the job"
            )
        if not values:
            raise Misconfigured(f"{name}: no value; give at least one")
        found[axis] = tuple(_checked(axis, value) for value in values)
    return found


def _checked(axis: str, value: object) -> Any:
    if axis == "stage_layers" and isinstance(value, str):
        if value not in LAYOUTS:
            raise Misconfigured(
                f"stage_layers = {printable(value)}: give {', '.join(LAYOUTS)}, or the layers of every part"
            )
        return value
    table, kind = ("parallel", Parallel) if AXES[axis].startswith("parallel") else ("training", Training)
    only: type[Any] = msgspec.defstruct(
        kind.__name__, [(axis, get_type_hints(kind, include_extras=True)[axis])], bases=(Record,)
    )
    return getattr(parse_record(table, {axis: value}, only), axis)


def divisions(job: Job, gpus: int, fixed: Fixed) -> Iterator[Division]:
    """Yield all divisions of `gpus` GPUs, also those that the model or the batch rules out."""
    node = job.cluster.gpus_per_node
    experts = job.model.experts.count if job.model.experts else 1
    every = divisors(gpus)
    tps = fixed.get("tp", tuple(n for n in every if n <= node))
    cps = fixed.get("cp", tuple(n for n in every if job.training.sequence % n == 0))
    pps = fixed.get("pp", tuple(n for n in every if n <= min(job.model.layers, MAX_PARTS)))
    for tp, cp, pp in product(tps, cps, pps):
        if gpus % (tp * cp * pp):
            continue
        dp = gpus // (tp * cp * pp)
        if dp not in fixed.get("dp", (dp,)):
            continue
        samples, left_out = divmod(job.training.global_batch, dp)
        micros = divisors(samples, MAX_MICRO_BATCH) if not left_out else (1,)
        for ep in fixed.get("ep", divisors(experts)):
            if (dp * cp) % ep == 0:
                yield from (Division(dp, tp, cp, pp, ep, micro) for micro in fixed.get("micro_batch", micros))


def pipelines(job: Job, division: Division, fixed: Fixed) -> Iterator[Pipeline]:
    """Yield all pipelines (schedule, parts per stage, layout) of a division."""
    pp, layers = division.pp, job.model.layers
    samples = job.training.global_batch // division.dp // division.micro_batch
    own = ("1f1b", *(("interleaved",) if pp > 1 and samples % pp == 0 else ()))
    if pp > 1 and job.parallel.schedule not in ("1f1b", "interleaved"):
        own += (job.parallel.schedule,)
    for schedule in fixed.get("schedule", own):
        for virtual in fixed.get("virtual", _virtual(layers, pp) if schedule == "interleaved" else (1,)):
            parts = pp * virtual
            for layout in fixed.get("stage_layers", LAYOUTS):
                possible = {"equal": layers % parts == 0, "ends": parts > 1 and (layers + 2) % parts == 0}
                possible["balanced"] = pp > 1 and layers >= parts
                if layout not in LAYOUTS or possible[layout]:
                    yield Pipeline(schedule, virtual, layout)


def _virtual(layers: int, pp: int) -> tuple[int, ...]:
    """Return the numbers of parts per stage, above 1, that divide a stage's layers (embedding, head counted or not)."""
    each = {layers // pp, -(-layers // pp), *((layers + 2) // pp for _ in (0,) if (layers + 2) % pp == 0)}
    return tuple(sorted({virtual for stage in each for virtual in divisors(stage) if virtual > 1}))


def shardings(job: Job, division: Division, fixed: Fixed) -> Iterator[Sharding]:
    """Yield each zero stage, sharded over all replicas or over the replicas in one unit of a network level."""
    dp = division.dp
    replica = division.tp * division.cp
    units = {level.size // replica for level in job.cluster.levels[:-1] if level.size % replica == 0}
    inside = sorted(n for n in units if 1 < n < dp and dp % n == 0)
    for zero in fixed.get("zero", (0, 1, 2, 3) if dp * division.cp > 1 else (0,)):
        for shard in fixed.get("shard", (None, *(inside if zero else ()))):
            yield Sharding(zero, shard)


def recomputations(job: Job, fixed: Fixed) -> tuple[Recomputation, ...]:
    """Return all kinds of recomputation that the search tries."""
    kinds = fixed.get("recompute", ("none", "selective", "full"))
    if "recompute_modules" in fixed:
        kinds = tuple(kind for kind in kinds if kind == "selective")
    if "recompute_num_layers" in fixed or "recompute_method" in fixed:
        kinds = tuple(kind for kind in kinds if kind == "full")
    found = [Recomputation()] if "none" in kinds else []
    if "selective" in kinds:
        found += [Recomputation("selective", each) for each in fixed.get("recompute_modules", _module_sets(job))]
    if "full" in kinds:
        counts, methods = fixed.get("recompute_num_layers"), fixed.get("recompute_method", ("block",))
        if counts is None and "recompute_method" not in fixed:
            found.append(Recomputation("full"))
        found += [
            Recomputation("full", method=method, num_layers=count)
            for method in methods
            for count in counts or ((0,) if method == "block" else (1,))
        ]
    return tuple(found)


def _module_sets(job: Job) -> list[tuple[RecomputeModule, ...]]:
    """Return the sets of modules to recompute; without core_attn for flash attention, and moe never with moe_act."""
    modules: list[RecomputeModule] = ["layernorm"]
    if not job.training.flash_attention:
        modules.append("core_attn")
    if job.model.expert_layers < job.model.layers:
        modules.append("mlp")
    if job.model.expert_layers:
        modules += ["moe_act", "moe"]
    found = [each for count in range(1, len(modules) + 1) for each in combinations(modules, count)]
    return [each for each in found if not {"moe", "moe_act"} <= set(each)]


def divided(job: Job, division: Division, *, pieces_tp: bool) -> Job:
    """Return the job with this division, its stages as even as possible, nothing sharded or recomputed.

    With `pieces_tp`, tensor parallelism is in pieces. Raise Misconfigured if model or batch cannot be divided so.
    """
    degrees = division._asdict()
    del degrees["micro_batch"]
    parallel = replace(
        job.parallel, **degrees, virtual=1, schedule="1f1b", zero=0, shard=None, ends_count=False,
        stage_layers=_even(job.model.layers, division.pp),
        pieces_tp=pieces_tp and division.tp > 1,
    )  # fmt: skip
    training = replace(_recomputing(job.training, Recomputation()), micro_batch=division.micro_batch)
    return replace(job, parallel=parallel, training=training)


def _even(layers: int, parts: int) -> tuple[int, ...]:
    """Return the numbers of layers of `parts` parts, as even as possible; the last parts have one more."""
    each, more = divmod(layers, parts)
    return tuple(each + (part >= parts - more) for part in range(parts))


def piped(job: Job, pipeline: Pipeline) -> Job:
    """Return the job with this pipeline; "balanced" stages stay even until the search deals their layers."""
    layers = pipeline.layers
    stages = layers if isinstance(layers, tuple) else None
    if layers == "balanced":
        stages = _even(job.model.layers, job.parallel.pp * pipeline.virtual)
    parallel = replace(
        job.parallel, schedule=pipeline.schedule, virtual=pipeline.virtual,
        ends_count=layers == "ends", stage_layers=stages,
    )  # fmt: skip
    return replace(job, parallel=parallel)


def sharded(job: Job, sharding: Sharding) -> Job:
    """Return the job with this sharding."""
    return replace(job, parallel=replace(job.parallel, **sharding._asdict()))


def recomputing(job: Job, again: Recomputation) -> Job:
    """Return the job with this recomputation."""
    return replace(job, training=_recomputing(job.training, again))


def _recomputing(training: Training, again: Recomputation) -> Training:
    return replace(
        training, recompute=again.recompute, recompute_modules=again.modules, recompute_method=again.method,
        recompute_num_layers=again.num_layers,
    )  # fmt: skip


def balanced(layers: int, layer_us: float, ends_us: Sequence[float], room: Sequence[int]) -> tuple[int, ...] | None:
    """Return each stage's number of layers so that the busiest stage has least to do; None if `room` is too small.

    Layers go one by one to the stage that has least to do with one more, of those that have room; of equal stages the
    later one is taken, which has fewer micro-batches in flight. Where layers take equally long, nothing has a shorter
    busiest stage (`tests/proof/plan/test_search.py`); where only some have experts, each counts as the mean. `ends_us`
    has the time of embedding or head on each stage, `room` the most layers that it can have.
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
    `ends_us` has the times of embedding and of head; `totals` returns the GiB of every stage of a job.
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
    """Return a lower bound of the step µs over all splits of the layers of `job` (no zero, no recomputation)."""
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
    """Return each part's number of layers, in the model's order; a stage's first parts have one more if needed."""
    return tuple(layers // virtual + (turn < layers % virtual) for turn in range(virtual) for layers in stages)


@cache
def divisors(number: int, most: int | None = None) -> tuple[int, ...]:
    """Return the divisors of a number that are at most `most`."""
    return tuple(n for n in range(1, min(number, most or number) + 1) if number % n == 0)
