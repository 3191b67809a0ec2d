"""Define the record of what NCCL's own logs say of a job: communicators, choices, bandwidths and what is wrong.

`NcclReport` is the key `nccl` of `counterpoint.diagnosis/1`: keys may be added, never renamed. Unknown values are null.
"""

from __future__ import annotations

from counterpoint.records import Record


class NcclCommunicators(Record, frozen=True, kw_only=True):
    """Describes communicators that are alike: their number, ranks, hosts and channels."""

    count: int
    ranks: int
    hosts: int | None
    channels: int | None  # for collectives; the fewest that a rank reports
    nvls_channels: int | None
    p2p_channels_per_peer: int | None


class NcclChoice(Record, frozen=True, kw_only=True):
    """Names what NCCL chose for the calls of one operation and size."""

    op: str
    bytes: int
    algorithm: str  # ring | tree | nvls | ... , or the name of a symmetric kernel
    protocol: str | None  # ll | ll128 | simple
    channels: int | None
    calls: int


class NcclBandwidth(Record, frozen=True, kw_only=True):
    """Holds what NCCL Inspector measured for one operation and size: medians over calls and ranks."""

    op: str
    bytes: int
    ranks: int
    hosts: int | None
    calls: int
    time_us: float
    bus_gb_per_s: float
    slowest: str  # the communicator and rank with the lowest median
    slowest_gb_per_s: float


class NcclRemark(Record, frozen=True, kw_only=True):
    """Describes one problem that NCCL's logs show, with its remedy."""

    kind: str  # sockets | no_gpu_direct | host_memory | few_channels | no_nvls | forced | slow_communicator | warning
    title: str
    evidence: str
    advice: str


class NcclReport(Record, frozen=True, kw_only=True):
    """Holds what the logs of NCCL (`NCCL_DEBUG=INFO`, NCCL Inspector) say of a job."""

    files: tuple[str, ...]
    lines: int  # of NCCL's
    version: str | None
    transports: dict[str, int]  # connections between ranks, by transport
    settings: dict[str, str]  # environment variables that NCCL took
    communicators: tuple[NcclCommunicators, ...]
    choices: tuple[NcclChoice, ...]  # largest bytes x calls first
    bandwidths: tuple[NcclBandwidth, ...]  # longest time x calls first
    remarks: tuple[NcclRemark, ...]
