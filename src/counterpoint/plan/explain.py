"""Explain a printed number: its formula with the values filled in, and the source of each value.

explain(job, "exposed_comm")   ->  lines of text
"""

from __future__ import annotations

import math
from collections.abc import Callable

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.answer import AXES, PARTS
from counterpoint.plan.compute.layers import LocalShape, layer_work
from counterpoint.plan.compute.roofline import GpuRates, cost
from counterpoint.plan.confidence import fits_in_memory, job_features, measured_errors, step_interval
from counterpoint.plan.job.job import OVERLAPPED, Job
from counterpoint.plan.job.model import model_flops
from counterpoint.plan.network.estimate import CollectiveTimes
from counterpoint.plan.network.group import Axis, axes
from counterpoint.plan.network.network import network_of
from counterpoint.plan.step.step import PredictedStep, predict_step

COMPUTE = ("matmul", "attention", "memory_bound", "recompute")
EXPOSED = ("tensor", "context", "expert", "shards", "gradients")
AXES_OF: dict[str, tuple[Axis, ...]] = {
    "tensor": ("tp",),
    "context": ("cp",),
    "expert": ("ep",),
    "shards": ("dp_cp", "shard", "replicate", "expert_dp"),
    "gradients": ("dp_cp", "shard", "replicate", "expert_dp"),
}
PART_SOURCE = {
    "shard_copies": "plan/step/data_parallel.py: bytes of each copy over memory bandwidth",
    "bubble": "critical path of the schedule - what the busiest stage runs (plan/step/schedule.py)",
    "optimizer": "bytes read and written per parameter over memory bandwidth (plan/step/step.py, OPTIMIZER_BYTES)",
    "offload": "bytes over the rate to the host - forward, and the same - backward (plan/step/layer_time.py)",
    "host": "kernels · host_us + collectives · host_collective_us - time of the GPU (plan/step/layer_time.py)",
    "stragglers": "(expected slowest of all ranks - 1) · compute (plan/step/step.py)",
}


def explain(job: Job, word: str) -> list[str]:
    """Return the lines that explain one number, or raise Misconfigured if `word` is none of `QUESTIONS`."""
    if word not in QUESTIONS:
        raise Misconfigured(f"--explain {printable(word)}: nothing has that name; give one of {', '.join(QUESTIONS)}")
    return QUESTIONS[word](job, predict_step(job))


def _step(job: Job, found: PredictedStep) -> list[str]:
    parts = [f"  {name:12} {_ms(found.parts[f'{name}_us']):>12}  {means}" for name, means in PARTS.items()]
    return [f"step = sum of its parts = {_ms(found.step_us)}", *parts, "  parts: plan/step/step.py"]


def _exposed(job: Job, found: PredictedStep) -> list[str]:
    terms = " + ".join(f"{found.parts[f'{name}_us'] / 1e3:.2f} ({name})" for name in EXPOSED)
    return [
        f"exposed_comm = {terms} = {_ms(found.exposed_comm_us)}",
        *_overlap(job),
        *(line for name in EXPOSED if found.parts[f"{name}_us"] for line in _collectives(job, name)),
        *(f"  {job.mechanism_of(axis)}, {axis}: {job.disturbance_of(axis).source}" for axis in OVERLAPPED),
    ]


def _overlap(job: Job) -> list[str]:
    kept = [(axis, job.mechanism_of(axis), job.disturbance_of(axis)) for axis in OVERLAPPED]
    return [
        *(
            f"  while both run, {axis} by {name}: compute keeps {mechanism.compute_kept:.0%} of its speed, "
            f"communication {mechanism.comm_kept:.0%}"
            for axis, name, mechanism in kept
        ),
        "  c / comm_kept <= g / compute_kept: T = g + (1 - compute_kept) · c / comm_kept (pair/together.py)",
    ]


def _comm(job: Job, found: PredictedStep) -> list[str]:
    return [
        f"comm = communication alone, by axis = {_ms(sum(found.comm_us.values()))}",
        *(f"  {axis:10} {_ms(us):>12}  {AXES.get(axis, axis)}" for axis, us in found.comm_us.items()),
        *(line for name in EXPOSED if found.parts[f"{name}_us"] for line in _collectives(job, name)),
    ]


def _collectives(job: Job, part: str) -> list[str]:
    """Return lines that explain the collectives of one part of the step, on each mesh axis: latency and bandwidth."""
    prices = CollectiveTimes(network_of(job.cluster))
    predict_step(job, prices=prices)
    mesh = axes(job.parallel)
    groups = {mesh[axis] for axis in AXES_OF[part] if mesh[axis].ranks > 1}
    found = [estimate for group, estimate in prices.asked if group in groups]
    return [f"    {line}" for one in found for line in one.explain().splitlines()]


def _compute(job: Job, found: PredictedStep) -> list[str]:
    rates = GpuRates.of(job.cluster.gpu, job.training.precision)
    work = layer_work(job.model, LocalShape.of(job.parallel, job.training), None)
    lines = []
    for way, operations in (("forward", work.forward), ("backward", work.backward)):
        for operation in operations:
            us = cost(operation, rates).us
            lines.append(f"  {way:8} {operation.name:28} {us:10.1f} µs  {_shape(operation)}")
    total = sum(found.parts[f"{name}_us"] for name in COMPUTE)
    return [
        f"compute = {_ms(total)}: one layer and micro-batch is",
        *lines,
        f"  figures: {rates.efficiency.source}; formulas: plan/compute/roofline.py",
    ]


def _shape(operation: object) -> str:
    names = ("batch", "m", "n", "k", "queries", "keys", "width", "num_bytes")
    return ", ".join(f"{name} {getattr(operation, name):,.0f}" for name in names if hasattr(operation, name))


def _mfu(job: Job, found: PredictedStep) -> list[str]:
    sequence, tokens = job.training.sequence, job.training.global_batch * job.training.sequence
    flops, peak = model_flops(job.model, sequence), job.cluster.gpu.tflops[job.training.precision]
    return [
        f"mfu = FLOP per token · tokens / GPUs / step / peak = {found.mfu:.1%}",
        f"  {flops:.4g} · {tokens:,} / {job.parallel.world_size:,} / {_ms(found.step_us)} / {peak:g} TFLOP/s",
        f"  FLOP per token: 6 · parameters and attention, without recomputation; peak: {job.cluster.gpu.source}",
    ]


def _memory(job: Job, found: PredictedStep) -> list[str]:
    memory = found.memory
    return [
        f"memory of stage {memory.stage} = {memory.total_gib:.1f} GiB",
        *(f"  {name:12} {gib:8.2f} GiB" for name, gib in memory.gib.items()),
        f"  P(fits in {memory.available_gib:g} GiB) = {fits_in_memory(found):.0%}: {measured_errors().memory_source}",
        "  formulas: plan/compute/memory.py",
    ]


def _serial(job: Job, found: PredictedStep) -> list[str]:
    comm = sum(found.comm_us.values())
    return [f"serial = compute + communication alone = {_ms(found.serial_us - comm)} + {_ms(comm)} = "
            f"{_ms(found.serial_us)}: nothing overlaps"]  # fmt: skip


def _ideal(job: Job, found: PredictedStep) -> list[str]:
    comm = sum(found.comm_us.values())
    return [f"ideal = max(compute, communication alone) = max({_ms(found.serial_us - comm)}, {_ms(comm)}) = "
            f"{_ms(found.ideal_us)}: everything overlaps, nothing is disturbed"]  # fmt: skip


def _interval(job: Job, found: PredictedStep) -> list[str]:
    interval, features = step_interval(job, found), job_features(job)
    likely = measured_errors().likely(features)
    low, middle, high = map(math.expm1, likely.ends)
    return [
        f"interval = {_ms(interval.low_us)} to {_ms(interval.high_us)}: {interval.level:.0%} of such steps",
        f"  measured / predicted - 1: {low:+.1%} to {high:+.1%}, {middle:+.1%} in the middle; 0 is always within",
        f"  from {interval.rows} measured steps, to which no constant was fitted; of those like it, with their source "
        f"left out, {interval.seen:.0%} lay within",
        *(f"  {name:14} {value}" for name, value in features.items()),
        *([f"  the slowest of the ranks: + {_ms(interval.slowest_us)}"] if interval.slowest_us else []),
        "  sources, with how similar their steps are (at most 1) and the median of measured / predicted - 1:",
        *(f"    {weight:4.2f}  {math.expm1(error):+6.1%}  {name}" for name, (weight, error) in likely.sources.items()),
        "  rows: plan/measured_steps.json, formulas: plan/confidence.py",
    ]


def _part(name: str) -> Callable[[Job, PredictedStep], list[str]]:
    def lines(job: Job, found: PredictedStep) -> list[str]:
        head = f"{name} = {_ms(found.parts[f'{name}_us'])}: {PARTS[name]}"
        if name in EXPOSED:
            return [head, *_overlap(job), *_collectives(job, name)]
        if name in COMPUTE:
            return [head, *_compute(job, found)]
        return [head, f"  {PART_SOURCE[name]}"]

    return lines


def _ms(us: float) -> str:
    return f"{us / 1e3:,.3f} ms"


QUESTIONS: dict[str, Callable[[Job, PredictedStep], list[str]]] = {
    "step": _step,
    "exposed_comm": _exposed,
    "comm": _comm,
    "compute": _compute,
    "serial": _serial,
    "ideal": _ideal,
    "mfu": _mfu,
    "memory": _memory,
    "interval": _interval,
    **{name: _part(name) for name in PARTS},
}
