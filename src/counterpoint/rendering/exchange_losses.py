"""Find the exchanges of tokens in which mechanisms of ours are slower than torch's, and what `auto` took there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from counterpoint.records.measurement import LEGS, Measurement

STOCK = ("torch", "nccl", "symm_mem")
NOISE = 1.03  # a time that is longer by no more than this factor is not one that lost


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeTimes:
    """Holds the µs of a dispatch and a combine by mechanism, alone or beside something; marked ones are left out."""

    what: str  # layer, tokens of a rank, routing
    beside: str  # "" if alone
    us: dict[str, float]
    auto: str | None  # which way `auto` went

    @property
    def best_stock(self) -> str | None:
        """Return the fastest of torch's mechanisms."""
        return min((name for name in self.us if name in STOCK), key=self.us.__getitem__, default=None)

    @property
    def best_own(self) -> str | None:
        """Return the fastest of our mechanisms; `auto` is none of its own."""
        ours = (name for name in self.us if name not in (*STOCK, "auto"))
        return min(ours, key=self.us.__getitem__, default=None)

    @property
    def is_lost(self) -> bool:
        """Return whether the fastest of torch's mechanisms is faster than all of ours, by more than noise."""
        stock, own = self.best_stock, self.best_own
        return stock is not None and own is not None and self.us[own] > NOISE * self.us[stock]

    @property
    def auto_lost(self) -> bool:
        """Return whether `auto` took one of our mechanisms where `torch` was faster, by more than noise."""
        if self.auto is None or self.auto in STOCK or "torch" not in self.us:
            return False
        return self.us.get(self.auto, self.us.get("auto", 0.0)) > NOISE * self.us["torch"]


def exchange_times(measurement: Measurement) -> list[ExchangeTimes]:
    """Return the times of every exchange whose two legs were measured: alone, then beside each work."""
    times: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    autos: dict[str, str | None] = {}
    for leg, what, beside, mechanism, us in _legs(measurement):
        times.setdefault((what, beside), {}).setdefault(mechanism, {})[leg] = us
    for block in measurement.blocks:
        leg, _, what = block.what.partition(" ")
        if leg in LEGS and block.mechanism == "auto":
            autos[what] = block.path
    return [
        ExchangeTimes(
            what=what,
            beside=beside,
            us={name: sum(legs.values()) for name, legs in of.items() if len(legs) == len(LEGS)},
            auto=autos.get(what),
        )
        for (what, beside), of in sorted(times.items(), key=lambda item: bool(item[0][1]))
    ]


def _legs(measurement: Measurement) -> Iterator[tuple[str, str, str, str, float]]:
    """Yield leg, exchange, what ran beside it, mechanism and µs of what is not marked."""
    for block in measurement.blocks:
        leg, _, what = block.what.partition(" ")
        if leg in LEGS and block.marked is None:
            yield leg, what, "", block.mechanism, block.time.us
    for row in measurement.rows:
        leg, _, what = row.collective.partition(" ")
        if leg in LEGS and row.marked is None:
            yield leg, what, row.workload.partition(" ")[0], row.mechanism, row.together.us
