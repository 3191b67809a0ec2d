"""The machines of a plan: a GPU, and the levels of network above it."""

from __future__ import annotations

from typing import Literal

from counterpoint.errors import Misconfigured
from counterpoint.plan.model import positive
from counterpoint.records.base import Record

__all__ = ["Cluster", "Gpu", "Level"]


class Gpu(Record, frozen=True, kw_only=True):
    """One GPU, as its data sheet has it; what is reached of that is measured elsewhere (`efficiency.py`).

    Args:
        name: as in `gpus.py`.
        tflops: dense peak by precision, in 10^12 operations per second.
        sms: streaming multiprocessors.
        memory_gib: device memory.
        memory_gb_per_s: its bandwidth.
        source: where the figures are from.
    """

    name: str
    tflops: dict[str, float]
    sms: int
    memory_gib: float
    memory_gb_per_s: float
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("sms", "memory_gib", "memory_gb_per_s"):
            positive(f"gpu.{name}", getattr(self, name))
        for precision, value in self.tflops.items():
            positive(f"gpu.tflops.{precision}", value)


class Level(Record, frozen=True, kw_only=True):
    """One level of the network, inside out: the first joins GPUs, each further one joins units of the one before.

    Args:
        name: "nvlink", "rail", "leaf", "spine", "pod".
        kind: what the transport is, which decides on latencies.
        size: GPUs below one unit of this level (8 for a node of 8 GPUs). The last level holds all GPUs.
        gb_per_s: of one GPU at this level, each direction, before oversubscription (one 400 Gb/s NIC per GPU: 50).
        latency_us: of one hop at this level.
        oversubscription: how often the links below are promised above; 1: non-blocking.
        in_network_reduction: switches add (SHARP, NVLS).
    """

    name: str
    kind: Literal["nvlink", "pcie", "network"]
    size: int
    gb_per_s: float
    latency_us: float
    oversubscription: float = 1.0
    in_network_reduction: bool = False

    def __post_init__(self) -> None:
        for name in ("size", "gb_per_s"):
            positive(f"level.{self.name}.{name}", getattr(self, name))
        if self.latency_us < 0:
            raise Misconfigured(f"level.{self.name}.latency_us = {self.latency_us}: give 0 or more")
        if self.oversubscription < 1:
            raise Misconfigured(f"level.{self.name}.oversubscription = {self.oversubscription}: give 1 or more")


class Cluster(Record, frozen=True, kw_only=True):
    """Equal GPUs below a tree of levels."""

    gpu: Gpu
    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        if not self.levels:
            raise Misconfigured("cluster.levels is empty: give at least the level that joins the GPUs of a node")
        for below, above in zip(self.levels, self.levels[1:], strict=False):
            if above.size <= below.size or above.size % below.size:
                raise Misconfigured(
                    f"level.{above.name}.size = {above.size}: give a multiple of level.{below.name}.size = {below.size}"
                )

    @property
    def num_gpus(self) -> int:
        return self.levels[-1].size

    def level_of(self, ranks: int, stride: int = 1) -> int:
        """Index of the lowest level that joins `ranks` ranks, `stride` apart and the first of them aligned.

        Raises:
            Misconfigured: the cluster has fewer GPUs.
        """
        span = (ranks - 1) * stride + 1
        for index, level in enumerate(self.levels):
            if span <= level.size:
                return index
        raise Misconfigured(f"{ranks} ranks, {stride} apart, on {self.num_gpus} GPUs: give a larger cluster")
