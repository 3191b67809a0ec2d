"""How a job is divided among its ranks, and how it trains."""

from __future__ import annotations

from typing import Literal

from counterpoint.errors import Misconfigured
from counterpoint.plan.model import Model, divides, positive
from counterpoint.records.base import Record

__all__ = ["Parallel", "Precision", "Training"]

Precision = Literal["bf16", "fp16", "fp8", "fp32"]


class Parallel(Record, frozen=True, kw_only=True):
    """Degrees of parallelism; world size = dp · pp · cp · tp. Ranks count tp first, then cp, dp, pp.

    Args:
        dp: replicas of the model, or shards of it with `zero`.
        tp: ranks that share every matrix.
        sequence: with tp, what is between the matrices is divided along the sequence (all_gather and reduce_scatter
            instead of all_reduce).
        pp: stages.
        virtual: parts of the model per stage (interleaving).
        schedule: of micro-batches over stages.
        cp: ranks that share a sequence.
        ep: ranks that share the experts of a layer; taken from dp · cp.
        zero: 0: every replica has everything; 1: optimizer states sharded over dp; 2: gradients, too; 3: parameters,
            too (FSDP).
        shard: with zero, ranks over which is sharded (HSDP); None: all of dp.
        reshard_after_forward: with zero 3, parameters are gathered again in backward.
        prefetch: with zero 3, layers gathered ahead.
        bucket_bytes: with zero 0 and 1, gradients reduced at once.
        overlap_tp: backward, tensor-parallel communication runs beside the product for the weights' gradient.
        overlap_dp: gradients are reduced (and parameters gathered) beside compute; False: after the last micro-batch.
        overlap_pp: what stages send each other runs beside compute; False: sender and receiver wait for it.
        ends_count: embedding and head each take the place of a layer when layers are dealt to stages.
    """

    dp: int = 1
    tp: int = 1
    sequence: bool = True
    pp: int = 1
    virtual: int = 1
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    cp: int = 1
    ep: int = 1
    zero: Literal[0, 1, 2, 3] = 0
    shard: int | None = None
    reshard_after_forward: bool = True
    prefetch: int = 1
    bucket_bytes: int = 25 << 20
    overlap_tp: bool = True
    overlap_dp: bool = True
    overlap_pp: bool = True
    ends_count: bool = False

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "virtual", "cp", "ep", "prefetch", "bucket_bytes"):
            positive(f"parallel.{name}", getattr(self, name))
        divides("parallel.ep", self.ep, "parallel.dp · parallel.cp", self.dp * self.cp)
        if self.shard is not None:
            positive("parallel.shard", self.shard)
            divides("parallel.shard", self.shard, "parallel.dp", self.dp)
        if self.virtual > 1 and self.schedule != "interleaved":
            raise Misconfigured(
                f'parallel.virtual = {self.virtual} with schedule = "{self.schedule}": '
                'only "interleaved" has several parts per stage'
            )

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp * self.cp


class Training(Record, frozen=True, kw_only=True):
    """What one optimizer step does.

    Args:
        sequence: tokens of one sample.
        global_batch: samples of one step over all ranks.
        micro_batch: samples that go through the model at once, on each replica.
        precision: of matrix products.
        recompute: what backward computes again. `selective`: attention's core (arXiv 2205.05198).
        optimizer: decides on the bytes of its states and on its traffic.
        grad_bytes: of a gradient element while it is accumulated and reduced.
        flash_attention: attention's scores never go to memory.
        fused_kernels: neighbouring elementwise operators are one kernel (Megatron-LM, torch.compile); False: eager.
        local_steps: replicas exchange what they have learnt each so many-th step (local SGD); 1: gradients, every step.
        asynchronous: replicas exchange gradients without waiting for each other (stale gradients, arXiv 1106.5730).
        fused_accumulation: weight gradients are added to their sum by the product that makes them.
    """

    sequence: int
    global_batch: int
    micro_batch: int = 1
    precision: Precision = "bf16"
    recompute: Literal["none", "selective", "full"] = "none"
    optimizer: Literal["adam", "adam8bit", "sgd"] = "adam"
    grad_bytes: Literal[2, 4] = 4
    flash_attention: bool = True
    fused_kernels: bool = True
    fused_accumulation: bool = True
    local_steps: int = 1
    asynchronous: bool = False

    def __post_init__(self) -> None:
        for name in ("sequence", "global_batch", "micro_batch", "local_steps"):
            positive(f"training.{name}", getattr(self, name))

    def micro_batches(self, parallel: Parallel) -> int:
        """Of one step, on each replica: gradient accumulation, or what fills a pipeline.

        Raises:
            Misconfigured: the batch cannot be divided so.
        """
        divides(
            "parallel.dp · training.micro_batch",
            parallel.dp * self.micro_batch,
            "training.global_batch",
            self.global_batch,
        )
        return self.global_batch // (parallel.dp * self.micro_batch)


def fits(model: Model, parallel: Parallel, training: Training) -> None:
    """Raises Misconfigured, with the field, where the model cannot be divided as asked."""
    divides("parallel.tp", parallel.tp, "model.heads", model.heads)
    slots, what = model.layers, "model.layers"
    if parallel.ends_count:
        slots, what = model.layers + 2, "model.layers + 2 (parallel.ends_count)"
    divides("parallel.pp · parallel.virtual", parallel.pp * parallel.virtual, what, slots)
    divides("parallel.cp", parallel.cp, "training.sequence", training.sequence)
    if parallel.ep > 1:
        if model.experts is None:
            raise Misconfigured(f"parallel.ep = {parallel.ep}: the model has no experts; give model.experts or ep = 1")
        divides("parallel.ep", parallel.ep, "model.experts.count", model.experts.count)
    training.micro_batches(parallel)
