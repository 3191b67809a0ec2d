"""Read the file of a job, whatever format it has, and say which flags must be given beside a foreign one."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.job.fields import read_value
from counterpoint.plan.job.foreign.arguments import is_megatron
from counterpoint.plan.job.foreign.huggingface import read_config
from counterpoint.plan.job.foreign.megatron import read_megatron
from counterpoint.plan.job.foreign.reading import ForeignJob
from counterpoint.plan.job.foreign.torchtitan import is_torchtitan, read_torchtitan
from counterpoint.plan.job.job import ADVICE, MAX_BYTES, parse_tables
from counterpoint.plan.network.protocols import all_levels
from counterpoint.read_file import read_text

NEEDED = {  # what a job must say, and the flags that say it
    "training.sequence": "--set training.sequence=TOKENS",
    "training.global_batch": "--global-batch SAMPLES",
    "model.vocab": "--set model.vocab=ROWS",
    "cluster.gpu": "--gpu NAME",
    "cluster.network": "--network NAME",
    "parallel.dp": "--nodes N (or --set parallel.dp=N)",
}
COUNTS = ("nodes", "weak_nodes", "cluster.gpus")  # which decide on parallel.dp
BY_FLAG = {"training.global_batch": "global_batch", "cluster.gpu": "gpu", "cluster.network": "network"}


def read_job_file(path: Path, changes: Mapping[str, str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the tables of a job, and notes on what a foreign file did not say or was not understood in it.

    Args:
        path: a job of counterpoint or torchtitan as TOML, a config.json, or arguments of Megatron-LM.
        changes: fields and what-ifs by name, which complete what a foreign file leaves open.

    Raises:
        Misconfigured: the file cannot be read, or with the changes does not say all that a job needs.
    """
    text = read_text(path, limit=MAX_BYTES, advice=ADVICE)
    try:
        found = _foreign(path, text)
        if isinstance(found, ForeignJob):
            return _completed(found, changes), found.notes
    except Misconfigured as error:
        where = printable(str(path), 200)
        raise Misconfigured(str(error) if str(error).startswith(where) else f"{where}: {error}") from None
    return found, ()


def _foreign(path: Path, text: str) -> ForeignJob | dict[str, Any]:
    """Return the job of a foreign file, or the tables of one of counterpoint."""
    if text.lstrip().startswith("{"):
        return read_config(_json(text))
    try:
        tables = parse_tables(path, text)
    except Misconfigured:
        if is_megatron(text):
            return read_megatron(text)
        raise
    return read_torchtitan(tables) if is_torchtitan(tables) else tables


def _json(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise Misconfigured(f"no JSON: {printable(str(error), 120)}; give config.json of Hugging Face") from None


def _completed(found: ForeignJob, changes: Mapping[str, str]) -> dict[str, Any]:
    """Return the tables with what the changes say of it, or raise Misconfigured with the flags that are missing."""
    tables = deepcopy(found.tables)
    for table in ("training", "parallel", "cluster"):
        tables.setdefault(table, {})
    for field, flag in BY_FLAG.items():
        table, name = field.split(".")
        if name not in tables[table] and flag in changes:
            tables[table][name] = read_value(changes[flag])
    if "parallel.dp" not in changes:
        _add_replicas(tables, changes)
    dp = _number(changes, "parallel.dp") or tables["parallel"].get("dp")
    if dp is not None and found.replicas > 1 and "shard" not in tables["parallel"] and dp % found.replicas == 0:
        tables["parallel"]["shard"] = dp // found.replicas
    if found.per_replica is not None:
        tables["training"].setdefault("global_batch", found.per_replica * (dp or 1))
    if missing := [flag for field, flag in NEEDED.items() if not _is_said(tables, changes, field)]:
        raise Misconfigured(f"not all that a job needs is in {found.what}: add {' '.join(missing)}")
    return tables


def _is_said(tables: Mapping[str, Any], changes: Mapping[str, str], field: str) -> bool:
    table, name = field.split(".")
    if field == "model.vocab" and "layers" not in tables["model"]:
        return True  # a model with a name
    if field == "cluster.network" and "cluster.levels" in changes:
        return True
    if field == "parallel.dp" and any(count in changes for count in COUNTS):
        return True
    return name in tables[table] or field in changes or any(each.startswith(f"{field}.") for each in changes)


def _add_replicas(tables: dict[str, Any], changes: Mapping[str, str]) -> None:
    """Add parallel.dp if the changes say how many nodes or GPUs there are."""
    gpus = _number(changes, "cluster.gpus")
    nodes = _number(changes, "nodes") or _number(changes, "weak_nodes")
    network = tables["cluster"].get("network") or changes.get("cluster.network")
    if gpus is None and nodes is not None and isinstance(network, str):
        gpus = nodes * all_levels(network)[0].size
    if gpus is None:
        return
    replica = 1
    for name in ("tp", "pp", "cp"):
        replica *= _number(changes, f"parallel.{name}") or tables["parallel"].get(name, 1)
    if gpus % replica:
        raise Misconfigured(f"tp · pp · cp = {replica} does not divide {gpus} GPUs: give other degrees, or other nodes")
    tables["parallel"]["dp"] = gpus // replica


def _number(changes: Mapping[str, str], name: str) -> int | None:
    value = read_value(changes[name]) if name in changes else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
