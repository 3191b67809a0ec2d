"""Read the file of a job: the model and its training, the division among ranks, and the machines.

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
    power_watts = 600            # of each GPU, and clock_ghz, host_gb_per_s; left out: those of its name
    gpus = 64                    # the last level is cut to it; left out: as many as ranks
    network = "h100-roce-400"    # or the file of plan --fit, or tables [[cluster.levels]] (and fits, such a file)
    machine = "mine.json"        # a profile of one's own GPUs (docs/reference/profile.md); left out: the shipped one
    nics = 4                     # of a node; and nic_gbit, failed_nics, oversubscription: a changed network
    [overlap]
    mechanism = "zero_sm"
    dp = "nccl"                  # of one axis, dp, tp or ep, if it has another mechanism
    [ranks]
    slow = 1.2
    [software]                   # whose measured steps are most like it; left out: anyone's
    name = "Megatron"            # Megatron, FSDP2, DeepSpeed, MaxText, nanotron, ...
    version = "2026-05"          # its date, or a version that begins with its year, as 25.07
    [run]                        # how long, what fails, what it costs: days and goodput
    tokens = 15e12
    gpu_mtbf_hours = 50000

Everything that is left out has the default of its record: `Model`, `Training`, `Parallel`, `Cluster`. A field that no
record has is an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from counterpoint.errors import Misconfigured, printable
from counterpoint.machine.profile import Disturbance, Profile
from counterpoint.pair.together import disturbance
from counterpoint.plan.job.cluster import GPUS, Cluster, ClusterGpu, Level, find_gpu
from counterpoint.plan.job.fields import Count, Factor, JobRecord, Name, Rate, Table, Text, check_known, parse_record
from counterpoint.plan.job.model import Model, find_model, known_models
from counterpoint.plan.job.parallel import Compression, ExpertExchange, Parallel, Training, check_division, on_gpus
from counterpoint.plan.network.network import SUFFIX, all_levels, levels, own_file, read_network
from counterpoint.read_file import parse_toml, read_text
from counterpoint.records import Record
from counterpoint.records.toml import toml_table

MAX_BYTES = 1 << 18
ADVICE = "give a job as TOML, such as those of examples/plan"
OVERLAPPED = ("dp", "tp", "ep")  # axes whose collectives may overlap with compute; compute waits for those of cp
BY_NODE = ("deepseek", "automodel")  # software that sends a token once to each node: DeepEP, HybridEP
MAX_LINE = 2000  # characters
MAX_DEPTH = 8  # of tables and arrays in each other


class Ranks(JobRecord, frozen=True, kw_only=True):
    """Describes how much the ranks differ in speed."""

    slow: Factor = 1.0  # factor by which one rank computes longer than the others
    # standard deviation / mean of a rank's time; the step waits for the slowest rank
    jitter: Annotated[float, Meta(ge=0, le=10)] = 0.0


class TrainingSoftware(JobRecord, frozen=True, kw_only=True):
    """Names a job's training software, which decides only on defaults and on the measured steps that are similar."""

    name: Name = "unknown"  # Megatron, FSDP2, DeepSpeed, MaxText, nanotron, ...
    version: Text = ""  # its date, or a version that begins with its year, as 25.07

    @property
    def year(self) -> int | None:
        """Return the year at the beginning of the software's version, 2025 for "25.07"; None if no year is there."""
        found = re.match(r"(?:20)?([1-4]\d)[.\-]?(?:0\d|1[0-2])\b", self.version)
        return 2000 + int(found[1]) if found else None

    @property
    def expert_exchange(self) -> ExpertExchange:
        """Return the way in which this software sends tokens to experts by default."""
        return "by_node" if self.name.casefold() in BY_NODE else "all_to_all"


Tokens = Annotated[float, Meta(ge=1, le=1e16)]  # the largest trainings have some 10^13
Hours = Annotated[float, Meta(ge=1e-2, le=1e9)]


class Run(JobRecord, frozen=True, kw_only=True):
    """Describes the whole training that a step belongs to. Checkpoints are written if machines fail, or if asked."""

    tokens: Tokens | None = None  # tokens to train on, rounded up to whole steps
    steps: Annotated[int, Meta(ge=1, le=1_000_000_000)] | None = None  # instead of tokens
    price_per_gpu_hour: Annotated[float, Meta(ge=0, le=1e6)] | None = None  # in any currency
    gpu_mtbf_hours: Hours | None = None  # mean time between failures that one GPU causes; None: none
    node_mtbf_hours: Hours | None = None  # mean time between failures that a node causes, besides its GPUs; None: none
    restart_minutes: Annotated[float, Meta(ge=0, le=1e6)] = 10.0  # from a failure until training goes on
    checkpoint_minutes: Annotated[float, Meta(ge=1e-3, le=1e7)] | Literal["optimal"] = "optimal"  # of work between two
    checkpoint_seconds: Annotated[float, Meta(ge=0, le=1e6)] | None = None  # that training waits; None: size / storage
    checkpoint_gb: Rate | None = None  # of all ranks together; None: parameters and states of the optimizer
    storage_gb_per_s: Rate = 100.0  # at which all ranks together write: assumed

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.steps is None):
            given = "both" if self.steps is not None else "neither"
            raise Misconfigured(f"run.tokens and run.steps: {given} given; give one of them")
        if self.checkpoint_seconds is not None and self.checkpoint_gb is not None:
            raise Misconfigured("run.checkpoint_seconds with run.checkpoint_gb: both say how long one takes; give one")


class OverlapTable(JobRecord, frozen=True, kw_only=True):
    """Holds the table [overlap] of a job's file: the mechanism by which collectives overlap with compute."""

    mechanism: Name = "nccl"
    dp: Name | None = None  # the mechanism of one axis, where it has another one
    tp: Name | None = None
    ep: Name | None = None


OF_GPUS = ("clock_ghz", "power_watts", "host_gb_per_s", "machine")  # fields of a GPU that [cluster] may have, too


class ClusterTable(JobRecord, frozen=True, kw_only=True):
    """Holds the fields of the table [cluster] in a job's file."""

    gpu: Name | ClusterGpu
    gpus: Count | None = None  # None: as many as the job has ranks, or the levels hold
    network: Text | None = None
    levels: tuple[Level, ...] | None = None  # instead of a network, innermost first
    fits: Text = ""  # file of the user's own network, whose fitted protocols count for `levels`
    clock_ghz: Rate | None = None
    power_watts: Rate | None = None
    host_gb_per_s: Rate | None = None
    machine: Text = ""
    nic_gbit: Rate | None = None  # Gb/s of one GPU's NIC, instead of the network's
    nics: Annotated[int, Meta(ge=1, le=1024)] | None = None  # NICs of a node; named networks have one per GPU
    failed_nics: Annotated[int, Meta(ge=0, le=1023)] | None = None  # NICs lost by one node; all others wait for it
    oversubscription: Factor | None = None  # of the topmost level that the job crosses

    def __post_init__(self) -> None:
        if (self.network is None) == (self.levels is None):
            raise Misconfigured("cluster: give either network, a name, or levels, inside out")
        if self.network is not None and self.fits:
            raise Misconfigured("cluster.fits with cluster.network: it is for levels; name its file as network instead")

    def cluster(self, ranks: int) -> Cluster:
        """Return the cluster before `linked` applies the NIC settings; it has `ranks` GPUs if `gpus` is not given."""
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
        """Return the number of GPUs of `nodes` nodes, and the cluster with that many GPUs."""
        alone = replace(self, gpus=None)
        if self.network is None:
            written = alone.cluster(1)
            gpus = nodes * written.gpus_per_node
            return gpus, with_gpus(written, gpus)
        gpus = nodes * all_levels(self.network)[0].size
        return gpus, alone.cluster(gpus)

    def linked(self, cluster: Cluster, ranks: int) -> Cluster:
        """Return the cluster with all levels, NICs and oversubscription applied; Misconfigured: no network."""
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


class Job(Record, frozen=True, kw_only=True):
    """Holds one training job, the input of `predict_step`, as records that are consistent with each other."""

    model: Model  # the transformer that is trained
    training: Training  # batch, sequence, precision
    parallel: Parallel  # degrees of parallelism
    cluster: Cluster  # its machines; it has as many GPUs as the job has ranks, or more
    mechanism: str = "nccl"  # how collectives overlap with compute: a mechanism of the profile, `ideal` or `serial`
    mechanisms: dict[str, str] = msgspec.field(default_factory=dict)  # by axis of OVERLAPPED, where it has another one
    compression: Compression | None = None  # of gradients; None: they are sent uncompressed
    ranks: Ranks = Ranks()  # how much the ranks differ in speed
    software: TrainingSoftware = TrainingSoftware()
    run: Run | None = None  # the training that the step belongs to; None: only the step is predicted

    def __post_init__(self) -> None:
        for field, name in {"mechanism": self.mechanism, **self.mechanisms}.items():
            try:
                disturbance(name, self.profile)
            except Misconfigured as error:
                raise Misconfigured(f"overlap.{field}: {error}") from None
        check_division(self.model, self.parallel, self.training)
        if self.parallel.pieces_tp and self.parallel.tp > self.cluster.gpus_per_node:
            raise Misconfigured(
                f"parallel.pieces_tp with tp = {self.parallel.tp} on nodes of {self.cluster.gpus_per_node} GPUs: copy "
                "engines reach the GPUs of a node; give a smaller tp, or leave it out"
            )
        if self.parallel.world_size > self.cluster.num_gpus:
            raise Misconfigured(
                f"parallel: dp · pp · cp · tp = {self.parallel.world_size} ranks on {self.cluster.num_gpus} GPUs: "
                "give smaller degrees, or a larger cluster"
            )

    @property
    def profile(self) -> Profile:
        """Return the measured profile of the job's GPUs."""
        return self.cluster.gpu.profile

    def mechanism_of(self, axis: str) -> str:
        """Return the name of the mechanism that runs the collectives of one mesh axis."""
        return self.mechanisms.get(axis, self.mechanism)

    def disturbance_of(self, axis: str) -> Disturbance:
        """Return by how much compute and the collectives of one mesh axis slow each other down."""
        return disturbance(self.mechanism_of(axis), self.profile)


RECORDS: dict[str, type[Any]] = {  # of the tables of a job's file
    "model": Model, "training": Training, "parallel": Parallel, "cluster": ClusterTable, "overlap": OverlapTable,
    "compression": Compression, "ranks": Ranks, "software": TrainingSoftware, "run": Run,
}  # fmt: skip


def read_tables(path: Path) -> dict[str, Any]:
    """Return the tables of a job's file; raise Misconfigured if it cannot be read, is no TOML or is above 256 KiB."""
    return parse_tables(path, read_text(path, limit=MAX_BYTES, advice=ADVICE))


def parse_tables(path: Path, text: str) -> dict[str, Any]:
    """Return the tables in the TOML text of a job's file; `path` is only for messages."""
    name = printable(str(path), 200)
    if max(map(len, text.splitlines()), default=0) > MAX_LINE:  # a key of thousands of parts takes tomllib minutes
        raise Misconfigured(f"{name}: a line has more than {MAX_LINE:,} characters; {ADVICE}")
    tables = parse_toml(text, name, ADVICE)
    if _is_deeper(tables, MAX_DEPTH):
        raise Misconfigured(f"{name}: nested deeper than {MAX_DEPTH} tables and arrays; {ADVICE}")
    _resolve(tables, path.parent)
    return tables


def _resolve(tables: dict[str, Any], folder: Path) -> None:
    """Resolve the file names in a job's file relative to the folder of that file, in place."""
    cluster = tables.get("cluster")
    if not isinstance(cluster, dict):
        return
    for name in ("machine", "network", "fits"):
        value = cluster.get(name)
        if isinstance(value, str) and value.endswith(SUFFIX):
            cluster[name] = str((folder / value).absolute())


def _is_deeper(value: object, depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return bool(inner) and (not depth or any(_is_deeper(each, depth - 1) for each in inner))


def parse_job(tables: Table, *, nodes: int | None = None, batch_grows: bool = False) -> Job:
    """Return the job that the tables of a TOML document describe.

    `nodes` replaces the tables' numbers of replicas and GPUs (None: the tables decide); then the batch stays, or grows
    with the replicas (`batch_grows`).

    Raises:
        Misconfigured: a field is wrong or the records do not go together; with the field and what is allowed.
    """
    check_known("", tables, tuple(RECORDS))
    for name in ("model", "training", "cluster"):
        if name not in tables:
            raise Misconfigured(f"there is no table [{name}]; give it")
    model = _model(tables["model"])
    read = {name: parse_record(name, table, RECORDS[name]) for name, table in tables.items() if name != "model"}
    training, machines = read.pop("training"), read.pop("cluster")
    parallel, overlap = read.pop("parallel", Parallel()), read.pop("overlap", OverlapTable())
    if "expert_exchange" not in tables.get("parallel", {}):
        parallel = replace(parallel, expert_exchange=read.get("software", TrainingSoftware()).expert_exchange)
    if nodes is None:
        cluster = machines.cluster(parallel.world_size)
    else:
        gpus, cluster = machines.on_nodes(nodes)
        parallel, training = on_gpus(parallel, training, gpus, batch_grows=batch_grows)
    mechanisms = {axis: getattr(overlap, axis) for axis in OVERLAPPED}
    return Job(
        model=model,
        training=training,
        parallel=parallel,
        cluster=machines.linked(cluster, parallel.world_size),
        mechanism=overlap.mechanism,
        mechanisms={axis: name for axis, name in mechanisms.items() if name is not None},
        **read,
    )


def _model(table: Table) -> Model:
    """Return the known model called `name` with other fields applied; if `layers` is given, `name` is only a label."""
    if isinstance(table, Mapping) and isinstance(table.get("name"), str) and "layers" not in table:
        known = msgspec.to_builtins(find_model(table["name"]))
        table = _merged({name: value for name, value in known.items() if value is not None}, table)
    return parse_record("model", table, Model)


def _merged(below: Table, above: Table) -> dict[str, Any]:
    """Return two tables merged recursively; the values of `above` win."""
    merged = dict(below)
    for name, value in above.items():
        lower = below.get(name)
        merged[name] = value
        if isinstance(value, Mapping) and isinstance(lower, Mapping):
            merged[name] = _merged(lower, value)
    return merged


def job_toml(job: Job) -> str:
    """Return the text of a job's file, which `parse_job` reads as the same job; defaults are left out."""
    tables = _changed_fields(job)
    if known_models().get(job.model.name) == job.model:
        tables["model"] = {"name": job.model.name}
    tables["cluster"] = _cluster_fields(job.cluster)
    if job.software.expert_exchange != "all_to_all":  # left out, it would be that of the software
        tables.setdefault("parallel", {})["expert_exchange"] = job.parallel.expert_exchange
    overlap = {name: tables.pop(name) for name in ("mechanism",) if name in tables} | tables.pop("mechanisms", {})
    if overlap:
        tables["overlap"] = overlap
    parts = [toml_table(f"[{name}]", tables[name]) for name in sorted(tables, key=[*RECORDS].index)]
    return "\n\n".join(parts) + "\n"


def _cluster_fields(cluster: Cluster) -> dict[str, Any]:
    """Return a cluster as a table, with only the names of GPU and network where their figures follow from the names."""
    gpu, known = _changed_fields(cluster.gpu), GPUS.get(cluster.gpu.name)
    found: dict[str, Any] = {"gpu": gpu}
    limits = {name: value for name, value in gpu.items() if name in OF_GPUS}
    if known is not None and gpu == _changed_fields(known) | limits:
        found = {"gpu": known.name, **limits}
    if cluster.network is None:
        found |= {"fits": cluster.fits} if cluster.fits else {}
        found |= {"levels": [_changed_fields(level) for level in cluster.levels]}
    else:
        found |= {"gpus": cluster.num_gpus, "network": cluster.network}
    return found | {  # the file may be written anywhere
        name: str(Path(value).absolute())
        for name, value in found.items()
        if isinstance(value, str) and value.endswith(SUFFIX)
    }


def _changed_fields(record: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a record, and of the records in it, that differ from their defaults."""
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(record):
        value = getattr(record, field.name)
        if field.required or value != field.default:
            found[field.name] = _changed_fields(value) if isinstance(value, msgspec.Struct) else value
    return found
