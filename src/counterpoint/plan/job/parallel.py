"""Describe how a job is divided among its ranks and trained: degrees, batches, compression, pipeline stages."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Annotated, Literal, get_args

from msgspec import Meta
from msgspec.structs import replace

from counterpoint.errors import Misconfigured
from counterpoint.plan.job.fields import Count, Degree, JobRecord, Layers, Part, Precision, Share, Width
from counterpoint.plan.job.model import Model, ParameterCount, divides, layer_parameters, mtp_parameters
from counterpoint.records import Record

MAX_PARTS = 128  # most stages of a pipeline, and parts per stage: simulating more takes minutes
MAX_TOKENS = 10**12  # of a step
RecomputeModule = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act"]
ExpertExchange = Literal["all_to_all", "by_node", "gather", "slabs"]
CORE_ONLY: tuple[RecomputeModule, ...] = ("core_attn",)


class Parallel(JobRecord, frozen=True, kw_only=True):
    """Holds the degrees of parallelism; world size = dp · pp · cp · tp. From rank to rank tp varies fastest."""

    dp: Degree = 1  # replicas of the model, or shards of it with `zero`
    tp: Degree = 1  # ranks that share every matrix
    sequence: bool = True  # with tp, activations between the matrices are divided, too (sequence parallelism)
    pp: Annotated[int, Meta(ge=1, le=MAX_PARTS)] = 1  # pipeline stages
    virtual: Annotated[int, Meta(ge=1, le=MAX_PARTS)] = 1  # parts of the model per stage (interleaving)
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"  # of micro-batches over stages
    cp: Degree = 1  # ranks that share a sequence
    ep: Degree = 1  # ranks that share the experts of a layer; taken from dp · cp
    # 1: tp does not shard experts, and ep takes ranks of tp, too; None: tp shards experts as it does every matrix
    expert_tp: Literal[1] | None = None
    # with ep, how tokens get to their experts: sent by counts that are exchanged first; once to each node and from
    # there over NVLink (DeepEP, HybridEP); all gathered; or in slabs of equal size for each pair of ranks
    expert_exchange: ExpertExchange = "all_to_all"
    capacity_factor: Annotated[float, Meta(ge=0.1, le=1024)] = 1.25  # size of a slab / mean of what it holds
    expert_nodes: Degree | None = None  # by_node: most nodes with experts of one token (node-limited routing)
    # with ep, tokens travel beside the experts of the other half of them (true, "halves"), or beside all compute of
    # another micro-batch (DualPipe, Megatron-Core's overlap_moe_expert_parallel_comm)
    overlap_ep: bool | Literal["halves", "micro_batches"] = False
    zero: Literal[0, 1, 2, 3] = 0  # sharded over dp: 1: optimizer states, 2: gradients, too, 3: parameters, too (FSDP)
    shard: Degree | None = None  # with zero, number of ranks to shard over (HSDP); None: all of dp
    reshard_after_forward: bool = True  # with zero 3, parameters are gathered again in backward
    prefetch: Layers = 1  # with zero 3, layers gathered ahead
    bucket_bytes: Annotated[int, Meta(ge=1, le=1 << 40)] = 25 << 20  # with zero 0 and 1, gradients reduced at once
    overlap_tp: bool = True  # backward, tensor-parallel communication runs during the product for the weights' gradient
    pieces_tp: bool = False  # with tp and sequence, matmuls take rows as they come, and send them (`parallel/tensor/`)
    overlap_dp: bool = True  # gradients and parameters are sent during compute; False: after the last micro-batch
    overlap_pp: bool = True  # sends between stages run during compute; False: sender and receiver wait for them
    ends_count: bool = False  # embedding and head count as a layer each when layers are divided among stages
    stage_layers: tuple[int, ...] | None = None  # of each of pp · virtual parts, in the model's order; None: equal

    def __post_init__(self) -> None:
        if self.pieces_tp and not (self.tp > 1 and self.sequence):
            raise Misconfigured(
                f"parallel.pieces_tp with tp = {self.tp}, sequence = {self.sequence}: give tp above 1, and sequence"
            )
        if self.virtual > 1 and self.schedule != "interleaved":
            raise Misconfigured(
                f'parallel.virtual = {self.virtual} with schedule = "{self.schedule}": '
                'only "interleaved" has several parts per stage'
            )
        if self.stage_layers is not None:
            self._check_stage_layers(self.stage_layers)

    def _check_stage_layers(self, layers: tuple[int, ...]) -> None:
        if self.ends_count:
            raise Misconfigured("parallel.stage_layers with ends_count: both say how layers are divided; give one")
        if len(layers) != self.pp * self.virtual or min(layers) < 0:
            raise Misconfigured(
                f"parallel.stage_layers = {list(layers)}: give pp · virtual = {self.pp * self.virtual} numbers, "
                "each 0 or more"
            )

    @property
    def experts_cut(self) -> int:
        """Return the number of ranks that share the matrices of one expert."""
        return self.tp if self.expert_tp is None else self.expert_tp

    @property
    def replica(self) -> int:
        """Return the number of ranks that hold one replica of the model."""
        return self.tp * self.pp * self.cp

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the job."""
        return self.dp * self.replica


class Training(JobRecord, frozen=True, kw_only=True):
    """Describes the training of one optimizer step: batch, sequence, precision, recomputation and the like."""

    sequence: Count  # tokens of one sample
    global_batch: Count  # samples of one step over all ranks
    micro_batch: Width = 1  # samples that go through the model at once, on each replica
    precision: Precision = "bf16"  # of matrix products
    # with precision = "fp8", the maxima that scale a cast: of the tensor in earlier steps, of itself, of rows or blocks
    fp8_scaling: Literal["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"] = "delayed"
    fp8_attention: bool = False  # with precision = "fp8", attention is in fp8, too; False: in bf16
    fp8_gather: bool = False  # with precision = "fp8" and zero = 3, layers are cast before they are gathered
    recompute: Literal["none", "selective", "full"] = "none"  # full: layers; selective: `recompute_modules` of each
    recompute_modules: tuple[RecomputeModule, ...] = CORE_ONLY  # names of Megatron-LM; core_attn: arXiv 2205.05198
    recompute_method: Literal["uniform", "block"] | None = None  # of full: see `recompute_num_layers`; None: all layers
    recompute_num_layers: Layers | None = None  # block: so many of each part; uniform: all, as units of so many layers
    # with recompute = "full", a layer is recomputed up to the last input that backward needs, not to its end, as by
    # torch's checkpoint since 2.1 without use_reentrant; Megatron-LM recomputes to the end
    early_stop: bool = False
    # decides on the bytes of states and on memory traffic; adam_bf16: parameters and moments in bf16, no float32 copy
    optimizer: Literal["adam", "adam8bit", "sgd", "adam_bf16"] = "adam"
    offload_optimizer: Share = 0.0  # part of its states that is on the host, whose CPUs update it (ZeRO-Offload)
    offload_activations: Share = 0.0  # part of activations that wait on the host for backward, copied beside compute
    grad_bytes: Literal[2, 4] = 4  # of a gradient element while it is accumulated and reduced
    flash_attention: bool = True  # attention's scores never go to memory
    flash_version: Literal[1, 2, 3] = 3  # of FlashAttention, or what is as fast: cuDNN's is as 3 on Hopper
    fused_norms: bool = True  # a norm is one kernel, as in torch and Megatron-LM; False: an RMSNorm of tensor operators
    fused_kernels: bool = True  # neighbouring elementwise operators (Megatron-LM, torch.compile); False: eager kernels
    cuda_graphs: bool = False  # layers are replayed as CUDA graphs, so that the host launches nothing
    fused_accumulation: bool = True  # the matmul that makes a weight gradient adds it to the sum
    # steps between two averages of the replicas' parameters (local SGD); 1: gradients, every step
    local_steps: Width = 1
    asynchronous: bool = False  # replicas do not wait for each other: stale gradients (arXiv 1106.5730)

    def __post_init__(self) -> None:
        if self.sequence * self.global_batch > MAX_TOKENS:
            raise Misconfigured(
                f"training.sequence · global_batch = {self.sequence * self.global_batch:,} tokens in a step: "
                f"give at most {MAX_TOKENS:,}"
            )
        self._check_recomputation()

    def _check_recomputation(self) -> None:
        if self.recompute_modules != CORE_ONLY and self.recompute != "selective":
            raise Misconfigured(
                f'training.recompute_modules with recompute = "{self.recompute}": only "selective" chooses modules'
            )
        if not self.recompute_modules or len(set(self.recompute_modules)) < len(self.recompute_modules):
            raise Misconfigured(
                f"training.recompute_modules = {list(self.recompute_modules)}: give at least one of "
                f"{', '.join(get_args(RecomputeModule))}, each once"
            )
        if (self.recompute_method is None) != (self.recompute_num_layers is None):
            raise Misconfigured("training.recompute_method and recompute_num_layers belong together: give both or none")
        if self.recompute_num_layers is not None and self.recompute != "full":
            raise Misconfigured(
                f'training.recompute_num_layers with recompute = "{self.recompute}": give recompute = "full"'
            )

    def recomputed_layers(self, layers: int) -> int:
        """Return how many of the `layers` layers of a stage's part backward recomputes in full."""
        if self.recompute != "full":
            return 0
        if self.recompute_method == "block" and self.recompute_num_layers is not None:
            return min(self.recompute_num_layers, layers)
        return layers

    @property
    def element_bytes(self) -> int:
        """Return the bytes of one parameter or activation in the precision of matrix products."""
        return 4 if self.precision == "fp32" else 2

    @property
    def gathered_bytes(self) -> int:
        """Return the bytes of each layer parameter in an all_gather of zero 3."""
        return 1 if self.precision == "fp8" and self.fp8_gather else self.element_bytes

    def micro_batches(self, parallel: Parallel) -> int:
        """Return the micro-batches per step of each replica; raise Misconfigured if the batch is not divisible."""
        divides(
            "parallel.dp · training.micro_batch",
            parallel.dp * self.micro_batch,
            "training.global_batch",
            self.global_batch,
        )
        return self.global_batch // (parallel.dp * self.micro_batch)


class Compression(JobRecord, frozen=True, kw_only=True):
    """Describes how gradients are compressed before they are reduced over dp (`step/data_parallel.py`)."""

    # how: low-rank factors, the largest elements, random elements, or fewer bits
    method: Literal["powersgd", "topk", "randomk", "quantized"]
    rank: Width = 4  # of powersgd's factors
    keep: Part = 0.01  # part of the elements that topk and randomk send
    bits: Literal[4, 8] = 8  # of a quantized element
    block: Width = 256  # quantized elements that share a scale
    error_feedback: bool = True  # the compression error is added to the next gradient: one more buffer, two more passes


def on_gpus(parallel: Parallel, training: Training, gpus: int, *, batch_grows: bool) -> tuple[Parallel, Training]:
    """Return degrees and batch of a job on `gpus` GPUs, with dp adjusted; the global batch is kept, or grows with dp.

    Raises:
        Misconfigured: a replica does not divide the GPUs, or the replicas do not divide the batch that grows.
    """
    divides("parallel.tp · pp · cp", parallel.replica, "GPUs", gpus)
    grown = replace(parallel, dp=gpus // parallel.replica)
    if not batch_grows:
        return grown, training
    divides("parallel.dp", parallel.dp, "training.global_batch", training.global_batch)
    return grown, replace(training, global_batch=training.global_batch // parallel.dp * grown.dp)


def check_division(model: Model, parallel: Parallel, training: Training) -> None:
    """Raise Misconfigured, with the field, where a degree of parallelism does not divide the model or the batch."""
    divides("parallel.tp", parallel.tp, "model.heads", model.heads)
    if parallel.pieces_tp and model.mla is not None:
        raise Misconfigured("parallel.pieces_tp with model.mla: its latents are not gathered in pieces; leave it out")
    _check_layers(model, parallel)
    divides("parallel.cp", parallel.cp, "training.sequence", training.sequence)
    if parallel.expert_tp is not None and parallel.tp > 1 and not parallel.sequence:
        raise Misconfigured(f"parallel.expert_tp = 1 with tp = {parallel.tp}, sequence = false: give sequence = true")
    if parallel.experts_cut == parallel.tp:
        divides("parallel.ep", parallel.ep, "parallel.dp · parallel.cp", parallel.dp * parallel.cp)
    else:
        ranks = parallel.dp * parallel.cp * parallel.tp
        divides("parallel.ep", parallel.ep, "parallel.dp · parallel.cp · parallel.tp", ranks)
    if parallel.shard is not None:
        divides("parallel.shard", parallel.shard, "parallel.dp", parallel.dp)
    if parallel.ep > 1:
        if model.experts is None:
            raise Misconfigured(f"parallel.ep = {parallel.ep}: the model has no experts; give model.experts or ep = 1")
        divides("parallel.ep", parallel.ep, "model.experts.count", model.experts.count)
    training.micro_batches(parallel)


def _check_layers(model: Model, parallel: Parallel) -> None:
    if parallel.stage_layers is not None:
        if sum(parallel.stage_layers) != model.layers:
            raise Misconfigured(
                f"parallel.stage_layers: {sum(parallel.stage_layers)} layers of model.layers = {model.layers}: "
                "give numbers that add up to it"
            )
        return
    layers, what = model.layers, "model.layers"
    if parallel.ends_count:
        layers, what = model.layers + 2, "model.layers + 2 (parallel.ends_count)"
    parts = parallel.pp * parallel.virtual
    if layers % parts:
        raise Misconfigured(
            f"parallel.pp · parallel.virtual = {parts} does not divide {what} = {layers}: "
            f"give a divisor of {layers}, or parallel.stage_layers"
        )


class StagePart(Record, frozen=True, kw_only=True):
    """Describes a chunk of consecutive layers on a pipeline stage; a stage has several parts if interleaved."""

    layers: int  # how many, `routed` of them with experts
    routed: int = 0
    embedding: bool = False  # the part begins with it
    head: bool = False  # the part ends with it
    mtp: int = 0  # modules of multi-token prediction beside it


def deal_layers(model: Model, parallel: Parallel) -> tuple[tuple[StagePart, ...], ...]:
    """Return the layers of all stages' parts, `[stage][part]`, dealt round robin: `stage_layers`, or else equally many.

    Which layers of a part have experts follows from their place in the model.
    """
    parts = parallel.pp * parallel.virtual
    layers = parallel.stage_layers
    if layers is None:
        each = (model.layers + (2 if parallel.ends_count else 0)) // parts
        ends = (0, parts - 1) if parallel.ends_count else ()
        layers = tuple(each - ends.count(index) for index in range(parts))
    return _dealt(model, layers, parallel.pp)


@lru_cache(maxsize=4096)
def _dealt(model: Model, layers: tuple[int, ...], stages: int) -> tuple[tuple[StagePart, ...], ...]:
    last = len(layers) - 1
    dealt = [
        StagePart(
            layers=end - start, routed=model.experts_between(start, end),
            embedding=index == 0, head=index == last, mtp=model.mtp if index == last else 0,
        )
        for index, (start, end) in enumerate(pairwise(accumulate(layers, initial=0)))
    ]  # fmt: skip
    return tuple(tuple(dealt[stage::stages]) for stage in range(stages))


def whole_stage(parts: tuple[StagePart, ...]) -> StagePart:
    """Return all parts of a stage joined into one part."""
    return StagePart(
        layers=sum(part.layers for part in parts),
        routed=sum(part.routed for part in parts),
        embedding=any(part.embedding for part in parts),
        head=any(part.head for part in parts),
        mtp=sum(part.mtp for part in parts),
    )


def part_parameters(model: Model, parallel: Parallel, part: StagePart) -> ParameterCount:
    """Return the number of parameters of a stage's part that one rank holds, before zero shards them."""
    dense, sparse = (
        layer_parameters(model, experts).of_rank(parallel.tp, parallel.ep, parallel.experts_cut)
        for experts in (None, model.experts)
    )
    shared = (part.layers - part.routed) * dense.shared + part.routed * sparse.shared
    shared += part.mtp * (sparse.shared + mtp_parameters(model))
    table = model.vocab * model.hidden / parallel.tp
    if model.tied and parallel.pp == 1:
        shared += table if part.embedding or part.head else 0.0
    else:
        looks_up = part.embedding or (part.mtp > 0 and not model.tied)
        shared += table * (looks_up + part.head)
    return ParameterCount(shared=shared, experts=(part.routed + part.mtp) * sparse.experts)
