"""Compute the memory of the fullest GPU: parameters and states kept over steps, activations kept for backward.

parameters   bytes of an element · parameters of the rank             / shards with zero 3
gradients    grad_bytes · the same                              / shards with zero 2 and 3
             once more for what error feedback keeps of compressed ones
optimizer    STATE_BYTES · the same                              / shards with zero 1, 2 and 3
             less what is on the host: `offload_optimizer`
gathered     zero 3: parameters and gradients of the layers that are unsharded at once: 1 + prefetch
activations  per layer and micro-batch, t tokens, size bytes of an element (arXiv 2205.05198, equations 1 to 6):
               between blocks, / tp with sequence parallelism
                 inputs of 2 norms and of 2 blocks 4 · size · t · h, masks of 2 dropouts 2 · t · h
               inside blocks, / tp
                 q, k, v and attention's output; inputs of the activation and of the second matrix
                 norms of q and k keep their inputs, too; latent attention its latents before and after their norms
               attention's core, without flash attention: softmax size, dropout's mask 1 and its output size,
                 times micro_batch · heads · sequence · keys / tp
               selective recomputation drops what its modules keep: core_attn the core; layernorm the inputs of both
                 blocks; mlp and moe what is inside the feed-forward block; moe_act the input of its second matrix
               full recomputation leaves the layer's input only: size · t · h; of units of several layers one input
               dropped activations are in memory again for the layer, or unit of layers, at work
             for GPT-3 this is 34 · t · h + 5 · heads · sequence · t
             times layers of a stage, times micro-batches that the stage has in flight (`schedule.in_flight`)
             less what waits on the host, `offload_activations`, of which two layers are being copied or in use
head         logits in the precision of training and in float32, of one micro-batch
reserved     CUDA context, NCCL's buffers, what the allocator cannot use: RESERVED_GIB, assumed, not measured
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

from msgspec.structs import replace

from counterpoint.plan.compute.layers import LocalShape
from counterpoint.plan.job.job import Job
from counterpoint.plan.job.model import Experts, Model, layer_parameters
from counterpoint.plan.job.parallel import (
    CORE_ONLY,
    RecomputeModule,
    StagePart,
    Training,
    deal_layers,
    part_parameters,
    whole_stage,
)
from counterpoint.plan.network.group import axes
from counterpoint.plan.step.schedule import in_flight
from counterpoint.records import Record

GIB = 2.0**30
RESERVED_GIB = 4.0
STATE_BYTES = {"adam": 12, "adam8bit": 6, "sgd": 8, "adam_bf16": 4}  # per parameter: float32 copy and moments


class Memory(Record, frozen=True, kw_only=True):
    """Holds the memory of the fullest GPU by purpose, in GiB."""

    gib: dict[str, float]  # by purpose, as listed above
    available_gib: float  # of the GPU
    stage: int  # the pipeline stage that this GPU runs
    verdict: str  # whether the job fits, and which purpose takes most memory
    stage_gib: tuple[float, ...] = ()  # the total of every stage

    @property
    def total_gib(self) -> float:
        """Return the total GiB of all purposes in `gib`."""
        return sum(self.gib.values())

    @property
    def fits(self) -> bool:
        """Return whether the GPU has enough memory for the total."""
        return self.total_gib <= self.available_gib


def memory(job: Job) -> Memory:
    """Return the memory of one GPU of the fullest pipeline stage by purpose, and the totals of all stages."""
    found = stage_memory(job)
    totals = tuple(sum(gib.values()) for gib in found)
    fullest = totals.index(max(totals))
    gib, available = found[fullest], job.cluster.gpu.memory_gib
    verdict = _verdict(gib, available, job)
    return Memory(gib=gib, available_gib=available, stage=fullest, verdict=verdict, stage_gib=totals)


def stage_totals(job: Job) -> list[float]:
    """Return the total GiB on one GPU of each pipeline stage."""
    return [sum(gib.values()) for gib in stage_memory(job)]


def least_totals(job: Job) -> list[float]:
    """Return, for each pipeline stage, a lower bound of a GPU's GiB over all zero stages and numbers of shards."""
    found = stage_memory(replace(job, parallel=replace(job.parallel, zero=3, shard=None)))
    return [sum(gib.values()) - gib["gathered"] for gib in found]


def stage_memory(job: Job) -> list[dict[str, float]]:
    """Return the GiB on one GPU of each pipeline stage, by purpose."""
    known: dict[tuple[StagePart, ...], tuple[dict[str, float], _Activations]] = {}
    host = job.training.offload_activations
    found = []
    parallel, micro = job.parallel, job.training.micro_batches(job.parallel)
    for index, parts in enumerate(deal_layers(job.model, parallel)):
        if parts not in known:
            known[parts] = (_same_in_every_stage(job, whole_stage(parts)), _activations(job, parts))
        sizes, (kept, working, layer) = known[parts]
        held = in_flight(parallel.schedule, parallel.pp, micro, parallel.virtual, stage=index)
        copied = host * min(kept, 2 * layer)
        found.append({**sizes, "activations": ((1 - host) * kept * held + copied + working) / GIB})
    return found


def least_gib(job: Job) -> float:
    """Return a lower bound of the fullest GPU's GiB over all shardings, recomputations and splits of layers."""
    whole = StagePart(layers=job.model.layers, routed=job.model.expert_layers, embedding=True, head=True)
    training = job.training
    each = training.element_bytes + training.grad_bytes + _state_bytes(training)
    return each * sharded_parameters(job, whole) / job.parallel.pp / GIB + RESERVED_GIB


def sharded_parameters(job: Job, stage: StagePart) -> float:
    """Return how many parameters of a stage one rank's zero shard has, over all replicas or `parallel.shard` ranks."""
    count, group = part_parameters(job.model, job.parallel, stage), axes(job.parallel)
    ranks = group["dp_cp"].ranks if job.parallel.shard is None else group["shard"].ranks
    return count.shared / ranks + count.experts / group["expert_dp"].ranks


def offloaded_bytes(job: Job, part: StagePart) -> float:
    """Return the bytes of one micro-batch's activations that a pipeline stage's part copies to the host."""
    return job.training.offload_activations * _activations(job, (part,)).kept


def _state_bytes(training: Training) -> float:
    """Return the bytes of optimizer states per parameter on the GPU; fp32 parameters need no master copy."""
    copy = 4 if training.precision == "fp32" and training.optimizer != "adam_bf16" else 0
    return (1 - training.offload_optimizer) * (STATE_BYTES[training.optimizer] - copy)


def _same_in_every_stage(job: Job, stage: StagePart) -> dict[str, float]:
    """Return one GPU's GiB by purpose, with 0 for activations, which depend on the pipeline stage's index."""
    model, training, parallel = job.model, job.training, job.parallel
    whole, sharded = part_parameters(model, parallel, stage).total, sharded_parameters(job, stage)
    local, element = LocalShape.of(parallel, training), training.element_bytes
    feeds_back = job.compression is not None and job.compression.error_feedback
    zero = parallel.zero
    sizes = {
        "parameters": element * (sharded if zero == 3 else whole),
        "gradients": training.grad_bytes * (sharded if zero >= 2 else whole) * (2 if feeds_back else 1),
        "optimizer": _state_bytes(training) * (sharded if zero >= 1 else whole),
        "gathered": _gathered(job, stage) if zero == 3 else 0.0,
        "activations": 0.0,
        "head": (1 + stage.mtp) * float(local.tokens) * model.vocab / local.tp * (element + 4) if stage.head else 0.0,
    }
    return {name: size / GIB for name, size in sizes.items()} | {"reserved": RESERVED_GIB}


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
    """Return the bytes of parameters and gradients that zero 3 holds unsharded at the same time."""
    model, parallel = job.model, job.parallel
    heaviest = layer_parameters(model, model.experts if stage.routed else None).of_rank(
        parallel.tp, parallel.ep, parallel.experts_cut
    )
    whole = 1 + parallel.prefetch if parallel.reshard_after_forward else stage.layers
    return 2.0 * heaviest.total * (min(whole, stage.layers) + 1)


class _Activations(NamedTuple):
    kept: float  # bytes until backward
    working: float  # bytes that a running layer needs in addition
    layer: float  # part of `kept` in the layer that keeps most


def _activations(job: Job, parts: tuple[StagePart, ...]) -> _Activations:
    """Return the bytes of one micro-batch's activations in a stage: kept for backward, in use, and of one layer."""
    model, training = job.model, job.training
    local, kind, modules = LocalShape.of(job.parallel, training), training.recompute, training.recompute_modules
    stage, kept, working, layer = whole_stage(parts), 0.0, 0.0, 0.0
    again = sum(training.recomputed_layers(part.layers) for part in parts) / max(stage.layers, 1)
    unit = 1
    if training.recompute_method == "uniform":
        unit = min(training.recompute_num_layers or 1, max(part.layers for part in parts))
    for layers, experts in ((stage.layers - stage.routed, None), (stage.routed, model.experts)):
        if not layers:
            continue
        whole = activation_bytes(model, local, "none", experts)
        less = activation_bytes(model, local, kind, experts, modules)
        if kind == "full":
            kept += layers * ((1 - again) * whole + again * less / unit)
        else:
            kept += layers * less
        working = max(working, unit * whole - less)
        layer = max(layer, whole if kind == "full" and again < 1 else less)
    if stage.routed and model.experts is not None:
        working += _under_way(model, model.experts, local, job.parallel.capacity_factor)
    if stage.mtp:  # the projection keeps both inputs, raw and normalised
        each = activation_bytes(model, local, kind, model.experts, modules)
        kept += stage.mtp * (each + 4.0 * local.element_bytes * local.tokens_between * model.hidden)
    return _Activations(kept, working, layer)


def _under_way(model: Model, experts: Experts, local: LocalShape, capacity_factor: float) -> float:
    """Return the bytes of the fixed-size buffers in which tokens travel to experts and back; all layers share them."""
    mean = float(local.tokens_between) * experts.per_token
    rows = {
        "all_to_all": 0.0,
        "by_node": 0.0,  # counted as activations, no larger than those that an expert keeps
        "gather": 2.0 * local.ep * local.tokens_between,  # tokens of all ranks, and their sums
        "slabs": 2 * mean * capacity_factor,  # rows sent, and rows received
    }
    return rows[local.exchange] * model.hidden * local.element_bytes


def activation_bytes(
    model: Model,
    local: LocalShape,
    recompute: Literal["none", "selective", "full"],
    experts: Experts | None = None,
    modules: Collection[RecomputeModule] = CORE_ONLY,
) -> float:
    """Return the bytes of activations that one layer keeps for one micro-batch on one rank.

    Backward recomputes as `recompute` says; if "selective", `modules`. Without `experts` the layer is dense.
    """
    dropped = modules if recompute == "selective" else ()
    size, wide = local.element_bytes, float(local.tokens_between) * model.hidden
    if recompute == "full":
        return size * wide
    between = (2 + (0 if "layernorm" in dropped else model.norms)) * size * wide + (2 * wide if model.dropout else 0.0)
    if model.mla is not None:
        latents = model.mla.latent_width - model.mla.qk_rope_head_dim
        between += 2.0 * size * local.tokens_between * latents
    heads = (model.heads + model.key_heads) * (model.head_width + model.value_width)
    if model.qk_norm:
        heads += (model.heads + model.key_heads) * model.head_width
    inputs = 3 if model.gated else 2
    if experts is None:
        inner = 0.0 if "mlp" in dropped else inputs * float(model.ffn_width)
    elif "moe" in dropped:
        inner = 0.0
    else:
        inputs -= "moe_act" in dropped
        inner = experts.per_token * local.expert_rows(experts) * (inputs * experts.width + 2.0 * model.hidden)
        inner += inputs * experts.shared * experts.width
    inside = size * local.tokens * (heads + inner) / local.tp
    core = 0.0
    if not local.flash and "core_attn" not in dropped:
        scores = local.batch * model.heads / local.tp * float(local.queries) * local.keys
        core = scores * (2 * size + 1 if model.dropout else size)
    return between + inside + core
