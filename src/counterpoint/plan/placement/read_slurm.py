"""Slurm's `topology.conf`, of the plugins topology/tree and topology/block, and Slurm's short lists of hosts.

    SwitchName=s0 Nodes=dev[0-5]            BlockName=b1 Nodes=node[1-32]
    SwitchName=s3 Switches=s[0-2]           BlockSizes=30,120

Names of parameters ignore case; # begins a comment; a backslash at the end of a line continues it. The format is that
of the manual page topology.conf(5). Blocks: the first size is a block, each further one joins as many blocks as it is
times the first, in the order of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise, product

import numpy as np

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.placement.topology import MAX_HOSTS, Topology

__all__ = ["hostlist", "of_blocks", "read_conf"]

KNOWN = {"switchname", "switches", "nodes", "linkspeed", "blockname", "blocksizes"}
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def read_conf(text: str, *, gpus: int) -> Topology:
    """Return the hosts of a `topology.conf`, in its order; the file does not have the GPUs of a host."""
    children: dict[str, list[str]] = {}
    nodes: dict[str, list[str]] = {}
    blocks: dict[str, list[str]] = {}
    sizes: list[int] = []
    for number, found in _lines(text):
        where = f"topology.conf, line {number}"
        hosts = hostlist(found.get("nodes", ""), where)
        if "switchname" in found:
            if "blockname" in found:
                raise Misconfigured(f"{where}: SwitchName and BlockName together: give either")
            for name in hostlist(found["switchname"], where):
                _once(name, children, where)
                children[name] = hostlist(found.get("switches", ""), where)
                nodes[name] = hosts
            if not hosts and not found.get("switches"):
                raise Misconfigured(f"{where}: SwitchName without Switches and without Nodes: give one of them")
        elif "blockname" in found:
            _once(found["blockname"], blocks, where)
            blocks[found["blockname"]] = hosts
        elif "blocksizes" in found:
            sizes = _sizes(found["blocksizes"], where)
        else:
            raise Misconfigured(f"{where}: {sorted(found)}: a line begins with SwitchName, BlockName or BlockSizes")
    if children and blocks:
        raise Misconfigured("topology.conf has switches and blocks: give the lines of one plugin")
    if not children and not blocks:
        raise Misconfigured("topology.conf has neither switches nor blocks: give SwitchName or BlockName lines")
    return of_blocks(blocks, sizes, gpus) if blocks else Topology.of_switches(children, nodes, gpus)


def of_blocks(blocks: dict[str, list[str]], sizes: Sequence[int], gpus: int) -> Topology:
    """Return hosts in blocks; each further size is a level that joins blocks in their order, the last joins all."""
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
    """Return the names of Slurm's short form: `a[0-3,12],b` -> a0, a1, a2, a3, a12, b; widths as written."""
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
    """Split at the commas outside of brackets."""
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


def _lines(text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the number and the parameters of every line that has some."""
    for number, line in enumerate(text.replace("\\\n", " ").splitlines(), start=1):
        found: dict[str, str] = {}
        for token in line.partition("#")[0].split():
            key, equals, value = token.partition("=")
            if not equals or key.lower() not in KNOWN:
                raise Misconfigured(
                    f"topology.conf, line {number}: {_short(token)}: give SwitchName=, Switches=, Nodes=, LinkSpeed=, "
                    "BlockName= or BlockSizes="
                )
            found[key.lower()] = value
        if found:
            yield number, found


def _sizes(text: str, where: str) -> list[int]:
    if not re.fullmatch(r"[1-9]\d{0,6}(,[1-9]\d{0,6})*", text):
        raise Misconfigured(f"{where}: BlockSizes={_short(text)}: give numbers of hosts, such as 30,120")
    return [int(size) for size in text.split(",")]


def _once(name: str, known: dict[str, list[str]], where: str) -> None:
    if name in known:
        raise Misconfigured(f"{where}: {_short(name)} is defined twice: give it one line")


def _short(text: str) -> str:
    return f'"{printable(text, 64)}"'
