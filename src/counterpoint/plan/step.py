"""One training step: what the critical rank does, part by part, and what it waits for.

    step = slots + bubble + ends of the replicas + optimizer + stragglers

    slots        m micro-batches · (forward + backward) of the busiest stage (`layer_time.py`)
    bubble       critical path of the schedule - slots: fill, drain, sends, and waiting for stages (`schedule.py`)
    gradients    exposed part of what replicas exchange once a step (`data_parallel.py`)
    optimizer    its traffic: OPTIMIZER_BYTES per parameter, sharded with zero
    stragglers   (E[slowest of all ranks] - 1) · compute (`stragglers.py`), or that of one rank known to be slow

and its frame, with the same compute, bubble and optimizer:

    serial = compute + all communication alone            nothing overlaps
    ideal  = max(compute, communication of each axis)     everything overlaps, also the axes: their links differ
"""

from __future__ import annotations

from counterpoint.plan.compression import NOTE
from counterpoint.plan.compute_cost import Machine
from counterpoint.plan.data_parallel import Reduced, in_pieces_us, layer_collectives, layer_copies_us, reduced
from counterpoint.plan.exchanges import send
from counterpoint.plan.job import Job
from counterpoint.plan.layer_time import Spent, WorkTime, end_time, layer_time
from counterpoint.plan.memory import Memory, held_by, memory, shards
from counterpoint.plan.networks import network_of
from counterpoint.plan.overlap import find_mechanism
from counterpoint.plan.parameters import Held, model_flops, most_held
from counterpoint.plan.prices import MeshPrices, Prices
from counterpoint.plan.schedule import Times, pipeline_us
from counterpoint.plan.stages import Part, deal, whole_stage
from counterpoint.plan.stragglers import Jitter, expected_slowest
from counterpoint.plan.validation import validated
from counterpoint.records.base import Record

__all__ = ["Step", "step"]

OPTIMIZER_BYTES = {  # read and written per parameter: update; then norm 4, unscale or clip 8, cast 6, set to zero 4
    "adam": 28 + 22,  # gradient, master, two moments read, three of them written: float32
    "adam8bit": 16 + 22,
    "sgd": 20 + 22,
}
CAST_HALF_GRADIENTS = 6  # where gradients are kept in two bytes, they are copied to float32 first


class Step(Record, frozen=True, kw_only=True):
    """A predicted step; `parts` add up to `step_us`.

    Args:
        step_us: of the whole job.
        parts: µs by name, of the critical rank; communication is what is exposed of it.
        comm_us: communication alone, by axis.
        serial_us, ideal_us: nothing overlaps, everything does.
        busiest: stage that has most to do.
        micro_batches: of each replica.
        tokens_per_s: of the job.
        model_tflops: per GPU; 6 · parameters and attention in full, without recomputation.
        mfu: of the data sheet's peak.
        memory: of the fullest GPU.
        times: of the parts of the pipeline, for `schedule.placed`.
        validated: the error on measured steps like it, or what has not been measured.
        notes: where the constants are from.
    """

    step_us: float
    parts: dict[str, float]
    comm_us: dict[str, float]
    serial_us: float
    ideal_us: float
    busiest: int
    micro_batches: int
    tokens_per_s: float
    model_tflops: float
    mfu: float
    memory: Memory
    times: Times
    validated: str
    notes: tuple[str, ...] = ()

    @property
    def exposed_comm_us(self) -> float:
        """Of all axes; sends between stages are in the bubble."""
        names = ("tensor_us", "context_us", "expert_us", "shards_us", "gradients_us")
        return sum(self.parts[name] for name in names)

    @property
    def comm_to_compute(self) -> float:
        """Communication alone over compute alone."""
        return sum(self.comm_us.values()) / (self.serial_us - sum(self.comm_us.values()))


class _Slots(Record, frozen=True, kw_only=True):
    """A part of a stage and one micro-batch; `comm_us`: communication alone, by axis."""

    forward: Spent
    backward: Spent
    weight_us: float
    comm_us: dict[str, float]


def step(
    job: Job, *, prices: Prices | None = None, machine: Machine | None = None, jitter: Jitter | None = None
) -> Step:
    """Predict one step.

    Args:
        job: what is trained on what.
        prices: of collectives; None: NCCL's figures for the job's cluster. Give the same one to every job of a search.
        machine: what a GPU reaches; None: `efficiency.py`.
        jitter: how ranks differ; None: as the job says, or as GPUs of this kind do (`efficiency.py`).

    Raises:
        Misconfigured: the micro-batches do not suit the schedule, or the GPU does not compute in this precision.
    """
    machine = machine or Machine.of(job.cluster.gpu, job.training.precision)
    mesh = (prices or Prices(network_of(job.cluster))).on(job.parallel)
    stages, micro = deal(job.model, job.parallel), job.training.micro_batches(job.parallel)
    slots = _all_slots(job, machine, mesh, stages)
    send_us = _send_us(job, mesh)
    times = _times(job, slots, stages, send_us)
    path_us = pipeline_us(job.parallel.schedule, times, micro)
    busiest = max(range(len(stages)), key=lambda s: sum(times.forward[s]) + sum(times.backward[s]))
    mine = [slots[part] for part in stages[busiest]]
    spent = Spent()
    for slot in mine:
        spent = spent.plus(slot.forward, micro).plus(slot.backward, micro)
    parts = spent.terms()
    parts["bubble_us"] = path_us - spent.total_us if len(stages) > 1 else 0.0  # of one stage: rounding
    ended = _ends(job, machine, mesh, stages[0], slots)
    parts["gradients_us"] = ended.exposed_us
    parts["optimizer_us"] = _optimizer_us(job, machine, stages[busiest])
    slowest = _slowest(job, machine, jitter)
    parts["stragglers_us"] = (slowest - 1.0) * (spent.compute_us + parts["optimizer_us"])
    comm_us = _alone(mine, micro, ended)
    return _summary(job, machine, parts, comm_us, spent, busiest, times)


def _summary(
    job: Job, machine: Machine, parts: dict[str, float], comm_us: dict[str, float], spent: Spent, busiest: int,
    times: Times,
) -> Step:  # fmt: skip
    step_us = sum(parts.values())
    compute = spent.compute_us + sum(parts[name] for name in ("bubble_us", "optimizer_us", "stragglers_us"))
    comm = sum(comm_us.values())
    tokens = float(job.training.global_batch) * job.training.sequence
    flops = model_flops(job.model, job.training.sequence) * tokens / job.parallel.world_size
    return Step(
        step_us=step_us,
        parts=parts,
        comm_us=comm_us,
        serial_us=compute + comm,
        ideal_us=max(compute, *comm_us.values()) if comm_us else compute,
        busiest=busiest,
        micro_batches=job.training.micro_batches(job.parallel),
        tokens_per_s=tokens / step_us * 1e6,
        model_tflops=flops / step_us / 1e6,
        mfu=flops / step_us / machine.peak,
        memory=memory(job),
        times=times,
        validated=validated(job),
        notes=_notes(job, machine),
    )


def _notes(job: Job, machine: Machine) -> tuple[str, ...]:
    training = job.training
    loses = job.compression is not None or training.local_steps > 1 or training.asynchronous
    figures = (f"GPU: {machine.efficiency.source}", f"overlap: {find_mechanism(job.mechanism).source}")
    return (*figures, *((NOTE,) if loses else ()))


def _all_slots(
    job: Job, machine: Machine, mesh: MeshPrices, stages: tuple[tuple[Part, ...], ...]
) -> dict[Part, _Slots]:
    """Each kind of part once: stages inside a pipeline are alike."""
    dense = layer_time(job, machine, mesh)
    kinds = {part for stage in stages for part in stage}
    routed = layer_time(job, machine, mesh, job.model.experts) if any(part.routed for part in kinds) else dense
    return {part: _slots(job, machine, mesh, part, dense, routed) for part in kinds}


def _slots(job: Job, machine: Machine, mesh: MeshPrices, part: Part, dense: WorkTime, routed: WorkTime) -> _Slots:
    works = [(dense, part.layers - part.routed), (routed, part.routed)]
    works += [(end_time(job, machine, first=True), 1)] if part.embedding else []
    works += [(end_time(job, machine, first=False), 1)] if part.head else []
    forward, backward, weight = Spent(), Spent(), 0.0
    comm_us: dict[str, float] = {}
    for work, count in works:
        forward, backward = forward.plus(work.forward, count), backward.plus(work.backward, count)
        weight += count * work.weight_us
        for axis, us in work.comm_us.items():
            comm_us[axis] = comm_us.get(axis, 0.0) + count * us
    if job.parallel.zero == 3 and job.parallel.dp * job.parallel.cp > 1:
        extra_forward, extra_backward, alone = _sharded(job, machine, mesh, part, forward, backward)
        forward, backward = forward.plus(extra_forward), backward.plus(extra_backward)
        comm_us["shards"] = alone
    return _Slots(forward=forward, backward=backward, weight_us=weight, comm_us=comm_us)


def _sharded(
    job: Job, machine: Machine, mesh: MeshPrices, part: Part, forward: Spent, backward: Spent
) -> tuple[Spent, Spent, float]:
    """zero 3: copies and exposed communication of a part. The ends are one more unit, whole from start to end."""
    model, parallel = job.model, job.parallel
    mechanism, persistent = find_mechanism(job.mechanism), machine.efficiency.persistent
    layers = most_held(model, parallel, layers=part.layers, routed=part.routed, embedding=False, head=False)
    ends = most_held(model, parallel, layers=0, routed=0, embedding=part.embedding, head=part.head)
    found, alone = [], 0.0
    sent, copies = layer_collectives(job, mesh, _each(layers, part.layers)), layer_copies_us(job, machine, layers)
    end_sent, end_copies = layer_collectives(job, mesh, ends), layer_copies_us(job, machine, ends)
    for turn, spent in enumerate((forward, backward)):
        comms = [(name, us * part.layers) for name, us in sent[turn]]
        end_us = sum(us for name, us in end_sent[turn] if turn == 0 or name != "all_gather")
        alone += sum(us for _, us in comms) + end_us
        copy_us = copies[turn] + end_copies[turn]
        if parallel.overlap_dp:
            compute = spent.total_us + copy_us
            both = in_pieces_us(compute, comms, max(part.layers, 1), mechanism, persistent=persistent)
            exposed = both - compute + end_us
        else:
            exposed = sum(us for _, us in comms) + end_us
        found.append(Spent(shard_copies_us=copy_us, shards_us=exposed))
    return found[0], found[1], alone


def _each(held: Held, layers: int) -> Held:
    """One of so many layers, on average."""
    return Held(shared=held.shared / max(layers, 1), experts=held.experts / max(layers, 1))


def _send_us(job: Job, mesh: MeshPrices) -> float:
    if job.parallel.pp == 1:
        return 0.0
    return sum(mesh.us(exchange) for exchange in send(job.model, job.parallel, job.training))


def _times(job: Job, slots: dict[Part, _Slots], stages: tuple[tuple[Part, ...], ...], send_us: float) -> Times:
    """Without overlap, sender and receiver wait for each other: a send becomes part of both."""
    waits = 0.0 if job.parallel.overlap_pp else send_us
    bubble_free = job.parallel.schedule == "zero_bubble"
    return Times(
        forward=tuple(tuple(slots[part].forward.total_us + waits for part in stage) for stage in stages),
        backward=tuple(tuple(slots[part].backward.total_us + waits for part in stage) for stage in stages),
        weight=tuple(tuple(slots[part].weight_us for part in stage) for stage in stages) if bubble_free else (),
        send_us=send_us - waits,
    )


def _ends(job: Job, machine: Machine, mesh: MeshPrices, stage: tuple[Part, ...], slots: dict[Part, _Slots]) -> Reduced:
    """What replicas exchange once a step; the first stage ends last."""
    held = held_by(job, whole_stage(stage))
    found = Reduced()
    apart = job.compression is not None or job.training.local_steps > 1 or job.training.asynchronous
    if job.parallel.zero < 3 or apart:
        found = reduced(
            job, machine, mesh, held,
            forward_us=sum(slots[part].forward.total_us for part in stage),
            backward_us=sum(slots[part].backward.total_us for part in stage),
        )  # fmt: skip
    if job.model.tied and job.parallel.pp > 1:  # first and last stage add up the gradients of the table they share
        size = job.model.vocab * job.model.hidden / job.parallel.tp * job.training.grad_bytes
        stride = mesh.groups["pp"].stride * (job.parallel.pp - 1)
        us = mesh.between(2, stride, "all_reduce", size)
        found = Reduced(alone_us=found.alone_us + us, exposed_us=found.exposed_us + us)
    return found


def _slowest(job: Job, machine: Machine, jitter: Jitter | None) -> float:
    spread = machine.efficiency.spread if job.ranks.jitter is None else job.ranks.jitter
    jitter, slow, parallel = jitter or Jitter(spread=spread), job.ranks.slow, job.parallel
    if not job.training.asynchronous:
        return max(expected_slowest(jitter, parallel.world_size), slow)
    pace = 1.0 - (1.0 - 1.0 / slow) / parallel.dp  # of all replicas, one of which is slow
    return expected_slowest(jitter, parallel.world_size // parallel.dp) / pace


def _optimizer_us(job: Job, machine: Machine, stage: tuple[Part, ...]) -> float:
    held, (shared, experts) = held_by(job, whole_stage(stage)), shards(job)
    mine = held.shared / shared + held.experts / experts if job.parallel.zero else held.total
    each = OPTIMIZER_BYTES[job.training.optimizer]
    each += CAST_HALF_GRADIENTS if job.training.grad_bytes == 2 and job.parallel.zero < 3 else 0
    return mine * each / machine.bandwidth


def _alone(slots: list[_Slots], micro: int, ended: Reduced) -> dict[str, float]:
    """Communication of the busiest stage, by axis; sends count in the bubble, where the schedule puts them."""
    total: dict[str, float] = {}
    for slot in slots:
        for axis, us in slot.comm_us.items():
            total[axis] = total.get(axis, 0.0) + micro * us
    if ended.alone_us:
        total["gradients"] = ended.alone_us
    return total
