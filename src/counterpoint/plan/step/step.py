"""Predict one training step: the time of the critical rank by part, and how long that rank waits.

    step = slots + bubble + ends of the replicas + optimizer + stragglers

    slots        m micro-batches · (forward + backward) of the busiest stage, and what its host adds (`layer_time.py`)
    bubble       critical path of the schedule - slots: fill, drain, sends, and waiting for stages (`schedule.py`)
    gradients    exposed part of what replicas exchange once a step (`data_parallel.py`)
    optimizer    its traffic: OPTIMIZER_BYTES per parameter, sharded with zero; with `offload_optimizer` the
                 update by the host's CPUs, and copies of gradients there and parameters back: neither is overlapped
    stragglers   (E[slowest of n ranks] - 1) · compute where `ranks.jitter` is given, or that of one rank known to be
                 slow: a step ends with the last rank. E[max of n] = ∫ q(u^(1/n)) du over 0..1, q: quantiles of a rank's
                 relative time, here normal, of independent ranks. Asynchronous replicas go on at the mean of their
                 paces; n is one replica's ranks

Published steps are of healthy machines, and constants were fitted to such steps: how much GPUs of one kind differ
widens the interval (`slowest_us`) and is no part of the step.

and its bounds, with the same compute, bubble and optimizer:

    serial = compute + all communication alone            nothing overlaps
    ideal  = max(compute, communication of each axis)     everything overlaps, also the axes: their links differ

How far off such predictions were is in `plan/confidence.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from operator import sub
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from msgspec.structs import asdict, replace

from counterpoint.errors import printable
from counterpoint.plan.compute.memory import Memory, memory, sharded_parameters, stage_totals
from counterpoint.plan.compute.roofline import GpuRates
from counterpoint.plan.job.job import OVERLAPPED, Job
from counterpoint.plan.job.model import model_flops, positive
from counterpoint.plan.job.parallel import StagePart, deal_layers, part_parameters, whole_stage
from counterpoint.plan.network.estimate import CollectiveTimes, MeshTimes
from counterpoint.plan.network.network import network_of
from counterpoint.plan.step.data_parallel import NOTE, CommTime, replica_exchange
from counterpoint.plan.step.exchanges import stage_exchanges
from counterpoint.plan.step.layer_time import (
    LayerTimes,
    MicroBatchTime,
    TimeByPart,
    layer_times,
    part_time,
    with_offloading,
)
from counterpoint.plan.step.schedule import (
    ScheduleName,
    StageTimes,
    least_of_any_stages_us,
    least_pipeline_us,
    pipeline_us,
)
from counterpoint.records import Record

Stage = tuple[StagePart, ...]
PartTimes = dict[StagePart, MicroBatchTime]
PathTime = Callable[[ScheduleName, StageTimes, int], float]
OPTIMIZER_BYTES = {  # read and written per parameter: update; then norm 4, unscale or clip 8, cast 6, set to zero 4
    "adam": (28, 22),  # gradient, master, two moments read, three of them written: float32
    "adam8bit": (16, 22),
    "sgd": (20, 22),
    "adam_bf16": (14, 12),  # everything in two bytes, no master
}
CPU_GB_PER_S = 145.0  # rate of updates by all CPUs of a host
CPU_GPUS = 8  # GPUs of that host
CPU_SOURCE = "Megatron-Bridge, Qwen3-30B-A3B on 16 H100: 4.19 s a step instead of 1.00"
QUANTILES = 2048  # of the distribution of the slowest rank
CAST_HALF_GRADIENTS = 6  # where gradients are kept in two bytes, they are copied to float32 first


class PredictedStep(Record, frozen=True, kw_only=True):
    """Holds a predicted step; the µs of `parts` add up to `step_us`."""

    step_us: float  # of the whole job
    parts: dict[str, float]  # µs by name, on the critical rank; communication counts only its exposed part
    comm_us: dict[str, float]  # communication alone, by axis
    serial_us: float  # if nothing overlapped
    ideal_us: float  # if everything overlapped
    micro_batches: int  # of each replica
    tokens_per_s: float  # of the job
    model_tflops: float  # per GPU; 6 · parameters and attention in full, without recomputation
    mfu: float  # of the data sheet's peak
    slowest_us: float  # what the slowest rank would add if GPUs differ as their profile says: not part of the step
    memory: Memory  # of the fullest GPU
    times: StageTimes  # of the parts of the pipeline, for `schedule.scheduled`
    notes: tuple[str, ...] = ()  # sources of the constants

    @property
    def exposed_comm_us(self) -> float:
        """Return the µs of exposed communication over all axes; sends between stages count as bubble."""
        names = ("tensor_us", "context_us", "expert_us", "shards_us", "gradients_us")
        return sum(self.parts[name] for name in names)

    @property
    def comm_to_compute(self) -> float:
        """Return the time of communication alone / the time of compute alone."""
        return sum(self.comm_us.values()) / (self.serial_us - sum(self.comm_us.values()))


class _Timed(NamedTuple):
    """Holds what `_summary` needs: a step's parts, its times of communication, stages and slowest rank, and notes."""

    parts: dict[str, float]
    comm_us: dict[str, float]
    spent: TimeByPart
    times: StageTimes
    slowest_us: float
    notes: tuple[str, ...]


def predict_step(job: Job, *, prices: CollectiveTimes | None = None, rates: GpuRates | None = None) -> PredictedStep:
    """Return the prediction of one step; share `prices`, a cache of collectives' times, among all jobs of a search."""
    rates = rates or GpuRates.of(job.cluster.gpu, job.training.precision)
    mesh = MeshTimes(prices or CollectiveTimes(network_of(job.cluster)), job.parallel)
    found = _timed(job, rates, mesh, layer_times(job, rates, mesh), pipeline_us)
    return _summary(job, rates, found)


def least_step_us(job: Job, rates: GpuRates, mesh: MeshTimes, layers: LayerTimes) -> float:
    """Return a lower bound of the µs of `predict_step`, without simulating the pipeline."""
    return sum(_timed(job, rates, mesh, layers, least_pipeline_us).parts.values())


def least_division_us(job: Job, rates: GpuRates, mesh: MeshTimes, layers: LayerTimes) -> float:
    """Return a lower bound of the step µs over all pipelines, zero stages and recomputations of a job's division.

    The busiest stage takes at least the mean over all stages, without zero's communication, and the slowest rank adds
    its delay in the layers' compute. `job` has neither zero nor recomputation.
    """
    whole = StagePart(
        layers=job.model.layers, routed=job.model.expert_layers, embedding=True, head=True, mtp=job.model.mtp
    )
    time, micro = part_time(job, rates, mesh, whole, layers), job.training.micro_batches(job.parallel)
    return micro / job.parallel.pp * time.total_us + _least_stragglers_us(job, layers)


def least_stages_us(job: Job, rates: GpuRates, mesh: MeshTimes, layers: LayerTimes) -> float:
    """Return a lower bound of the step µs of `job` (no zero, no recomputation) over all zero stages, recomputations."""
    stages, micro = deal_layers(job.model, job.parallel), job.training.micro_batches(job.parallel)
    times = _stage_times(job, mesh, stages, _part_times(job, rates, mesh, stages, layers), least_pipeline_us)
    return least_pipeline_us(job.parallel.schedule, times, micro) + _least_stragglers_us(job, layers)


def least_dealt_us(
    job: Job, rates: GpuRates, mesh: MeshTimes, layers: LayerTimes, stages: Sequence[int], ends_us: Sequence[float]
) -> float:
    """Return a lower bound of the step µs over all splits of layers among stages, with this job's schedule.

    `job` has neither zero nor recomputation; `stages` has the layers of each stage, dealt so that the busiest stage has
    least to do, and `ends_us` the time of embedding or head on each stage.
    """
    parallel, micro, layer_us = job.parallel, job.training.micro_batches(job.parallel), layers.mean_us(job.model)
    least_us = micro * max(count * layer_us + us for count, us in zip(stages, ends_us, strict=True))
    if parallel.schedule != "zero_bubble":  # zero_bubble has no dW in its drain
        path_us = least_of_any_stages_us(
            job.model.layers * layer_us, ends_us, micro, virtual=parallel.virtual, send_us=_send_us(job, mesh)
        )
        least_us = max(least_us, path_us)
    return least_us + _least_stragglers_us(job, layers)


def _least_stragglers_us(job: Job, layers: LayerTimes) -> float:
    inside = layers.of_part(StagePart(layers=job.model.layers, routed=job.model.expert_layers), 0)
    compute_us = inside.forward.compute_us + inside.backward.compute_us
    micro = job.training.micro_batches(job.parallel)
    return (_slowest(job) - 1.0) * micro / job.parallel.pp * compute_us


def _timed(job: Job, rates: GpuRates, mesh: MeshTimes, layers: LayerTimes, path: PathTime) -> _Timed:
    stages, micro = deal_layers(job.model, job.parallel), job.training.micro_batches(job.parallel)
    # not in `_part_times`: its lower bounds are of jobs without recomputation, which copy more
    part_times = {
        part: with_offloading(job, part, time) for part, time in _part_times(job, rates, mesh, stages, layers).items()
    }
    times = _stage_times(job, mesh, stages, part_times, path)
    busiest = max(range(len(stages)), key=lambda s: sum(part_times[part].total_us for part in stages[s]))
    mine = [part_times[part] for part in stages[busiest]]
    spent = TimeByPart()
    for part, times_of_it in Counter(stages[busiest]).items():
        time = part_times[part]
        spent = spent.plus(time.forward, times_of_it * micro).plus(time.backward, times_of_it * micro)
    parts = asdict(spent)
    path_us = max(path(job.parallel.schedule, times, micro), spent.total_us)
    parts["bubble_us"] = path_us - spent.total_us if len(stages) > 1 else 0.0  # of one stage: rounding
    exchanging = stages[busiest if job.parallel.zero == 2 else 0]  # else once a step: the first ends last
    ends = _ends(job, rates, mesh, exchanging, part_times)
    parts["gradients_us"] = ends.exposed_us
    parts["optimizer_us"] = _optimizer_us(job, rates, stages[busiest])
    busy_us = spent.compute_us + parts["optimizer_us"]
    parts["stragglers_us"] = (_slowest(job) - 1.0) * busy_us
    slowest_us = (expected_slowest(rates.efficiency.spread, job.parallel.world_size) - 1.0) * busy_us
    notes = (*_notes(job, rates), *_launch_bound(mine, stages[busiest]))
    return _Timed(parts, _comm_us(mine, micro, ends), spent, times, slowest_us, notes)


def _summary(job: Job, rates: GpuRates, found: _Timed) -> PredictedStep:
    parts, comm_us, step_us = found.parts, found.comm_us, sum(found.parts.values())
    others = ("bubble_us", "optimizer_us", "stragglers_us", "host_us", "offload_us")
    compute = found.spent.compute_us + sum(parts[name] for name in others)
    comm = sum(comm_us.values())
    tokens = float(job.training.global_batch) * job.training.sequence
    flops = model_flops(job.model, job.training.sequence) * tokens / job.parallel.world_size
    return PredictedStep(
        step_us=step_us, parts=parts, comm_us=comm_us, serial_us=compute + comm,
        ideal_us=max(compute, *comm_us.values()) if comm_us else compute,
        micro_batches=job.training.micro_batches(job.parallel), tokens_per_s=tokens / step_us * 1e6,
        model_tflops=flops / step_us / 1e6, mfu=flops / step_us / job.cluster.gpu.tflops[job.training.precision] / 1e6,
        slowest_us=found.slowest_us, memory=memory(job), times=found.times, notes=found.notes,
    )  # fmt: skip


def _notes(job: Job, rates: GpuRates) -> tuple[str, ...]:
    training = job.training
    loses = job.compression is not None or training.local_steps > 1 or training.asynchronous
    ways = dict.fromkeys(job.disturbance_of(axis).source for axis in OVERLAPPED)
    figures = (f"GPU: {rates.efficiency.source}", *(f"overlap: {source}" for source in ways))
    assumed = job.profile.note(("mechanisms", "efficiency"))
    own = [each for each in (job.cluster.gpu.machine, job.cluster.fits) if each]
    unlike = [f"with figures of {printable(', '.join(own), 200)}, not those whose errors are stated"] if own else []
    figures = (*figures, *([f"figures {assumed}"] if assumed else []), *unlike, *_offloading(job))
    return (*figures, *((NOTE,) if loses else ()))


def _offloading(job: Job) -> tuple[str, ...]:
    """Return a note on the GiB that each GPU offloads to its host, and on the rates of copies and updates."""
    training = job.training
    whole = replace(job, training=replace(training, offload_optimizer=0.0, offload_activations=0.0))
    if whole == job:
        return ()
    saved = max(map(sub, stage_totals(whole), stage_totals(job)))
    updates = f", updates at {CPU_GB_PER_S:g} GB/s of a host's CPUs ({CPU_SOURCE})" * bool(training.offload_optimizer)
    rate = job.cluster.gpu.host_bytes_per_us / 1e3
    return (f"offloading: {saved:.1f} GiB of each GPU are on its host; copies at {rate:g} GB/s{updates}",)


def _launch_bound(parts: list[MicroBatchTime], stage: Stage) -> tuple[str, ...]:
    """Return a warning for each part of the busiest stage that the host launches more slowly than the GPU runs it."""
    return tuple(
        f"launch-bound: of each micro-batch the host takes {sum(time.launch_us) / 1e3:.2f} ms to launch "
        f"{time.kernels:.0f} kernels and the collectives of {part.layers} layers, the GPU {time.gpu_us / 1e3:.2f} ms "
        f"to run them: {late_us / 1e3:.2f} ms are lost; a larger micro_batch, fused_kernels or cuda_graphs lower it"
        for part, time in dict(zip(stage, parts, strict=True)).items()
        if (late_us := time.forward.host_us + time.backward.host_us)
    )


def _part_times(job: Job, rates: GpuRates, mesh: MeshTimes, stages: tuple[Stage, ...], layers: LayerTimes) -> PartTimes:
    """Return the time of each distinct stage part, computed once; inner stages of a pipeline have equal parts."""
    kinds = {part for stage in stages for part in stage}
    return {part: part_time(job, rates, mesh, part, layers) for part in kinds}


def _stage_times(
    job: Job, mesh: MeshTimes, stages: tuple[Stage, ...], part_times: PartTimes, path: PathTime
) -> StageTimes:
    """Return the times of all stages' parts: of GPUs to run them, or of hosts to launch them if hosts end later.

    Without overlap sender and receiver wait, so a send becomes part of both stages' times. The time that a host adds to
    its GPU's is not divided among slots, since then a longer kernel could make a slot shorter.
    """
    send_us = _send_us(job, mesh)
    waits = 0.0 if job.parallel.overlap_pp else send_us
    apart = job.parallel.schedule == "zero_bubble"

    def of_parts(us: Callable[[MicroBatchTime], float]) -> tuple[tuple[float, ...], ...]:
        each = {part: us(time) for part, time in part_times.items()}
        return tuple(tuple(each[part] for part in stage) for stage in stages)

    gpus = StageTimes(
        forward=of_parts(lambda time: time.forward.total_us + waits),
        backward=of_parts(lambda time: time.backward.total_us - time.backward.host_us + waits),
        weight=of_parts(lambda time: time.weight_us) if apart else (),
        send_us=send_us - waits,
    )
    if job.training.cuda_graphs:
        return gpus
    hosts = StageTimes(
        forward=of_parts(lambda time: time.launch_us[0]),
        backward=of_parts(lambda time: time.launch_us[1]),
        weight=of_parts(lambda time: time.weight_launch_us) if apart else (),
        send_us=send_us,
    )
    micro = job.training.micro_batches(job.parallel)
    return max(gpus, hosts, key=lambda times: path(job.parallel.schedule, times, micro))


def _send_us(job: Job, mesh: MeshTimes) -> float:
    sends = stage_exchanges(job.model, job.parallel, job.training) if job.parallel.pp > 1 else ()
    return sum(exchange.us(mesh) for exchange in sends)


def _ends(job: Job, rates: GpuRates, mesh: MeshTimes, stage: Stage, part_times: PartTimes) -> CommTime:
    """Return the time in which a stage's replicas exchange gradients: once a step, or per micro-batch with zero 2."""
    found = CommTime()
    apart = job.compression is not None or job.training.local_steps > 1 or job.training.asynchronous
    if job.parallel.zero < 3 or apart:
        found = replica_exchange(
            job, rates, mesh, part_parameters(job.model, job.parallel, whole_stage(stage)),
            forward_us=sum(part_times[part].forward.total_us for part in stage),
            backward_us=sum(part_times[part].backward.total_us - part_times[part].backward.host_us for part in stage),
            host_us=sum(part_times[part].backward.host_us for part in stage),
        )  # fmt: skip
    shares_table = job.model.tied or job.model.mtp  # first and last stage share the embedding, and add up its gradients
    if shares_table and job.parallel.pp > 1:
        size = job.model.vocab * job.model.hidden / job.parallel.tp * job.training.grad_bytes
        stride = mesh.groups["pp"].stride * (job.parallel.pp - 1)
        us = mesh.between(2, stride, "all_reduce", size)
        found = CommTime(alone_us=found.alone_us + us, exposed_us=found.exposed_us + us)
    return found


def _slowest(job: Job) -> float:
    """Return the slowest rank's time / the mean time, as `job.ranks` describes the ranks."""
    spread, slow, parallel = job.ranks.jitter, job.ranks.slow, job.parallel
    if not job.training.asynchronous:
        return max(expected_slowest(spread, parallel.world_size), slow)
    pace = 1.0 - (1.0 - 1.0 / slow) / parallel.dp  # mean over all replicas, one of which is slow
    return expected_slowest(spread, parallel.world_size // parallel.dp) / pace


def expected_slowest(spread: float, ranks: int) -> float:
    """Return the expected time of the slowest of `ranks` ranks / the mean time, at least 1."""
    positive("ranks", ranks)
    if not spread or ranks == 1:
        return 1.0
    return 1.0 + spread * _expected_deviations(ranks)


@cache
def _expected_deviations(ranks: int) -> float:
    """Return E[max of `ranks` normal variables] in standard deviations, by the midpoint rule over the distribution."""
    normal = NormalDist()
    middle = (np.arange(QUANTILES) + 0.5) / QUANTILES
    return float(np.mean([normal.inv_cdf(u) for u in np.minimum(middle ** (1.0 / ranks), 1.0 - 1e-15)]))


def _optimizer_us(job: Job, rates: GpuRates, stage: Stage) -> float:
    whole = whole_stage(stage)
    mine = (
        sharded_parameters(job, whole) if job.parallel.zero else part_parameters(job.model, job.parallel, whole).total
    )
    training, share = job.training, job.training.offload_optimizer
    update, passes = OPTIMIZER_BYTES[training.optimizer]
    each = (1 - share) * update + passes
    each += CAST_HALF_GRADIENTS if training.grad_bytes == 2 and job.parallel.zero < 3 else 0
    us = mine * each / rates.bandwidth
    if share:
        ranks = min(job.cluster.gpus_per_node, job.parallel.world_size, CPU_GPUS)
        us += share * mine * update * ranks / (CPU_GB_PER_S * 1e3)
        us += share * mine * (training.grad_bytes + training.element_bytes) / job.cluster.gpu.host_bytes_per_us
    return us


def _comm_us(parts: list[MicroBatchTime], micro: int, ends: CommTime) -> dict[str, float]:
    """Return the µs of communication alone on the busiest stage, by axis; sends between stages count as bubble."""
    total: dict[str, float] = {}
    for part in parts:
        for axis, us in part.comm_us.items():
            total[axis] = total.get(axis, 0.0) + micro * us
    if ends.alone_us:
        total["gradients"] = ends.alone_us
    return total
