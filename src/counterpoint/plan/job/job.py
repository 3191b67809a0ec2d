"""Read the file of a job: what is trained, how it is divided among ranks, and on which machines.

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
    power_watts = 600            # of each GPU, and clock_ghz; left out: those of the data sheet
    gpus = 64                    # the last level is cut to it; left out: as many as ranks
    network = "h100-roce-400"    # or the file of plan --fit, or tables [[cluster.levels]] (and fits, such a file)
    machine = "mine.json"        # a profile of one's own GPUs (docs/reference/profile.md); left out: the shipped one
    [overlap]
    mechanism = "zero_sm"
    dp = "nccl"                  # of one axis, dp, tp or ep, if it has another mechanism
    [ranks]
    slow = 1.2
    [run]                        # how long, what fails, what it costs: days and goodput
    tokens = 15e12
    gpu_mtbf_hours = 50000

Everything that is left out has the default of its record: `Model`, `Training`, `Parallel`, `Cluster`. A field that no
record has is an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta
from msgspec.structs import asdict

from counterpoint.errors import Misconfigured, printable
from counterpoint.machine.profile import Disturbance, Profile
from counterpoint.pair.together import disturbance
from counterpoint.plan.job.cluster import GPUS, Cluster, ClusterGpu, Level, find_gpu
from counterpoint.plan.job.fields import (
    CheckedRecord,
    Factor,
    check_known,
    check_table,
    parse_name,
    parse_record,
    shown,
)
from counterpoint.plan.job.model import Model, find_model, known_models
from counterpoint.plan.job.parallel import Compression, Parallel, Training, check_division
from counterpoint.plan.job.run import Run
from counterpoint.plan.network.protocols import SUFFIX, levels, own_file, read_network
from counterpoint.read_file import parse_toml, read_text
from counterpoint.records import Record
from counterpoint.records.toml import toml_table

MAX_BYTES = 1 << 18
ADVICE = "give a job as TOML, such as those of examples/plan"
OVERLAPPED = ("dp", "tp", "ep")  # axes whose collectives may run beside compute; contexts' are waited for
OF_GPUS = ("clock_ghz", "power_watts", "machine")  # fields of a GPU that are the cluster's, too
MAX_LINE = 2000  # characters
TABLES = ("model", "training", "parallel", "cluster", "overlap", "compression", "ranks", "run")
MAX_DEPTH = 8  # of tables and arrays in each other

Table = Mapping[str, Any]


class Ranks(CheckedRecord, frozen=True, kw_only=True):
    """Describes how much the ranks differ in speed."""

    table: ClassVar[str] = "ranks"

    slow: Factor = 1.0  # one rank computes so many times as long as the others
    # standard deviation of a rank's time over its mean, for which the step then waits
    jitter: Annotated[float, Meta(ge=0, le=10)] = 0.0


class JobParts(Record, frozen=True, kw_only=True):
    """Holds the records of a job before anything is said about whether they go together."""

    model: Model  # the transformer that is trained
    training: Training  # batch, sequence, precision
    parallel: Parallel  # degrees of parallelism
    cluster: Cluster  # its machines; it has as many GPUs as the job has ranks, or more
    mechanism: str = "nccl"  # how collectives overlap with compute: a mechanism of the profile, `ideal` or `serial`
    mechanisms: dict[str, str] = msgspec.field(default_factory=dict)  # of axes in OVERLAPPED that have another one
    compression: Compression | None = None  # of gradients; None: sent whole
    ranks: Ranks = Ranks()  # how much they differ in speed
    run: Run | None = None  # the training that the step is one of; None: only the step is asked for

    def whole(self) -> Job:
        """Return the job, or raise Misconfigured where its records do not go together."""
        return Job(**asdict(self))


class Job(JobParts, frozen=True, kw_only=True):
    """Describes one training job, which `predict_step` predicts: records that go together."""

    def __post_init__(self) -> None:
        for name in (self.mechanism, *self.mechanisms.values()):
            disturbance(name, self.profile)  # raises if there is no such mechanism
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
        """Return the profile of the job's GPUs: what was measured on them."""
        return self.cluster.gpu.profile

    def mechanism_of(self, axis: str) -> str:
        """Return the mechanism of the collectives of one axis."""
        return self.mechanisms.get(axis, self.mechanism)

    def disturbance_of(self, axis: str) -> Disturbance:
        """Return how much compute and the collectives of one axis slow each other down."""
        return disturbance(self.mechanism_of(axis), self.profile)


def read_tables(path: Path) -> dict[str, Any]:
    """Return the tables of a job's file; Misconfigured if it cannot be read, is no TOML or larger than 256 KiB."""
    return parse_tables(path, read_text(path, limit=MAX_BYTES, advice=ADVICE))


def parse_tables(path: Path, text: str) -> dict[str, Any]:
    """Return the tables of the text of a job's file; `path` is for messages."""
    name = printable(str(path), 200)
    if max(map(len, text.splitlines()), default=0) > MAX_LINE:  # a key of thousands of parts takes tomllib minutes
        raise Misconfigured(f"{name}: a line has more than {MAX_LINE:,} characters; {ADVICE}")
    tables = parse_toml(text, name, ADVICE)
    if _is_deeper(tables, MAX_DEPTH):
        raise Misconfigured(f"{name}: nested deeper than {MAX_DEPTH} tables and arrays; {ADVICE}")
    _resolve(tables, path.parent)
    return tables


def _resolve(tables: dict[str, Any], folder: Path) -> None:
    """Let files that a job's file names be those next to it."""
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


def parse_job(tables: Table) -> Job:
    """Return the job of a TOML document, or raise Misconfigured with the field, its value and what is allowed."""
    return parse_parts(tables).whole()


def parse_parts(tables: Table) -> JobParts:
    """Return the records of a TOML document, each checked by itself; Misconfigured as `parse_job` raises it."""
    check_known("", tables, TABLES)
    for name in ("model", "training", "cluster"):
        if name not in tables:
            raise Misconfigured(f"there is no table [{name}]; give it")
    parallel = parse_record("parallel", tables.get("parallel", {}), Parallel)
    overlap = check_table("overlap", tables.get("overlap", {}))
    check_known("overlap", overlap, ("mechanism", *OVERLAPPED))
    compression = tables.get("compression")
    return JobParts(
        model=_model(check_table("model", tables["model"])),
        training=parse_record("training", tables["training"], Training),
        parallel=parallel,
        cluster=_cluster(check_table("cluster", tables["cluster"]), parallel.world_size),
        mechanism=parse_name("overlap.mechanism", overlap.get("mechanism", "nccl")),
        mechanisms={axis: parse_name(f"overlap.{axis}", overlap[axis]) for axis in OVERLAPPED if axis in overlap},
        compression=None if compression is None else parse_record("compression", compression, Compression),
        ranks=parse_record("ranks", tables.get("ranks", {}), Ranks),
        run=parse_record("run", tables["run"], Run) if "run" in tables else None,
    )


def _model(table: Table) -> Model:
    """Return the known model of this name, with what else is given changed; next to `layers` a name is only a label."""
    if "name" in table and "layers" not in table:
        known = msgspec.to_builtins(find_model(parse_name("model.name", table["name"])))
        table = _merged({name: value for name, value in known.items() if value is not None}, table)
    return parse_record("model", table, Model)


def _merged(below: Table, above: Table) -> dict[str, Any]:
    """Return the fields of two tables; of those in both, the upper one's, and tables merged in the same manner."""
    merged = dict(below)
    for name, value in above.items():
        lower = below.get(name)
        merged[name] = value
        if isinstance(value, Mapping) and isinstance(lower, Mapping):
            merged[name] = _merged(lower, value)
    return merged


def _cluster(table: Table, ranks: int) -> Cluster:
    """Return the cluster, its network named or written out; without `gpus` it has as many as the job has ranks."""
    check_known("cluster", table, ("gpu", "gpus", *OF_GPUS, "network", "levels", "fits"))
    count = table.get("gpus", ranks)
    if ("network" in table) == ("levels" in table):
        raise Misconfigured("cluster: give either network, a name, or levels, inside out")
    if isinstance(count, bool) or not isinstance(count, int):
        raise Misconfigured(f"cluster.gpus = {shown(count)}: give a whole number")
    if "gpu" not in table:
        raise Misconfigured("cluster.gpu is missing: give the name of a GPU, or a table of its figures")
    gpu = parse_gpu(table["gpu"])
    limits = {name: table[name] for name in OF_GPUS if name in table}
    if limits:
        gpu = parse_record("cluster.gpu", asdict(gpu) | limits, ClusterGpu)
    if "network" in table:
        if "fits" in table:
            raise Misconfigured("cluster.fits with cluster.network: it is for levels; name its file as network instead")
        network = parse_name("cluster.network", table["network"])
        return Cluster(gpu=gpu, levels=levels(network, count), network=network, fits=own_file(network))
    if not isinstance(table["levels"], list):
        raise Misconfigured(f"cluster.levels = {shown(table['levels'])}: give tables [[cluster.levels]]")
    found = (parse_record(f"cluster.levels[{index}]", each, Level) for index, each in enumerate(table["levels"]))
    fits = parse_name("cluster.fits", table.get("fits", ""))
    if fits:
        read_network(fits)
    written = Cluster(gpu=gpu, levels=tuple(found), fits=fits)
    if "gpus" in table and count != written.num_gpus:
        raise Misconfigured(
            f"cluster.gpus = {shown(count)} with levels whose last holds {written.num_gpus} GPUs: leave it out"
        )
    return written


def parse_gpu(value: object) -> ClusterGpu:
    """Return the GPU that is given by its name, or by a table of its figures."""
    if isinstance(value, Mapping):
        return parse_record("cluster.gpu", value, ClusterGpu)
    return find_gpu(parse_name("cluster.gpu", value))


def job_toml(job: Job) -> str:
    """Return the file of a job, which `parse_job` reads as the same job; defaults are left out."""
    tables = _changed_fields(job)
    if known_models().get(job.model.name) == job.model:
        tables["model"] = {"name": job.model.name}
    tables["cluster"] = _cluster_fields(job.cluster)
    overlap = {name: tables.pop(name) for name in ("mechanism",) if name in tables} | tables.pop("mechanisms", {})
    if overlap:
        tables["overlap"] = overlap
    parts = [toml_table(f"[{name}]", tables[name]) for name in sorted(tables, key=TABLES.index)]
    return "\n\n".join(parts) + "\n"


def _cluster_fields(cluster: Cluster) -> dict[str, Any]:
    """Return the table of a cluster, GPU and network by name where these say all of it."""
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
    """Return the fields of a record that do not have their default, those of records in it, too."""
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(record):
        value = getattr(record, field.name)
        if field.required or value != field.default:
            found[field.name] = _changed_fields(value) if isinstance(value, msgspec.Struct) else value
    return found
