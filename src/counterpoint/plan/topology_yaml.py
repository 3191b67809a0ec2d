"""Slurm's `topology.yaml` (manual page topology.yaml(5)): several named topologies, of switches or of blocks.

Read is the part of YAML that such files use: mappings and lists by indentation, lists in brackets, plain and quoted
words, comments. Everything else that YAML can do (anchors, tags, several documents, block text) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.topology import Topology
from counterpoint.plan.topology_slurm import hostlist, of_blocks
from counterpoint.plan.topology_tree import of_switches

__all__ = ["plain_yaml", "read_yaml"]

MAX_LINES = 200_000
MAX_DEPTH = 12
_KEY = re.compile(r"([A-Za-z_][\w.-]*)\s*:(?:\s+(.*)|)$")


def read_yaml(text: str, *, gpus: int, name: str | None = None) -> Topology:
    """One topology of a `topology.yaml`.

    Args:
        text: of the file.
        gpus: of each host, which the file does not say.
        name: which topology; None: the default of the cluster, or the only one.

    Raises:
        Misconfigured: no such topology, none that is the default, a flat one (it names no hosts), or not such a file.
    """
    found = plain_yaml(text)
    if not isinstance(found, list) or not all(isinstance(each, dict) and "topology" in each for each in found):
        raise Misconfigured("topology.yaml: give a list of topologies, each with its name: - topology: NAME")
    chosen = _chosen(found, name)
    where = f"topology.yaml, topology {chosen['topology']}"
    if isinstance(chosen.get("tree"), dict):
        children: dict[str, list[str]] = {}
        nodes: dict[str, list[str]] = {}
        for switch in _entries(chosen["tree"], "switches", "switch", where):
            children[switch["switch"]] = _names(switch, "children", where)
            nodes[switch["switch"]] = _names(switch, "nodes", where)
        return of_switches(children, nodes, gpus)
    if isinstance(chosen.get("block"), dict):
        entries = _entries(chosen["block"], "blocks", "block", where)
        blocks = {block["block"]: _names(block, "nodes", where) for block in entries}
        sizes = chosen["block"].get("block_sizes") or []
        if not isinstance(sizes, list) or not all(re.fullmatch(r"[1-9]\d{0,6}", str(size)) for size in sizes):
            raise Misconfigured(f"{where}: block_sizes = {printable(str(sizes), 64)}: give numbers of hosts")
        return of_blocks(blocks, [int(size) for size in sizes], gpus)
    raise Misconfigured(f"{where}: give tree: or block:, which name hosts (flat and others do not)")


def _chosen(found: list[dict[str, Any]], name: str | None) -> dict[str, Any]:
    names = [str(each["topology"]) for each in found]
    if name is None:
        default = [each for each in found if str(each.get("cluster_default")).lower() in ("true", "yes")]
        chosen = default[0] if default else found[0] if len(found) == 1 else None
    else:
        chosen = next((each for each in found if str(each["topology"]) == name), None)
    if chosen is None:
        said = "none is the cluster's default" if name is None else f"there is no {printable(name, 64)}"
        raise Misconfigured(f"topology.yaml: {said}; choose from {printable(', '.join(names), 200)}")
    return chosen


def _entries(table: dict[str, Any], key: str, name: str, where: str) -> list[dict[str, Any]]:
    """Entries of a list, each with a name that occurs once."""
    entries = table.get(key)
    if not isinstance(entries, list) or not all(isinstance(e, dict) and isinstance(e.get(name), str) for e in entries):
        raise Misconfigured(f"{where}: give {key}: as a list of entries with {name}: NAME")
    seen: set[str] = set()
    for entry in entries:
        if entry[name] in seen:
            raise Misconfigured(f"{where}: {name} {printable(entry[name], 64)} is defined twice: give it one entry")
        seen.add(entry[name])
    return entries


def _names(entry: Mapping[str, Any], key: str, where: str) -> list[str]:
    value = entry.get(key)
    if value is None:
        return []
    if not isinstance(value, str):
        raise Misconfigured(f"{where}: {key} = {printable(str(value), 64)}: give names such as node[01-04]")
    return hostlist(value, where)


def plain_yaml(text: str) -> Any:
    """Mappings, lists and strings of a text in the subset above; nothing but `null` and `~` becomes anything else.

    Raises:
        Misconfigured: with the line that cannot be read.
    """
    lines = [_line(number, line) for number, line in enumerate(text.splitlines(), start=1)]
    if len(lines) > MAX_LINES:
        raise Misconfigured(f"topology.yaml has {len(lines)} lines: at most {MAX_LINES} are read")
    reader = _Reader([line for line in lines if line.text and line.text != "---"])
    if not reader.lines:
        raise Misconfigured("topology.yaml is empty: give at least one topology")
    found = reader.value(reader.lines[0].indent, 0)
    if reader.at < len(reader.lines):
        reader.refuse("its indentation fits nothing above it")
    return found


@dataclass(slots=True)
class _Line:
    number: int
    indent: int
    text: str


def _line(number: int, line: str) -> _Line:
    text = re.sub(r"(^|\s)#.*$", "", line).rstrip()
    if "\t" in text[: len(text) - len(text.lstrip())]:
        raise Misconfigured(f"topology.yaml, line {number}: a tab in the indentation: give spaces")
    return _Line(number, len(text) - len(text.lstrip(" ")), text.strip())


class _Reader:
    """Goes through the lines once."""

    def __init__(self, lines: list[_Line]) -> None:
        self.lines, self.at = lines, 0

    def refuse(self, why: str) -> None:
        line = self.lines[min(self.at, len(self.lines) - 1)]
        raise Misconfigured(f"topology.yaml, line {line.number}: {printable(line.text, 64)!r}: {why}")

    def value(self, indent: int, depth: int) -> Any:
        """What begins at this line, with this indentation."""
        if depth > MAX_DEPTH:
            self.refuse(f"more than {MAX_DEPTH} levels deep")
        return self.sequence(indent, depth) if self.is_item(indent) else self.mapping(indent, depth)

    def is_item(self, indent: int) -> bool:
        if self.at >= len(self.lines):
            return False
        line = self.lines[self.at]
        return line.indent == indent and (line.text == "-" or line.text.startswith("- "))

    def sequence(self, indent: int, depth: int) -> list[Any]:
        found: list[Any] = []
        while self.is_item(indent):
            line = self.lines[self.at]
            rest = line.text[1:].lstrip(" ")
            if not rest:
                self.at += 1
                found.append(self.below(indent, depth))
            elif _KEY.match(rest):  # a mapping that begins behind the dash: as if the dash were a space
                line.indent, line.text = line.indent + len(line.text) - len(rest), rest
                found.append(self.mapping(line.indent, depth + 1))
            else:
                self.at += 1
                found.append(self.word(rest, line))
        return found

    def mapping(self, indent: int, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self.at < len(self.lines) and self.lines[self.at].indent == indent and not self.is_item(indent):
            line = self.lines[self.at]
            match = _KEY.match(line.text)
            if match is None:
                self.refuse("give KEY: VALUE, or - for a list")
            assert match is not None
            if match[1] in found:
                self.refuse(f"{match[1]} is given twice")
            self.at += 1
            found[match[1]] = self.word(match[2], line) if match[2] else self.below(indent, depth, items=True)
        return found

    def below(self, indent: int, depth: int, *, items: bool = False) -> Any:
        """What is indented further; a list may begin at the indentation of its key."""
        if self.at < len(self.lines) and self.lines[self.at].indent > indent:
            return self.value(self.lines[self.at].indent, depth + 1)
        return self.sequence(indent, depth + 1) if items and self.is_item(indent) else None

    def word(self, text: str, line: _Line) -> Any:
        quoted = re.fullmatch(r"\"([^\"\\]*)\"|'([^']*)'", text)
        if quoted:
            return quoted[1] if quoted[1] is not None else quoted[2]
        listed = re.fullmatch(r"\[([^\[\]{}]*)\]", text)
        if listed:
            return [self.word(part.strip(), line) for part in listed[1].split(",")] if listed[1].strip() else []
        if text[:1] in set("&*!|>{}[\"'%@`") or re.search(r":\s|\s#", text):
            allowed = "give a plain word, a quoted word or a list in brackets"
            raise Misconfigured(f"topology.yaml, line {line.number}: {printable(text, 64)!r}: {allowed}")
        return None if text in ("null", "~") else text
