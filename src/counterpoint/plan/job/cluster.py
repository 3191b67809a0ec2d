"""Describe the machines of a plan: equal GPUs, and the levels of network above them."""

from __future__ import annotations

from typing import Literal

from counterpoint.errors import Misconfigured, printable
from counterpoint.machine.gpus import GPUS as SHEETS
from counterpoint.plan.job.model import positive
from counterpoint.records import Record


class ClusterGpu(Record, frozen=True, kw_only=True):
    """Holds the data sheet of one GPU; what is reached of it is measured (`machine/profile.py`)."""

    name: str  # as in `machine/gpus.py`
    tflops: dict[str, float]  # dense peak by precision, in 10^12 operations per second
    sms: int  # streaming multiprocessors
    memory_gib: float  # device memory
    memory_gb_per_s: float  # its bandwidth
    source: str = ""  # of the figures
    clock_ghz: float | None = None  # at which its SMs are locked; None: as high as power allows
    power_watts: float | None = None  # its power limit; None: that of the data sheet

    def __post_init__(self) -> None:
        for name in ("sms", "memory_gib", "memory_gb_per_s"):
            positive(f"gpu.{name}", getattr(self, name))
        for name in ("clock_ghz", "power_watts"):
            if getattr(self, name) is not None:
                positive(f"gpu.{name}", getattr(self, name))
        for precision, value in self.tflops.items():
            positive(f"gpu.tflops.{precision}", value)


class Level(Record, frozen=True, kw_only=True):
    """Describes one level of the network: the first joins GPUs, each further one joins units of the one before."""

    name: str  # "nvlink", "rail", "leaf", "spine", "pod"
    kind: Literal["nvlink", "pcie", "network"]  # the transport, which decides on latencies
    size: int  # GPUs below one unit of this level (8 for a node of 8 GPUs). The last level holds all GPUs
    gb_per_s: float  # of one GPU at this level, each direction, before oversubscription (one 400 Gb/s NIC per GPU: 50)
    latency_us: float  # of one hop at this level
    oversubscription: float = 1.0  # bandwidth of the links below over that of the links above; 1: non-blocking
    in_network_reduction: bool = False  # switches reduce (SHARP, NVLS)

    def __post_init__(self) -> None:
        for name in ("size", "gb_per_s"):
            positive(f"level.{self.name}.{name}", getattr(self, name))
        if self.latency_us < 0:
            raise Misconfigured(f"level.{self.name}.latency_us = {self.latency_us}: give 0 or more")
        if self.oversubscription < 1:
            raise Misconfigured(f"level.{self.name}.oversubscription = {self.oversubscription}: give 1 or more")


class Cluster(Record, frozen=True, kw_only=True):
    """Describes equal GPUs below a tree of levels."""

    gpu: ClusterGpu  # of every rank
    levels: tuple[Level, ...]  # inside out; the last holds all GPUs
    network: str | None = None  # name of the network that the levels are from; None: they were written out, or changed

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
        """Return the number of GPUs of the cluster."""
        return self.levels[-1].size

    @property
    def gpus_per_node(self) -> int:
        """Return the number of GPUs below one unit of the innermost level."""
        return self.levels[0].size

    def level_of(self, ranks: int, stride: int = 1) -> int:
        """Return the index of the lowest level that joins `ranks` ranks, `stride` apart; Misconfigured if none does."""
        span = (ranks - 1) * stride + 1
        for index, level in enumerate(self.levels):
            if span <= level.size:
                return index
        raise Misconfigured(f"{ranks} ranks, {stride} apart, on {self.num_gpus} GPUs: give a larger cluster")


GPUS: dict[str, ClusterGpu] = {  # those of the one table of data sheets that have memory figures
    sheet.name: ClusterGpu(
        name=sheet.name,
        tflops=sheet.tflops,
        sms=sheet.sm.num_sms,
        memory_gib=sheet.memory_gib,
        memory_gb_per_s=sheet.memory_gb_per_s,
        source=sheet.source,
    )
    for sheet in sorted(SHEETS, key=lambda sheet: sheet.name)
    if sheet.memory_gib is not None and sheet.memory_gb_per_s is not None
}


def find_gpu(name: str) -> ClusterGpu:
    """Return the GPU of that name, in any case, or raise Misconfigured with the names that there are."""
    found = {known.lower(): gpu for known, gpu in GPUS.items()}.get(name.lower())
    if found is None:
        raise Misconfigured(f"gpu = {printable(name)!r}: known are {', '.join(GPUS)}; give one, or a table of figures")
    return found
