"""Define the options of a dispatcher, and the sizes that its mechanisms have in common."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch

from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.errors import Misconfigured

MechanismName = Literal["auto", "torch", "gather", "slabs"]
Overflow = Literal["raise", "drop", "second_round"]
WIRE_DTYPES = (torch.float8_e4m3fn,)


@dataclass(frozen=True, kw_only=True)
class ExpertOptions(CommunicatorOptions):
    """Holds options of a dispatcher, besides those of its communicator; they must be equal on all ranks.

    Args:
        mechanism: `auto` takes the fastest by prediction; else the one that moves all tokens: `torch` (counts, which
            the host waits for, and all_to_all_single), `gather` (all ranks get all tokens), `slabs` (equally many rows
            for each rank).
        beside_us: µs of what the caller computes between the halves of a dispatch and a combine, when it runs alone;
            `auto` goes by it.
        overflow: what happens to choices for which there is no room: `raise` an error, at the next dispatch,
            `check` or `close` at the latest; `drop` them, as if their weights were 0, and count them; send them in a
            `second_round`. Only a `capacity_factor` can leave a choice without room.
        capacity_factor: room for this many times the rows of an even routing; None: for all rows that may come, but
            1.25 in the first round of `slabs` with a `second_round`. With `second_round` it limits what travels at
            once, else the rows of a rank's experts, too.
        wire_dtype: dtype in which tokens travel to their experts, with a scale for each token; None: their own.
            Derivatives and results travel in their own.
        pad_multiple: each expert's rows begin at a multiple of this, as float8 matmuls want them.
        equal_tokens: all ranks dispatch equally many tokens in each call. False: up to `max_tokens` each, and `gather`
            sends blocks of `max_tokens`, since nobody waits to know how many there are.
        zero_tail: also write zeros to the rows past the last offset, which takes as long as so many tokens. Grouped
            matmuls skip these rows; what adds up all rows, such as the derivative of a norm's weight, needs zeros.

    Raises:
        Misconfigured: an option has a value that is not allowed.
    """

    mechanism: MechanismName = "auto"
    beside_us: float = 0.0
    overflow: Overflow = "second_round"
    capacity_factor: float | None = None
    wire_dtype: torch.dtype | None = None
    pad_multiple: int = 1
    equal_tokens: bool = False
    zero_tail: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("mechanism", get_args(MechanismName)), ("overflow", get_args(Overflow))):
            if getattr(self, name) not in allowed:
                raise Misconfigured(f"{name}={getattr(self, name)!r}: allowed are {', '.join(allowed)}")
        if self.capacity_factor is not None and not 0 < self.capacity_factor < math.inf:
            raise Misconfigured(f"capacity_factor={self.capacity_factor}: give a number above 0, or None")
        if self.wire_dtype not in (None, *WIRE_DTYPES):
            raise Misconfigured(f"wire_dtype={self.wire_dtype}: allowed are None, {', '.join(map(str, WIRE_DTYPES))}")
        if not 0 <= self.beside_us < math.inf:
            raise Misconfigured(f"beside_us={self.beside_us}: give 0 µs or more")
        if self.pad_multiple < 1:
            raise Misconfigured(f"pad_multiple={self.pad_multiple}: give 1 or more")
        for name in ("channels", "mailbox_bytes"):
            if getattr(self, name) != getattr(CommunicatorOptions, name):
                raise Misconfigured(f"{name}={getattr(self, name)}: a dispatcher has its own; leave it out")
        super().__post_init__()

    def shared_by_dispatchers(self) -> dict[str, object]:
        """Return the options that must be equal on all ranks, besides those that communicators compare."""
        inherited = CommunicatorOptions.__dataclass_fields__
        return {one.name: getattr(self, one.name) for one in fields(ExpertOptions) if one.name not in inherited}


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
