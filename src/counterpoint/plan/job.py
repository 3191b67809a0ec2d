"""A job as its file describes it: what is trained, how it is divided, on what.

    [model]
    name = "llama3-70b"          # or the widths: layers, hidden, heads, ...
    [training]
    sequence = 8192
    global_batch = 128
    [parallel]
    dp = 8
    tp = 8
    zero = 3
    [cluster]
    gpu = "H100"                 # or a table [cluster.gpu]
    gpus = 64                    # the last level is cut to it
    network = "h100-roce-400"    # or tables [[cluster.levels]]
    [overlap]
    mechanism = "zero_sm"
    [ranks]
    slow = 1.2

Everything that is left out has the default of its record: `Model`, `Training`, `Parallel`, `Cluster`.
"""

from __future__ import annotations

from counterpoint.errors import Misconfigured
from counterpoint.plan.cluster import Cluster
from counterpoint.plan.compression import Compression
from counterpoint.plan.model import Model
from counterpoint.plan.overlap import find_mechanism
from counterpoint.plan.parallel import Parallel, Training, fits
from counterpoint.records.base import Record

__all__ = ["Job", "Ranks"]


class Ranks(Record, frozen=True, kw_only=True):
    """How equal the ranks are.

    Args:
        slow: one rank computes so many times as long as the others.
        jitter: standard deviation of a rank's time over its mean; None: as measured for the GPU.
    """

    slow: float = 1.0
    jitter: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.slow < 1000:
            raise Misconfigured(f"ranks.slow = {self.slow}: give a factor from 1 to below 1000")
        if self.jitter is not None and not 0 <= self.jitter < 10:
            raise Misconfigured(f"ranks.jitter = {self.jitter}: give a part of the mean, from 0 to below 10")


class Job(Record, frozen=True, kw_only=True):
    """What `step` predicts.

    Args:
        model: what is trained.
        training: batch, sequence, precision.
        parallel: how it is divided.
        cluster: on what; it has as many GPUs as the job has ranks, or more.
        mechanism: how collectives overlap with compute: a name of `overlap.py`.
        compression: of gradients; None: sent whole.
        ranks: how equal they are.

    Raises:
        Misconfigured: no such mechanism, the model cannot be divided so, or the cluster is too small.
    """

    model: Model
    training: Training
    parallel: Parallel
    cluster: Cluster
    mechanism: str = "nccl"
    compression: Compression | None = None
    ranks: Ranks = Ranks()

    def __post_init__(self) -> None:
        find_mechanism(self.mechanism)
        fits(self.model, self.parallel, self.training)
        if self.parallel.world_size > self.cluster.num_gpus:
            raise Misconfigured(
                f"parallel: dp · pp · cp · tp = {self.parallel.world_size} ranks on {self.cluster.num_gpus} GPUs: "
                "give smaller degrees, or a larger cluster"
            )
