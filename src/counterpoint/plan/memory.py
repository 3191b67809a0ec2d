"""Memory of the fullest GPU: what lives from step to step, and what a micro-batch leaves behind for its backward.

parameters   bytes of an element · held parameters             / shards with zero 3
gradients    grad_bytes · held                                 / shards with zero 2 and 3
             once more for what error feedback keeps of compressed ones
optimizer    STATE_BYTES · held                                / shards with zero 1, 2 and 3
gathered     zero 3: parameters and gradients of the layers that are whole at once: 1 + prefetch
activations  per layer and micro-batch, t tokens, size bytes of an element (arXiv 2205.05198, equations 1 to 6):
               between blocks, / tp with sequence parallelism
                 inputs of 2 norms and of 2 blocks 4 · size · t · h, masks of 2 dropouts 2 · t · h
               inside blocks, / tp
                 q, k, v and attention's output; inputs of the activation and of the second matrix
               attention's core, without flash attention: softmax size, dropout's mask 1 and its output size,
                 times micro_batch · heads · sequence · keys / tp; selective recomputation drops it
               full recomputation leaves the layer's input only: size · t · h
             GPT-3's 34 · t · h + 5 · heads · sequence · t comes out of it
             times layers of a stage, times micro-batches in flight (`schedule.in_flight`)
head         logits in the precision of training and in float32, of one micro-batch
reserved     CUDA context, NCCL's buffers, what the allocator cannot use: RESERVED_GIB, assumed, not measured
"""

from __future__ import annotations

from typing import Literal

from counterpoint.plan.groups import axes
from counterpoint.plan.job import Job
from counterpoint.plan.layers import Share
from counterpoint.plan.model import Experts, Model
from counterpoint.plan.parameters import Held, layer_parameters, most_held
from counterpoint.plan.schedule import in_flight
from counterpoint.plan.stages import Part, deal, whole_stage
from counterpoint.records.base import Record

__all__ = ["Memory", "activation_bytes", "held_by", "memory", "shards"]

GIB = 2.0**30
RESERVED_GIB = 4.0
STATE_BYTES = {"adam": 12, "adam8bit": 6, "sgd": 8}  # float32 copy of the parameters and moments, per parameter


class Memory(Record, frozen=True, kw_only=True):
    """GiB of the fullest GPU, by what they are for.

    Args:
        stage: whose GPU it is.
        verdict: fits or not, and what takes most.
    """

    parameters_gib: float
    gradients_gib: float
    optimizer_gib: float
    gathered_gib: float
    activations_gib: float
    head_gib: float
    reserved_gib: float
    available_gib: float
    stage: int
    verdict: str

    @property
    def total_gib(self) -> float:
        return (
            self.parameters_gib + self.gradients_gib + self.optimizer_gib + self.gathered_gib
            + self.activations_gib + self.head_gib + self.reserved_gib
        )  # fmt: skip

    @property
    def fits(self) -> bool:
        return self.total_gib <= self.available_gib


def memory(job: Job) -> Memory:
    """Of the fullest stage: the first holds most micro-batches, the last has the logits."""
    stages = deal(job.model, job.parallel)
    found = [_of_stage(job, index, whole_stage(stages[index])) for index in sorted({0, len(stages) - 1})]
    return max(found, key=lambda each: each.total_gib)


def shards(job: Job) -> tuple[int, int]:
    """Ranks over which zero divides what is shared, and what experts have."""
    group = axes(job.parallel)
    shared = group["dp_cp"].ranks if job.parallel.shard is None else group["shard"].ranks
    return shared, group["expert_dp"].ranks


def held_by(job: Job, stage: Part) -> Held:
    """Parameters of one rank of this stage before zero shards them."""
    return most_held(
        job.model, job.parallel, layers=stage.layers, routed=stage.routed, embedding=stage.embedding, head=stage.head
    )


def _of_stage(job: Job, index: int, stage: Part) -> Memory:
    model, training, parallel = job.model, job.training, job.parallel
    held, (shared, experts) = held_by(job, stage), shards(job)
    sharded = held.shared / shared + held.experts / experts
    element = 4 if training.precision == "fp32" else 2
    states = STATE_BYTES[training.optimizer] - (4 if training.precision == "fp32" else 0)
    zero = parallel.zero
    sizes = {
        "parameters": element * (sharded if zero == 3 else held.total),
        "gradients": training.grad_bytes * (sharded if zero >= 2 else held.total) * (2 if _feeds_back(job) else 1),
        "optimizer": states * (sharded if zero >= 1 else held.total),
        "gathered": _gathered(job, stage) if zero == 3 else 0.0,
        "activations": _activations(job, index, stage),
        "head": _logits(model, Share.of(parallel, training)) if stage.head else 0.0,
    }
    gib = {name: size / GIB for name, size in sizes.items()}
    available = job.cluster.gpu.memory_gib
    return Memory(
        **{f"{name}_gib": value for name, value in gib.items()},
        reserved_gib=RESERVED_GIB,
        available_gib=available,
        stage=index,
        verdict=_verdict(gib, available, job),
    )


def _feeds_back(job: Job) -> bool:
    return job.compression is not None and job.compression.error_feedback


def _verdict(gib: dict[str, float], available: float, job: Job) -> str:
    total = sum(gib.values()) + RESERVED_GIB
    most = max(gib, key=gib.__getitem__)
    if total <= available:
        return f"fits: {total:.1f} of {available:g} GiB, most of it {most} ({gib[most]:.1f} GiB)"
    advice = {
        "parameters": "raise tp or pp, or zero = 3",
        "gradients": "raise tp or pp, or zero = 2",
        "optimizer": "raise tp or pp, or zero = 1",
        "gathered": "raise tp, or lower prefetch",
        "activations": "lower micro_batch, raise tp or cp, or recompute"
        + (" more" if job.training.recompute != "none" else ""),
        "head": "lower micro_batch, or raise tp or cp",
    }[most]
    return f"does not fit: {total:.1f} of {available:g} GiB, most of it {most} ({gib[most]:.1f} GiB): {advice}"


def _gathered(job: Job, stage: Part) -> float:
    """Whole parameters and gradients of the layers at work."""
    model, parallel = job.model, job.parallel
    heaviest = layer_parameters(model, model.experts if stage.routed else None)
    each = heaviest.shared / parallel.tp + heaviest.experts / parallel.tp / parallel.ep
    whole = 1 + parallel.prefetch if parallel.reshard_after_forward else stage.layers
    return 2.0 * each * (min(whole, stage.layers) + 1)


def _activations(job: Job, index: int, stage: Part) -> float:
    model, training, parallel = job.model, job.training, job.parallel
    share, kind = Share.of(parallel, training), training.recompute
    dense = activation_bytes(model, share, kind)
    routed = activation_bytes(model, share, kind, model.experts) if stage.routed else 0.0
    whole = (stage.layers - stage.routed) * dense + stage.routed * routed
    micro = training.micro_batches(parallel)
    name, virtual = parallel.schedule, parallel.virtual
    most = in_flight(name, parallel.pp, micro, virtual)
    here = most if name in ("gpipe", "interleaved") or index == 0 else max(most - index, 1.0)
    working = 0.0
    if kind == "full":  # one layer at a time is whole again
        working = activation_bytes(model, share, "none", model.experts if stage.routed else None)
    return whole * here + working


def activation_bytes(
    model: Model, share: Share, recompute: Literal["none", "selective", "full"], experts: Experts | None = None
) -> float:
    """What one layer keeps of one micro-batch, on one rank."""
    size, wide = share.element_bytes, float(share.tokens_between) * model.hidden
    if recompute == "full":
        return size * wide
    between = 4 * size * wide + (2 * wide if model.dropout else 0.0)
    heads = (2 * model.heads + 2 * model.key_heads) * model.head_width
    inputs = 3 if model.gated else 2
    if experts is None:
        inner = inputs * float(model.ffn_width)
    else:
        inner = experts.per_token * experts.imbalance * (inputs * experts.width + 2.0 * model.hidden)
        inner += inputs * experts.shared * experts.width
    inside = size * share.tokens * (heads + inner) / share.tp
    core = 0.0
    if not share.flash and recompute == "none":
        scores = share.batch * model.heads / share.tp * float(share.queries) * share.keys
        core = scores * (2 * size + 1 if model.dropout else size)
    return between + inside + core


def _logits(model: Model, share: Share) -> float:
    return float(share.tokens) * model.vocab / share.tp * (share.element_bytes + 4)
