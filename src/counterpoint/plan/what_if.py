"""Other jobs like this one: every what-if is a change of the job's tables, before they become records.

    edited(tables, "nodes", "16")                  a name of `WHAT_IFS`
    edited(tables, "parallel.tp", "4")             or any field of the job's file
    swept(tables, "nodes", ["1", "2", "4"])        one job for each value

So whatever a job's file can say can be asked, and what cannot be is an error that names the field.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.job import Job
from counterpoint.plan.job_file import TABLES, parse_job
from counterpoint.plan.model import divides, positive
from counterpoint.plan.networks import all_levels

__all__ = ["WHAT_IFS", "WhatIf", "edited", "swept"]

Tables = dict[str, Any]
MAX_VALUES = 1000


class WhatIf(NamedTuple):
    """A question with a name.

    Args:
        unit: of its value, for people.
        means: what it changes.
        change: of the tables, given the job that they describe and the value.
    """

    unit: str
    means: str
    change: Callable[[Tables, Job, Any], None]


def edited(tables: Mapping[str, Any], name: str, text: str) -> Tables:
    """The tables after one change.

    Args:
        tables: of a job.
        name: of `WHAT_IFS`, or a field, such as "parallel.tp".
        text: the value as TOML has it; a bare word stands for a string.

    Raises:
        Misconfigured: neither a what-if nor a field, or a value that it cannot have.
    """
    changed = copy.deepcopy(dict(tables))
    value = _value(text)
    if name in WHAT_IFS:
        what_if = WHAT_IFS[name]
        try:
            what_if.change(changed, parse_job(tables), value)
        except TypeError:
            raise Misconfigured(f"{name} = {printable(text)}: give {what_if.unit}") from None
        return changed
    _set(changed, name, value)
    return changed


def swept(tables: Mapping[str, Any], name: str, texts: Sequence[str]) -> list[tuple[str, Job | Misconfigured]]:
    """A job for each value; where there can be none, the reason.

    Raises:
        Misconfigured: no value, or more than 1000.
    """
    if not 1 <= len(texts) <= MAX_VALUES:
        raise Misconfigured(f"{name}: {len(texts)} values; give 1 to {MAX_VALUES}")
    return [(text, _job(tables, name, text)) for text in texts]


def _job(tables: Mapping[str, Any], name: str, text: str) -> Job | Misconfigured:
    try:
        return parse_job(edited(tables, name, text))
    except Misconfigured as error:
        return error


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _set(tables: Tables, field: str, value: Any) -> None:
    """Raises Misconfigured if `field` is in no table; whether the table has it is said when it becomes a record."""
    first, *rest = field.split(".")
    if first not in TABLES or not rest:
        raise Misconfigured(
            f"{printable(field)} is not known: give a field, such as parallel.tp, or one of {', '.join(WHAT_IFS)}"
        )
    table = tables
    for key in (first, *rest[:-1]):
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise Misconfigured(f"{printable(field)}: {printable(key)} is no table")
    table[rest[-1]] = value


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    positive(name, value)
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    positive(name, value)
    return float(value)


def _gpus(tables: Tables, job: Job, count: int) -> None:
    """Replicas more or fewer, of the same batch: strong scaling."""
    one = job.parallel.tp * job.parallel.pp * job.parallel.cp
    divides("parallel.tp · pp · cp", one, "GPUs", count)
    tables.setdefault("parallel", {})["dp"] = count // one
    cluster = tables["cluster"]
    if "levels" in cluster:
        levels = job.cluster.levels
        unit = levels[-2].size if len(levels) > 1 else 1
        cluster["levels"][-1]["size"] = max(levels[-1].size, -(-count // unit) * unit)
    else:
        cluster["gpus"] = count


def _nodes(tables: Tables, job: Job, value: Any) -> None:
    _gpus(tables, job, _whole("nodes", value) * job.cluster.levels[0].size)


def _weak_nodes(tables: Tables, job: Job, value: Any) -> None:
    """The batch grows with the replicas."""
    each = job.training.global_batch // job.parallel.dp
    _nodes(tables, job, value)
    tables["training"]["global_batch"] = each * tables["parallel"]["dp"]


def _levels(tables: Tables, job: Job) -> list[dict[str, Any]]:
    """The levels of the network, written out, to be changed: all that a network of that name has, so it can grow."""
    cluster = tables["cluster"]
    cluster.pop("gpus", None)
    whole = all_levels(cluster.pop("network")) if "network" in cluster else job.cluster.levels
    grown = whole if whole[-1].size >= job.cluster.num_gpus else job.cluster.levels
    levels: list[dict[str, Any]] = [msgspec.to_builtins(level) for level in grown]
    cluster["levels"] = levels
    return levels


def _networks(tables: Tables, job: Job) -> list[dict[str, Any]]:
    crossed = job.cluster.levels[job.cluster.level_of(job.parallel.world_size)]
    if crossed.kind != "network":
        raise Misconfigured(f"all ranks are below one {crossed.name}: give nodes, or a job that has more ranks, first")
    return [level for level in _levels(tables, job) if level["kind"] == "network"]


def _nic(tables: Tables, job: Job, value: Any) -> None:
    """Of one GPU: a node with as many NICs as GPUs has one for each."""
    rate = _number("nic_gbit", value) / 8
    for level in _networks(tables, job):
        level["gb_per_s"] = rate


def _nics(tables: Tables, job: Job, value: Any) -> None:
    per_gpu = _whole("nics", value) / job.cluster.levels[0].size
    for level in _networks(tables, job):
        level["gb_per_s"] *= per_gpu


def _failed_nic(tables: Tables, job: Job, value: Any) -> None:
    """Its node's traffic goes over the others, and every collective across nodes waits for that node."""
    lost, nics = _whole("failed_nics", value), job.cluster.levels[0].size
    if lost >= nics:
        raise Misconfigured(f"failed_nics = {lost} of {nics}: a node without a network cannot take part")
    for level in _networks(tables, job):
        level["gb_per_s"] *= (nics - lost) / nics


def _oversubscription(tables: Tables, job: Job, value: Any) -> None:
    """Of the topmost level that the job crosses."""
    factor = _number("oversubscription", value)
    _networks(tables, job)
    tables["cluster"]["levels"][job.cluster.level_of(job.parallel.world_size)]["oversubscription"] = factor


def _accumulation(tables: Tables, job: Job, value: Any) -> None:
    steps = _whole("accumulation", value)
    tables["training"]["global_batch"] = steps * job.parallel.dp * job.training.micro_batch


def _field(field: str) -> Callable[[Tables, Job, Any], None]:
    return lambda tables, job, value: _set(tables, field, value)


def _compression(tables: Tables, job: Job, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError
    method, _, amount = value.partition(":")
    fields = {"powersgd": "rank", "topk": "keep", "randomk": "keep", "quantized": "bits"}
    if method == "none":
        tables.pop("compression", None)
        return
    table: dict[str, Any] = {"method": method}
    if amount and method in fields:
        table[fields[method]] = _value(amount)
    tables["compression"] = table


WHAT_IFS: dict[str, WhatIf] = {  # in the order in which several are applied
    "gpu": WhatIf("the name of a GPU", "another generation; the network stays", _field("cluster.gpu")),
    "network": WhatIf("the name of a network", "another topology", _field("cluster.network")),
    "nodes": WhatIf("a number of nodes", "replicas more or fewer, the same batch (strong scaling)", _nodes),
    "weak_nodes": WhatIf(
        "a number of nodes", "replicas more or fewer, the batch with them (weak scaling)", _weak_nodes
    ),
    "nic_gbit": WhatIf("Gb/s of one GPU's NIC", "speed of the network between nodes", _nic),
    "nics": WhatIf("a number of NICs per node", "as many as GPUs is one for each", _nics),
    "failed_nics": WhatIf("a number of NICs", "one node has lost so many", _failed_nic),
    "oversubscription": WhatIf("a factor", "of the topmost level that the job crosses", _oversubscription),
    "global_batch": WhatIf("a number of samples", "of one step", _field("training.global_batch")),
    "micro_batch": WhatIf("a number of samples", "through the model at once", _field("training.micro_batch")),
    "accumulation": WhatIf("a number of micro-batches", "per step; the batch with them", _accumulation),
    "bucket_mib": WhatIf(
        "MiB",
        "gradients that are reduced at once",
        lambda tables, job, value: _set(tables, "parallel.bucket_bytes", round(_number("bucket_mib", value) * 2**20)),
    ),
    "precision": WhatIf("bf16, fp16, fp8 or fp32", "of matrix products", _field("training.precision")),
    "recompute": WhatIf("none, selective or full", "what backward computes again", _field("training.recompute")),
    "compression": WhatIf(
        "none, powersgd:RANK, topk:PART, randomk:PART or quantized:BITS", "of gradients", _compression
    ),
    "mechanism": WhatIf("the name of a mechanism", "how collectives overlap with compute", _field("overlap.mechanism")),
    "local_steps": WhatIf(
        "a number of steps", "between exchanges of replicas (local SGD)", _field("training.local_steps")
    ),
    "asynchronous": WhatIf(
        "true or false", "replicas do not wait for each other (stale gradients)", _field("training.asynchronous")
    ),
    "slow_rank": WhatIf("a factor", "by which one rank computes slower", _field("ranks.slow")),
    "jitter": WhatIf("a part of the step", "standard deviation between ranks", _field("ranks.jitter")),
}
