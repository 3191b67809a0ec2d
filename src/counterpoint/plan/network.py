"""What a library reaches on the links of a cluster: protocols, and where their figures are from.

A collective that makes `steps` hops and moves `share · S` bytes of every GPU over its slowest level takes

    latency   L = base + Σ over levels of steps · (hop of the level's kind + the level's own latency)
    bandwidth X = S · max over levels of share / bandwidth          bandwidth = gb_per_s / oversubscription · efficiency
    time      T = L · φ(X / L)

φ joins the two. NCCL's own model has φ(u) = 1 + u for each of its three protocols and takes the fastest. A protocol
that was fitted to measurements has φ as a curve through points instead, which stands for all that depends on size:
pipelines that fill, protocols that change. Its slope in logarithms is between 0 and 1, hence T never falls with more
bytes, less bandwidth or more latency; T is L with nothing to move, and X with much.
"""

from __future__ import annotations

import math
from bisect import bisect
from itertools import pairwise
from typing import Literal

import msgspec

from counterpoint.errors import Misconfigured
from counterpoint.plan.cluster import Cluster
from counterpoint.records.base import Record

__all__ = ["OPERATIONS", "Fit", "Kind", "Network", "Operation", "Protocol"]

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


class Fit(Record, frozen=True, kw_only=True):
    """What a protocol was fitted to, and how far it is off on rows that it had not seen.

    Args:
        source: what was measured, on what, when.
        gpu: of the machine it was measured on.
        rows: that were fitted in the end.
        ranks: group sizes among them.
        smallest_bytes, largest_bytes: of the full array.
        held_out: what was left out to state the error: "a third of the sizes, 8 ranks".
        error_mean, error_max: of |predicted / measured - 1| on held-out rows; None: too few rows to hold any out.
    """

    source: str
    gpu: str
    rows: int
    ranks: tuple[int, ...]
    smallest_bytes: int
    largest_bytes: int
    held_out: str
    error_mean: float | None
    error_max: float | None

    def outside(self, gpu: str, ranks: int, num_bytes: float) -> str:
        """Why a prediction there is not validated; "" if it is."""
        if self.gpu != gpu:
            return f"{gpu}, measured on {self.gpu}"
        if ranks not in self.ranks:
            return f"{ranks} ranks, measured with {', '.join(map(str, self.ranks))}"
        if not self.smallest_bytes <= num_bytes <= self.largest_bytes:
            return f"{num_bytes:.4g} bytes, measured from {self.smallest_bytes:.4g} to {self.largest_bytes:.4g}"
        return "" if self.error_max is not None else "no row was held out"

    def summary(self) -> str:
        """One line for people."""
        if self.error_mean is None or self.error_max is None:
            return f"{self.source}; error unknown: {self.held_out}"
        return f"{self.source}: {self.error_mean:.1%} mean, {self.error_max:.1%} at most on rows held out"


class Protocol(Record, frozen=True, kw_only=True):
    """How a library moves bytes over links.

    Args:
        name: "LL", "LL128", "Simple"; "fitted".
        base_us: to begin and to end, whatever is moved.
        hop_us: of one step, by kind of level.
        efficiency: of the level's bandwidth that is reached in the limit, by kind.
        ceiling_gb_per_s: by kind, of all GPUs of the group below one unit together; NCCL has one for LL.
        lost_per_doubling: of `efficiency`, with every doubling of the group beyond two.
        curve: points (log2 u, log2 φ(u)), ascending, slopes within 0 and 1; (): φ = 1 + u.
        operations, algorithms, kinds: what it is for; (): all. `kinds` is about the highest level that is crossed.
        fit: None: taken from `source` as it is.
        source: of the figures.
    """

    name: str
    base_us: float
    hop_us: dict[Kind, float]
    efficiency: dict[Kind, float]
    ceiling_gb_per_s: dict[Kind, float] = msgspec.field(default_factory=dict)
    lost_per_doubling: float = 0.0
    curve: tuple[tuple[float, float], ...] = ()
    operations: tuple[str, ...] = ()
    algorithms: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    fit: Fit | None = None
    source: str = ""

    def __post_init__(self) -> None:
        for (x0, y0), (x1, y1) in pairwise(self.curve):
            if not (x1 > x0 and -0.01 <= (y1 - y0) / (x1 - x0) <= 1.01):  # a hundredth: figures are rounded
                raise Misconfigured(
                    f"protocol {self.name!r}: its curve goes from ({x0}, {y0}) to ({x1}, {y1}): "
                    "give ascending points with slopes between 0 and 1"
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

    def time_us(self, latency_us: float, bandwidth_us: float) -> float:
        """T = L · φ(X / L)."""
        if not self.curve or not bandwidth_us or not latency_us:
            return latency_us + bandwidth_us
        return latency_us * math.exp2(_interpolated(self.curve, math.log2(bandwidth_us / latency_us)))


def _interpolated(curve: tuple[tuple[float, float], ...], at: float) -> float:
    """log2 φ at log2 u: straight between points, flat below the first, slope 1 above the last."""
    if at <= curve[0][0]:
        return curve[0][1]
    index = bisect(curve, (at, math.inf))
    x0, y0 = curve[index - 1]
    if index == len(curve):
        return y0 + at - x0
    x1, y1 = curve[index]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


class Network(Record, frozen=True, kw_only=True):
    """A cluster, and what a library reaches on it.

    Args:
        name: for people.
        cluster: GPUs and levels.
        protocols: of the library; several may serve the same: the fastest is taken, as NCCL does.
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

    def protocols_for(self, operation: str, algorithm: str, kind: str) -> tuple[Protocol, ...]:
        """Those of the highest precedence that serve it.

        Raises:
            Misconfigured: there is none.
        """
        serving = [protocol for protocol in self.protocols if protocol.serves(operation, algorithm, kind)]
        if not serving:
            known = ", ".join(protocol.name for protocol in self.protocols) or "none"
            raise Misconfigured(
                f"network {self.name!r}: no protocol serves {operation} by {algorithm} over {kind}; it has: {known}"
            )
        best = max(protocol.precedence for protocol in serving)
        return tuple(protocol for protocol in serving if protocol.precedence == best)
