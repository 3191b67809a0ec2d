"""The answer of `counterpoint plan --topology`: the rank order found, as a record and as files for launchers."""

from __future__ import annotations

from pathlib import Path

from counterpoint.errors import Misconfigured
from counterpoint.plan.job import Job
from counterpoint.plan.launch_files import LaunchFile, launch_files
from counterpoint.plan.placement import place
from counterpoint.plan.placement_cost import Layout
from counterpoint.plan.topology_files import read_topology
from counterpoint.plan.topology_slurm import hostlist
from counterpoint.plan.traffic import Traffic
from counterpoint.plan.volumes import sent_bytes
from counterpoint.records.prediction import LevelLoad, PlacementResult, RankOrder

__all__ = ["place_job"]


def place_job(job: Job, path: Path, hosts: str | None) -> tuple[PlacementResult, tuple[LaunchFile, ...]]:
    """Where the ranks of a job should be, on hosts with as many GPUs as the innermost level of its cluster.

    Args:
        job: whose groups and volumes decide.
        path: of the topology.
        hosts: the job's, in the order in which its launcher has them, as in n[1-4],n7; None: the first ones of the
            topology.

    Raises:
        Misconfigured: a topology that cannot be read, too few hosts, or a name that it does not have.
    """
    gpus = job.cluster.levels[0].size
    whole = read_topology(path, gpus=gpus)
    needed = -(-job.parallel.world_size // gpus)
    names = whole.hosts[:needed] if hosts is None else tuple(hostlist(hosts))
    if len(names) < needed:
        raise Misconfigured(
            f"{job.parallel.world_size} ranks on {len(names)} hosts of {gpus} GPUs: give {needed} hosts, by --hosts"
        )
    traffic = Traffic.of_job(job.parallel, sent_bytes(job))
    found = place(traffic, whole.only(list(names)).rated(job.cluster))
    files = launch_files(found, traffic.mesh)
    result = PlacementResult(
        orders=tuple(map(_order, (found.found, *found.compared))),
        host_of=tuple(found.host_of(rank) for rank in range(len(found.slots))),
        files={file.name: file.use for file in files},
        steps=found.steps,
    )
    return result, files


def _order(layout: Layout) -> RankOrder:
    return RankOrder(
        name=layout.name,
        cost=layout.cost,
        time_us=layout.time_us,
        levels=tuple(
            LevelLoad(level=each.level, num_bytes=each.num_bytes, cost=each.cost, time_us=each.time_us)
            for each in layout.levels
        ),
    )
