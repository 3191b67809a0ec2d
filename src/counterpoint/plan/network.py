"""What a library reaches on the links of a cluster: protocols, and where their figures are from.

A collective that makes `steps` hops, moves `share · S` bytes of every GPU over its slowest level, and in which every
rank handles a shard of its own without sending it, takes

    hops      H = Σ over levels of steps · (hop of the level's kind + the level's own latency)
    bandwidth X = S · max over levels of share / bandwidth          bandwidth = gb_per_s / oversubscription · efficiency
    own       O = S / n / own_gb_per_s
    time      T = base + (H^j + X^j)^(1/j) + O + fill · √(base · X)

NCCL's own model has j = 1, O = 0 and fill = 0 for each of its three protocols, and it takes the protocol that is the
fastest there. What was fitted to measurements has figures of its own for the same protocols (j = 2: while one slice is
under way the next is sent, so the longer of hops and bytes hides most of the other; fill: pipelines that fill), but is
taken where NCCL believes in it. T never falls with more bytes, less bandwidth or more latency within a protocol.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from counterpoint.errors import Misconfigured
from counterpoint.plan.cluster import Cluster
from counterpoint.records.base import Record

__all__ = ["OPERATIONS", "Fit", "Kind", "Network", "Operation", "Protocol", "Span"]

Kind = Literal["nvlink", "pcie", "network"]
Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send_recv"]
OPERATIONS: tuple[Operation, ...] = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "send_recv",
)


class Span(Record, frozen=True, kw_only=True):
    """Rows of one group size and of sizes near each other, and how far the fit is off where it had not seen them.

    Args:
        ranks: of the group.
        smallest_bytes, largest_bytes: of the full array.
        mean, worst: of |predicted / measured - 1| on held-out rows; None: none of these could be held out.
    """

    ranks: int
    smallest_bytes: int
    largest_bytes: int
    mean: float | None
    worst: float | None


class Fit(Record, frozen=True, kw_only=True):
    """What the protocols of an operation were fitted to.

    Args:
        source: what was measured, on what, when.
        gpu: of the machine it was measured on.
        rows: that were fitted in the end.
        held_out: what was left out to state the errors: "a third of the sizes, 8 ranks".
        spans: ascending by ranks, then by size.
    """

    source: str
    gpu: str
    rows: int
    held_out: str
    spans: tuple[Span, ...]

    def outside(self, gpu: str, ranks: int, num_bytes: float) -> str:
        """Why a prediction there is not validated; "" if it is."""
        spans = [span for span in self.spans if span.ranks == ranks]
        if self.gpu != gpu:
            return f"{gpu}, measured on {self.gpu}"
        if not spans:
            return f"{ranks} ranks, measured with {', '.join(map(str, dict.fromkeys(s.ranks for s in self.spans)))}"
        smallest, largest = spans[0].smallest_bytes, spans[-1].largest_bytes
        if not smallest <= num_bytes <= largest:
            return f"{num_bytes:.4g} bytes, measured from {smallest:.4g} to {largest:.4g} with {ranks} ranks"
        return "" if self.worst(ranks, num_bytes) is not None else "no row was held out"

    def worst(self, ranks: int, num_bytes: float) -> float | None:
        """The largest error on held-out rows there; between two spans, that of both."""
        spans = [span for span in self.spans if span.ranks == ranks]
        below = [span for span in spans if span.smallest_bytes <= num_bytes][-1:]
        above = [span for span in spans if span.largest_bytes >= num_bytes][:1]
        return max((span.worst for span in (*below, *above) if span.worst is not None), default=None)


class Protocol(Record, frozen=True, kw_only=True):
    """How a library moves bytes over links.

    Args:
        name: "LL", "LL128", "Simple".
        base_us: to begin and to end, whatever is moved.
        hop_us: of one step, by kind of level.
        efficiency: of the level's bandwidth that is reached in the limit, by kind.
        ceiling_gb_per_s: by kind, of all GPUs of the group below one unit together; NCCL has one for LL.
        own_gb_per_s: at which a rank handles the shard that it does not send; None: at once.
        join: j, at least 1.
        fill: 0 or more.
        most_bytes: of the full array for which it is taken; None: any.
        operations, algorithms, kinds: what it is for; (): all. `kinds` is about the highest level that is crossed.
        fit: None: taken from `source` as it is.
        source: of the figures.
    """

    name: str
    base_us: float
    hop_us: dict[Kind, float]
    efficiency: dict[Kind, float]
    ceiling_gb_per_s: dict[Kind, float] = msgspec.field(default_factory=dict)
    own_gb_per_s: float | None = None
    join: float = 1.0
    fill: float = 0.0
    most_bytes: int | None = None
    operations: tuple[str, ...] = ()
    algorithms: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    fit: Fit | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if not (self.join >= 1 and 0 <= self.fill < math.inf):
            raise Misconfigured(
                f"protocol {self.name!r}: join = {self.join}, fill = {self.fill}: give join >= 1 and fill >= 0, "
                "or time would fall with more bytes"
            )
        if self.own_gb_per_s is not None and not self.own_gb_per_s > 0:
            raise Misconfigured(
                f"protocol {self.name!r}: own_gb_per_s = {self.own_gb_per_s}: give a rate above 0, or none"
            )

    def serves(self, operation: str, algorithm: str, kind: str) -> bool:
        """Whether it is meant for this."""
        return (
            (not self.operations or operation in self.operations)
            and (not self.algorithms or algorithm in self.algorithms)
            and (not self.kinds or kind in self.kinds)
        )

    @property
    def precedence(self) -> int:
        """Fitted to this operation before fitted to several before taken from a source."""
        return 0 if self.fit is None else 2 if self.operations else 1

    def time_us(self, hops_us: float, bandwidth_us: float, own_us: float) -> float:
        """T = base + (H^j + X^j)^(1/j) + O + fill · √(base · X)."""
        joined = _joined(hops_us, bandwidth_us, self.join)
        return self.base_us + joined + own_us + self.fill * math.sqrt(self.base_us * bandwidth_us)


def _joined(hops_us: float, bandwidth_us: float, join: float) -> float:
    """(H^j + X^j)^(1/j), without overflow."""
    longer, shorter = max(hops_us, bandwidth_us), min(hops_us, bandwidth_us)
    if not shorter:
        return longer
    return longer + shorter if join == 1 else float(longer * (1 + (shorter / longer) ** join) ** (1 / join))


class Network(Record, frozen=True, kw_only=True):
    """A cluster, and what a library reaches on it.

    Args:
        name: for people.
        cluster: GPUs and levels.
        protocols: of the library; several may serve the same: the one that NCCL believes to be the fastest is taken.
        nccl: its version; it decides on what NCCL offers.
        notes: where the figures of the levels are from, one line each.
    """

    name: str = ""
    cluster: Cluster
    protocols: tuple[Protocol, ...]
    nccl: tuple[int, int] = (2, 28)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for protocol in self.protocols:
            for level in self.cluster.levels:
                if level.kind not in protocol.hop_us or level.kind not in protocol.efficiency:
                    raise Misconfigured(
                        f"protocol {protocol.name!r} has no hop_us or efficiency for {level.kind!r}, "
                        f"which level {level.name!r} is: give both"
                    )

    def protocols_for(self, operation: str, algorithm: str, kind: str) -> tuple[tuple[Protocol, Protocol], ...]:
        """Those of the highest precedence that serve it, each with the figures by which it is chosen.

        These are NCCL's own for the protocol of that name; what NCCL has none for is not taken. Where no protocol here
        is NCCL's own, each is chosen by its figures.

        Raises:
            Misconfigured: there is none.
        """
        serving = [protocol for protocol in self.protocols if protocol.serves(operation, algorithm, kind)]
        own = {protocol.name: protocol for protocol in serving if protocol.fit is None}
        serving = [protocol for protocol in serving if not own or protocol.name in own]
        if not serving:
            names = ", ".join(protocol.name for protocol in self.protocols) or "none"
            raise Misconfigured(
                f"network {self.name!r}: no protocol serves {operation} by {algorithm} over {kind}; it has: {names}"
            )
        best = max(protocol.precedence for protocol in serving)
        chosen = (protocol for protocol in serving if protocol.precedence == best)
        return tuple((protocol, own.get(protocol.name, protocol)) for protocol in chosen)
