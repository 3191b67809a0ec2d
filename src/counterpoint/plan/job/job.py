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
    network = "h100-roce-400"    # or tables [[cluster.levels]]
    [overlap]
    mechanism = "zero_sm"
    [ranks]
    slow = 1.2

Everything that is left out has the default of its record: `Model`, `Training`, `Parallel`, `Cluster`. A field that no
record has is an error that names it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from counterpoint.errors import Misconfigured, printable
from counterpoint.machine.profile import Disturbance, Profile, shipped_profile
from counterpoint.pair.together import disturbance
from counterpoint.plan.job.cluster import Cluster, ClusterGpu, Level, find_gpu
from counterpoint.plan.job.model import Experts, Model, find_model
from counterpoint.plan.job.parallel import Compression, Parallel, Training, check_division
from counterpoint.plan.network.protocols import levels
from counterpoint.records import Record

MAX_BYTES = 1 << 20
TABLES = ("model", "training", "parallel", "cluster", "overlap", "compression", "ranks")

R = TypeVar("R", bound=Record)
Table = Mapping[str, Any]


class Ranks(Record, frozen=True, kw_only=True):
    """Describes how much the ranks differ in speed."""

    slow: float = 1.0  # one rank computes so many times as long as the others
    jitter: float = 0.0  # standard deviation of a rank's time over its mean, for which the step then waits

    def __post_init__(self) -> None:
        if not 1 <= self.slow < 1000:
            raise Misconfigured(f"ranks.slow = {self.slow}: give a factor from 1 to below 1000")
        if not 0 <= self.jitter < 10:
            raise Misconfigured(f"ranks.jitter = {self.jitter}: give a part of the mean, from 0 to below 10")


class Job(Record, frozen=True, kw_only=True):
    """Describes one training job, which `predict_step` predicts."""

    model: Model  # the transformer that is trained
    training: Training  # batch, sequence, precision
    parallel: Parallel  # degrees of parallelism
    cluster: Cluster  # its machines; it has as many GPUs as the job has ranks, or more
    mechanism: str = "nccl"  # how collectives overlap with compute: a mechanism of the profile, `ideal` or `serial`
    compression: Compression | None = None  # of gradients; None: sent whole
    ranks: Ranks = Ranks()  # how much they differ in speed

    def __post_init__(self) -> None:
        disturbance(self.mechanism, self.profile)  # raises if there is no such mechanism
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
        return shipped_profile(self.cluster.gpu.name)

    @property
    def disturbance(self) -> Disturbance:
        """Return how much compute and collectives by the job's mechanism slow each other down."""
        return disturbance(self.mechanism, self.profile)


def read_tables(path: Path) -> dict[str, Any]:
    """Return the tables of a job's file; Misconfigured if it cannot be read, is no TOML or larger than 1 MiB."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise Misconfigured(f"{path}: {error.strerror}; give a job as TOML, such as those of examples/plan") from None
    if len(content) > MAX_BYTES:
        raise Misconfigured(f"{path}: larger than {MAX_BYTES} bytes; a job has a few lines")
    try:
        return tomllib.loads(content.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise Misconfigured(f"{path}: not TOML: {printable(str(error))}") from None


def parse_job(tables: Table) -> Job:
    """Return the job of a TOML document, or raise Misconfigured with the field, its value and what is allowed."""
    _check_known("", tables, TABLES)
    for name in ("model", "training", "cluster"):
        if name not in tables:
            raise Misconfigured(f"there is no table [{name}]; give it")
    parallel = parse_record("parallel", tables.get("parallel", {}), Parallel)
    overlap = _table("overlap", tables.get("overlap", {}))
    _check_known("overlap", overlap, ("mechanism",))
    compression = tables.get("compression")
    return Job(
        model=_model(_table("model", tables["model"])),
        training=parse_record("training", tables["training"], Training),
        parallel=parallel,
        cluster=_cluster(_table("cluster", tables["cluster"]), parallel.world_size),
        mechanism=parse_name("overlap.mechanism", overlap.get("mechanism", "nccl")),
        compression=None if compression is None else parse_record("compression", compression, Compression),
        ranks=parse_record("ranks", tables.get("ranks", {}), Ranks),
    )


def _model(table: Table) -> Model:
    """Return the known model of this name if `name` is all that is given; next to widths it is only a label."""
    if set(table) == {"name"}:
        return find_model(parse_name("model.name", table["name"]))
    if table.get("experts") is not None:
        parse_record("model.experts", table["experts"], Experts)  # its unknown fields
    return parse_record("model", table, Model)


def _cluster(table: Table, ranks: int) -> Cluster:
    """Return the cluster, its network named or written out; without `gpus` it has as many as the job has ranks."""
    _check_known("cluster", table, ("gpu", "gpus", "clock_ghz", "power_watts", "network", "levels"))
    count = table.get("gpus", ranks)
    if ("network" in table) == ("levels" in table):
        raise Misconfigured("cluster: give either network, a name, or levels, inside out")
    if isinstance(count, bool) or not isinstance(count, int):
        raise Misconfigured(f"cluster.gpus = {printable(repr(count))}: give a whole number")
    gpu = parse_gpu(table.get("gpu"))
    limits = {name: table[name] for name in ("clock_ghz", "power_watts") if name in table}
    if limits:
        gpu = parse_record("cluster.gpu", msgspec.structs.asdict(gpu) | limits, ClusterGpu)
    if "network" in table:
        network = parse_name("cluster.network", table["network"])
        return Cluster(gpu=gpu, levels=levels(network, count), network=network)
    if not isinstance(table["levels"], list):
        raise Misconfigured("cluster.levels: give tables [[cluster.levels]]")
    return Cluster(gpu=gpu, levels=tuple(parse_record("cluster.levels", each, Level) for each in table["levels"]))


def parse_gpu(value: object) -> ClusterGpu:
    """Return the GPU that is given by its name, or by a table of its figures."""
    if isinstance(value, Mapping):
        return parse_record("cluster.gpu", value, ClusterGpu)
    return find_gpu(parse_name("cluster.gpu", value))


def parse_record(where: str, table: object, kind: type[R]) -> R:
    """Return a table as a record of that kind, or raise Misconfigured with the field that is wrong."""
    fields = _table(where, table)
    _check_known(where, fields, kind.__struct_fields__)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        if isinstance(cause, Misconfigured):
            raise cause from None
        raise Misconfigured(f"{where}: {printable(str(error))}") from None


def parse_name(where: str, value: object) -> str:
    """Return `value` if it is a string, else raise Misconfigured."""
    if not isinstance(value, str):
        raise Misconfigured(f"{where} = {printable(repr(value))}: give a name")
    return value


def _check_known(where: str, table: Table, allowed: tuple[str, ...]) -> None:
    """Raise Misconfigured at the first key of `table` that is not allowed."""
    for key in table:
        if key not in allowed:
            field = printable(f"{where}.{key}" if where else key)
            raise Misconfigured(f"{field} is not known: allowed are {', '.join(allowed)}")


def _table(where: str, value: object) -> Table:
    if not isinstance(value, Mapping):
        raise Misconfigured(f"{where} = {printable(repr(value))}: give a table [{where}]")
    return value
