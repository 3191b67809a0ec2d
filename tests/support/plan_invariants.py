"""What holds for every job whatever the constants are, as a table of functions that raise AssertionError."""

import math
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, permutations
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from counterpoint.errors import Misconfigured
from counterpoint.plan.answer import answer
from counterpoint.plan.compute.memory import memory
from counterpoint.plan.job.changes import build_job, on_nodes
from counterpoint.plan.job.cluster import Level
from counterpoint.plan.job.job import Job, job_toml, parse_job
from counterpoint.plan.job.model import model_flops
from counterpoint.plan.job.parallel import Parallel, deal_layers, part_parameters
from counterpoint.plan.step.schedule import scheduled
from counterpoint.plan.step.step import predict_step
from counterpoint.records.prediction import Prediction

ROUNDING = 1e-9

Invariant = Callable[[Job], None]
Record = Literal["model", "training", "parallel", "ranks"]
Measure = Callable[[Job | None], float | None]
INVARIANTS: dict[str, Invariant] = {}


def invariant(check: Invariant) -> Invariant:
    """Add a function to the table; its name says what holds."""
    INVARIANTS[check.__name__] = check
    return check


def us(job: Job) -> float:
    return predict_step(job).step_us


def gib(job: Job) -> float:
    return memory(job).total_gib


def changed(job: Job, record: Record, **fields: Any) -> Job | None:
    """Return the job with other values in one of its records; None where it cannot be."""
    try:
        found = replace(job, **{record: replace(getattr(job, record), **fields)})
        predict_step(found)
    except Misconfigured:
        return None
    return found


def with_levels(job: Job, change: Callable[[Level], dict[str, Any]]) -> Job:
    levels = tuple(replace(level, **change(level)) for level in job.cluster.levels)
    return replace(job, cluster=replace(job.cluster, levels=levels))


def times(name: str, factor: float, *, between_nodes: bool | None = None) -> Callable[[Level], dict[str, Any]]:
    """Multiply a figure of levels: of all, of those between nodes, or of those inside."""

    def change(level: Level) -> dict[str, Any]:
        is_meant = between_nodes is None or (level.kind == "network") == between_nodes
        return {name: getattr(level, name) * factor} if is_meant else {}

    return change


def with_gpu(job: Job, **figures: Any) -> Job:
    return replace(job, cluster=replace(job.cluster, gpu=replace(job.cluster.gpu, **figures)))


def rising(*values: float | None) -> None:
    """Raise unless the values rise or stay; those that cannot be are left out."""
    there = [value for value in values if value is not None]
    for less, more in pairwise(there):
        assert less <= more * (1 + ROUNDING), there


def time_of(job: Job | None) -> float | None:
    return None if job is None else us(job)


def memory_of(job: Job | None) -> float | None:
    return None if job is None else gib(job)


def numbers(found: object) -> list[float]:
    if isinstance(found, dict):
        return [number for value in found.values() for number in numbers(value)]
    if isinstance(found, list | tuple):
        return [number for value in found for number in numbers(value)]
    return [found] if isinstance(found, int | float) else []


def _rises(job: Job, of: Measure, record: Record, name: str, values: Sequence[Any], are_factors: bool) -> None:
    now = getattr(getattr(job, record), name)
    rising(*(of(changed(job, record, **{name: now * value if are_factors else value})) for value in values))


_RISING: dict[str, tuple[Measure, Record, str, Sequence[Any], bool]] = {
    "fused_kernels_are_never_slower": (time_of, "training", "fused_kernels", (True, False), False),
    "fused_accumulation_is_never_slower": (time_of, "training", "fused_accumulation", (True, False), False),
    "recomputation_is_never_faster": (time_of, "training", "recompute", ("none", "selective", "full"), False),
    "recomputation_saves_memory": (memory_of, "training", "recompute", ("full", "selective", "none"), False),
    "flash_attention_saves_memory": (memory_of, "training", "flash_attention", (True, False), False),
    "more_tokens_are_never_faster": (time_of, "training", "sequence", (1, 2, 4), True),
    "a_larger_batch_is_never_faster": (time_of, "training", "global_batch", (1, 2, 3, 8), True),
    "more_layers_are_never_faster": (time_of, "model", "layers", (1, 2, 4), True),
    "a_larger_vocabulary_is_never_faster": (time_of, "model", "vocab", (1, 2, 4), True),
    "overlap_of_tp_is_never_slower": (time_of, "parallel", "overlap_tp", (True, False), False),
    "overlap_of_dp_is_never_slower": (time_of, "parallel", "overlap_dp", (True, False), False),
    "overlap_of_pp_is_never_slower": (time_of, "parallel", "overlap_pp", (True, False), False),
    "a_slower_rank_is_never_faster": (time_of, "ranks", "slow", (1.0, 1.1, 3.0), False),
    "jitter_is_never_faster": (time_of, "ranks", "jitter", (0.0, 0.02, 0.5), False),
}
INVARIANTS |= {
    name: partial(_rises, of=of, record=record, name=field, values=values, are_factors=are_factors)
    for name, (of, record, field, values, are_factors) in _RISING.items()
}


LESS = (4.0, 2.0, 1.0, 0.7, 0.1)


def _later(more_us: float) -> Callable[[Level], dict[str, Any]]:
    return lambda level: {"latency_us": level.latency_us + more_us}


def _with_peaks(job: Job, factor: float) -> Job:
    return with_gpu(job, tflops={name: peak * factor for name, peak in job.cluster.gpu.tflops.items()})


def _with_memory_rate(job: Job, factor: float) -> Job:
    return with_gpu(job, memory_gb_per_s=job.cluster.gpu.memory_gb_per_s * factor)


_NEVER_FASTER: dict[str, tuple[Callable[[Job, float], Job], Sequence[float]]] = {
    "less_bandwidth_between_nodes": (lambda job, f: with_levels(job, times("gb_per_s", f, between_nodes=True)), LESS),
    "less_bandwidth_inside_nodes": (lambda job, f: with_levels(job, times("gb_per_s", f, between_nodes=False)), LESS),
    "more_latency": (lambda job, us: with_levels(job, _later(us)), (0.0, 0.5, 5.0, 500.0)),
    "more_oversubscription": (lambda job, f: with_levels(job, times("oversubscription", f)), (1.0, 2.0, 7.0)),
    "fewer_flops_per_second": (_with_peaks, LESS),
    "less_memory_bandwidth": (_with_memory_rate, LESS),
}


def _never_faster(job: Job, change: Callable[[Job, float], Job], values: Sequence[float]) -> None:
    rising(*(us(change(job, value)) for value in values))


INVARIANTS |= {
    f"{name}_is_never_faster": partial(_never_faster, change=change, values=values)
    for name, (change, values) in _NEVER_FASTER.items()
}


@invariant
def every_number_is_finite_and_none_is_negative(job: Job) -> None:
    found = msgspec.to_builtins(answer(job))
    assert all(0 <= number < math.inf for number in numbers(found))


@invariant
def parts_add_up_to_the_step(job: Job) -> None:
    step = predict_step(job)
    assert math.isclose(sum(step.parts.values()), step.step_us)
    assert min(step.parts.values()) >= -ROUNDING * step.step_us, step.parts


@invariant
def a_step_is_between_ideal_and_serial(job: Job) -> None:
    step = predict_step(job)
    rising(step.ideal_us, step.step_us, step.serial_us)


@invariant
def exposed_communication_is_part_of_all(job: Job) -> None:
    step = predict_step(job)
    rising(step.exposed_comm_us, sum(step.comm_us.values()))


@invariant
def no_peak_is_exceeded(job: Job) -> None:
    assert 0 < predict_step(job).mfu <= 1


@invariant
def flops_are_those_of_the_model(job: Job) -> None:
    step = predict_step(job)
    tokens = job.training.sequence * job.training.global_batch
    done = step.model_tflops * step.step_us * 1e6 * job.parallel.world_size
    assert math.isclose(done, tokens * model_flops(job.model, job.training.sequence))


@invariant
def tokens_are_those_of_the_batch(job: Job) -> None:
    step = predict_step(job)
    assert math.isclose(step.tokens_per_s * step.step_us / 1e6, job.training.sequence * job.training.global_batch)


@invariant
def sharding_more_never_keeps_more(job: Job) -> None:
    kept = []
    for zero in (3, 2, 1, 0):
        found = changed(job, "parallel", zero=zero)
        if found is not None:
            parts = memory(found).gib
            kept.append(sum(parts[name] for name in ("parameters", "gradients", "optimizer")))
    rising(*kept)


@invariant
def larger_micro_batches_never_take_less_memory(job: Job) -> None:
    sizes = (job.training.micro_batch * factor for factor in (1, 2, 4))
    one = replace(job, training=replace(job.training, recompute="none"))  # fewer micro-batches may be in flight
    found = [changed(one, "training", micro_batch=size) for size in sizes]
    rising(*(None if each is None else memory(each).gib["head"] for each in found))


@invariant
def parameters_do_not_depend_on_the_division(job: Job) -> None:
    whole, *cut = (
        sum(
            part_parameters(job.model, parallel, replace(part, embedding=False, head=False)).total
            for stage in deal_layers(job.model, parallel)
            for part in stage
        )
        for parallel in (Parallel(), replace(job.parallel, tp=1, ep=1), job.parallel)
    )
    assert math.isclose(whole, cut[0])
    assert whole / job.parallel.tp / job.parallel.ep * (1 - ROUNDING) <= cut[1] <= whole * (1 + ROUNDING)


@invariant
def mechanisms_are_between_ideal_and_serial(job: Job) -> None:
    names = ["ideal", "nccl", "serial"]
    rising(*(us(replace(job, mechanism=name)) for name in names))


@invariant
def more_imbalance_is_never_faster(job: Job) -> None:
    if job.model.experts is not None:
        experts = [replace(job.model.experts, imbalance=much) for much in (1.0, 1.2, 4.0)]
        rising(*(time_of(changed(job, "model", experts=each)) for each in experts))


@invariant
def a_gpu_with_more_memory_is_as_fast(job: Job) -> None:
    more = with_gpu(job, memory_gib=2 * job.cluster.gpu.memory_gib)
    assert us(more) == us(job)
    assert memory(more).fits >= memory(job).fits


@invariant
def the_verdict_is_that_of_the_figures(job: Job) -> None:
    found = memory(job)
    assert found.fits == (sum(found.gib.values()) <= job.cluster.gpu.memory_gib)
    assert found.verdict.startswith("fits" if found.fits else "does not fit")


@invariant
def slots_of_a_stage_never_overlap(job: Job) -> None:
    step, micro = predict_step(job), min(job.training.micro_batches(job.parallel), 4 * job.parallel.pp)
    bars = scheduled(job.parallel.schedule, step.times, micro)
    for stage in range(job.parallel.pp):
        mine = sorted((bar.start_us, bar.end_us) for bar in bars if bar.stage == stage)
        rising(*(moment for bar in mine for moment in bar))


@invariant
def a_prediction_is_the_same_twice_and_through_json(job: Job) -> None:
    found = answer(job)
    assert answer(job) == found
    assert msgspec.json.decode(msgspec.json.encode(found), type=Prediction) == found


@invariant
def a_job_is_the_same_through_its_file(job: Job) -> None:
    again = parse_job(tomllib.loads(job_toml(job)))
    assert replace(again, cluster=replace(again.cluster, network=job.cluster.network)) == job


@invariant
def as_many_nodes_as_there_are_change_nothing(job: Job) -> None:
    nodes = job.cluster.num_gpus / job.cluster.gpus_per_node
    if nodes == int(nodes) and job.cluster.num_gpus == job.parallel.world_size:
        assert us(on_nodes(job, int(nodes), batch_grows=False)) == us(job)


@invariant
def linked_flags_are_one_job_in_any_order(job: Job) -> None:
    tables = msgspec.to_builtins(job)
    tables["overlap"] = {"mechanism": tables.pop("mechanism")}
    tables = {name: table for name, table in tables.items() if table is not None}
    tables["cluster"] = {name: tables["cluster"][name] for name in ("gpu", "levels")}
    replica = job.parallel.tp * job.parallel.pp * job.parallel.cp
    nodes = 4 * max(1, -(-replica * job.parallel.ep // job.cluster.gpus_per_node))
    gpus = nodes * job.cluster.gpus_per_node
    batch = str(gpus // replica * 16)
    asked = {"nodes": str(nodes), "parallel.shard": "2"}
    asked |= {"training.global_batch": batch, "training.micro_batch": "2"}
    found: list[Job | str] = []
    for order in permutations(asked.items()):
        try:
            found.append(build_job(tables, dict(order)))
        except Misconfigured as error:
            found.append(str(error))
    assert all(each == found[0] for each in found)
