"""Turn a predicted step into printable records: times by part of the step, timeline, curves and sensitivities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from counterpoint.errors import Misconfigured
from counterpoint.plan.compute.memory import stage_totals
from counterpoint.plan.confidence import fits_in_memory, job_features, measured_errors, step_interval
from counterpoint.plan.goodput import training_run
from counterpoint.plan.job.changes import NODES, SAME_GPUS, on_nodes, scaled_links, with_levels
from counterpoint.plan.job.job import Job
from counterpoint.plan.observed import Anchor
from counterpoint.plan.step.schedule import scheduled
from counterpoint.plan.step.step import PredictedStep, predict_step
from counterpoint.records.prediction import (
    Bar,
    Curve,
    PlacementResult,
    PlanOutcome,
    Prediction,
    StepInterval,
    TimePart,
)

if TYPE_CHECKING:
    from counterpoint.plan.placement.launch_files import LaunchFile


PARTS = {
    "matmul": "matrix products", "attention": "scores and values",
    "memory_bound": "norms, activations, and what else waits for memory", "recompute": "computed again for backward",
    "shard_copies": "copies into and out of what is gathered and reduced",
    "tensor": "exposed: activations between ranks that share a matrix",
    "context": "exposed: keys and values between ranks that share a sequence",
    "expert": "exposed: tokens to their experts and back",
    "shards": "exposed: parameters gathered, gradients scattered",
    "gradients": "exposed: gradients between replicas, once a step", "bubble": "stages of the pipeline that wait",
    "host": "launch-bound: the host launches kernels more slowly than the GPU runs them",
    "offload": "exposed: activations to the host and back", "optimizer": "the update",
    "stragglers": "the slowest rank over the mean",
}  # fmt: skip
AXES = {
    "tp": "ranks that share a matrix",
    "cp": "ranks that share a sequence",
    "ep": "ranks that share experts",
    "shards": "parameters and gradients of zero 3",
    "gradients": "replicas, once a step",
}
CURVES = {  # what the values of a curve change, and what stays
    "nodes": "Train on more or fewer nodes with the same batch (strong scaling).",
    "weak_nodes": "Train on more or fewer nodes; the batch grows with them (weak scaling).",
    **dict.fromkeys(SAME_GPUS, "On as many GPUs: parallel.dp takes those that it leaves."),
}
MUCH = 0.4  # fraction of a step in exposed communication from which a search for another division pays
NEGLIGIBLE = 1e-9  # fraction of a step: smaller differences of equal times are rounding errors
MAX_BARS = 8000  # at most, in one timeline
SHOWN_ROUNDS = 4  # rounds shown in a timeline; a round is as many micro-batches as there are stages


def answer(
    job: Job, *, asked: Mapping[str, str] | None = None, detailed: bool = False, anchor: Anchor | None = None
) -> Prediction:
    """Return a job's predicted step as the record that is printed; `asked` are the changes that were asked for.

    `detailed` adds timeline, curves and sensitivities; `anchor` is the observed step of the job before the changes, by
    which all times are shifted.
    """
    step = predict_step(job)
    found = _prediction(job, step, asked or {}, anchor)
    if not detailed:
        return found
    return replace(
        found,
        timeline=_timeline(job, step, found.step_us / step.step_us),
        curves=scaling(job, anchor),
        sensitivities=sensitivities(job, anchor),
    )


def _anchored(job: Job, found: PredictedStep, anchor: Anchor | None) -> tuple[PredictedStep, StepInterval]:
    """Return a predicted step and the interval of its time, both scaled by the observed step `anchor` if given."""
    interval = step_interval(job, found)
    if anchor is None:
        return found, interval
    shifted = anchor.shifted(found)
    return shifted, anchor.interval(job, shifted, interval)


def _prediction(job: Job, found: PredictedStep, asked: Mapping[str, str], anchor: Anchor | None) -> Prediction:
    found, interval = _anchored(job, found, anchor)
    tables = msgspec.json.decode(msgspec.json.encode(job))
    del tables["cluster"]["network"]  # the levels say all that was predicted from
    memory, known = found.memory, measured_errors()
    return Prediction(
        model=job.model.name,
        gpu=job.cluster.gpu.name,
        gpus=job.parallel.world_size,
        step_us=found.step_us,
        parts=tuple(TimePart(name=name, us=us, means=PARTS[name]) for name, us in _parts(found).items()),
        comm=tuple(
            TimePart(name=axis, us=us, means=AXES.get(axis, axis)) for axis, us in found.comm_us.items() if us > 0
        ),
        exposed_comm_us=found.exposed_comm_us,
        comm_to_compute=found.comm_to_compute,
        serial_us=found.serial_us,
        ideal_us=found.ideal_us,
        micro_batches=found.micro_batches,
        tokens_per_s=found.tokens_per_s,
        model_tflops=found.model_tflops,
        mfu=found.mfu,
        memory=memory.gib,
        stage_memory_gib=memory.stage_gib,
        memory_available_gib=memory.available_gib,
        fits=memory.fits,
        fits_probability=fits_in_memory(found),
        fits_source=known.memory_source,
        verdict=memory.verdict,
        validated=known.validated(job_features(job)),
        interval=interval,
        observed=None if anchor is None else anchor.verdict(),
        comparisons=known.comparisons,
        notes=found.notes + _advice(job, found),
        run=training_run(job, found.step_us, (interval.low_us, interval.high_us)),
        job=tables,
        asked=dict(asked),
    )


def _advice(job: Job, found: PredictedStep) -> tuple[str, ...]:
    """Return notes where much communication is exposed, and where zero 3 takes more memory than zero 2 would."""
    notes = []
    if found.exposed_comm_us >= MUCH * found.step_us:
        share = f"{found.exposed_comm_us / found.step_us:.0%}"
        notes.append(f"{share} of the step is exposed communication; --search finds divisions with less")
    if job.parallel.zero == 3:
        more = found.memory.total_gib - max(stage_totals(replace(job, parallel=replace(job.parallel, zero=2))))
        gathered = f"gathered layers take {found.memory.gib['gathered']:.1f} GiB"
        notes += [f"zero 3 takes {more:.1f} GiB more than zero 2 would: {gathered}"] if more > 0 else []
    return tuple(notes)


def _parts(found: PredictedStep) -> dict[str, float]:
    """Return the µs of a predicted step by part (`PARTS`), without negligible parts."""
    each = {name: found.parts[f"{name}_us"] for name in PARTS}
    return {name: us for name, us in each.items() if us > NEGLIGIBLE * found.step_us}


def outcome(job: Job, found: PredictedStep, anchor: Anchor | None = None, **named: Any) -> PlanOutcome:
    """Return a job's main figures from its predicted step `found`, and `named` fields such as `label` or `settings`.

    Raise Misconfigured if the training would never end.
    """
    found, interval = _anchored(job, found, anchor)
    return PlanOutcome(
        gpus=job.parallel.world_size,
        step_us=found.step_us,
        parts=_parts(found),
        low_us=interval.low_us,
        high_us=interval.high_us,
        mfu=found.mfu,
        exposed_comm_us=found.exposed_comm_us,
        tokens_per_s=found.tokens_per_s,
        memory_gib=found.memory.total_gib,
        fits=found.memory.fits,
        fits_probability=fits_in_memory(found),
        run=training_run(job, found.step_us, (interval.low_us, interval.high_us)),
        **named,
    )


def curve(name: str, jobs: Iterable[tuple[str, Job | Misconfigured]], anchor: Anchor | None = None) -> Curve:
    """Return a curve with a point per (value, job) from `swept`: the predicted step, or why the job is impossible."""
    points = tuple(_point(label, job, anchor) for label, job in jobs)
    if all(point.why_not for point in points):
        raise Misconfigured(f"{name}: no value can be: {points[0].why_not}")
    return Curve(name=name, means=CURVES.get(name, ""), points=points)


def _point(label: str, job: Job | Misconfigured, anchor: Anchor | None) -> PlanOutcome:
    try:
        if isinstance(job, Misconfigured):
            raise job
        return outcome(job, predict_step(job), anchor, label=label)
    except Misconfigured as error:
        return PlanOutcome(label=label, why_not=str(error))


def scaling(job: Job, anchor: Anchor | None = None) -> tuple[Curve, ...]:
    """Return strong- and weak-scaling curves for 1/4 to 4 times the nodes, without node counts that do not work."""
    nodes = max(1, job.parallel.world_size // job.cluster.gpus_per_node)
    counts = sorted({max(1, nodes // 4), max(1, nodes // 2), nodes, 2 * nodes, 4 * nodes})
    found = []
    for name in NODES:
        points = []
        for count in counts:
            with suppress(Misconfigured):
                points.append(_point(str(count), on_nodes(job, count, batch_grows=name == "weak_nodes"), anchor))
        points = [point for point in points if not point.why_not]
        if len(points) > 1:
            found.append(Curve(name=name, means=CURVES[name], points=tuple(points)))
    return tuple(found)


def sensitivities(job: Job, anchor: Anchor | None = None) -> tuple[PlanOutcome, ...]:
    """Return one predicted step per change (a resource twice as fast, or a cost removed), the largest gain first."""
    now_us, gpu = predict_step(job).step_us, job.cluster.gpu

    others = {
        "network between nodes, twice": scaled_links(job, 2.0, network=True),
        "NVLink, twice": scaled_links(job, 2.0, network=False),
        "matrix throughput, twice": _with_gpu(job, tflops={what: 2 * each for what, each in gpu.tflops.items()}),
        "memory bandwidth, twice": _with_gpu(job, memory_gb_per_s=2 * gpu.memory_gb_per_s),
        "latency of links, none (not NCCL's)": with_levels(job, lambda level: {"latency_us": 0.0}),
        "overlap without disturbance": replace(job, mechanism="ideal", mechanisms={}),
    }
    if {job.mechanism, *job.mechanisms.values()} != {"zero_sm"}:
        others["zero-SM collectives"] = replace(job, mechanism="zero_sm", mechanisms={})
    steps = {label: predict_step(other) for label, other in others.items()}
    changed = [label for label, step in steps.items() if step.step_us != now_us]
    return tuple(
        outcome(others[label], steps[label], anchor, label=label)
        for label in sorted(changed, key=lambda label: steps[label].step_us)
    )


def _with_gpu(job: Job, **figures: object) -> Job:
    gpu = replace(job.cluster.gpu, **figures)
    return replace(job, cluster=replace(job.cluster, gpu=gpu))


def _timeline(job: Job, found: PredictedStep, factor: float) -> tuple[Bar, ...]:
    """Return the timeline's bars, tasks of all stages for the first micro-batches, with times scaled by `factor`."""
    bars = scheduled(job.parallel.schedule, found.times, min(found.micro_batches, SHOWN_ROUNDS * job.parallel.pp))
    return tuple(
        Bar(
            stage=bar.stage, kind=bar.slot.kind, micro=bar.slot.micro, part=bar.slot.part,
            start_us=factor * bar.start_us, end_us=factor * bar.end_us,
        )
        for bar in sorted(bars, key=lambda bar: bar.start_us)[:MAX_BARS]
    )  # fmt: skip


def place_job(
    job: Job, path: Path, hosts: str | None, *, name: str | None = None
) -> tuple[PlacementResult, tuple[LaunchFile, ...]]:
    """Return a comparison of rank orders for a job on a topology's hosts, and launchers' files for the best order.

    `path` is the topology's file, and `name` chooses one of a topology.yaml. `hosts` are the job's in its launcher's
    order, as in n[1-4],n7; None: the first ones of the topology.

    Raises:
        Misconfigured: too few hosts; the readers raise it for a topology that cannot be read, or lacks a host.
    """
    from counterpoint.plan.placement.launch_files import launch_files
    from counterpoint.plan.placement.place import place
    from counterpoint.plan.placement.read_slurm import hostlist
    from counterpoint.plan.placement.read_topology import read_topology
    from counterpoint.plan.placement.traffic import RankTraffic, sent_bytes

    gpus = job.cluster.gpus_per_node
    whole = read_topology(path, gpus=gpus, name=name)
    needed = -(-job.parallel.world_size // gpus)
    chosen = whole.hosts[:needed] if hosts is None else tuple(hostlist(hosts))
    if len(chosen) < needed:
        ranks = job.parallel.world_size
        raise Misconfigured(f"{ranks} ranks on {len(chosen)} hosts of {gpus} GPUs: give {needed} hosts, by --hosts")
    traffic = RankTraffic.of_job(job.parallel, sent_bytes(job))
    found = place(traffic, whole.only(list(chosen)).rated(job.cluster))
    files = launch_files(found, traffic.mesh)
    result = PlacementResult(
        orders=(found.found, *found.compared),
        host_of=tuple(found.host_of(rank) for rank in range(len(found.slots))),
        files={file.name: file.use for file in files},
        steps=found.steps,
    )
    return result, files
