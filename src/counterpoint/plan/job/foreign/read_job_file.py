"""Read a job's file, whatever its format, and name the flags that a foreign file needs in addition."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.job.foreign.huggingface import read_config
from counterpoint.plan.job.foreign.megatron import is_megatron, read_megatron
from counterpoint.plan.job.foreign.reading import ForeignJob
from counterpoint.plan.job.job import ADVICE, MAX_BYTES, parse_tables
from counterpoint.read_file import read_text

NEEDED = {  # by field: the flags that set it, and the name of its own flag if it has one
    "training.sequence": ("--set training.sequence=TOKENS", ""),
    "training.global_batch": ("--set training.global_batch=SAMPLES", ""),
    "model.vocab": ("--set model.vocab=ROWS", ""),
    "cluster.gpu": ("--gpu NAME", "gpu"),
    "cluster.network": ("--network NAME", "network"),
    "parallel.dp": ("--nodes N (or --set parallel.dp=N)", "nodes"),
}


def read_job_file(path: Path, changes: Mapping[str, str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the tables of a job, and notes on what was read from a foreign file, assumed and left out.

    The file is a job as TOML, a config.json of Hugging Face, or the arguments that a run of Megatron-LM prints;
    `changes`, flags and fields by name, complete what a foreign file leaves open.

    Raises:
        Misconfigured: the file cannot be read, or with the changes does not say all that a job needs.
    """
    text = read_text(path, limit=MAX_BYTES, advice=ADVICE)
    try:
        found = _foreign(path, text)
        if isinstance(found, ForeignJob):
            _check_complete(found, changes)
            return dict(found.tables), found.notes
    except Misconfigured as error:
        where = printable(str(path), 200)
        raise Misconfigured(str(error) if str(error).startswith(where) else f"{where}: {error}") from None
    return found, ()


def _foreign(path: Path, text: str) -> ForeignJob | dict[str, Any]:
    """Return the job that a foreign file describes, or the tables of a file in counterpoint's own format."""
    if text.lstrip().startswith("{"):
        try:
            return read_config(msgspec.json.decode(text, type=dict[str, Any]))
        except (msgspec.DecodeError, RecursionError) as error:
            raise Misconfigured(f"no JSON: {printable(str(error), 120)}; give config.json of Hugging Face") from None
    try:
        return parse_tables(path, text)
    except Misconfigured:
        if is_megatron(text):
            return read_megatron(text)
        raise


def _check_complete(found: ForeignJob, changes: Mapping[str, str]) -> None:
    """Raise Misconfigured, with the missing flags, unless the file and the changes give all that a job needs."""

    def is_said(field: str, flag: str) -> bool:
        table, _, name = field.partition(".")
        levels = field == "cluster.network" and "cluster.levels" in changes
        return levels or name in found.tables.get(table, {}) or bool({flag, field} & changes.keys())

    if missing := [flags for field, (flags, name) in NEEDED.items() if not is_said(field, name)]:
        raise Misconfigured(f"not all that a job needs is in {found.what}: add {' '.join(missing)}")
