"""A job's step as the record that is printed: parts with their meaning, timeline, curves, sensitivities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from counterpoint.errors import Misconfigured
from counterpoint.plan.job import Job
from counterpoint.plan.job_file import parse_job
from counterpoint.plan.memory import Memory
from counterpoint.plan.schedule import placed
from counterpoint.plan.search import Searched
from counterpoint.plan.step import Step, step
from counterpoint.plan.what_if import WHAT_IFS, swept
from counterpoint.records.prediction import Bar, Choice, Curve, Part, Point, Prediction, SearchResult, Sensitivity

__all__ = ["PARTS", "answer", "curve", "predict", "scaling", "searched", "sensitivities"]

PARTS = {
    "matmul": "matrix products",
    "attention": "scores and values",
    "memory_bound": "norms, activations, and what else waits for memory",
    "recompute": "computed again for backward",
    "shard_copies": "copies into and out of what is gathered and reduced",
    "tensor": "exposed: activations between ranks that share a matrix",
    "context": "exposed: keys and values between ranks that share a sequence",
    "expert": "exposed: tokens to their experts and back",
    "shards": "exposed: parameters gathered, gradients scattered",
    "gradients": "exposed: gradients between replicas, once a step",
    "bubble": "stages of the pipeline that wait",
    "optimizer": "the update",
    "stragglers": "the slowest rank over the mean",
}
AXES = {
    "tp": "ranks that share a matrix",
    "cp": "ranks that share a sequence",
    "ep": "ranks that share experts",
    "shards": "parameters and gradients of zero 3",
    "gradients": "replicas, once a step",
}
NOTHING = 1e-9  # of a step: what is left when equal times are taken from each other
MAX_BARS = 8000  # of a timeline
SHOWN = 4  # times as many micro-batches as stages
DOUBLED = ("network between nodes", "NVLink", "matrix throughput", "memory bandwidth")


def answer(tables: Mapping[str, Any], *, asked: Mapping[str, str] | None = None, detailed: bool = False) -> Prediction:
    """The prediction of a job.

    Args:
        tables: of its file, after what was asked.
        asked: what was changed in them, to be shown.
        detailed: also timeline, scaling over nodes and sensitivities, for a page.

    Raises:
        Misconfigured: no such job.
    """
    job = parse_job(tables)
    mine = step(job)
    found = predict(job, mine, asked or {})
    if not detailed:
        return found
    return msgspec.structs.replace(
        found, timeline=_timeline(job, mine), curves=scaling(tables, job), sensitivities=sensitivities(job)
    )


def predict(job: Job, found: Step, asked: Mapping[str, str]) -> Prediction:
    """A step as a record."""
    memory = found.memory
    return Prediction(
        model=job.model.name,
        gpu=job.cluster.gpu.name,
        gpus=job.parallel.world_size,
        step_us=found.step_us,
        parts=tuple(
            Part(name=name, us=found.parts[f"{name}_us"], means=means)
            for name, means in PARTS.items()
            if found.parts[f"{name}_us"] > NOTHING * found.step_us
        ),
        comm=tuple(Part(name=axis, us=us, means=AXES.get(axis, axis)) for axis, us in found.comm_us.items() if us > 0),
        exposed_comm_us=found.exposed_comm_us,
        comm_to_compute=found.comm_to_compute,
        serial_us=found.serial_us,
        ideal_us=found.ideal_us,
        micro_batches=found.micro_batches,
        tokens_per_s=found.tokens_per_s,
        model_tflops=found.model_tflops,
        mfu=found.mfu,
        memory=_memory(memory),
        memory_available_gib=memory.available_gib,
        fits=memory.fits,
        verdict=memory.verdict,
        validated=found.validated,
        notes=found.notes,
        job=msgspec.to_builtins(job),
        asked=dict(asked),
    )


def _memory(memory: Memory) -> dict[str, float]:
    names = ("parameters", "gradients", "optimizer", "gathered", "activations", "head", "reserved")
    return {name: getattr(memory, f"{name}_gib") for name in names}


def curve(tables: Mapping[str, Any], name: str, values: Sequence[str]) -> Curve:
    """The job over the values of one what-if or field; a value that cannot be has its reason.

    Raises:
        Misconfigured: no values, too many, or no such name.
    """
    unit = WHAT_IFS[name].unit if name in WHAT_IFS else ""
    points = tuple(_point(value, job) for value, job in swept(tables, name, values))
    if all(point.why_not for point in points):
        raise Misconfigured(f"{name}: no value can be: {points[0].why_not}")
    return Curve(name=name, unit=unit, points=points)


def _point(value: str, job: Job | Misconfigured) -> Point:
    try:
        if isinstance(job, Misconfigured):
            raise job
        found = step(job)
    except Misconfigured as error:
        return Point(value=value, why_not=str(error))
    return Point(
        value=value,
        step_us=found.step_us,
        mfu=found.mfu,
        exposed_comm_us=found.exposed_comm_us,
        tokens_per_s=found.tokens_per_s,
        memory_gib=found.memory.total_gib,
        fits=found.memory.fits,
    )


def scaling(tables: Mapping[str, Any], job: Job) -> tuple[Curve, ...]:
    """The same batch, and the same batch per replica, on a quarter to four times the nodes; only what can be."""
    nodes = max(1, job.parallel.world_size // job.cluster.levels[0].size)
    values = [str(n) for n in sorted({max(1, nodes // 4), max(1, nodes // 2), nodes, 2 * nodes, 4 * nodes})]
    found = []
    for name in ("nodes", "weak_nodes"):
        points = tuple(point for point in (_point(*each) for each in swept(tables, name, values)) if not point.why_not)
        if len(points) > 1:
            found.append(Curve(name=name, unit=WHAT_IFS[name].unit, points=points))
    return tuple(found)


def sensitivities(job: Job) -> tuple[Sensitivity, ...]:
    """The step with one thing twice as good, or without it; what changes it most first."""
    now = step(job).step_us
    others = {f"{name}, twice": _doubled(job, name) for name in DOUBLED}
    others["latency of the network, none"] = _levels(job, lambda level: {"latency_us": 0.0})
    others["overlap without disturbance"] = msgspec.structs.replace(job, mechanism="ideal")
    if job.mechanism != "zero_sm":
        others["zero-SM collectives"] = msgspec.structs.replace(job, mechanism="zero_sm")
    found = [
        Sensitivity(name=name, step_us=us, change=us / now - 1)
        for name, us in ((name, step(other).step_us) for name, other in others.items())
        if us != now
    ]
    return tuple(sorted(found, key=lambda each: each.change))


def _doubled(job: Job, name: str) -> Job:
    gpu = job.cluster.gpu
    match name:
        case "matrix throughput":
            faster = msgspec.structs.replace(gpu, tflops={what: 2 * each for what, each in gpu.tflops.items()})
        case "memory bandwidth":
            faster = msgspec.structs.replace(gpu, memory_gb_per_s=2 * gpu.memory_gb_per_s)
        case _:
            network = name == "network between nodes"
            return _levels(
                job, lambda level: {"gb_per_s": 2 * level.gb_per_s} if (level.kind == "network") == network else {}
            )
    return msgspec.structs.replace(job, cluster=msgspec.structs.replace(job.cluster, gpu=faster))


def _levels(job: Job, change: Any) -> Job:
    levels = tuple(msgspec.structs.replace(level, **change(level)) for level in job.cluster.levels)
    return msgspec.structs.replace(job, cluster=msgspec.structs.replace(job.cluster, levels=levels))


def _timeline(job: Job, found: Step) -> tuple[Bar, ...]:
    """What the stages run: all micro-batches, or as many as show how the pipeline fills, goes on and drains."""
    bars = placed(job.parallel.schedule, found.times, min(found.micro_batches, SHOWN * job.parallel.pp))
    return tuple(
        Bar(
            stage=bar.stage, kind=bar.slot.kind, micro=bar.slot.micro, part=bar.slot.part,
            start_us=bar.start_us, end_us=bar.end_us,
        )
        for bar in sorted(bars, key=lambda bar: bar.start_us)[:MAX_BARS]
    )  # fmt: skip


def searched(found: Searched) -> SearchResult:
    """A search as a record."""
    return SearchResult(
        considered=found.considered,
        priced=found.priced,
        too_large=found.too_large,
        impossible=found.impossible,
        choices=tuple(
            Choice(
                settings=_settings(each.job),
                step_us=each.step.step_us,
                mfu=each.step.mfu,
                memory_gib=each.step.memory.total_gib,
            )
            for each in found.best
        ),
    )


def _settings(job: Job) -> dict[str, int | str]:
    degrees = ("dp", "tp", "pp", "virtual", "schedule", "cp", "ep", "zero")
    mine = {f"parallel.{name}": getattr(job.parallel, name) for name in degrees}
    return mine | {"training.micro_batch": job.training.micro_batch, "training.recompute": job.training.recompute}
