"""Networks by name: levels from networks.toml, protocols from protocols.toml and from fits/.

A fit serves clusters of the GPUs that it names; where it does not reach, NCCL's own figures do.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

import msgspec

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.cluster import Cluster, Level
from counterpoint.plan.model import positive
from counterpoint.plan.network import Network, Protocol
from counterpoint.records.base import Record

__all__ = [
    "FittedProtocols",
    "all_levels",
    "fitted_protocols",
    "levels",
    "names",
    "nccl_protocols",
    "network_of",
    "source",
]


class FittedProtocols(Record, frozen=True, kw_only=True):
    """One file of fits/: what was fitted to one machine.

    Args:
        gpus: that it serves: the one that was measured, and others with the same links.
        protocols: all with `fit`.
    """

    gpus: tuple[str, ...]
    protocols: tuple[Protocol, ...]


def names() -> tuple[str, ...]:
    """Of all networks."""
    return tuple(_networks())


def levels(name: str, num_gpus: int) -> tuple[Level, ...]:
    """The levels of a network of that name around so many GPUs, in whole units of each level.

    Raises:
        Misconfigured: there is no such network, or it cannot have so many GPUs: a switch of NVLinks does not grow.
    """
    positive("cluster.gpus", num_gpus)
    found: list[Level] = []
    for level in all_levels(name):
        if found and found[-1].size >= num_gpus:
            break
        found.append(level)
    if found[-1].kind != "network" and num_gpus > found[-1].size:
        raise Misconfigured(
            f"cluster.gpus = {num_gpus} on {name}: {found[-1].size} GPUs are all it joins; "
            "give a network that has levels above"
        )
    below = found[-2].size if len(found) > 1 else 1
    whole = -(-num_gpus // below) * below
    return (*found[:-1], msgspec.structs.replace(found[-1], size=whole))


def all_levels(name: str) -> tuple[Level, ...]:
    """All levels of a network of that name, at their full size.

    Raises:
        Misconfigured: there is no such network.
    """
    return msgspec.convert(_entry(name)["levels"], tuple[Level, ...])


def source(name: str) -> str:
    """Where its figures are from."""
    return str(_entry(name)["source"])


def network_of(cluster: Cluster, *, nccl: tuple[int, int] = (2, 28), name: str = "") -> Network:
    """A cluster with NCCL's protocols, fitted ones where its GPU was measured."""
    fitted = (each for each in fitted_protocols() if cluster.gpu.name in each.gpus)
    protocols = (*nccl_protocols(), *(protocol for each in fitted for protocol in each.protocols))
    return Network(name=name, cluster=cluster, protocols=protocols, nccl=nccl)


@cache
def nccl_protocols() -> tuple[Protocol, ...]:
    """As NCCL's own model has them."""
    text = Path(__file__).with_name("protocols.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text)["protocol"], tuple[Protocol, ...])


@cache
def fitted_protocols() -> tuple[FittedProtocols, ...]:
    """All files of fits/."""
    folder = Path(__file__).with_name("fits")
    return tuple(msgspec.json.decode(path.read_bytes(), type=FittedProtocols) for path in sorted(folder.glob("*.json")))


def _entry(name: str) -> dict[str, object]:
    if name not in _networks():
        raise Misconfigured(f"cluster.network = {printable(name)!r}: choose from: {', '.join(names())}")
    return _networks()[name]


@cache
def _networks() -> dict[str, dict[str, object]]:
    return tomllib.loads(Path(__file__).with_name("networks.toml").read_text("utf-8"))
