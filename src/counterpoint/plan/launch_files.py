"""A placement as launchers read it. Text only: who calls writes the files.

Launchers count the ranks of a host by rank number (`SLURM_LOCALID`, `OMPI_COMM_WORLD_LOCAL_RANK`), and programs take
the GPU of that number. Where a placement gives the GPUs of a host in another order, a launcher's file alone cannot say
so: `gpus_in_order` is False then, and every rank has to take its GPU from `ranks.csv`.
Formats: srun(1) (`--distribution`, SLURM_HOSTFILE), mpirun(1) of Open MPI (rankfile, hostfile), PyTorch's `DeviceMesh`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.placement import Placement
from counterpoint.records.base import Record

__all__ = [
    "LaunchFile",
    "device_mesh",
    "distribution",
    "gpus_in_order",
    "hostfile",
    "launch_files",
    "rankfile",
    "ranks_csv",
    "slurm_hostfile",
]

I64 = NDArray[np.int64]


class LaunchFile(Record, frozen=True, kw_only=True):
    """A file to write, and how it is used.

    Args:
        name: of the file.
        text: what it holds.
        use: the command or call that reads it.
    """

    name: str
    text: str
    use: str


def launch_files(placement: Placement, mesh: Sequence[tuple[str, int]] = ()) -> tuple[LaunchFile, ...]:
    """All files that can say this placement.

    Args:
        placement: of `place`.
        mesh: axes and their lengths, the fastest first, as `Traffic.mesh`; () for one axis.
    """
    found = [LaunchFile(name="ranks.csv", text=ranks_csv(placement), use="rank, host, GPU: for people and programs")]
    ranks = len(placement.slots)
    note = "" if gpus_in_order(placement) else "; each rank takes its GPU from ranks.csv, not by its local rank"
    pattern = distribution(placement)
    short = "" if pattern is None else f", or without the file: srun --ntasks={ranks} --distribution={pattern}"
    found += [
        LaunchFile(
            name="slurm_hostfile",
            text=slurm_hostfile(placement),
            use=f"SLURM_HOSTFILE=slurm_hostfile srun --ntasks={ranks} --distribution=arbitrary{short}{note}",
        ),
        LaunchFile(name="rankfile", text=rankfile(placement), use=f"mpirun --map-by rankfile:file=rankfile{note}"),
    ]
    if _consecutive(placement):
        use = f"mpirun --hostfile hostfile -n {ranks} --map-by slot{note}"
        found.append(LaunchFile(name="hostfile", text=hostfile(placement), use=use))
    if _full(placement):
        use = 'torchrun, --node-rank counting `hosts`; then DeviceMesh("cuda", torch.tensor(ranks).reshape(shape))'
        found.append(LaunchFile(name="device_mesh.json", text=device_mesh(placement, mesh), use=use))
    return tuple(found)


def ranks_csv(placement: Placement) -> str:
    """A line per rank: its host, its GPU there, and the local rank that a launcher will give it."""
    host, gpu = _hosts_and_gpus(placement)
    local = _local_ranks(host)
    lines = [
        f"{rank},{placement.hosts[h]},{g},{k}" for rank, (h, g, k) in enumerate(zip(host, gpu, local, strict=True))
    ]
    return "\n".join(["rank,host,gpu,local_rank", *lines, ""])


def slurm_hostfile(placement: Placement) -> str:
    """A host per line, in the order of the ranks."""
    return "".join(f"{placement.hosts[slot // placement.gpus]}\n" for slot in placement.slots)


def rankfile(placement: Placement) -> str:
    """`rank R=HOST slot=K`, K counting the ranks of the host."""
    host, _ = _hosts_and_gpus(placement)
    local = _local_ranks(host)
    return "".join(
        f"rank {rank}={placement.hosts[h]} slot={k}\n" for rank, (h, k) in enumerate(zip(host, local, strict=True))
    )


def hostfile(placement: Placement) -> str:
    """`HOST slots=N`, in the order in which ranks fill them.

    Raises:
        Misconfigured: the ranks of a host do not follow each other; a hostfile cannot say that.
    """
    if not _consecutive(placement):
        raise Misconfigured("hostfile: the ranks of a host do not follow each other; use the rankfile")
    host, _ = _hosts_and_gpus(placement)
    starts = np.flatnonzero(np.append(True, np.diff(host) != 0))
    counts = np.diff(np.append(starts, len(host)))
    return "".join(f"{placement.hosts[host[s]]} slots={n}\n" for s, n in zip(starts, counts, strict=True))


def distribution(placement: Placement) -> str | None:
    """Slurm's `--distribution` that gives this placement on the hosts as listed; None: none does."""
    host, _ = _hosts_and_gpus(placement)
    if (
        not gpus_in_order(placement)
        or not _full(placement)
        or len(placement.slots) != len(placement.hosts) * placement.gpus
    ):
        return None
    rank, hosts = np.arange(len(host)), len(placement.hosts)
    if (host == rank // placement.gpus).all():
        return "block"
    if (host == rank % hosts).all():
        return "cyclic"
    for size in range(2, placement.gpus):
        if placement.gpus % size == 0 and (host == rank // size % hosts).all():
            return f"plane={size}"
    return None


def device_mesh(placement: Placement, mesh: Sequence[tuple[str, int]] = ()) -> str:
    """JSON for `DeviceMesh("cuda", torch.tensor(ranks).reshape(shape), mesh_dim_names=names)`.

    `ranks[r]` is the rank under which the process of logical rank r was launched: `hosts` one after the other, their
    GPUs in order.

    Raises:
        Misconfigured: a host is used in part, where torchrun would start all of it; a mesh of another size.
    """
    if not _full(placement):
        raise Misconfigured("device_mesh: a host is used in part; torchrun starts a process on each of its GPUs")
    axes = list(mesh) or [("rank", len(placement.slots))]
    if np.prod([length for _, length in axes]) != len(placement.slots):
        raise Misconfigured(f"mesh {printable(str(axes), 80)}: give one of {len(placement.slots)} ranks")
    host, gpu = _hosts_and_gpus(placement)
    used, index = np.unique(host, return_inverse=True)
    found = {
        "hosts": [placement.hosts[h] for h in used],
        "gpus": placement.gpus,
        "mesh_dim_names": [name for name, _ in reversed(axes)],
        "shape": [length for _, length in reversed(axes)],
        "ranks": (index * placement.gpus + gpu).tolist(),
    }
    return json.dumps(found) + "\n"


def gpus_in_order(placement: Placement) -> bool:
    """The GPU of every rank is its local rank, which is what programs take."""
    host, gpu = _hosts_and_gpus(placement)
    return bool((_local_ranks(host) == gpu).all())


def _hosts_and_gpus(placement: Placement) -> tuple[I64, I64]:
    slots = np.array(placement.slots, dtype=np.int64)
    return slots // placement.gpus, slots % placement.gpus


def _local_ranks(host: I64) -> I64:
    """How many lower ranks share the host."""
    order = np.argsort(host, kind="stable")
    counts = np.bincount(host)
    local = np.empty_like(host)
    local[order] = np.arange(len(host)) - np.repeat(np.cumsum(counts) - counts, counts)
    return local


def _consecutive(placement: Placement) -> bool:
    host, _ = _hosts_and_gpus(placement)
    return int((np.diff(host) != 0).sum()) == len(np.unique(host)) - 1


def _full(placement: Placement) -> bool:
    """Every host that is used is used whole."""
    host, _ = _hosts_and_gpus(placement)
    counts = np.bincount(host)
    return bool((counts[counts > 0] == placement.gpus).all())
