"""Compute the memory of the fullest GPU: what stays from step to step, and what a micro-batch keeps for backward.

parameters   bytes of an element · parameters of the rank             / shards with zero 3
gradients    grad_bytes · the same                              / shards with zero 2 and 3
             once more for what error feedback keeps of compressed ones
optimizer    STATE_BYTES · the same                              / shards with zero 1, 2 and 3
gathered     zero 3: parameters and gradients of the layers that are whole at once: 1 + prefetch
activations  per layer and micro-batch, t tokens, size bytes of an element (arXiv 2205.05198, equations 1 to 6):
               between blocks, / tp with sequence parallelism
                 inputs of 2 norms and of 2 blocks 4 · size · t · h, masks of 2 dropouts 2 · t · h
               inside blocks, / tp
                 q, k, v and attention's output; inputs of the activation and of the second matrix
                 norms of q and k keep their inputs, too; latent attention its latents before and after their norms
               attention's core, without flash attention: softmax size, dropout's mask 1 and its output size,
                 times micro_batch · heads · sequence · keys / tp; selective recomputation drops it
               full recomputation leaves the layer's input only: size · t · h
               what recomputation drops of the layer that is at work is there again, once
             for GPT-3 this is 34 · t · h + 5 · heads · sequence · t
             times layers of a stage, times micro-batches in flight (`schedule.in_flight`)
head         logits in the precision of training and in float32, of one micro-batch
reserved     CUDA context, NCCL's buffers, what the allocator cannot use: RESERVED_GIB, assumed, not measured
"""

from __future__ import annotations

from typing import Literal

from counterpoint.plan.compute.layers import LocalShape
from counterpoint.plan.job.job import Job
from counterpoint.plan.job.model import Experts, Model, layer_parameters
from counterpoint.plan.job.parallel import StagePart, deal_layers, part_parameters, whole_stage
from counterpoint.plan.network.group import axes
from counterpoint.plan.step.schedule import in_flight
from counterpoint.records import Record

GIB = 2.0**30
RESERVED_GIB = 4.0
STATE_BYTES = {"adam": 12, "adam8bit": 6, "sgd": 8}  # float32 copy of the parameters and moments, per parameter


class Memory(Record, frozen=True, kw_only=True):
    """Holds the GiB of the fullest GPU."""

    gib: dict[str, float]  # by purpose, as listed above
    available_gib: float  # of the GPU
    stage: int  # the pipeline stage that this GPU runs
    verdict: str  # whether the job fits, and what takes most

    @property
    def total_gib(self) -> float:
        """Return the sum of `gib`."""
        return sum(self.gib.values())

    @property
    def fits(self) -> bool:
        """Return whether the GPU has so much memory."""
        return self.total_gib <= self.available_gib


def memory(job: Job) -> Memory:
    """Return the memory of the fullest stage: the first holds most micro-batches, the last has the logits."""
    stages = deal_layers(job.model, job.parallel)
    found = [_of_stage(job, index, whole_stage(stages[index])) for index in sorted({0, len(stages) - 1})]
    return max(found, key=lambda each: each.total_gib)


def sharded_parameters(job: Job, stage: StagePart) -> float:
    """Return the parameters in a rank's shard with zero: divided by all replicas, or by `parallel.shard` ranks."""
    count, group = part_parameters(job.model, job.parallel, stage), axes(job.parallel)
    ranks = group["dp_cp"].ranks if job.parallel.shard is None else group["shard"].ranks
    return count.shared / ranks + count.experts / group["expert_dp"].ranks


def _of_stage(job: Job, index: int, stage: StagePart) -> Memory:
    model, training, parallel = job.model, job.training, job.parallel
    whole, sharded = part_parameters(model, parallel, stage).total, sharded_parameters(job, stage)
    local, element = LocalShape.of(parallel, training), training.element_bytes
    feeds_back = job.compression is not None and job.compression.error_feedback
    states = STATE_BYTES[training.optimizer] - (4 if training.precision == "fp32" else 0)
    zero = parallel.zero
    sizes = {
        "parameters": element * (sharded if zero == 3 else whole),
        "gradients": training.grad_bytes * (sharded if zero >= 2 else whole) * (2 if feeds_back else 1),
        "optimizer": states * (sharded if zero >= 1 else whole),
        "gathered": _gathered(job, stage) if zero == 3 else 0.0,
        "activations": _activations(job, index, stage),
        "head": (1 + stage.mtp) * float(local.tokens) * model.vocab / local.tp * (element + 4) if stage.head else 0.0,
    }
    gib = {name: size / GIB for name, size in sizes.items()} | {"reserved": RESERVED_GIB}
    available = job.cluster.gpu.memory_gib
    return Memory(gib=gib, available_gib=available, stage=index, verdict=_verdict(gib, available, job))


def _verdict(gib: dict[str, float], available: float, job: Job) -> str:
    total = sum(gib.values())
    most = max((name for name in gib if name != "reserved"), key=gib.__getitem__)
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


def _gathered(job: Job, stage: StagePart) -> float:
    """Return the bytes of the layers whose parameters and gradients are unsharded at once with zero 3."""
    model, parallel = job.model, job.parallel
    heaviest = layer_parameters(model, model.experts if stage.routed else None).of_rank(parallel.tp, parallel.ep)
    whole = 1 + parallel.prefetch if parallel.reshard_after_forward else stage.layers
    return 2.0 * heaviest.total * (min(whole, stage.layers) + 1)


def _activations(job: Job, index: int, stage: StagePart) -> float:
    model, training, parallel = job.model, job.training, job.parallel
    local, kind = LocalShape.of(parallel, training), training.recompute
    dense = activation_bytes(model, local, kind)
    routed = activation_bytes(model, local, kind, model.experts) if stage.routed else 0.0
    whole = (stage.layers - stage.routed) * dense + stage.routed * routed
    if stage.mtp:
        whole += stage.mtp * (activation_bytes(model, local, kind, model.experts) + _mtp_bytes(model, local))
    micro = training.micro_batches(parallel)
    name, virtual = parallel.schedule, parallel.virtual
    most = in_flight(name, parallel.pp, micro, virtual)
    here = most if name in ("gpipe", "interleaved") or index == 0 else max(most - index, 1.0)
    working = 0.0  # what was dropped of a layer is there again while its backward runs
    if stage.layers > stage.routed:
        working = activation_bytes(model, local, "none") - dense
    if stage.routed:
        working = max(working, activation_bytes(model, local, "none", model.experts) - routed)
    return whole * here + working


def _mtp_bytes(model: Model, local: LocalShape) -> float:
    """Return the bytes that the projection of a module of multi-token prediction keeps: both inputs, and normalised."""
    return 4.0 * local.element_bytes * local.tokens_between * model.hidden


def activation_bytes(
    model: Model, local: LocalShape, recompute: Literal["none", "selective", "full"], experts: Experts | None = None
) -> float:
    """Return the bytes that one layer keeps of one micro-batch, on one rank.

    Args:
        model: widths.
        local: the part of the micro-batch that the rank works on.
        recompute: what backward computes again.
        experts: experts of the layer; None: a dense layer.
    """
    size, wide = local.element_bytes, float(local.tokens_between) * model.hidden
    if recompute == "full":
        return size * wide
    between = (2 + model.norms) * size * wide + (2 * wide if model.dropout else 0.0)
    if model.mla is not None:
        latents = model.mla.latent_width - model.mla.qk_rope_head_dim
        between += 2.0 * size * local.tokens_between * latents
    heads = (model.heads + model.key_heads) * (model.head_width + model.value_width)
    if model.qk_norm:
        heads += (model.heads + model.key_heads) * model.head_width
    inputs = 3 if model.gated else 2
    if experts is None:
        inner = inputs * float(model.ffn_width)
    else:
        inner = experts.per_token * experts.imbalance * (inputs * experts.width + 2.0 * model.hidden)
        inner += inputs * experts.shared * experts.width
    inside = size * local.tokens * (heads + inner) / local.tp
    core = 0.0
    if not local.flash and recompute == "none":
        scores = local.batch * model.heads / local.tp * float(local.queries) * local.keys
        core = scores * (2 * size + 1 if model.dropout else size)
    return between + inside + core
