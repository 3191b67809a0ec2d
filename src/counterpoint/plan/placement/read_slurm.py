"""Read Slurm's `topology.conf` and `topology.yaml` (plugins topology/tree, topology/block) and its lists of hosts.

    SwitchName=s0 Nodes=dev[0-5]            BlockName=b1 Nodes=node[1-32]
    SwitchName=s3 Switches=s[0-2]           BlockSizes=30,120

`topology.conf`: names of parameters ignore case; # begins a comment; a backslash at the end of a line continues it. The
format is that of the manual page topology.conf(5). Blocks: the first size is a block, each further one joins as many
blocks as it is times the first, in the order of the file.

`topology.yaml` has several named topologies (manual page topology.yaml(5)). PyYAML parses; mappings, lists and strings
are built here from its events, so that no object is constructed, no alias is expanded, and nesting deeper than in such
a file is refused. Numbers and `True` stay text, as host names must.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product
from typing import Any, NoReturn

import msgspec
import numpy as np

from counterpoint.errors import Misconfigured, Unsupported, printable
from counterpoint.plan.placement.topology import MAX_HOSTS, Topology

KNOWN = {"switchname", "switches", "nodes", "linkspeed", "blockname", "blocksizes"}
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
MAX_TEXT = 4 << 20  # characters: 65,536 hosts, each with a line of its own
MAX_DEPTH = 12
EMPTY = ("", "~", "null")
KEYS = {"switch": "switchname", "children": "switches", "block": "blockname", "nodes": "nodes"}  # of YAML, and of .conf


class _Plugin(msgspec.Struct):
    """Holds the fields below `tree:` or `block:` of a `topology.yaml`."""

    switches: list[dict[str, str]] = []
    blocks: list[dict[str, str]] = []
    block_sizes: list[str] = []


class _Named(msgspec.Struct):
    """Holds one named topology of a `topology.yaml`."""

    topology: str  # name
    cluster_default: str = ""
    tree: _Plugin | None = None
    block: _Plugin | None = None


def read_conf(text: str, *, gpus: int) -> Topology:
    """Return the topology in a `topology.conf`, hosts in file order; `gpus` per host, which the file does not state."""
    return _topology("topology.conf", _lines(text), gpus)


def read_yaml(text: str, *, gpus: int, name: str | None = None) -> Topology:
    """Return one topology of a `topology.yaml`; without `name`, the cluster's default or the only one."""
    try:
        chosen = _chosen(msgspec.convert(plain_yaml(text), list[_Named]), name)
    except msgspec.ValidationError as error:
        raise Misconfigured(
            f"topology.yaml: {printable(str(error), 200)}: give a list of topologies, each with topology: NAME and "
            "tree: {switches: [{switch, children, nodes}]} or block: {blocks: [{block, nodes}], block_sizes}"
        ) from None
    where = f"topology.yaml, topology {printable(chosen.topology, 64)}"
    plugin = chosen.tree or chosen.block or _Plugin()
    lines = [
        {KEYS[key]: "" if value in EMPTY else value for key, value in entry.items() if key in KEYS}
        for entry in (*plugin.switches, *plugin.blocks)
    ]
    if plugin.block_sizes:
        lines.append({"blocksizes": ",".join(plugin.block_sizes)})
    return _topology(where, ((where, line) for line in lines), gpus)


def _topology(file: str, lines: Iterable[tuple[str, dict[str, str]]], gpus: int) -> Topology:
    """Return the topology of parsed lines, each a (position, parameters) pair with names as in `topology.conf`."""
    children: dict[str, list[str]] = {}
    nodes: dict[str, list[str]] = {}
    blocks: dict[str, list[str]] = {}
    sizes: list[int] = []
    for where, found in lines:
        hosts = hostlist(found.get("nodes", ""), where)
        if "switchname" in found:
            if "blockname" in found:
                raise Misconfigured(f"{where}: SwitchName and BlockName together: give either")
            for name in hostlist(found["switchname"], where):
                _put(nodes, name, hosts, where)
                children[name] = hostlist(found.get("switches", ""), where)
            if not hosts and not found.get("switches"):
                raise Misconfigured(f"{where}: SwitchName without Switches and without Nodes: give one of them")
        elif "blockname" in found:
            _put(blocks, found["blockname"], hosts, where)
        elif "blocksizes" in found:
            sizes = _sizes(found["blocksizes"], where)
        else:
            raise Misconfigured(f"{where}: {sorted(found)}: a line begins with SwitchName, BlockName or BlockSizes")
    if children and blocks:
        raise Misconfigured(f"{file} has switches and blocks: give the lines of one plugin")
    if not children and not blocks:
        raise Misconfigured(f"{file} has neither switches nor blocks: give either, since they name hosts")
    return of_blocks(blocks, sizes, gpus) if blocks else Topology.of_switches(children, nodes, gpus)


def _put(known: dict[str, list[str]], name: str, hosts: list[str], where: str) -> None:
    """Add a switch or block with its hosts; raise Misconfigured if that name is taken."""
    if name in known:
        raise Misconfigured(f"{where}: {_short(name)} is defined twice: give it once")
    known[name] = hosts


def of_blocks(blocks: dict[str, list[str]], sizes: Sequence[int], gpus: int) -> Topology:
    """Return the topology of hosts in blocks; each of `sizes` but the first adds a level, and a top level joins all."""
    base = sizes[0] if sizes else min(map(len, blocks.values()))
    small = [name for name, hosts in blocks.items() if len(hosts) < base]
    if small:
        raise Misconfigured(
            f'block "{printable(small[0], 64)}" has {len(blocks[small[0]])} hosts, the first of BlockSizes is {base}: '
            "no block may have fewer"
        )
    for below, above in pairwise(sizes):
        factor = above // max(1, below)
        if above % max(1, below) or factor < 2 or factor & (factor - 1):
            raise Misconfigured(
                f"BlockSizes has {below}, then {above}: give each as the one before times a power of two"
            )
    hosts = [host for each in blocks.values() for host in each]
    index = np.repeat(np.arange(len(blocks)), [len(each) for each in blocks.values()])
    joined = [size // base for size in sizes[1:] if size // base < len(blocks)]
    units = [index, *(index // count for count in joined)]
    names = ["host", "block", *(f"{count} blocks" for count in joined)]
    if len(blocks) > 1:
        units.append(np.zeros_like(index))
        names.append("all blocks")
    return Topology.of_units(hosts, np.array(units), gpus, names=names)


def hostlist(text: str, where: str = "hostlist") -> list[str]:
    """Return the hosts in Slurm's short form: `a[0-3,12],b` -> a0, a1, a2, a3, a12, b; digits stay zero-padded."""
    names: list[str] = []
    for part in _split(text, where):
        pieces = re.split(r"\[([^\[\]]*)\]", part)  # text, numbers, text, numbers, text
        if any(bracket in piece for piece in pieces[::2] for bracket in "[]"):
            raise Misconfigured(f"{where}: {_short(part)} has a bracket without its other half")
        choices = [_numbers(piece, where, part) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        count = 1
        for choice in choices:
            count *= len(choice)
        if len(names) + count > MAX_HOSTS:
            raise Misconfigured(f"{where}: {_short(part)} makes more than {MAX_HOSTS} names")
        names += ["".join(chosen) for chosen in product(*choices)]
    return names


def _split(text: str, where: str) -> list[str]:
    """Split a host list at the commas outside of brackets."""
    parts = re.split(r",(?![^\[]*\])", text.strip()) if text.strip() else []
    if any(not part.strip() or re.search(r"\s", part.strip()) for part in parts):
        raise Misconfigured(f"{where}: {_short(text)} has an empty name, or a space in one")
    return [part.strip() for part in parts]


def _numbers(text: str, where: str, part: str) -> list[str]:
    found: list[str] = []
    for piece in text.split(","):
        match = _RANGE.fullmatch(piece.strip())
        if match is None:
            raise Misconfigured(f"{where}: {_short(piece)} in {_short(part)}: give a number or a range such as 0-3")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= MAX_HOSTS:
            raise Misconfigured(f"{where}: range {piece} in {_short(part)}: give a rising one of at most {MAX_HOSTS}")
        found += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return found


def _lines(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (position, parameters) for every line of a `topology.conf` that has parameters."""
    for number, line in enumerate(text.replace("\\\n", " ").splitlines(), start=1):
        where, found = f"topology.conf, line {number}", dict[str, str]()
        for token in line.partition("#")[0].split():
            key, equals, value = token.partition("=")
            if not equals or key.lower() not in KNOWN:
                raise Misconfigured(
                    f"{where}: {_short(token)}: give SwitchName=, Switches=, Nodes=, LinkSpeed=, "
                    "BlockName= or BlockSizes="
                )
            found[key.lower()] = value
        if found:
            yield where, found


def _sizes(text: str, where: str) -> list[int]:
    if not re.fullmatch(r"[1-9]\d{0,6}(,[1-9]\d{0,6})*", text):
        raise Misconfigured(f"{where}: BlockSizes {_short(text)}: give numbers of hosts, such as 30,120")
    return [int(size) for size in text.split(",")]


def _short(text: str) -> str:
    return f'"{printable(text, 64)}"'


def _chosen(found: list[_Named], name: str | None) -> _Named:
    if name is None:
        default = [each for each in found if each.cluster_default.lower() in ("true", "yes")]
        chosen = default[0] if default else found[0] if len(found) == 1 else None
    else:
        chosen = next((each for each in found if each.topology == name), None)
    if chosen is None:
        why = "none is the cluster's default" if name is None else f"there is no {printable(name, 64)}"
        names = ", ".join(each.topology for each in found)
        raise Misconfigured(f"topology.yaml: {why}; choose from {printable(names, 200)}")
    return chosen


def plain_yaml(text: str) -> Any:
    """Return a YAML document of mappings, lists and strings; raise Misconfigured, with the line, at anything else."""
    if len(text) > MAX_TEXT:
        raise Misconfigured(f"topology.yaml has {len(text)} characters: at most {MAX_TEXT} are read")
    try:
        import yaml
    except ImportError:
        raise Unsupported(
            "topology.yaml needs PyYAML, which is not installed: pip install 'counterpoint[plan]'"
        ) from None
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
    """Return the mapping, list or string that begins with this YAML event."""
    import yaml

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
