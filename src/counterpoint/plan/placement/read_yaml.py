"""Slurm's `topology.yaml` (manual page topology.yaml(5)): several named topologies, of switches or of blocks.

PyYAML parses; mappings, lists and strings are built here from its events, so that no object is ever constructed, no
alias expanded and no nesting followed beyond what such a file has. Numbers and `True` stay text, as host names must.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import yaml

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.placement.read_slurm import hostlist, of_blocks
from counterpoint.plan.placement.topology import Topology

__all__ = ["plain_yaml", "read_yaml"]

MAX_TEXT = 4 << 20  # characters: 65,536 hosts, each with a line of its own
MAX_DEPTH = 12
EMPTY = (None, "", "~", "null")


def read_yaml(text: str, *, gpus: int, name: str | None = None) -> Topology:
    """Return one topology of a `topology.yaml`; without a name the default of the cluster, or the only one."""
    found = plain_yaml(text)
    if not isinstance(found, list) or not all(isinstance(each, dict) and "topology" in each for each in found):
        raise Misconfigured("topology.yaml: give a list of topologies, each with its name: - topology: NAME")
    chosen = _chosen(found, name)
    where = f"topology.yaml, topology {printable(str(chosen['topology']), 64)}"
    if isinstance(chosen.get("tree"), dict):
        switches = _entries(chosen["tree"], "switches", "switch", where)
        children = {each["switch"]: _hosts(each, "children", where) for each in switches}
        nodes = {each["switch"]: _hosts(each, "nodes", where) for each in switches}
        return Topology.of_switches(children, nodes, gpus)
    if isinstance(chosen.get("block"), dict):
        blocks = _entries(chosen["block"], "blocks", "block", where)
        sizes = chosen["block"].get("block_sizes") or []
        if not isinstance(sizes, list) or not all(re.fullmatch(r"[1-9]\d{0,6}", str(size)) for size in sizes):
            raise Misconfigured(f"{where}: block_sizes = {printable(str(sizes), 64)}: give numbers of hosts")
        return of_blocks({each["block"]: _hosts(each, "nodes", where) for each in blocks}, [*map(int, sizes)], gpus)
    raise Misconfigured(f"{where}: give tree: or block:, which name hosts (flat and others do not)")


def _chosen(found: list[dict[str, Any]], name: str | None) -> dict[str, Any]:
    names = [str(each["topology"]) for each in found]
    if name is None:
        default = [each for each in found if str(each.get("cluster_default")).lower() in ("true", "yes")]
        chosen = default[0] if default else found[0] if len(found) == 1 else None
    else:
        chosen = next((each for each in found if str(each["topology"]) == name), None)
    if chosen is None:
        why = "none is the cluster's default" if name is None else f"there is no {printable(name, 64)}"
        raise Misconfigured(f"topology.yaml: {why}; choose from {printable(', '.join(names), 200)}")
    return chosen


def _entries(table: dict[str, Any], key: str, name: str, where: str) -> list[dict[str, Any]]:
    """Return the entries of a list, each with a name that occurs once."""
    entries = table.get(key)
    if not isinstance(entries, list) or not all(isinstance(e, dict) and isinstance(e.get(name), str) for e in entries):
        raise Misconfigured(f"{where}: give {key}: as a list of entries with {name}: NAME")
    seen: set[str] = set()
    for entry in entries:
        if entry[name] in seen:
            raise Misconfigured(f"{where}: {name} {printable(entry[name], 64)} is defined twice: give it one entry")
        seen.add(entry[name])
    return entries


def _hosts(entry: Mapping[str, Any], key: str, where: str) -> list[str]:
    value = entry.get(key)
    if value in EMPTY:
        return []
    if not isinstance(value, str):
        raise Misconfigured(f"{where}: {key} = {printable(str(value), 64)}: give names such as node[01-04]")
    return hostlist(value, where)


def plain_yaml(text: str) -> Any:
    """Return the mappings, lists and strings of a YAML document; anything else is Misconfigured, with its line."""
    if len(text) > MAX_TEXT:
        raise Misconfigured(f"topology.yaml has {len(text)} characters: at most {MAX_TEXT} are read")
    events = yaml.parse(text, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader))
    try:
        next(events)  # of the stream
        if isinstance(next(events), yaml.StreamEndEvent):
            raise Misconfigured("topology.yaml is empty: give at least one topology")
        found = _value(events, next(events), 0)
        next(events)  # of the document's end
        if not isinstance(event := next(events), yaml.StreamEndEvent):
            _refuse(event, "a second document: give one")
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = "" if mark is None else f", line {mark.line + 1}"
        raise Misconfigured(f"topology.yaml{where}: {printable(str(problem or error), 200)}: give YAML") from None
    return found


def _value(events: Iterator[Any], event: Any, depth: int) -> Any:
    """Return what begins with this event."""
    if depth > MAX_DEPTH:
        _refuse(event, f"more than {MAX_DEPTH} levels deep")
    if event.anchor is not None or getattr(event, "tag", None) is not None:
        _refuse(event, "anchors, aliases and tags are not read: write out what is meant")
    if isinstance(event, yaml.ScalarEvent):
        return event.value
    if isinstance(event, yaml.SequenceStartEvent):
        found = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            found.append(_value(events, event, depth + 1))
        return found
    table: dict[str, Any] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        key = _value(events, event, depth + 1)
        if not isinstance(key, str) or key in table:
            _refuse(event, f"{printable(str(key), 64)} is no name, or is given twice: give each key once")
        table[key] = _value(events, next(events), depth + 1)
    return table


def _refuse(event: Any, why: str) -> NoReturn:
    raise Misconfigured(f"topology.yaml, line {event.start_mark.line + 1}: {why}")
