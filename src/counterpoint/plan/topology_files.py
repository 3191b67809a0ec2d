"""Reads a topology from a file, of whichever kind it is: by its name, and for JSON by what it holds."""

from __future__ import annotations

from pathlib import Path

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.topology import Topology
from counterpoint.plan.topology_json import read_topograph
from counterpoint.plan.topology_matrix import read_matrix_csv, read_matrix_json
from counterpoint.plan.topology_slurm import read_conf
from counterpoint.plan.topology_yaml import read_yaml

__all__ = ["MAX_BYTES", "read_text", "read_topology"]

MAX_BYTES = 256 << 20  # a matrix of 4096 rows in CSV
KINDS = "topology.conf, topology.yaml, .json (Topograph or a matrix), .csv (a matrix)"


def read_topology(path: Path, *, gpus: int = 8, name: str | None = None) -> Topology:
    """The hosts of a file.

    Args:
        path: `*.conf`, `*.yaml`, `*.yml`, `*.json` or `*.csv`.
        gpus: of each host, where the file does not say.
        name: which topology of a `topology.yaml`.

    Raises:
        Misconfigured: a file that cannot be read, is too large, or is none of these.
    """
    kind = path.suffix.lower()
    if kind not in (".conf", ".yaml", ".yml", ".json", ".csv"):
        raise Misconfigured(f"{printable(str(path), 200)}: not known by its name; give {KINDS}")
    if name is not None and kind not in (".yaml", ".yml"):
        raise Misconfigured(f"name = {printable(name, 64)}: only topology.yaml has several topologies; leave it out")
    text = read_text(path)
    try:
        if kind == ".conf":
            return read_conf(text, gpus=gpus)
        if kind in (".yaml", ".yml"):
            return read_yaml(text, gpus=gpus, name=name)
        if kind == ".csv":
            return read_matrix_csv(text, gpus=gpus)
        return read_matrix_json(text) if '"matrix"' in text else read_topograph(text, gpus=gpus)
    except Misconfigured as error:
        raise Misconfigured(f"{printable(str(path), 200)}: {error}") from None


def read_text(path: Path) -> str:
    """Raises Misconfigured: missing, too large, or not text."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise Misconfigured(f"{printable(str(path), 200)}: {size} bytes; at most {MAX_BYTES} are read")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        raise Misconfigured(f"{printable(str(path), 200)}: {why}; name a file that can be read") from None
