"""Change a job by command-line flags or by fields of its file, or sweep one of them over several values.

    build_job(tables, {"parallel.tp": "4", "nodes": "16"})       the file's tables with a field set, on 16 nodes
    swept(tables, {}, "nodes", ["1", "2", "4"])                  one job for each value

Values are as TOML has them; a bare word stands for a string. Flags that name a part of the job come first, then fields,
then the number of nodes, whatever order they are given in; only the resulting job has to be possible.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from msgspec.structs import replace

from counterpoint.errors import Misconfigured, NoSuchValue, printable
from counterpoint.plan.job.cluster import Level
from counterpoint.plan.job.fields import Table, parse_record, read_value
from counterpoint.plan.job.job import OF_GPUS, RECORDS, Job, parse_job, with_gpus
from counterpoint.plan.job.model import divides
from counterpoint.plan.job.parallel import Parallel, on_gpus

MAX_VALUES = 1000
MAX_NODES = 1 << 20
NODES = ("nodes", "weak_nodes")
DECIDES = {  # flags, and for each the other changes that set the same thing
    "gpu": ("cluster.gpu",),
    "network": ("cluster.network", "cluster.levels"),
    "mechanism": ("overlap.mechanism",),
    "nodes": ("parallel.dp", "cluster.gpus"),
    "weak_nodes": ("nodes", "parallel.dp", "cluster.gpus", "training.global_batch"),
}
SAME_GPUS = ("parallel.tp", "parallel.pp", "parallel.cp")  # when one of these is swept, dp takes the remaining GPUs


def build_job(tables: Table, changes: Mapping[str, str]) -> Job:
    """Return the job of a file with changes, named as flags or fields; raise Misconfigured if it is impossible."""
    _check_together(changes)
    return _built(tables, changes)


def swept(
    tables: Table, changes: Mapping[str, str], name: str, texts: Sequence[str]
) -> list[tuple[str, Job | Misconfigured]]:
    """Return each value of one flag or field with its job, or with the error where that job is impossible.

    A sweep over parallel.tp, pp or cp keeps the number of GPUs: parallel.dp takes what the others leave. `tables` are
    of the job's file, `changes` all other changes, as `build_job` takes them, and `texts` 1 to 1000 values of `name`.

    Raises:
        Misconfigured: there are no values or too many, one of them can be no value of the field in any job, or one of
            `changes` contradicts the varied field.
    """
    if not 1 <= len(texts) <= MAX_VALUES:
        raise Misconfigured(f"{name}: {len(texts)} values; give 1 to {MAX_VALUES}")
    _check_together({**changes, name: texts[0]})
    ranks = _parallel(tables, changes).world_size if name in SAME_GPUS else None
    return [(text, _job_or_reason(tables, {**changes, name: text}, ranks)) for text in texts]


def on_nodes(job: Job, nodes: int, *, batch_grows: bool) -> Job:
    """Return the job on `nodes` nodes, with dp adjusted; the batch stays, or grows with the replicas (`batch_grows`).

    Raise Misconfigured if the job cannot be divided over these nodes.
    """
    gpus = nodes * job.cluster.gpus_per_node
    parallel, training = on_gpus(job.parallel, job.training, gpus, batch_grows=batch_grows)
    return replace(job, parallel=parallel, training=training, cluster=with_gpus(job.cluster, gpus))


def _check_together(changes: Mapping[str, str]) -> None:
    """Raise Misconfigured where a flag and another change set the same thing."""
    for flag in DECIDES.keys() & changes.keys():
        for name in changes:
            if any(f"{name}.".startswith(f"{decided}.") for decided in DECIDES[flag]):
                raise Misconfigured(f"{flag} with {printable(name, 80)}: both decide on it; give one of them")


def _built(tables: Table, changes: Mapping[str, str]) -> Job:
    changed = _changed(tables, changes)
    for flag in NODES:
        if flag in changes:
            nodes = read_value(changes[flag])
            if isinstance(nodes, bool) or not isinstance(nodes, int) or not 1 <= nodes <= MAX_NODES:
                said = printable(changes[flag], 80)
                raise NoSuchValue(f"{flag} = {said}: give a number of nodes, from 1 to {MAX_NODES:,}")
            return parse_job(changed, nodes=nodes, batch_grows=flag == "weak_nodes")
    return parse_job(changed)


def _job_or_reason(tables: Table, changes: Mapping[str, str], ranks: int | None) -> Job | Misconfigured:
    """Return the job after changes, with dp set to give `ranks` ranks, or the error that says why it is impossible."""
    try:
        if ranks is None:
            return _built(tables, changes)
        replica = _parallel(tables, changes).replica
        divides("parallel.tp · pp · cp", replica, "GPUs", ranks)
        return _built(tables, {**changes, "parallel.dp": str(ranks // replica)})
    except NoSuchValue:
        raise
    except Misconfigured as error:
        return error


def _parallel(tables: Table, changes: Mapping[str, str]) -> Parallel:
    """Return the parallel degrees of a job after changes, before the number of nodes decides on dp."""
    return parse_record("parallel", _changed(tables, changes).get("parallel", {}), Parallel)


def _changed(tables: Table, changes: Mapping[str, str]) -> dict[str, Any]:
    """Return a copy of a job's tables with the changes applied; their values are checked when the tables are read."""
    changed = copy.deepcopy(dict(tables))
    for flag in ("gpu", "network", "mechanism"):
        if flag not in changes:
            continue
        value = read_value(changes[flag])
        if flag == "mechanism":
            changed["overlap"] = {"mechanism": value}
            continue
        cluster = changed.setdefault("cluster", {})
        if flag == "gpu" and isinstance(cluster, dict):  # drop the settings of the GPU that is replaced
            changed["cluster"] = {name: of for name, of in cluster.items() if name not in OF_GPUS}
        _set(changed, f"cluster.{flag}", value)
    for name, text in changes.items():
        if name not in DECIDES:
            _set(changed, name, read_value(text))
    return changed


def _set(tables: dict[str, Any], field: str, value: object) -> None:
    """Set one field of the tables in place."""
    *above, last = field.split(".")
    if not above:
        names = [f"{table}.{name}" for table, kind in RECORDS.items() for name in kind.__struct_fields__]
        near = [name for name in names if name.endswith(f".{last}")] or get_close_matches(last, names, n=1, cutoff=0.4)
        raise NoSuchValue(f"{printable(field, 80)} is not known: give a field, such as {(near or ['parallel.tp'])[0]}")
    table = tables
    for key in above:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise Misconfigured(f"{printable(field)}: {printable(key)} is no table")
    table[last] = value


def with_levels(job: Job, change: Callable[[Level], dict[str, float]]) -> Job:
    """Return the job with each network level changed in the fields that `change` returns for that level."""
    levels = tuple(replace(level, **change(level)) for level in job.cluster.levels)
    return replace(job, cluster=replace(job.cluster, levels=levels, network=None))


def scaled_links(job: Job, factor: float, *, network: bool) -> Job:
    """Return the job with `factor` times the bandwidth between nodes (`network` true) or inside nodes (false)."""
    return with_levels(
        job, lambda level: {"gb_per_s": factor * level.gb_per_s} if (level.kind == "network") == network else {}
    )
