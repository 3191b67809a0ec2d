"""Topograph's instance list: each host with the switches above it, the closest first.

    {"instances": [{"id": "node1", "network_layers": ["leaf-a", "spine-a"], "attributes": {"nvlink": "nvl-1"}}, ...]}

Order as documented by Topograph's graph engine (docs.nvidia.com/topograph/engines/graph): tier 0 is the switch at the
host. A domain of NVLink that several hosts share lies below the leaves; it is one more level where every host has one.
"""

from __future__ import annotations

from typing import Any

import msgspec

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.topology import MAX_HOSTS, Topology
from counterpoint.plan.topology_tree import of_paths

__all__ = ["read_topograph"]

NVLINK_LABEL = "accelerator.topograph.run/domain"


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


class _File(msgspec.Struct):
    instances: list[_Instance]


def read_topograph(text: str | bytes, *, gpus: int) -> Topology:
    """The hosts of such a file.

    Args:
        text: of the file.
        gpus: of each host.

    Raises:
        Misconfigured: not such a file, hosts that occur twice, switches that form no tree with one root.
    """
    try:
        found = msgspec.json.decode(text, type=_File).instances
    except msgspec.DecodeError as error:
        raise Misconfigured(
            f"not a list of instances with id and network_layers: {printable(str(error), 200)}; "
            "give what Topograph's graph engine writes"
        ) from None
    if len(found) > MAX_HOSTS:
        raise Misconfigured(f"instances: {len(found)} hosts; at most {MAX_HOSTS} are placed")
    paths: dict[str, list[str]] = {}
    domains = len({each.nvlink for each in found}) < len(found) and all(each.nvlink for each in found)
    for each in found:
        if each.id in paths:
            raise Misconfigured(f"instance {printable(each.id, 64)} occurs twice: name every host once")
        if not each.network_layers:
            raise Misconfigured(f"instance {printable(each.id, 64)}: network_layers is empty: give the switch above it")
        below = [f"nvlink {each.nvlink}"] if domains else []
        paths[each.id] = [*below, *each.network_layers]
    return of_paths(paths, gpus)
