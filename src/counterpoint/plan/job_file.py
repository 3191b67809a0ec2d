"""Reads a job from TOML: names become records, and what is not a field is an error that names it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.cluster import Cluster, Gpu, Level
from counterpoint.plan.compression import Compression
from counterpoint.plan.gpus import find_gpu
from counterpoint.plan.job import Job, Ranks
from counterpoint.plan.model import Experts, Model
from counterpoint.plan.models import model
from counterpoint.plan.networks import levels
from counterpoint.plan.parallel import Parallel, Training
from counterpoint.records.base import Record

__all__ = ["parse_job", "read_job", "read_tables"]

MAX_BYTES = 1 << 20
TABLES = ("model", "training", "parallel", "cluster", "overlap", "compression", "ranks")

R = TypeVar("R", bound=Record)
Table = Mapping[str, Any]


def read_job(path: Path) -> Job:
    """The job that a file describes.

    Raises:
        Misconfigured: see `read_tables`; or it describes no job: with the field, its value and what is allowed.
    """
    tables = read_tables(path)
    try:
        return parse_job(tables)
    except Misconfigured as error:
        raise Misconfigured(f"{path}: {error}") from None


def read_tables(path: Path) -> dict[str, Any]:
    """The tables of a file, as they stand there.

    Raises:
        Misconfigured: it cannot be read, is no TOML or larger than 1 MiB.
    """
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
    """The job of a TOML document.

    Raises:
        Misconfigured: see `read_job`.
    """
    known("", tables, TABLES)
    for name in ("model", "training", "cluster"):
        if name not in tables:
            raise Misconfigured(f"there is no table [{name}]; give it")
    parallel = record("parallel", tables.get("parallel", {}), Parallel)
    overlap = _table("overlap", tables.get("overlap", {}))
    known("overlap", overlap, ("mechanism",))
    compression = tables.get("compression")
    return Job(
        model=_model(_table("model", tables["model"])),
        training=record("training", tables["training"], Training),
        parallel=parallel,
        cluster=_cluster(_table("cluster", tables["cluster"]), parallel.world_size),
        mechanism=_text("overlap.mechanism", overlap.get("mechanism", "nccl")),
        compression=None if compression is None else record("compression", compression, Compression),
        ranks=record("ranks", tables.get("ranks", {}), Ranks),
    )


def _model(table: Table) -> Model:
    """A name alone stands for a known model; with widths it is only a name."""
    if set(table) == {"name"}:
        return model(_text("model.name", table["name"]))
    if table.get("experts") is not None:
        record("model.experts", table["experts"], Experts)  # its unknown fields
    return record("model", table, Model)


def _cluster(table: Table, ranks: int) -> Cluster:
    """Named or written out; as many GPUs as the job has ranks, if nothing is said."""
    known("cluster", table, ("gpu", "gpus", "network", "levels"))
    gpu, count = table.get("gpu"), table.get("gpus", ranks)
    if ("network" in table) == ("levels" in table):
        raise Misconfigured("cluster: give either network, a name, or levels, inside out")
    if isinstance(count, bool) or not isinstance(count, int):
        raise Misconfigured(f"cluster.gpus = {printable(repr(count))}: give a whole number")
    found = gpu if isinstance(gpu, Mapping) else find_gpu(_text("cluster.gpu", gpu))
    chip = found if isinstance(found, Gpu) else record("cluster.gpu", found, Gpu)
    if "network" in table:
        return Cluster(gpu=chip, levels=levels(_text("cluster.network", table["network"]), count))
    if not isinstance(table["levels"], list):
        raise Misconfigured("cluster.levels: give tables [[cluster.levels]]")
    return Cluster(gpu=chip, levels=tuple(record("cluster.levels", each, Level) for each in table["levels"]))


def record(where: str, table: object, kind: type[R]) -> R:
    """`table` as a record of that kind.

    Raises:
        Misconfigured: a field is unknown, missing or of another type.
    """
    fields = _table(where, table)
    known(where, fields, kind.__struct_fields__)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        if isinstance(cause, Misconfigured):
            raise cause from None
        raise Misconfigured(f"{where}: {printable(str(error))}") from None


def known(where: str, table: Table, allowed: tuple[str, ...]) -> None:
    """Raises Misconfigured at the first key of `table` that is none of these."""
    for key in table:
        if key not in allowed:
            field = printable(f"{where}.{key}" if where else key)
            raise Misconfigured(f"{field} is not known: allowed are {', '.join(allowed)}")


def _table(where: str, value: object) -> Table:
    if not isinstance(value, Mapping):
        raise Misconfigured(f"{where} = {printable(repr(value))}: give a table [{where}]")
    return value


def _text(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise Misconfigured(f"{where} = {printable(repr(value))}: give a name")
    return value
