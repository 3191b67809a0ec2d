"""Define the sizes that the mechanisms of a dispatcher have in common."""

from __future__ import annotations

import math
from dataclasses import dataclass

from counterpoint.errors import Misconfigured
from counterpoint.parallel.options import ExpertOptions


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """Describes which experts are where, and the largest call.

    Args:
        rank: of this process.
        world_size: number of ranks.
        experts: of all ranks, divided evenly: those of rank r begin at `r * experts / world_size`.
        top_k: choices of a token.
        max_tokens: most tokens that a rank dispatches at once.
        hidden: elements of a token.

    Raises:
        Misconfigured: a size is not allowed.
    """

    rank: int
    world_size: int
    experts: int
    top_k: int
    max_tokens: int
    hidden: int

    def __post_init__(self) -> None:
        for name in ("experts", "top_k", "max_tokens", "hidden"):
            if getattr(self, name) < 1:
                raise Misconfigured(f"{name}={getattr(self, name)}: give 1 or more")
        if self.top_k > self.experts:
            raise Misconfigured(f"top_k={self.top_k} of {self.experts} experts: give at most as many")
        if self.experts % self.world_size:
            raise Misconfigured(f"{self.experts} experts on {self.world_size} ranks: give a multiple")

    @property
    def local_experts(self) -> int:
        """Return the number of experts of a rank."""
        return self.experts // self.world_size

    @property
    def first_expert(self) -> int:
        """Return the number of this rank's first expert."""
        return self.rank * self.local_experts

    def block(self, tokens: int, options: ExpertOptions) -> int:
        """Return how many tokens of each rank there may be in a call in which this one has so many."""
        return max(tokens, 1) if options.equal_tokens else self.max_tokens

    def capacity(self, tokens: int, options: ExpertOptions) -> int:
        """Return how many rows this rank's experts have room for, if each rank dispatches `tokens` at most."""
        rows = self.world_size * tokens * self.top_k
        if options.capacity_factor is not None and options.overflow != "second_round":
            rows = min(rows, math.ceil(options.capacity_factor * tokens * self.top_k))
        return self.padded(rows, options.pad_multiple)

    def padded(self, rows: int, pad_multiple: int) -> int:
        """Return the room for so many rows, where each expert's begin at a multiple of `pad_multiple`."""
        return -(-(rows + self.local_experts * (pad_multiple - 1)) // pad_multiple) * pad_multiple


def too_many(rank: int, tokens: int, layout: ExpertLayout) -> Misconfigured:
    """Return the error of a call in which a rank has more tokens than were agreed on."""
    return Misconfigured(
        f"rank {rank} dispatches {tokens} tokens at once, more than max_tokens={layout.max_tokens}: give a larger one "
        "(without one the first call of a layer decides, and its parts have a part of it each)"
    )


def no_room(rows: int, options: ExpertOptions) -> Misconfigured:
    """Return the error of a call in which the experts of a rank had not enough room."""
    return Misconfigured(
        f"no room for {rows} rows of a rank's experts with capacity_factor={options.capacity_factor}: "
        "give a larger one, or overflow='drop'"
    )
