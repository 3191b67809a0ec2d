"""Read a topology from a file; the file's name, and for JSON also the content, tells the format.

Topograph's instance list has each host with the switches above it, the closest first:

    {"instances": [{"id": "node1", "network_layers": ["leaf-a", "spine-a"], "attributes": {"nvlink": "nvl-1"}}, ...]}

Order as documented by Topograph's graph engine (docs.nvidia.com/topograph/engines/graph): tier 0 is the switch at the
host. A domain of NVLink that several hosts share lies below the leaves; it is one more level where every host has one.

Measured distances are a matrix between hosts or GPUs, as CSV or JSON:

    bandwidth,node1,node2,node3          {"kind": "distance", "names": ["node1", ...], "gpus": 8, "inside": 0.1,
    node1,,48.1,24.9                      "matrix": [[0, 1, 2], ...]}
    ...

`bandwidth` is in GB/s, and d = 1 / bandwidth is nanoseconds per byte; `distance` is in any unit. Both ways of a pair
are averaged.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.placement.read_slurm import read_conf, read_yaml
from counterpoint.plan.placement.topology import Topology, TopologyLevel
from counterpoint.read_file import read_text

MAX_BYTES = 256 << 20  # a matrix of 4096 rows in CSV
KINDS = "topology.conf, topology.yaml, .json (Topograph or a matrix), .csv (a matrix)"
NVLINK_LABEL = "accelerator.topograph.run/domain"
F64 = NDArray[np.float64]
MAX_MEASURED = 4_096  # rows


def read_topology(path: Path, *, gpus: int = 8, name: str | None = None) -> Topology:
    """Return a file's topology; `gpus`: per host, if not in the file; `name`: which topology of a `topology.yaml`."""
    kind, shown = path.suffix.lower(), printable(str(path), 200)
    if kind not in (".conf", ".yaml", ".yml", ".json", ".csv"):
        raise Misconfigured(f"{shown}: not known by its name; give {KINDS}")
    if name is not None and kind not in (".yaml", ".yml"):
        raise Misconfigured(f"name = {printable(name, 64)}: only topology.yaml has several topologies; leave it out")
    text = read_text(path, limit=MAX_BYTES, advice=f"give {KINDS}")
    try:
        if kind == ".conf":
            return read_conf(text, gpus=gpus)
        if kind in (".yaml", ".yml"):
            return read_yaml(text, gpus=gpus, name=name)
        if kind == ".csv":
            return read_matrix_csv(text, gpus=gpus)
        return read_matrix_json(text) if '"matrix"' in text else read_topograph(text, gpus=gpus)
    except Misconfigured as error:
        raise Misconfigured(f"{shown}: {error}") from None


class _Instance(msgspec.Struct):
    id: str
    network_layers: list[str]
    attributes: dict[str, Any] = {}
    labels: dict[str, str] | None = None
    nvlink_domain: str = ""

    @property
    def nvlink(self) -> str:
        """Return the host's NVLink domain from the first field that has one; "" if no field does."""
        found = self.nvlink_domain or (self.labels or {}).get(NVLINK_LABEL) or self.attributes.get("nvlink") or ""
        return found if isinstance(found, str) else ""


class _Instances(msgspec.Struct):
    instances: list[_Instance]


def read_topograph(text: str | bytes, *, gpus: int) -> Topology:
    """Return the topology of Topograph's instance list: a level per network layer, and one for NVLink domains."""
    try:
        found = msgspec.json.decode(text, type=_Instances).instances
    except msgspec.DecodeError as error:
        raise Misconfigured(
            f"not a list of instances with id and network_layers: {printable(str(error), 200)}; "
            "give what Topograph's graph engine writes"
        ) from None
    paths: dict[str, list[str]] = {}
    domains = len({each.nvlink for each in found}) < len(found) and all(each.nvlink for each in found)
    for each in found:
        if each.id in paths:
            raise Misconfigured(f"instance {printable(each.id, 64)} occurs twice: name every host once")
        if not each.network_layers:
            raise Misconfigured(f"instance {printable(each.id, 64)}: network_layers is empty: give the switch above it")
        below = [f"nvlink {each.nvlink}"] if domains else []
        paths[each.id] = [*below, *each.network_layers]
    return Topology.of_paths(paths, gpus)


class _Matrix(msgspec.Struct):
    kind: Literal["bandwidth", "distance"]
    matrix: list[list[float | None]]
    names: list[str] | None = None
    gpus: int = 1
    inside: float = 0.0


def read_matrix_json(text: str | bytes) -> Topology:
    """Return the topology of a distance matrix in JSON; raise Misconfigured if the text holds none."""
    try:
        found = msgspec.json.decode(text, type=_Matrix)
    except msgspec.DecodeError as error:
        raise Misconfigured(
            f'not a measured matrix: {printable(str(error), 200)}; give "kind" ("bandwidth" or "distance"), "matrix", '
            'and if need be "names", "gpus" and "inside"'
        ) from None
    names = found.names or [f"gpu{index}" for index in range(len(found.matrix))]
    rows = [[np.nan if value is None else value for value in row] for row in found.matrix]
    return _topology(found.kind, names, rows, gpus=found.gpus, inside=found.inside)


def read_matrix_csv(text: str, *, gpus: int = 1) -> Topology:
    """Return the topology of a matrix in CSV: bandwidth or distance in the first cell, hosts in row and column 1."""
    table = [row for row in csv.reader(io.StringIO(text)) if any(cell.strip() for cell in row)]
    kind = table[0][0].strip().lower() if table and table[0] else ""
    if kind not in ("bandwidth", "distance"):
        raise Misconfigured(
            f'first cell of the matrix is {printable(kind, 40)!r}: give "bandwidth" (GB/s) or "distance"'
        )
    names = [cell.strip() for cell in table[0][1:]]
    rows = []
    for name, row in zip(names, table[1:], strict=False):
        if row[0].strip() != name:
            raise Misconfigured(f"row {printable(row[0], 64)!r} of the matrix: the columns say {printable(name, 64)!r}")
        try:
            rows.append([float(cell) if cell.strip() else np.nan for cell in row[1:]])
        except ValueError as error:
            raise Misconfigured(f"row {printable(name, 64)!r} of the matrix: {printable(str(error), 80)}") from None
    if len(table) - 1 != len(names):
        raise Misconfigured(f"the matrix has {len(names)} columns and {len(table) - 1} rows: give a square one")
    return _topology("bandwidth" if kind == "bandwidth" else "distance", names, rows, gpus=gpus, inside=0.0)


def _topology(
    kind: Literal["bandwidth", "distance"], names: list[str], rows: list[list[float]], *, gpus: int, inside: float
) -> Topology:
    size = len(names)
    if not 1 <= size <= MAX_MEASURED:
        raise Misconfigured(f"the matrix has {size} names: give 1 to {MAX_MEASURED}")
    lengths = {len(row) for row in rows}
    if len(rows) != size or lengths != {size}:
        raise Misconfigured(
            f"the matrix has {len(rows)} rows of {sorted(lengths)} values for {size} names: give a square one"
        )
    found = np.array(rows, dtype=np.float64)
    np.fill_diagonal(found, 1.0 if kind == "bandwidth" else 0.0)
    if not np.isfinite(found).all() or (found <= 0 if kind == "bandwidth" else found < 0).any():
        least = "above 0" if kind == "bandwidth" else "of 0 or more"
        raise Misconfigured(f"the matrix has an empty cell or a {kind} that is not {least}: measure every pair")
    distance = 1 / found if kind == "bandwidth" else found
    np.fill_diagonal(distance, 0.0)
    return of_matrix(names, (distance + distance.T) / 2, gpus=gpus, inside=inside)


def of_matrix(hosts: list[str], matrix: F64, *, gpus: int = 1, inside: float = 0.0) -> Topology:
    """Return a topology of measured distances `[hosts, hosts]`, symmetric: hosts, and all at their mean distance.

    `hosts` has a name per row; where rows are GPUs, each is a host of one GPU. Two GPUs of a host are `inside` apart.
    """
    apart = matrix[~np.eye(len(hosts), dtype=bool)]
    mean = float(apart.mean()) if apart.size else 0.0
    levels = (TopologyLevel(name="host", distance=inside), TopologyLevel(name="measured", distance=mean))
    units = np.zeros((1, len(hosts)), dtype=np.int64)
    return Topology(hosts=tuple(hosts), gpus=gpus, levels=levels, units=units, matrix=matrix)
