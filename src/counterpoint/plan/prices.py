"""Collectives of a mesh at their price, each asked for once."""

from __future__ import annotations

from counterpoint.plan.collective_cost import CollectiveEstimate, estimate
from counterpoint.plan.exchanges import Exchange
from counterpoint.plan.groups import Axis, Group, axes
from counterpoint.plan.network import Network
from counterpoint.plan.parallel import Parallel

__all__ = ["MeshPrices", "Prices"]


class Prices:
    """What collectives take on one network. Keep it for a search: most of its jobs ask for the same ones."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._known: dict[tuple[str, float, Group, float], CollectiveEstimate] = {}

    def find(self, operation: str, num_bytes: float, group: Group, active: float = 1.0) -> CollectiveEstimate:
        """As `estimate`; raises Misconfigured if the network has no room for the group."""
        key = (operation, num_bytes, group, active)
        if key not in self._known:
            self._known[key] = estimate(operation, num_bytes, group, self.network, active=active)
        return self._known[key]

    @property
    def asked(self) -> tuple[tuple[Group, CollectiveEstimate], ...]:
        """Every collective that was asked for, with its group."""
        return tuple((group, found) for (_, _, group, _), found in self._known.items())

    def on(self, parallel: Parallel) -> MeshPrices:
        """For the groups of one mesh."""
        return MeshPrices(self, parallel)


class MeshPrices:
    """Prices by axis of a mesh."""

    def __init__(self, prices: Prices, parallel: Parallel) -> None:
        self._prices = prices
        self.groups: dict[Axis, Group] = axes(parallel)
        # neighbours on a line, not the whole axis: what a stage sends goes to the next one, one after another
        self.groups["pp"] = Group(ranks=min(parallel.pp, 2), stride=self.groups["pp"].stride)
        self._active: dict[Axis, float] = {"pp": 1.0 / parallel.pp}

    def find(self, axis: Axis, operation: str, num_bytes: float) -> CollectiveEstimate:
        """One collective of this axis."""
        return self._prices.find(operation, num_bytes, self.groups[axis], self._active.get(axis, 1.0))

    def between(self, ranks: int, stride: int, operation: str, num_bytes: float) -> float:
        """µs of one collective of any other group."""
        return self._prices.find(operation, num_bytes, Group(ranks=ranks, stride=stride)).us

    def us(self, exchange: Exchange) -> float:
        """All of its collectives."""
        return exchange.count * self.find(exchange.axis, exchange.operation, exchange.num_bytes).us
