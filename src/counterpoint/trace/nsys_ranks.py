"""Find the ranks of a Nsight Systems export, the properties of their GPUs, and the UTC of its times."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from counterpoint.errors import printable
from counterpoint.trace.nsys_nvtx import NcclCommunicator
from counterpoint.trace.nsys_tables import Export
from counterpoint.trace.source import rank_from_name
from counterpoint.trace.timeline import I64, Device

MAX_RANKS = 1024  # ranks in one export, which comes from one host

# Variables of launchers that give every rank its own process and so its own capture; the first that is set counts.
_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "PMIX_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
_NODE_VARIABLES = ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID")
_NEWEST_UTC_NS = 4 * 10**18  # the year 2096; anything beyond is not a time


@dataclass(frozen=True, kw_only=True, slots=True)
class RankId:
    """Identifies one rank: one process and a device that it uses."""

    process: int  # globalPid
    device: int  # CUDA ordinal in that process
    number: int
    known: bool
    world_size: int | None = None


def find_ranks(
    export: Export,
    process: I64,
    device: I64,
    is_kernel: npt.NDArray[np.bool_],
    communicators: Sequence[NcclCommunicator],
    file_name: str,
) -> list[RankId]:
    """Return the (process, device) pairs that ran kernels (or only copies, if no pair ran kernels), ordered by rank.

    A single pair gets its rank from the launcher's environment, else the file name, else NCCL. Several pairs get the
    ranks of their largest NCCL communicator, else consecutive numbers, after the ranks of earlier nodes if known.
    """
    chosen = is_kernel if is_kernel.any() else np.ones_like(is_kernel)
    processes, which = np.unique(process[chosen], return_inverse=True)
    devices, used = np.unique(device[chosen], return_inverse=True)
    pairs = [(int(processes[p]), int(devices[d])) for p, d in
             (divmod(int(code), len(devices)) for code in np.unique(which * len(devices) + used))]  # fmt: skip
    if len(pairs) > MAX_RANKS:
        raise export.bad(f"claims {len(pairs)} pairs of process and device; at most {MAX_RANKS} fit in one capture")
    variables = _environment(export)
    by_nccl = _by_nccl(pairs, communicators)
    if len(pairs) == 1:
        return [_lone(pairs[0], variables, file_name, by_nccl)]
    if by_nccl:
        return sorted(by_nccl, key=lambda rank: rank.number)
    node = next((variables[key] for key in _NODE_VARIABLES if key in variables), 0)
    return [RankId(process=p, device=d, number=node * len(pairs) + at, known=False) for at, (p, d) in enumerate(pairs)]


def _lone(pair: tuple[int, int], variables: dict[str, int], file_name: str, by_nccl: list[RankId]) -> RankId:
    process, device = pair
    for name, size in _VARIABLES:
        if name in variables:
            world = variables.get(size)
            return RankId(process=process, device=device, number=variables[name], known=True, world_size=world)
    named = rank_from_name(file_name)
    if named is None and "LOCAL_RANK" in variables:
        named = variables["LOCAL_RANK"]
    # A lone capture cannot show whether NCCL's largest communicator is the whole job, so it does not settle the rank.
    number = named if named is not None else by_nccl[0].number if by_nccl else 0
    return RankId(process=process, device=device, number=number, known=False)


def _by_nccl(pairs: Sequence[tuple[int, int]], communicators: Sequence[NcclCommunicator]) -> list[RankId]:
    """Return the pairs' ranks in the largest NCCL communicator if each pair has a distinct one, else an empty list."""
    size = max((one.num_ranks for one in communicators), default=0)
    joined: dict[int, list[NcclCommunicator]] = {}
    for one in communicators:
        if one.num_ranks == size:
            joined.setdefault(one.process, []).append(one)
    devices = Counter(process for process, _ in pairs)
    found = []
    for process, device in pairs:
        lone = devices[process] == 1  # processes with one device, where NCCL's number of the device is not needed
        numbers = {one.rank for one in joined.get(process, ()) if lone or one.device == device}
        if len(numbers) != 1 or not 0 <= (number := numbers.pop()) < size:
            return []
        found.append(RankId(process=process, device=device, number=number, known=True, world_size=size))
    return found if len({rank.number for rank in found}) == len(pairs) else []


def _environment(export: Export) -> dict[str, int]:
    """Return the launcher's environment variables in the export that have a number as value."""
    stored = [row.get("value") for row in export.small("TARGET_INFO_SYSTEM_ENV", ("name", "value"))
              if row.get("name") == "DeviceEnvironment"]  # fmt: skip
    stored += [row.get("value") for row in export.small("META_DATA_CAPTURE", ("name", "value"))
               if str(row.get("name")).endswith(":ENVIRONMENT_VARIABLE")]  # fmt: skip
    wanted = {name for pair in _VARIABLES for name in pair} | {*_NODE_VARIABLES, "LOCAL_RANK"}
    found = {}
    for text in stored:
        for name, value in re.findall(r'(?:^|;)([A-Z_]+)="?(\d{1,6})"?(?=;|$)', text) if isinstance(text, str) else ():
            if name in wanted:
                found[name] = int(value)
    return found


def device_of(export: Export, rank: RankId) -> Device:
    """Return the properties of the GPU of `rank` from TARGET_INFO_GPU; missing properties are None."""
    fields = ("id", "name", "smCount", "maxRegistersPerSm", "maxShmemPerSm", "maxWarpsPerSm", "threadsPerWarp",
              "maxThreadsPerSm")  # fmt: skip
    gpus = export.small("TARGET_INFO_GPU", fields)
    links = export.small("TARGET_INFO_CUDA_DEVICE", ("gpuId", "cudaId", "pid"))
    pid = rank.process >> 24 & 0xFFFFFF
    mine = [link.get("gpuId") for link in links if link.get("cudaId") == rank.device and link.get("pid") in (pid, None)]
    number = mine[0] if mine else rank.device
    gpu = next((one for one in gpus if one.get("id") == number), gpus[0] if len(gpus) == 1 else None)
    if gpu is None:
        return Device()
    whole = {key: value for key, value in gpu.items() if isinstance(value, int) and 0 < value < 1 << 31}
    warps, width = whole.get("maxWarpsPerSm"), whole.get("threadsPerWarp")
    name = gpu.get("name")
    return Device(
        name=printable(name, 100) if isinstance(name, str) and name else None,
        num_sms=whole.get("smCount"),
        regs_per_sm=whole.get("maxRegistersPerSm"),
        smem_per_sm=whole.get("maxShmemPerSm"),
        threads_per_sm=whole.get("maxThreadsPerSm") or (warps * width if warps and width else None),
        index=number if isinstance(number, int) and len(gpus) > 1 else None,
        host_gpus=len(gpus) if len(gpus) > 1 else None,
    )


def utc_ns(export: Export, event_ns: int) -> int:
    """Return the UTC (ns) of `event_ns` on the export's clock; `event_ns` itself if the session's start is unknown.

    Times count from the start of the session, or (newer nsys, exported without normalising) on the system clock, in
    which case the analysis starts at the session's `systemClockNs`.
    """
    session = export.small("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs", "systemClockNs"))
    utc = session[0].get("utcEpochNs") if session else None
    if not isinstance(utc, int) or not 0 < utc < _NEWEST_UTC_NS:
        return event_ns
    clock = session[0].get("systemClockNs")
    starts = [row.get("startTime") for row in export.small("ANALYSIS_DETAILS", ("startTime",))]
    if isinstance(clock, int) and clock in starts and 0 <= clock <= event_ns:
        return utc + event_ns - clock
    return utc + event_ns
