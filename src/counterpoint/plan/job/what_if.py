"""Change a job: set fields of its file, then apply what-ifs, each of them a function `Job -> Job`.

    build_job(tables, {"parallel.tp": "4", "nodes": "16"})       the file's tables with a field set, then on 16 nodes
    what_if(job, "nodes", "16")                                  a job on 16 nodes
    swept(tables, {}, "nodes", ["1", "2", "4"])                  one job for each value

Every field of a job's file can be set; a value that is not allowed is an error that names the field.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import asdict, replace

from counterpoint.errors import Misconfigured, NoSuchValue, printable
from counterpoint.plan.job.cluster import Cluster, ClusterGpu, Level
from counterpoint.plan.job.fields import parse_name, parse_record, read_value
from counterpoint.plan.job.job import TABLES, Job, JobParts, parse_gpu, parse_parts
from counterpoint.plan.job.model import divides, positive
from counterpoint.plan.job.parallel import Compression
from counterpoint.plan.job.run import Run
from counterpoint.plan.network.protocols import all_levels, levels, own_file

MAX_VALUES = 1000
LINKS = ("cluster.gpus", "cluster.levels", "cluster.network")
CONTRADICTIONS = (
    ("nodes", "weak_nodes", "both say how many nodes there are"),
    ("global_batch", "accumulation", "both say how large the batch is"),
    ("global_batch", "weak_nodes", "with weak_nodes the batch grows with the nodes"),
)
SAME_GPUS = ("parallel.tp", "parallel.pp", "parallel.cp")  # swept, dp takes the GPUs that they leave
COMPRESSION_AMOUNTS = {"powersgd": "rank", "topk": "keep", "randomk": "keep", "quantized": "bits"}


class JobChange(NamedTuple):
    """Describes one what-if: its value, the fields of a job that it sets, and the function that applies it."""

    unit: str  # of its value, for people
    means: str  # what it changes, for people: a sentence
    decides: tuple[str, ...]  # fields or tables of the job's file that it sets
    change: Callable[[JobParts, Any], JobParts]  # returns the changed job, from the job and the value
    kind: type = object  # of the value: int and float are above 0, object is checked by the record that it goes to


def build_job(tables: Mapping[str, Any], changes: Mapping[str, str]) -> Job:
    """Return the job of a file after changes, fields before what-ifs.

    The order of `changes` is of no matter: what-ifs are applied in that of `WHAT_IFS`. Only the job in the end has to
    be possible, so what belongs together, such as more nodes and a larger batch, can be asked for by several of them.

    Raises:
        Misconfigured: the job is impossible, or two changes contradict each other.
    """
    return what_ifs(_parts_of(tables, changes), changes)


def _parts_of(tables: Mapping[str, Any], changes: Mapping[str, str]) -> JobParts:
    """Return the records of a job after the changes of fields, before what-ifs."""
    for name, text in changes.items():
        if name not in WHAT_IFS:
            tables = _with_field(tables, name, text)
    return parse_parts(tables)


def what_ifs(job: JobParts, changes: Mapping[str, str]) -> Job:
    """Return the job after all what-ifs among `changes`; values are as TOML has them, a bare word stands for a string.

    Raises:
        Misconfigured: the job is impossible, or two what-ifs contradict each other.
    """
    for one, other, why in CONTRADICTIONS:
        if one in changes and other in changes:
            raise Misconfigured(f"{one} with {other}: {why}; give one of them")
    for name in WHAT_IFS:
        if name in changes:
            job = _changed(job, name, changes[name])
    return job.whole()


def what_if(job: Job, name: str, text: str) -> Job:
    """Return the job after one what-if."""
    return what_ifs(job, {name: text})


def _changed(job: JobParts, name: str, text: str) -> JobParts:
    change, value = WHAT_IFS[name], read_value(text)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    accepted = {int: number and isinstance(value, int), float: number, str: isinstance(value, str), object: True}
    if not accepted[change.kind]:
        raise NoSuchValue(f"{name} = {printable(text, 80)}: give {change.unit}")
    if change.kind in (int, float):
        positive(name, value)
    try:
        return change.change(JobParts(**asdict(job)), value)
    except OverflowError:
        raise Misconfigured(f"{name} = {printable(text, 80)}: give a smaller number") from None


def swept(
    tables: Mapping[str, Any], changes: Mapping[str, str], name: str, texts: Sequence[str]
) -> list[tuple[str, Job | Misconfigured]]:
    """Return each value of one what-if or field with its job, or with the error where that job is impossible.

    A sweep over parallel.tp, pp or cp keeps the number of GPUs: parallel.dp takes what the others leave.

    Args:
        tables: the tables of the job's file.
        changes: all other changes, as `build_job` takes them.
        name: the what-if or field that is varied.
        texts: its values, 1 to 1000 of them.

    Raises:
        Misconfigured: there are no values or too many, one of them can be no value of the field in any job, or one of
            `changes` sets the varied field, too.
    """
    if not 1 <= len(texts) <= MAX_VALUES:
        raise Misconfigured(f"{name}: {len(texts)} values; give 1 to {MAX_VALUES}")
    for other in (changes.keys() & WHAT_IFS.keys()) - {name}:
        if any(f"{name}.".startswith(f"{field}.") for field in WHAT_IFS[other].decides) and name not in WHAT_IFS:
            raise Misconfigured(f"--sweep {name} with {other}: {other} decides on {name}; leave out one of them")
    ranks = build_job(tables, changes).parallel.world_size if name in SAME_GPUS else None
    return [(text, _job_or_reason(tables, {**changes, name: text}, ranks)) for text in texts]


def _job_or_reason(tables: Mapping[str, Any], changes: Mapping[str, str], ranks: int | None) -> Job | Misconfigured:
    """Return the job after changes, on as many ranks as given, by its dp; or why it cannot be."""
    try:
        if ranks is None:
            return build_job(tables, changes)
        parallel = _parts_of(tables, changes).parallel
        replica = parallel.tp * parallel.pp * parallel.cp
        divides("parallel.tp · pp · cp", replica, "GPUs", ranks)
        return build_job(tables, {**changes, "parallel.dp": str(ranks // replica)})
    except NoSuchValue:
        raise
    except Misconfigured as error:
        return error


def _with_field(tables: Mapping[str, Any], field: str, text: str) -> dict[str, Any]:
    """Return a copy of the tables with another value for a field; `parse_job` says whether a record has that field."""
    first, *rest = field.split(".")
    if first not in TABLES or not rest:
        known = ", ".join(WHAT_IFS)
        raise NoSuchValue(f"{printable(field)} is not known: give a field, such as parallel.tp, or one of {known}")
    changed = copy.deepcopy(dict(tables))
    table = changed
    for key in (first, *rest[:-1]):
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise Misconfigured(f"{printable(field)}: {printable(key)} is no table")
    table[rest[-1]] = read_value(text)
    return changed


def _with_fields(job: JobParts, table: str, **changes: object) -> JobParts:
    """Return the job with other values in one of its records, checked as those of a file are."""
    record = getattr(job, table)
    return replace(job, **{table: parse_record(table, asdict(record) | changes, type(record))})


def _on_nodes(job: JobParts, nodes: int, *, weak: bool = False) -> JobParts:
    """Return the job on `nodes` nodes, with more or fewer replicas; the batch stays, or with `weak` grows with them."""
    gpus = nodes * job.cluster.gpus_per_node
    replica = job.parallel.tp * job.parallel.pp * job.parallel.cp
    divides("parallel.tp · pp · cp", replica, "GPUs", gpus)
    parallel, training = replace(job.parallel, dp=gpus // replica), job.training
    if weak:
        divides("parallel.dp", job.parallel.dp, "training.global_batch", training.global_batch)
        training = replace(training, global_batch=training.global_batch // job.parallel.dp * parallel.dp)
    return replace(job, parallel=parallel, training=training, cluster=with_gpus(job.cluster, gpus))


def with_gpus(cluster: Cluster, gpus: int) -> Cluster:
    """Return the cluster for `gpus` GPUs: a named network is built anew, of written-out levels the last may grow."""
    if cluster.network is not None:
        return replace(cluster, levels=levels(cluster.network, gpus))
    *below, last = cluster.levels
    unit = below[-1].size if below else 1
    return replace(cluster, levels=(*below, replace(last, size=max(last.size, -(-gpus // unit) * unit))))


def _on_network(job: JobParts, value: object) -> JobParts:
    name = parse_name("cluster.network", value)
    if job.cluster.network is None:
        raise Misconfigured("cluster: give either network, a name, or levels, inside out")
    whole, gpus = all_levels(name)[-1], job.cluster.num_gpus
    if whole.kind != "network":  # it cannot grow; whether that is too small shows when all is applied
        gpus = min(gpus, whole.size)
    return replace(job, cluster=replace(job.cluster, levels=levels(name, gpus), network=name, fits=own_file(name)))


def _whole_network(job: JobParts) -> tuple[Level, ...]:
    """Return all levels of the job's network, also those above the job, so that it can grow after a change."""
    cluster = job.cluster
    crossed = cluster.levels[cluster.level_of(job.parallel.world_size)]
    if crossed.kind != "network":
        raise Misconfigured(f"all ranks are below one {crossed.name}: give nodes, or a job that has more ranks, first")
    whole = cluster.levels if cluster.network is None else all_levels(cluster.network)
    return whole if whole[-1].size >= cluster.num_gpus else cluster.levels


def _with_levels(job: JobParts, changed: Iterable[Level]) -> JobParts:
    return replace(job, cluster=replace(job.cluster, levels=tuple(changed), network=None))


def _with_rates(job: JobParts, rate: Callable[[Level], float]) -> JobParts:
    """Return the job with other GB/s per GPU, as `rate` says, at every level between nodes."""
    whole = _whole_network(job)
    return _with_levels(job, (replace(each, gb_per_s=rate(each)) if each.kind == "network" else each for each in whole))


def _with_nics(job: JobParts, nics: int) -> JobParts:
    """Return the job with `nics` NICs per node; the GB/s of the levels are those of one NIC for each GPU."""
    part = nics / job.cluster.gpus_per_node
    return _with_rates(job, lambda level: level.gb_per_s * part)


def _without_nics(job: JobParts, lost: int) -> JobParts:
    """Return the job with a node that has lost NICs: every collective across nodes waits for that node."""
    if lost >= job.cluster.gpus_per_node:
        raise Misconfigured(
            f"failed_nics = {lost} of {job.cluster.gpus_per_node}: a node without a network cannot take part"
        )
    whole = _whole_network(job)
    return _with_levels(job, (replace(each, failed_nics=lost) if each.kind == "network" else each for each in whole))


def _oversubscribed(job: JobParts, factor: float) -> JobParts:
    """Return the job with another oversubscription of the topmost level that it crosses."""
    top, whole = job.cluster.level_of(job.parallel.world_size), _whole_network(job)
    return _with_levels(
        job, (replace(each, oversubscription=float(factor)) if i == top else each for i, each in enumerate(whole))
    )


def _accumulated(job: JobParts, steps: int) -> JobParts:
    batch = steps * job.parallel.dp * job.training.micro_batch
    return _with_fields(job, "training", global_batch=batch)


def _compressed(job: JobParts, text: str) -> JobParts:
    method, colon, amount = text.partition(":")
    if colon and (method == "none" or not amount):
        raise Misconfigured(f"compression = {printable(text, 80)}: give {WHAT_IFS['compression'].unit}")
    if method == "none":
        return replace(job, compression=None)
    table: dict[str, object] = {"method": method}
    if amount and method in COMPRESSION_AMOUNTS:
        table[COMPRESSION_AMOUNTS[method]] = read_value(amount)
    return replace(job, compression=parse_record("compression", table, Compression))


def _field(unit: str, means: str, table: str, name: str) -> JobChange:
    """Return the what-if that sets one field of one of the job's records."""
    return JobChange(unit, means, (f"{table}.{name}",), lambda job, value: _with_fields(job, table, **{name: value}))


def _on_machine(job: JobParts, value: object) -> JobParts:
    if not value:
        raise Misconfigured('machine = "": give the file of a profile')
    gpu = replace(job.cluster.gpu, machine=parse_name("cluster.machine", value))
    return replace(job, cluster=replace(job.cluster, gpu=gpu))


def _gpu_limit(unit: str, means: str, name: str) -> JobChange:
    """Return the what-if that sets the clock or the power of the job's GPUs."""

    def change(job: JobParts, value: Any) -> JobParts:
        gpu = parse_record("cluster.gpu", asdict(job.cluster.gpu) | {name: value}, ClusterGpu)
        return replace(job, cluster=replace(job.cluster, gpu=gpu))

    return JobChange(unit, means, (f"cluster.{name}", f"cluster.gpu.{name}"), change, float)


def _run_field(unit: str, means: str, name: str) -> JobChange:
    """Return the what-if that sets one field of the whole training; tokens replace steps, or begin the table."""

    def change(job: JobParts, value: Any) -> JobParts:
        table = {} if job.run is None else asdict(job.run)
        if name == "tokens":
            table["steps"] = None
        return replace(job, run=parse_record("run", table | {name: value}, Run))

    return JobChange(unit, means, (f"run.{name}",), change)


WHAT_IFS: dict[str, JobChange] = {  # in the order in which several are applied
    "gpu": JobChange(
        "the name of a GPU", "Train on another GPU; the network stays.", ("cluster.gpu",),
        lambda job, value: replace(job, cluster=replace(job.cluster, gpu=parse_gpu(value))),
    ),
    "machine": JobChange(
        "the file of a profile", "Take the figures of a profile of your own: efficiency, mechanisms.",
        ("cluster.machine", "cluster.gpu.machine"), _on_machine,
    ),
    "clock_ghz": _gpu_limit("GHz", "Lock the clock of the GPUs.", "clock_ghz"),
    "power_watts": _gpu_limit("W of one GPU", "Limit the power of the GPUs.", "power_watts"),
    "network": JobChange(
        "the name of a network", "Join the GPUs by another network.", ("cluster.network",), _on_network
    ),
    "nodes": JobChange(
        "a number of nodes", "Train on more or fewer nodes with the same batch (strong scaling).",
        ("parallel.dp", *LINKS), _on_nodes, int,
    ),
    "weak_nodes": JobChange(
        "a number of nodes", "Train on more or fewer nodes; the batch grows with them (weak scaling).",
        ("parallel.dp", "training.global_batch", *LINKS), lambda job, nodes: _on_nodes(job, nodes, weak=True), int,
    ),
    "nic_gbit": JobChange(
        "Gb/s of one GPU's NIC", "Change the speed of the network between nodes.", LINKS,
        lambda job, gbit: _with_rates(job, lambda level: gbit / 8), float,
    ),
    "nics": JobChange(
        "a number of NICs per node", "Change the NICs of a node; as many as it has GPUs is one for each.",
        LINKS, _with_nics, int,
    ),
    "failed_nics": JobChange("a number of NICs", "Let one node lose some of its NICs.", LINKS, _without_nics, int),
    "oversubscription": JobChange(
        "a factor", "Oversubscribe the topmost level that the job crosses.", LINKS, _oversubscribed, float
    ),
    "global_batch": _field("a number of samples", "Change the batch of one step.", "training", "global_batch"),
    "micro_batch": _field(
        "a number of samples", "Change what goes through the model at once.", "training", "micro_batch"
    ),
    "accumulation": JobChange(
        "a number of micro-batches", "Accumulate more or fewer gradients per step; the batch grows with them.",
        ("training.global_batch",), _accumulated, int,
    ),
    "bucket_mib": JobChange(
        "MiB", "Change the size of the gradients that are reduced at once.", ("parallel.bucket_bytes",),
        lambda job, mib: _with_fields(job, "parallel", bucket_bytes=round(mib * 2**20)), float,
    ),
    "precision": _field("bf16, fp16, fp8 or fp32", "Change the precision of matrix products.", "training", "precision"),
    "recompute": _field("none, selective or full", "Change what backward computes again.", "training", "recompute"),
    "compression": JobChange(
        "none, powersgd:RANK, topk:PART, randomk:PART or quantized:BITS", "Compress gradients.", ("compression",),
        _compressed, str,
    ),
    "mechanism": JobChange(
        "the name of a mechanism", "Change how collectives overlap with compute.", ("overlap",),
        lambda job, value: replace(job, mechanism=parse_name("overlap.mechanism", value), mechanisms={}),
    ),
    "local_steps": _field(
        "a number of steps", "Let replicas exchange only after so many steps (local SGD).", "training", "local_steps"
    ),
    "asynchronous": _field(
        "true or false", "Let replicas not wait for each other (stale gradients).", "training", "asynchronous"
    ),
    "slow_rank": _field("a factor", "Let one rank compute slower.", "ranks", "slow"),
    "jitter": _field("a part of the step", "Change the standard deviation between ranks.", "ranks", "jitter"),
    "tokens": _run_field("a number of tokens", "Train on so many tokens: days, GPU-hours, goodput.", "tokens"),
    "price_per_gpu_hour": _run_field("a price", "Change what a GPU costs for an hour.", "price_per_gpu_hour"),
    "gpu_mtbf_hours": _run_field("hours", "Change how long one GPU goes between two failures.", "gpu_mtbf_hours"),
    "restart_minutes": _run_field("minutes", "Change how long a restart takes.", "restart_minutes"),
    "checkpoint_minutes": _run_field(
        "minutes, or optimal", "Change how much work is between two checkpoints.", "checkpoint_minutes"
    ),
}  # fmt: skip
