"""Describe the machines of a plan: equal GPUs, and the levels of network above them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from counterpoint.errors import Misconfigured, printable
from counterpoint.machine.gpus import GPUS as SHEETS
from counterpoint.machine.profile import MAX_BYTES, Profile, own_profile, shipped_profile
from counterpoint.plan.job.fields import Count, Factor, JobRecord, Micros, Name, Rate, Text
from counterpoint.read_file import read_text
from counterpoint.records import Record

HOST_LINKS = {  # GB/s, by the first letters of a GPU's name
    "GB": 390.0,  # NVLink-C2C, 450: assumed to reach as much of it as PCIe does
    "A": 25.0, "L": 25.0,  # PCIe 4: assumed
    "": 55.6,  # PCIe 5: NVIDIA's nvbandwidth, host_to_device_memcpy_ce on H100
}  # fmt: skip


class ClusterGpu(JobRecord, frozen=True, kw_only=True):
    """Holds the data sheet of one GPU; its profile (`machine/profile.py`) has the measured fractions of these peaks."""

    name: Name  # as in `machine/gpus.py`
    # dense peak by precision, in 10^12 operations per second
    tflops: Annotated[dict[Name, Rate], Meta(min_length=1)]
    sms: Annotated[int, Meta(ge=1, le=4096)]  # streaming multiprocessors
    memory_gib: Rate  # device memory
    memory_gb_per_s: Rate  # its bandwidth
    source: Text = ""  # of the figures
    clock_ghz: Rate | None = None  # clock at which its SMs are locked; None: as high as power allows
    power_watts: Rate | None = None  # its power limit; None: that of the data sheet
    host_gb_per_s: Rate | None = None  # to host memory and back, in each direction; None: `HOST_LINKS` by its name
    machine: Text = ""  # file of the user's own profile (docs/reference/profile.md); "": the shipped profile

    @property
    def profile(self) -> Profile:
        """Return the measured profile of this GPU: the user's own, or the shipped one."""
        return plan_profile(self.name, self.machine)

    @property
    def host_bytes_per_us(self) -> float:
        """Return the rate of copies between this GPU and its host, in each direction."""
        named = next(rate for letters, rate in HOST_LINKS.items() if self.name.startswith(letters))
        return (self.host_gb_per_s or named) * 1e3


@cache
def plan_profile(gpu: str, machine: str) -> Profile:
    """Return a GPU's profile from the file `machine`, or the shipped one; raise Misconfigured for an invalid file."""
    if not machine:
        return shipped_profile(gpu)
    try:
        read_text(Path(machine), limit=MAX_BYTES, advice="give a profile as JSON (docs/reference/profile.md)")
        return own_profile(gpu, machine) or shipped_profile(gpu)
    except Misconfigured as error:
        raise Misconfigured(f"cluster.machine = {error}") from None


class Level(JobRecord, frozen=True, kw_only=True):
    """Describes one level of the network: the first joins GPUs, each further one joins units of the level below."""

    name: Name  # "nvlink", "rail", "leaf", "spine", "pod"
    kind: Literal["nvlink", "pcie", "network"]  # the transport, which decides on latencies
    size: Count  # GPUs below one unit of this level (8 for a node of 8 GPUs). The last level holds all GPUs
    gb_per_s: Rate  # of one GPU at this level, each direction, before oversubscription (one 400 Gb/s NIC per GPU: 50)
    latency_us: Micros  # of one hop at this level
    oversubscription: Factor = 1.0  # bandwidth of the links below over that of the links above; 1: non-blocking
    in_network_reduction: bool = False  # switches reduce (SHARP, NVLS)
    failed_nics: Annotated[int, Meta(ge=0, le=1023)] = 0  # NICs that one node has lost, of one NIC per GPU


class Cluster(Record, frozen=True, kw_only=True):
    """Describes a cluster: equal GPUs below a tree of network levels."""

    gpu: ClusterGpu  # of every rank
    levels: tuple[Level, ...]  # innermost first; the last holds all GPUs
    network: str | None = None  # name of the network that the levels are from; None: they were written out, or changed
    fits: str = ""  # file of the user's own network, whose fitted protocols count even if levels were changed

    def __post_init__(self) -> None:
        if not self.levels:
            raise Misconfigured("cluster.levels is empty: give at least the level that joins the GPUs of a node")
        lost = max(level.failed_nics for level in self.levels)
        if lost >= self.gpus_per_node:
            raise Misconfigured(
                f"failed_nics = {lost} of {self.gpus_per_node}: a node without a network cannot take part; give fewer"
            )
        for below, above in zip(self.levels, self.levels[1:], strict=False):
            if above.size <= below.size or above.size % below.size:
                raise Misconfigured(
                    f"cluster.levels: size = {above.size} of {printable(above.name)}: "
                    f"give a multiple of {below.size}, the size of {printable(below.name)} below it"
                )

    @property
    def num_gpus(self) -> int:
        """Return the number of GPUs of the cluster."""
        return self.levels[-1].size

    @property
    def gpus_per_node(self) -> int:
        """Return the number of GPUs in one unit of the innermost network level."""
        return self.levels[0].size

    def level_of(self, ranks: int, stride: int = 1) -> int:
        """Return the index of the lowest level that joins `ranks` ranks, `stride` apart, or raise Misconfigured."""
        span = (ranks - 1) * stride + 1
        for index, level in enumerate(self.levels):
            if span <= level.size:
                return index
        raise Misconfigured(f"{ranks} ranks, {stride} apart, on {self.num_gpus} GPUs: give a larger cluster")


GPUS: dict[str, ClusterGpu] = {  # those of the one table of data sheets that have memory figures
    sheet.name: ClusterGpu(
        name=sheet.name, tflops=sheet.tflops, sms=sheet.sm.num_sms, memory_gib=sheet.memory_gib,
        memory_gb_per_s=sheet.memory_gb_per_s, source=sheet.source,
    )
    for sheet in sorted(SHEETS, key=lambda sheet: sheet.name)
    if sheet.memory_gib is not None and sheet.memory_gb_per_s is not None
}  # fmt: skip


def find_gpu(name: str) -> ClusterGpu:
    """Return the GPU called `name`, in any case; raise Misconfigured, with the known names, if there is none."""
    found = {known.lower(): gpu for known, gpu in GPUS.items()}.get(name.lower())
    if found is None:
        raise Misconfigured(f"gpu = {printable(name)!r}: known are {', '.join(GPUS)}; give one, or a table of figures")
    return found
