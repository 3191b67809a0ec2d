"""Why a printed number is what it is: its formula with the numbers in it, and where each of them is from.

explain(job, "exposed_comm")   ->  lines of text
"""

from __future__ import annotations

from collections.abc import Callable

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.answer import AXES, PARTS
from counterpoint.plan.compute_cost import Machine, cost
from counterpoint.plan.groups import Axis, axes
from counterpoint.plan.job import Job
from counterpoint.plan.layers import Share, layer
from counterpoint.plan.networks import network_of
from counterpoint.plan.overlap import find_mechanism
from counterpoint.plan.parameters import model_flops
from counterpoint.plan.prices import Prices
from counterpoint.plan.step import Step, step

__all__ = ["QUESTIONS", "explain"]

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
    "shard_copies": "plan/data_parallel.py: bytes of each copy over memory bandwidth",
    "bubble": "critical path of the schedule - what the busiest stage runs (plan/schedule.py)",
    "optimizer": "bytes read and written per parameter over memory bandwidth (plan/step.py, OPTIMIZER_BYTES)",
    "stragglers": "(expected slowest of all ranks - 1) · compute (plan/stragglers.py)",
}


def explain(job: Job, word: str) -> list[str]:
    """The lines behind one number.

    Args:
        job: as it was predicted.
        word: one of `QUESTIONS`.

    Raises:
        Misconfigured: none of these.
    """
    if word not in QUESTIONS:
        raise Misconfigured(f"--explain {printable(word)}: nothing has that name; give one of {', '.join(QUESTIONS)}")
    return QUESTIONS[word](job, step(job))


def _step(job: Job, found: Step) -> list[str]:
    parts = [f"  {name:12} {_ms(found.parts[f'{name}_us']):>12}  {means}" for name, means in PARTS.items()]
    return [f"step = sum of its parts = {_ms(found.step_us)}", *parts, "  parts: plan/step.py"]


def _exposed(job: Job, found: Step) -> list[str]:
    terms = " + ".join(f"{found.parts[f'{name}_us'] / 1e3:.2f} ({name})" for name in EXPOSED)
    mechanism = find_mechanism(job.mechanism)
    return [
        f"exposed_comm = {terms} = {_ms(found.exposed_comm_us)}",
        *_beside(job),
        *(line for name in EXPOSED if found.parts[f"{name}_us"] for line in _collectives(job, name)),
        f"  {mechanism.name}: {mechanism.source}",
    ]


def _beside(job: Job) -> list[str]:
    mechanism = find_mechanism(job.mechanism)
    return [
        f"  beside compute, by {mechanism.name}: compute keeps {mechanism.compute_kept:.0%} of its speed, "
        f"communication {mechanism.comm_kept:.0%}",
        "  c / comm_kept <= g / compute_kept: T = g + (1 - compute_kept) · c / comm_kept (plan/overlap.py)",
    ]


def _comm(job: Job, found: Step) -> list[str]:
    lines = [f"  {axis:10} {_ms(us):>12}  {AXES.get(axis, axis)}" for axis, us in found.comm_us.items()]
    return [
        f"comm = communication alone, by axis = {_ms(sum(found.comm_us.values()))}",
        *lines,
        *(line for name in EXPOSED if found.parts[f"{name}_us"] for line in _collectives(job, name)),
    ]


def _collectives(job: Job, part: str) -> list[str]:
    """One of each kind of collective that the step asked for on the axes of a part, down to latency and bandwidth."""
    prices = Prices(network_of(job.cluster))
    step(job, prices=prices)
    mesh = axes(job.parallel)
    groups = {mesh[axis] for axis in AXES_OF[part] if mesh[axis].ranks > 1}
    found = [estimate for group, estimate in prices.asked if group in groups]
    return [f"    {line}" for one in found for line in one.explain().splitlines()]


def _compute(job: Job, found: Step) -> list[str]:
    machine = Machine.of(job.cluster.gpu, job.training.precision)
    work = layer(job.model, Share.of(job.parallel, job.training), None)
    lines = []
    for way, operations in (("forward", work.forward), ("backward", work.backward)):
        for operation in operations:
            us = cost(operation, machine).us
            lines.append(f"  {way:8} {operation.name:28} {us:10.1f} µs  {_shape(operation)}")
    total = sum(found.parts[f"{name}_us"] for name in COMPUTE)
    return [
        f"compute = {_ms(total)}: one layer and micro-batch is",
        *lines,
        f"  figures: {machine.efficiency.source}; formulas: plan/compute_cost.py",
    ]


def _shape(operation: object) -> str:
    names = ("batch", "m", "n", "k", "queries", "keys", "width", "num_bytes")
    return ", ".join(f"{name} {getattr(operation, name):,.0f}" for name in names if hasattr(operation, name))


def _mfu(job: Job, found: Step) -> list[str]:
    sequence, tokens = job.training.sequence, job.training.global_batch * job.training.sequence
    flops, peak = model_flops(job.model, sequence), job.cluster.gpu.tflops[job.training.precision]
    return [
        f"mfu = FLOP per token · tokens / GPUs / step / peak = {found.mfu:.1%}",
        f"  {flops:.4g} · {tokens:,} / {job.parallel.world_size:,} / {_ms(found.step_us)} / {peak:g} TFLOP/s",
        f"  FLOP per token: 6 · parameters and attention, without recomputation; peak: {job.cluster.gpu.source}",
    ]


def _memory(job: Job, found: Step) -> list[str]:
    memory = found.memory
    names = ("parameters", "gradients", "optimizer", "gathered", "activations", "head", "reserved")
    lines = [f"  {name:12} {getattr(memory, f'{name}_gib'):8.2f} GiB" for name in names]
    return [f"memory of stage {memory.stage} = {memory.total_gib:.1f} GiB", *lines, "  formulas: plan/memory.py"]


def _serial(job: Job, found: Step) -> list[str]:
    comm = sum(found.comm_us.values())
    return [f"serial = compute + communication alone = {_ms(found.serial_us - comm)} + {_ms(comm)} = "
            f"{_ms(found.serial_us)}: nothing overlaps"]  # fmt: skip


def _ideal(job: Job, found: Step) -> list[str]:
    comm = sum(found.comm_us.values())
    return [f"ideal = max(compute, communication alone) = max({_ms(found.serial_us - comm)}, {_ms(comm)}) = "
            f"{_ms(found.ideal_us)}: everything overlaps, nothing is disturbed"]  # fmt: skip


def _part(name: str) -> Callable[[Job, Step], list[str]]:
    def lines(job: Job, found: Step) -> list[str]:
        head = f"{name} = {_ms(found.parts[f'{name}_us'])}: {PARTS[name]}"
        if name in EXPOSED:
            return [head, *_beside(job), *_collectives(job, name)]
        if name in COMPUTE:
            return [head, *_compute(job, found)]
        return [head, f"  {PART_SOURCE[name]}"]

    return lines


def _ms(us: float) -> str:
    return f"{us / 1e3:,.3f} ms"


QUESTIONS: dict[str, Callable[[Job, Step], list[str]]] = {
    "step": _step,
    "exposed_comm": _exposed,
    "comm": _comm,
    "compute": _compute,
    "serial": _serial,
    "ideal": _ideal,
    "mfu": _mfu,
    "memory": _memory,
    **{name: _part(name) for name in PARTS},
}
