"""Read the table [cluster] of a job's file as a cluster, and make clusters of other sizes."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace

from counterpoint.errors import Misconfigured
from counterpoint.plan.job.cluster import Cluster, ClusterGpu, Level, find_gpu
from counterpoint.plan.job.fields import Count, Factor, JobRecord, Name, Rate, Text
from counterpoint.plan.network.protocols import all_levels, levels, own_file, read_network

OF_GPUS = ("clock_ghz", "power_watts", "machine")  # fields of a GPU that the table [cluster] may have, too


class ClusterTable(JobRecord, frozen=True, kw_only=True):
    """Holds the fields of the table [cluster] in a job's file."""

    gpu: Name | ClusterGpu
    gpus: Count | None = None  # None: as many as the job has ranks, or the levels hold
    network: Text | None = None
    levels: tuple[Level, ...] | None = None  # instead of a network, inside out
    fits: Text = ""  # file of a network of one's own, whose fitted protocols count for `levels`
    clock_ghz: Rate | None = None
    power_watts: Rate | None = None
    machine: Text = ""
    nic_gbit: Rate | None = None  # Gb/s of one GPU's NIC, instead of the network's
    nics: Annotated[int, Meta(ge=1, le=1024)] | None = None  # of a node; the network has one for each GPU
    failed_nics: Annotated[int, Meta(ge=0, le=1023)] | None = None  # that one node has lost, for which all others wait
    oversubscription: Factor | None = None  # of the topmost level that the job crosses

    def __post_init__(self) -> None:
        if (self.network is None) == (self.levels is None):
            raise Misconfigured("cluster: give either network, a name, or levels, inside out")
        if self.network is not None and self.fits:
            raise Misconfigured("cluster.fits with cluster.network: it is for levels; name its file as network instead")

    def cluster(self, ranks: int) -> Cluster:
        """Return the cluster without NIC settings (`linked` applies those); without `gpus` it has `ranks` GPUs."""
        gpu = self.gpu if isinstance(self.gpu, ClusterGpu) else find_gpu(self.gpu)
        gpu = replace(gpu, **{name: value for name in OF_GPUS if (value := getattr(self, name))})
        if self.network is not None:
            found = levels(self.network, self.gpus or ranks)
            return Cluster(gpu=gpu, levels=found, network=self.network, fits=own_file(self.network))
        if self.fits:
            try:
                read_network(self.fits)
            except Misconfigured as error:
                raise Misconfigured(f"cluster.fits = {error}") from None
        written = Cluster(gpu=gpu, levels=self.levels or (), fits=self.fits)
        if self.gpus not in (None, written.num_gpus):
            raise Misconfigured(
                f"cluster.gpus = {self.gpus} with levels whose last holds {written.num_gpus} GPUs: leave it out"
            )
        return written

    def on_nodes(self, nodes: int) -> tuple[int, Cluster]:
        """Return the number of GPUs of `nodes` nodes, and the cluster with them."""
        alone = replace(self, gpus=None)
        if self.network is None:
            written = alone.cluster(1)
            gpus = nodes * written.gpus_per_node
            return gpus, with_gpus(written, gpus)
        gpus = nodes * all_levels(self.network)[0].size
        return gpus, alone.cluster(gpus)

    def linked(self, cluster: Cluster, ranks: int) -> Cluster:
        """Return the cluster with `nic_gbit`, `nics`, `failed_nics` and `oversubscription` applied.

        All levels of a named network are written out, also those above the job, so that it can grow afterwards.

        Raises:
            Misconfigured: the job uses no network between nodes.
        """
        changes = (self.nic_gbit, self.nics, self.failed_nics, self.oversubscription)
        if changes == (None, None, None, None):
            return cluster
        top = cluster.level_of(ranks)
        if cluster.levels[top].kind != "network":
            raise Misconfigured(
                f"cluster.nic_gbit, nics, failed_nics, oversubscription: all ranks are below one "
                f"{cluster.levels[top].name}: give nodes, or a job that has more ranks, first"
            )
        whole = cluster.levels if cluster.network is None else all_levels(cluster.network)
        whole = whole if whole[-1].size >= cluster.num_gpus else cluster.levels
        changed = [self._linked(each, cluster.gpus_per_node) if each.kind == "network" else each for each in whole]
        if self.oversubscription is not None:
            changed[top] = replace(changed[top], oversubscription=self.oversubscription)
        return replace(cluster, levels=tuple(changed), network=None)

    def _linked(self, level: Level, gpus_per_node: int) -> Level:
        rate = level.gb_per_s if self.nic_gbit is None else self.nic_gbit / 8
        part = 1.0 if self.nics is None else self.nics / gpus_per_node
        lost = level.failed_nics if self.failed_nics is None else self.failed_nics
        return replace(level, gb_per_s=rate * part, failed_nics=lost)


def with_gpus(cluster: Cluster, gpus: int) -> Cluster:
    """Return the cluster with `gpus` GPUs: a named network is rebuilt; of explicit levels only the last may grow."""
    if cluster.network is not None:
        return replace(cluster, levels=levels(cluster.network, gpus))
    *below, last = cluster.levels
    unit = below[-1].size if below else 1
    return replace(cluster, levels=(*below, replace(last, size=max(last.size, -(-gpus // unit) * unit))))
