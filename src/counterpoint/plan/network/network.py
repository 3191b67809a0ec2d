"""Describe latencies and bandwidths of NCCL's protocols on a cluster's links, with sources; and the named networks.

A collective that makes `steps` hops, moves `share · S` bytes of every GPU over its slowest level, and in which every
rank handles a shard of its own without sending it, takes

    hops      H = Σ over levels of steps · (hop of the level's kind + the level's own latency)
    bandwidth X = S · max over levels of share / bandwidth          bandwidth = gb_per_s / oversubscription · efficiency
    own       O = S / n / own_gb_per_s
    time      T = base + (H^j + X^j)^(1/j) + O + fill · √(base · X)

NCCL's own model has j = 1, O = 0 and fill = 0 for each of its three protocols, and it takes the protocol that is the
fastest there. Fitted protocols have the same names and other figures (j = 2: while one slice is under way the next is
sent, so the longer of hops and bytes hides most of the other; fill: pipelines that fill), but each is taken where
NCCL's model takes the protocol of its name on the measured links (`algorithms.py`). T never falls with more bytes, less
bandwidth or more latency.

Networks by name have their levels from networks.toml, NCCL's figures from protocols.toml and fitted ones from fits/. A
fit serves clusters of the GPUs that it names; other clusters have NCCL's own figures.
"""

from __future__ import annotations

import math
import tomllib
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.job.cluster import Cluster, Level
from counterpoint.plan.job.model import positive
from counterpoint.read_file import read_text
from counterpoint.records import Record

Kind = Literal["nvlink", "pcie", "network"]
Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send_recv"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)


SUFFIX = ".json"  # of a network in a file
MAX_BYTES = 1 << 20
LARGEST = 1e7  # least figure that is too large
Figure = Annotated[float, Meta(gt=0, lt=LARGEST)]


class FittedRange(Record, frozen=True, kw_only=True):
    """Describes the measured rows of one group size and a range of bytes, with the fit's error on held-out rows."""

    ranks: int  # ranks of the group
    smallest_bytes: int  # of the full array, as `largest_bytes`
    largest_bytes: int
    # mean and worst |predicted / measured - 1| of held-out rows; None: none of these could be held out
    mean: float | None
    worst: float | None


class Fit(Record, frozen=True, kw_only=True):
    """Records the measurements to which protocols were fitted, and the errors of the fit."""

    source: str  # what was measured, on what, when
    gpu: str  # GPU of the machine it was measured on
    rows: int  # number of rows in the final fit
    held_out: str  # what was left out to state the errors: "a third of the sizes, 8 ranks"
    gb_per_s: dict[Kind, Figure]  # of one GPU, by kind of level, of the links that were measured
    spans: tuple[FittedRange, ...]  # ascending by ranks, then by size

    def outside(self, gpu: str, ranks: int, num_bytes: float) -> str:
        """Return why a prediction for this GPU, number of ranks and bytes is not validated; "" if it is."""
        ranges = [each for each in self.spans if each.ranks == ranks]
        if self.gpu != gpu:
            return f"{gpu}, measured on {self.gpu}"
        if not ranges:
            measured = ", ".join(map(str, dict.fromkeys(each.ranks for each in self.spans)))
            return f"{ranks} ranks, measured with {measured}"
        smallest, largest = ranges[0].smallest_bytes, ranges[-1].largest_bytes
        if not smallest <= num_bytes <= largest:
            return f"{num_bytes:.4g} bytes, measured from {smallest:.4g} to {largest:.4g} with {ranks} ranks"
        return "" if self.worst(ranks, num_bytes) is not None else "no row was held out"

    def worst(self, ranks: int, num_bytes: float) -> float | None:
        """Return the largest held-out error for this number of ranks and bytes; between two ranges, the larger one."""
        ranges = [each for each in self.spans if each.ranks == ranks]
        below = [each for each in ranges if each.smallest_bytes <= num_bytes][-1:]
        above = [each for each in ranges if each.largest_bytes >= num_bytes][:1]
        return max((each.worst for each in (*below, *above) if each.worst is not None), default=None)


class Protocol(Record, frozen=True, kw_only=True):
    """Describes one protocol by which a library moves bytes over links, with its latencies and bandwidths."""

    name: str  # "LL", "LL128", "Simple"
    base_us: Figure  # time to begin and to end, whatever is moved
    hop_us: dict[Kind, Figure]  # time of one hop, by kind of level
    efficiency: dict[Kind, Figure]  # part of the level's bandwidth that is reached in the limit, by kind
    # by kind, most GB/s of all GPUs of a group below one unit together; NCCL has such a limit for LL
    ceiling_gb_per_s: dict[Kind, Figure] = msgspec.field(default_factory=dict)
    own_gb_per_s: Figure | None = None  # at which a rank copies or adds the shard that it does not send; None: at once
    join: Annotated[float, Meta(ge=1, lt=LARGEST)] = 1.0  # j of the equation above, at least 1
    fill: Annotated[float, Meta(ge=0, lt=LARGEST)] = 0.0  # of the equation above, 0 or more
    # of a fitted protocol: NCCL chooses by its own model's bandwidth times this, which differs by version and tuner
    believed: Figure = 1.0
    most_bytes: int | None = None  # largest full array for which it is taken; None: any
    # these three: what the protocol serves; (): all. `kinds`: of the highest level that a group crosses
    operations: tuple[str, ...] = ()
    algorithms: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    fit: Fit | None = None  # what its figures were fitted to; None: they are taken from `source` as they are
    source: str = ""  # where the figures are from

    def serves(self, operation: str, algorithm: str, kind: str) -> bool:
        """Return whether the protocol can run an operation by an algorithm ("": any) over links of this kind."""
        return (
            (not self.operations or operation in self.operations)
            and (not self.algorithms or not algorithm or algorithm in self.algorithms)
            and (not self.kinds or kind in self.kinds)
        )

    @property
    def precedence(self) -> int:
        """Return the protocol's precedence (highest is used): 2 if fitted to given operations, 1 if to all, else 0."""
        return 0 if self.fit is None else 2 if self.operations else 1

    def time_us(self, hops_us: float, bandwidth_us: float, own_us: float) -> float:
        """Return a collective's µs: T = base + (H^j + X^j)^(1/j) + O + fill · √(base · X)."""
        longer, shorter = max(hops_us, bandwidth_us), min(hops_us, bandwidth_us)
        if not shorter:
            joined = longer
        elif self.join == 1:
            joined = longer + shorter
        else:  # the longer one first: no overflow
            joined = float(longer * (1 + (shorter / longer) ** self.join) ** (1 / self.join))
        return self.base_us + joined + own_us + self.fill * math.sqrt(self.base_us * bandwidth_us)


class Network(Record, frozen=True, kw_only=True):
    """Holds a cluster and the protocols by which a library, such as NCCL, communicates on it."""

    cluster: Cluster  # GPUs and levels
    # protocols of the library; of several that serve the same, NCCL takes the fastest in its own model
    protocols: tuple[Protocol, ...]
    nccl: tuple[int, int] = (2, 28)  # NCCL's version, which decides what it offers

    def __post_init__(self) -> None:
        for protocol in self.protocols:
            for level in self.cluster.levels:
                if level.kind not in protocol.hop_us or level.kind not in protocol.efficiency:
                    raise Misconfigured(
                        f"protocol {protocol.name!r} has no hop_us or efficiency for {level.kind!r}, "
                        f"which level {level.name!r} is: give both"
                    )

    def measured_gb_per_s(self, operation: str, kind: str) -> dict[Kind, float]:
        """Return the GB/s, by kind, of the links on which the operation was measured; {}: it was not measured."""
        fits = [
            (protocol.precedence, protocol.fit)
            for protocol in self.protocols
            if protocol.fit and protocol.serves(operation, "", kind)
        ]
        return max(fits, key=itemgetter(0))[1].gb_per_s if fits else {}

    def protocols_for(self, operation: str, algorithm: str, kind: str) -> tuple[tuple[Protocol, Protocol], ...]:
        """Return the protocols of highest precedence, each with the protocol whose figures NCCL compares.

        NCCL compares its own figures for the protocol of the same name; a protocol without such figures is not taken.
        Where none of the network's protocols is NCCL's own, each is compared by the figures that it has.

        Raises:
            Misconfigured: no protocol serves the operation.
        """
        serving = [protocol for protocol in self.protocols if protocol.serves(operation, algorithm, kind)]
        own = {protocol.name: protocol for protocol in serving if protocol.fit is None}
        serving = [protocol for protocol in serving if not own or protocol.name in own]
        if not serving:
            names = ", ".join(protocol.name for protocol in self.protocols) or "none"
            raise Misconfigured(f"no protocol serves {operation} by {algorithm} over {kind}; there are: {names}")
        best = max(protocol.precedence for protocol in serving)
        chosen = (protocol for protocol in serving if protocol.precedence == best)
        return tuple((protocol, own.get(protocol.name, protocol)) for protocol in chosen)


class OwnNetwork(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds the file of a network that a user has fitted (`fit.py`)."""

    schema: Literal["counterpoint.network/1"] = "counterpoint.network/1"
    source: str
    gpu: str  # on which it was measured
    levels: tuple[Level, ...]  # innermost first, at full size
    protocols: tuple[Protocol, ...]


class FittedProtocols(Record, frozen=True, kw_only=True):
    """Holds one file of fits/: the protocols fitted to one machine."""

    gpus: tuple[str, ...]  # GPUs that it serves: the one that was measured, and others with the same links
    protocols: tuple[Protocol, ...]  # fitted protocols, all with `fit`


def names() -> tuple[str, ...]:
    """Return the names of all known networks."""
    return tuple(_networks())


def levels(name: str, num_gpus: int) -> tuple[Level, ...]:
    """Return a named network's levels that `num_gpus` GPUs need, innermost first; the last is cut to whole units."""
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
    """Return all levels of a named network at full size; raise Misconfigured if the name is unknown."""
    if name.endswith(SUFFIX):
        return read_network(name).levels
    networks = _networks()
    if name not in networks:
        raise Misconfigured(
            f"cluster.network = {printable(name)!r}: choose from: {', '.join(networks)}, or a file of --fit, *{SUFFIX}"
        )
    return msgspec.convert(networks[name]["levels"], tuple[Level, ...])


def network_of(cluster: Cluster) -> Network:
    """Return a cluster with NCCL's protocols and the fitted ones: the user's, and others shipped for its GPU."""
    own = read_network(cluster.fits).protocols if cluster.fits else ()

    def replaced(shipped: Protocol) -> bool:  # by one of the user, of as many operations and a kind of link in common
        return any(each.operations == shipped.operations and {*each.kinds} & {*shipped.kinds} for each in own)

    fitted = (each for each in fitted_protocols() if cluster.gpu.name in each.gpus)
    shipped = (protocol for each in fitted for protocol in each.protocols if not replaced(protocol))
    return Network(cluster=cluster, protocols=(*nccl_protocols(), *shipped, *own))


def own_file(network: str) -> str:
    """Return `network` if it is the name of a file; "" if it is the name of a known network."""
    return network if network.endswith(SUFFIX) else ""


@cache
def read_network(path: str) -> OwnNetwork:
    """Return the network in a file; raise Misconfigured if the file is invalid."""
    name, advice = printable(path, 200), "give a file that counterpoint plan --fit has written"
    text = read_text(Path(path), limit=MAX_BYTES, advice=advice)
    try:
        found = msgspec.json.decode(text, type=OwnNetwork)
        if not found.levels or not all(each.fit for each in found.protocols):
            raise Misconfigured("a network has levels, and its protocols a fit each")
    except (msgspec.DecodeError, Misconfigured, RecursionError) as error:
        raise Misconfigured(f"{name} is no network: {printable(str(error), 200)}; {advice}") from None
    return found


@cache
def nccl_protocols() -> tuple[Protocol, ...]:
    """Return NCCL's protocols with the figures of its own model."""
    return msgspec.convert(_read_toml("protocols.toml")["protocol"], tuple[Protocol, ...])


@cache
def fitted_protocols() -> tuple[FittedProtocols, ...]:
    """Return the fitted protocols of all files in fits/."""
    folder = Path(__file__).with_name("fits")
    return tuple(msgspec.json.decode(path.read_bytes(), type=FittedProtocols) for path in sorted(folder.glob("*.json")))


@cache
def _networks() -> dict[str, dict[str, Any]]:
    return _read_toml("networks.toml")


def _read_toml(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(name).read_text("utf-8"))
