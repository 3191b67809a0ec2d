"""Reads a topology from a file of any kind: by its name, and for JSON by what it holds.

Topograph's instance list has each host with the switches above it, the closest first:

    {"instances": [{"id": "node1", "network_layers": ["leaf-a", "spine-a"], "attributes": {"nvlink": "nvl-1"}}, ...]}

Order as documented by Topograph's graph engine (docs.nvidia.com/topograph/engines/graph): tier 0 is the switch at the
host. A domain of NVLink that several hosts share lies below the leaves; it is one more level where every host has one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.placement.read_matrix import read_matrix_csv, read_matrix_json
from counterpoint.plan.placement.read_slurm import read_conf
from counterpoint.plan.placement.read_yaml import read_yaml
from counterpoint.plan.placement.topology import Topology

__all__ = ["read_topograph", "read_topology"]

MAX_BYTES = 256 << 20  # a matrix of 4096 rows in CSV
KINDS = "topology.conf, topology.yaml, .json (Topograph or a matrix), .csv (a matrix)"
NVLINK_LABEL = "accelerator.topograph.run/domain"


def read_topology(path: Path, *, gpus: int = 8, name: str | None = None) -> Topology:
    """Return all hosts of a file; it may not have the `gpus` of a host, and a `topology.yaml` has several by `name`."""
    kind, shown = path.suffix.lower(), printable(str(path), 200)
    if kind not in (".conf", ".yaml", ".yml", ".json", ".csv"):
        raise Misconfigured(f"{shown}: not known by its name; give {KINDS}")
    if name is not None and kind not in (".yaml", ".yml"):
        raise Misconfigured(f"name = {printable(name, 64)}: only topology.yaml has several topologies; leave it out")
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise Misconfigured(f"{size} bytes; at most {MAX_BYTES} are read")
        text = path.read_text(encoding="utf-8")
        if kind == ".conf":
            return read_conf(text, gpus=gpus)
        if kind in (".yaml", ".yml"):
            return read_yaml(text, gpus=gpus, name=name)
        if kind == ".csv":
            return read_matrix_csv(text, gpus=gpus)
        return read_matrix_json(text) if '"matrix"' in text else read_topograph(text, gpus=gpus)
    except Misconfigured as error:
        raise Misconfigured(f"{shown}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        raise Misconfigured(f"{shown}: {why}; name a file that can be read") from None


class _Instance(msgspec.Struct):
    id: str
    network_layers: list[str]
    attributes: dict[str, Any] = {}
    labels: dict[str, str] | None = None
    nvlink_domain: str = ""

    @property
    def nvlink(self) -> str:
        """Its NVLink domain, as any version of the format has it."""
        found = self.nvlink_domain or (self.labels or {}).get(NVLINK_LABEL) or self.attributes.get("nvlink") or ""
        return found if isinstance(found, str) else ""


class _Instances(msgspec.Struct):
    instances: list[_Instance]


def read_topograph(text: str | bytes, *, gpus: int) -> Topology:
    """Return the hosts of Topograph's instance list, with a level per network layer and one of NVLink domains."""
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
