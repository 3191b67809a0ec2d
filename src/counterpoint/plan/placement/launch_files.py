"""Write a placement as the text of files that launchers read; the caller saves the files.

Launchers count the ranks of a host by rank number (`SLURM_LOCALID`, `OMPI_COMM_WORLD_LOCAL_RANK`), programs take the
GPU of that number, and a `Placement` gives the GPUs of a host to ranks in the same order. Formats: srun(1)
(`--distribution`, SLURM_HOSTFILE), mpirun(1) of Open MPI (rankfile, hostfile), PyTorch's `DeviceMesh`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from counterpoint.plan.placement.place import Placement
from counterpoint.records import Record

I64 = NDArray[np.int64]


class LaunchFile(Record, frozen=True, kw_only=True):
    """Holds the text of a file for a launcher, and how to use it."""

    name: str  # name of the file
    text: str  # what it holds
    use: str  # the command or call that reads it


def launch_files(placement: Placement, mesh: Sequence[tuple[str, int]] = ()) -> tuple[LaunchFile, ...]:
    """Return all files that can express this placement; `mesh` has (axis, length), the fastest-varying first."""
    axes = list(mesh) or [("rank", len(placement.slots))]
    ranks, hosts = len(placement.slots), [placement.host_of(rank) for rank in range(len(placement.slots))]
    gpus = [slot % placement.gpus for slot in placement.slots]
    seats = list(enumerate(zip(hosts, gpus, strict=True)))
    rows = "".join(f"{rank},{host},{k},{k}\n" for rank, (host, k) in seats)
    lines = "".join(f"rank {rank}={host} slot={k}\n" for rank, (host, k) in seats)
    pattern = distribution(placement)
    short = "" if pattern is None else f", or without the file: srun --ntasks={ranks} --distribution={pattern}"
    srun = f"SLURM_HOSTFILE=slurm_hostfile srun --ntasks={ranks} --distribution=arbitrary{short}"
    found = [
        LaunchFile(
            name="ranks.csv", text=f"rank,host,gpu,local_rank\n{rows}", use="rank, host, GPU: for people and programs"
        ),
        LaunchFile(name="slurm_hostfile", text="".join(f"{host}\n" for host in hosts), use=srun),
        LaunchFile(name="rankfile", text=lines, use="mpirun --map-by rankfile:file=rankfile"),
    ]
    host = _hosts(placement)
    starts = np.flatnonzero(np.append(True, np.diff(host) != 0))
    if len(starts) == len(np.unique(host)):  # a hostfile has the ranks of a host one after the other
        counts = np.diff(np.append(starts, ranks))
        slots = "".join(f"{hosts[start]} slots={count}\n" for start, count in zip(starts, counts, strict=True))
        found.append(
            LaunchFile(name="hostfile", text=slots, use=f"mpirun --hostfile hostfile -n {ranks} --map-by slot")
        )
    used = np.bincount(host)
    if (used[used > 0] == placement.gpus).all():  # of a host used in part, torchrun would start all GPUs
        use = 'torchrun, --node-rank counting `hosts`; then DeviceMesh("cuda", torch.tensor(ranks).reshape(shape))'
        found.append(LaunchFile(name="device_mesh.json", text=_device_mesh(placement, axes), use=use))
    return tuple(found)


def distribution(placement: Placement) -> str | None:
    """Return the `--distribution` by which Slurm makes this placement on the hosts as listed; None: no value does."""
    host, hosts, rank = _hosts(placement), len(placement.hosts), np.arange(len(placement.slots))
    if len(rank) != hosts * placement.gpus:
        return None
    if (host == rank // placement.gpus).all():
        return "block"
    if (host == rank % hosts).all():
        return "cyclic"
    for size in range(2, placement.gpus):
        if placement.gpus % size == 0 and (host == rank // size % hosts).all():
            return f"plane={size}"
    return None


def _device_mesh(placement: Placement, axes: Sequence[tuple[str, int]]) -> str:
    """Return JSON for `DeviceMesh("cuda", torch.tensor(ranks).reshape(shape), mesh_dim_names=names)`.

    `ranks[r]` is the rank under which the process of logical rank r was launched: `hosts` one after the other, their
    GPUs in order.
    """
    used, index = np.unique(_hosts(placement), return_inverse=True)
    found = {
        "hosts": [placement.hosts[host] for host in used],
        "gpus": placement.gpus,
        "mesh_dim_names": [name for name, _ in reversed(axes)],
        "shape": [length for _, length in reversed(axes)],
        "ranks": (index * placement.gpus + np.array(placement.slots) % placement.gpus).tolist(),
    }
    return json.dumps(found) + "\n"


def _hosts(placement: Placement) -> I64:
    return np.array(placement.slots, dtype=np.int64) // placement.gpus
