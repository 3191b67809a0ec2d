"""A topology from what scheduler files list: switches with children, or hosts with the switches above them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.topology import MAX_HOSTS, Topology

__all__ = ["of_paths", "of_switches"]

MAX_TIERS = 8


def of_switches(children: Mapping[str, Sequence[str]], nodes: Mapping[str, Sequence[str]], gpus: int) -> Topology:
    """From switches.

    Args:
        children: switch -> the switches below it.
        nodes: switch -> the hosts at it.
        gpus: of each host.

    Raises:
        Misconfigured: a switch or host with two parents, a switch that is named and not there, more than one root,
            a ring of switches, no hosts.
    """
    switches = children.keys() | nodes.keys()
    above: dict[str, str] = {}
    for parent, below in children.items():
        for child in below:
            if child not in switches:
                raise Misconfigured(
                    f"switch {_quoted(child)} below {_quoted(parent)} is not defined: give it a line of its own"
                )
            if child in above:
                raise Misconfigured(
                    f"switch {_quoted(child)} is below {_quoted(above[child])} and below {_quoted(parent)}: "
                    "a tree has one way up"
                )
            above[child] = parent
    roots = sorted(switches - above.keys())
    if len(roots) != 1:
        named = ", ".join(map(_quoted, roots[:5])) or "none: the switches form a ring"
        raise Misconfigured(f"the topology has {len(roots)} roots ({named}): give one switch that joins all the others")
    paths: dict[str, list[str]] = {}
    for switch, hosts in nodes.items():
        path = _path(switch, above)
        for host in hosts:
            if host in paths:
                raise Misconfigured(
                    f"host {_quoted(host)} is at {_quoted(paths[host][0])} and at {_quoted(switch)}: name it once"
                )
            paths[host] = path
    return of_paths(paths, gpus)


def of_paths(paths: Mapping[str, Sequence[str]], gpus: int) -> Topology:
    """From hosts.

    Args:
        paths: host -> the switches above it, the closest first. Where one path is shorter, its closest switch counts
            for the tiers that it lacks.
        gpus: of each host.

    Raises:
        Misconfigured: no hosts, too many, no common root, or a switch with two parents.
    """
    if not paths or len(paths) > MAX_HOSTS:
        raise Misconfigured(f"the topology has {len(paths)} hosts: give 1 to {MAX_HOSTS}")
    tiers = max(map(len, paths.values()))
    if not 1 <= tiers <= MAX_TIERS:
        raise Misconfigured(f"the topology has {tiers} tiers of switches: give 1 to {MAX_TIERS}")
    full = [[path[0]] * (tiers - len(path)) + list(path) if path else [""] * tiers for path in paths.values()]
    names = sorted({name for path in full for name in path})
    index = {name: number for number, name in enumerate(names)}
    units = np.array([[index[name] for name in path] for path in full], dtype=np.int64).T
    return Topology.of_units(list(paths), units, gpus)


def _path(switch: str, above: Mapping[str, str]) -> list[str]:
    """A switch and all above it."""
    path = [switch]
    while path[-1] in above:
        path.append(above[path[-1]])
        if len(path) > MAX_TIERS:
            raise Misconfigured(
                f"switch {_quoted(switch)} is below more than {MAX_TIERS - 1} others: a ring or a chain is no tree"
            )
    return path


def _quoted(name: str) -> str:
    return f'"{printable(name, 64)}"'
