"""Describe how a job is divided among its ranks, and how it trains: degrees, batches, compression, pipeline stages."""

from __future__ import annotations

from typing import Literal

from counterpoint.errors import Misconfigured
from counterpoint.plan.job.model import Model, ParameterCount, divides, layer_parameters, positive
from counterpoint.records import Record

Precision = Literal["bf16", "fp16", "fp8", "fp32"]


class Parallel(Record, frozen=True, kw_only=True):
    """Holds the degrees of parallelism; world size = dp · pp · cp · tp. Ranks count tp first, then cp, dp, pp."""

    dp: int = 1  # replicas of the model, or shards of it with `zero`
    tp: int = 1  # ranks that share every matrix
    sequence: bool = True  # with tp, activations between the matrices are divided, too (sequence parallelism)
    pp: int = 1  # pipeline stages
    virtual: int = 1  # parts of the model per stage (interleaving)
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"  # of micro-batches over stages
    cp: int = 1  # ranks that share a sequence
    ep: int = 1  # ranks that share the experts of a layer; taken from dp · cp
    zero: Literal[0, 1, 2, 3] = 0  # sharded over dp: 1: optimizer states, 2: gradients, too, 3: parameters, too (FSDP)
    shard: int | None = None  # with zero, ranks over which is sharded (HSDP); None: all of dp
    reshard_after_forward: bool = True  # with zero 3, parameters are gathered again in backward
    prefetch: int = 1  # with zero 3, layers gathered ahead
    bucket_bytes: int = 25 << 20  # with zero 0 and 1, gradients reduced at once
    overlap_tp: bool = True  # backward, tensor-parallel communication runs during the product for the weights' gradient
    pieces_tp: bool = False  # with tp and sequence, matmuls take rows as they come, and send them (`parallel/tensor/`)
    overlap_dp: bool = True  # gradients and parameters are sent during compute; False: after the last micro-batch
    overlap_pp: bool = True  # what stages send each other runs during compute; False: sender and receiver wait for it
    ends_count: bool = False  # embedding and head count as a layer each when layers are divided among stages

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "virtual", "cp", "ep", "prefetch", "bucket_bytes"):
            positive(f"parallel.{name}", getattr(self, name))
        divides("parallel.ep", self.ep, "parallel.dp · parallel.cp", self.dp * self.cp)
        if self.shard is not None:
            positive("parallel.shard", self.shard)
            divides("parallel.shard", self.shard, "parallel.dp", self.dp)
        if self.pieces_tp and not (self.tp > 1 and self.sequence):
            raise Misconfigured(
                f"parallel.pieces_tp with tp = {self.tp}, sequence = {self.sequence}: give tp above 1, and sequence"
            )
        if self.virtual > 1 and self.schedule != "interleaved":
            raise Misconfigured(
                f'parallel.virtual = {self.virtual} with schedule = "{self.schedule}": '
                'only "interleaved" has several parts per stage'
            )

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the job."""
        return self.dp * self.tp * self.pp * self.cp


class Training(Record, frozen=True, kw_only=True):
    """Describes what one optimizer step does."""

    sequence: int  # tokens of one sample
    global_batch: int  # samples of one step over all ranks
    micro_batch: int = 1  # samples that go through the model at once, on each replica
    precision: Precision = "bf16"  # of matrix products
    # with precision = "fp8", whose maxima scale what is cast: of the tensor in earlier steps, of the tensor, of blocks
    fp8_scaling: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "delayed"
    fp8_attention: bool = False  # with precision = "fp8", attention is in fp8, too; False: in bf16
    recompute: Literal["none", "selective", "full"] = "none"  # selective: attention's core (arXiv 2205.05198)
    optimizer: Literal["adam", "adam8bit", "sgd"] = "adam"  # decides on the bytes of its states and on its traffic
    grad_bytes: Literal[2, 4] = 4  # of a gradient element while it is accumulated and reduced
    flash_attention: bool = True  # attention's scores never go to memory
    flash_version: Literal[1, 2, 3] = 3  # of FlashAttention, or what is as fast: cuDNN's is as 3 on Hopper
    fused_norms: bool = True  # a norm is one kernel, as in torch and Megatron-LM; False: an RMSNorm of tensor operators
    fused_kernels: bool = True  # neighbouring elementwise operators (Megatron-LM, torch.compile); False: eager kernels
    cuda_graphs: bool = False  # layers are replayed as CUDA graphs, so that the host launches nothing
    fused_accumulation: bool = True  # weight gradients are added to their sum by the product that makes them
    local_steps: int = 1  # steps between two averages of the replicas' parameters (local SGD); 1: gradients, every step
    asynchronous: bool = False  # replicas do not wait for each other: stale gradients (arXiv 1106.5730)

    def __post_init__(self) -> None:
        for name in ("sequence", "global_batch", "micro_batch", "local_steps"):
            positive(f"training.{name}", getattr(self, name))

    @property
    def element_bytes(self) -> int:
        """Return the bytes of a parameter or activation in the precision of matrix products."""
        return 4 if self.precision == "fp32" else 2

    def micro_batches(self, parallel: Parallel) -> int:
        """Return the micro-batches of one step on each replica; Misconfigured if the batch cannot be divided so."""
        divides(
            "parallel.dp · training.micro_batch",
            parallel.dp * self.micro_batch,
            "training.global_batch",
            self.global_batch,
        )
        return self.global_batch // (parallel.dp * self.micro_batch)


class Compression(Record, frozen=True, kw_only=True):
    """Describes how gradients are compressed before they are reduced over dp (`step/data_parallel.py`)."""

    # how: low-rank factors, the largest elements, random elements, or fewer bits
    method: Literal["powersgd", "topk", "randomk", "quantized"]
    rank: int = 4  # of powersgd's factors
    keep: float = 0.01  # part of the elements that topk and randomk send, above 0 and at most 1
    bits: Literal[4, 8] = 8  # of a quantized element
    block: int = 256  # quantized elements that share a scale
    error_feedback: bool = True  # what was left out is added to the next gradient: one more buffer, two more passes

    def __post_init__(self) -> None:
        positive("compression.rank", self.rank)
        positive("compression.block", self.block)
        if not 0 < self.keep <= 1:
            raise Misconfigured(f"compression.keep = {self.keep}: give a part above 0 and at most 1")


def check_division(model: Model, parallel: Parallel, training: Training) -> None:
    """Raise Misconfigured, with the field, where the model or the batch cannot be divided as asked."""
    divides("parallel.tp", parallel.tp, "model.heads", model.heads)
    layers, what = model.layers, "model.layers"
    if parallel.ends_count:
        layers, what = model.layers + 2, "model.layers + 2 (parallel.ends_count)"
    divides("parallel.pp · parallel.virtual", parallel.pp * parallel.virtual, what, layers)
    divides("parallel.cp", parallel.cp, "training.sequence", training.sequence)
    if parallel.ep > 1:
        if model.experts is None:
            raise Misconfigured(f"parallel.ep = {parallel.ep}: the model has no experts; give model.experts or ep = 1")
        divides("parallel.ep", parallel.ep, "model.experts.count", model.experts.count)
    training.micro_batches(parallel)


class StagePart(Record, frozen=True, kw_only=True):
    """Describes consecutive layers that one stage of the pipeline runs."""

    layers: int  # how many, `routed` of them with experts
    routed: int = 0
    embedding: bool = False  # the part begins with it
    head: bool = False  # the part ends with it


def deal_layers(model: Model, parallel: Parallel) -> tuple[tuple[StagePart, ...], ...]:
    """Return `[stage][part]`: equally many layers each, parts round robin; with `ends_count` both ends have one less.

    Layers with experts are spread evenly, since one in `every` is one; a part has a whole number of them.
    """
    parts = parallel.pp * parallel.virtual
    places = model.layers + (2 if parallel.ends_count else 0)
    each, routed = places // parts, model.expert_layers

    def part(index: int) -> StagePart:
        first, last = index == 0, index == parts - 1
        layers = each - (first + last if parallel.ends_count else 0)
        share = routed * (index + 1) // parts - routed * index // parts
        return StagePart(layers=layers, routed=min(share, layers), embedding=first, head=last)

    return tuple(
        tuple(part(turn * parallel.pp + stage) for turn in range(parallel.virtual)) for stage in range(parallel.pp)
    )


def whole_stage(parts: tuple[StagePart, ...]) -> StagePart:
    """Return the parts of a stage merged into one."""
    return StagePart(
        layers=sum(part.layers for part in parts),
        routed=sum(part.routed for part in parts),
        embedding=any(part.embedding for part in parts),
        head=any(part.head for part in parts),
    )


def part_parameters(model: Model, parallel: Parallel, part: StagePart) -> ParameterCount:
    """Return the parameters of one rank that runs this part, before zero shards them."""
    dense, sparse = layer_parameters(model), layer_parameters(model, model.experts)
    shared = ((part.layers - part.routed) * dense.shared + part.routed * sparse.shared) / parallel.tp
    table = model.vocab * model.hidden / parallel.tp
    if model.tied and parallel.pp == 1:
        shared += table if part.embedding or part.head else 0.0
    else:
        shared += table * (part.embedding + part.head)
    return ParameterCount(shared=shared, experts=part.routed * sparse.experts / parallel.tp / parallel.ep)
