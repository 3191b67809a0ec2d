"""Define the layout of experts over ranks, and the interface of mechanisms that move tokens to their experts."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias, TypeVar

from torch import Tensor

from counterpoint.collectives.communicator import Communicator
from counterpoint.errors import Misconfigured
from counterpoint.parallel.call_memory import CallMemory
from counterpoint.parallel.expert.overflow import RoomCheck
from counterpoint.parallel.group import RankGroup
from counterpoint.parallel.options import ExpertOptions
from counterpoint.parallel.report import RoutedPath

T = TypeVar("T")
Halves: TypeAlias = Generator[None, None, T]  # an operation in two halves: the first ends with `yield`


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """Says which rank has which experts, and how many tokens the largest call may have.

    Args:
        rank: number of this rank.
        world_size: number of ranks.
        experts: number of experts of all ranks, divided evenly: rank r's experts begin at `r * experts / world_size`.
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

    @cached_property
    def local_experts(self) -> int:
        """Return the number of experts on each rank."""
        return self.experts // self.world_size

    @cached_property
    def first_expert(self) -> int:
        """Return the index, among all experts, of this rank's first expert."""
        return self.rank * self.local_experts

    def block(self, tokens: int, options: ExpertOptions) -> int:
        """Return an upper bound of any rank's tokens in a call in which this rank has `tokens`."""
        return max(tokens, 1) if options.equal_tokens else self.max_tokens

    def capacity(self, tokens: int, options: ExpertOptions) -> int:
        """Return the number of rows for which this rank's experts have room, if each rank has at most `tokens`."""
        rows = self.world_size * tokens * self.top_k
        if options.capacity_factor is not None and options.overflow != "second_round":
            rows = min(rows, math.ceil(options.capacity_factor * tokens * self.top_k))
        return self.padded(rows, options.pad_multiple)

    def padded(self, rows: int, pad_multiple: int) -> int:
        """Return how many rows suffice for `rows` rows if each expert's are padded to a multiple of `pad_multiple`."""
        return -(-(rows + self.local_experts * (pad_multiple - 1)) // pad_multiple) * pad_multiple


def too_many(rank: int, tokens: int, layout: ExpertLayout) -> Misconfigured:
    """Return the error for a call in which `rank` has more tokens than `max_tokens`."""
    return Misconfigured(
        f"rank {rank} dispatches {tokens} tokens at once, more than max_tokens={layout.max_tokens}: give a larger one "
        "(without one the first call of a layer decides, and its parts have a part of it each)"
    )


class TokenMechanism(Protocol):
    """Moves tokens to their experts and back, by one mechanism; works on plain tensors, without autograd.

    Every operation is a generator: up to its `yield` it begins the communication; `finished` runs the rest, which waits
    for the communication: on a GPU the current stream waits, not the host. Second halves run in the order of the first
    halves of their kind, and several dispatches and combines may be under way. All ranks make the same calls in the
    same order.

    A token's sum is made in float32: `weight * row` of its choices in a fixed order, rounded once if they come from
    one rank.
    """

    name: RoutedPath

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> Halves[tuple[Tensor, Tensor, Any]]:
        """Send tokens `[tokens, hidden]` to the experts `ids`, `[tokens, top_k]`; return rows, offsets and the route.

        Tokens are contiguous; ids are int32 or int64, -1 is none, and `weights`, `[tokens, top_k]`, of any floating
        dtype, both of any strides. If a rank has more than `max_tokens`, all ranks get an error.

        Rows are `[capacity, hidden]`, by local expert, then by rank, token and choice. Offsets are int32
        `[local_experts]`, where each expert's rows end; rows past the last one are not used. The route is all that the
        other operations have to know, and nothing large, since it is held until derivatives are made.
        """

    def combine(self, rows: Tensor, route: Any, *, weighted: bool) -> Halves[tuple[Tensor, Tensor | None]]:
        """Send the outputs of experts back; return each token's sum, `[tokens, hidden]`, in the dtype of the rows.

        The second value is what `spread` needs for the derivative of the weights, if the combine is weighted. An
        unweighted combine is the derivative of a dispatch.
        """

    def spread(self, grads: Tensor, route: Any, saved: Tensor | None) -> Halves[tuple[Tensor, Halves[Tensor] | None]]:
        """Send the sums' derivatives, `[tokens, hidden]`, to the rows' ranks, as the derivative of a weighted combine.

        Return the derivative of the rows `[capacity, hidden]`, each times its weight, and, with the second value of
        `combine`, the derivative of the weights, float32 `[tokens, top_k]`, whose first half has run.
        """

    def dropped(self) -> int:
        """Return how many expert choices have exceeded this rank's capacity so far, after waiting for the device."""

    def check(self) -> None:
        """Raise an error if communication has failed or choices exceeded capacity; all ranks call this."""
        return  # nothing to raise: torch has its own watchdog

    def close(self) -> None:
        """Raise an error if choices exceeded capacity, unless it was raised before. All ranks call this."""
        return  # nothing to close: who made the process group closes it


def finished(operation: Halves[T]) -> T:
    """Run the second half (after `yield`) of an operation, and return the operation's result."""
    try:
        next(operation)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("an operation has two halves")


class OwnCommunication:
    """Holds a mechanism's communicator, and counts expert choices that find no room.

    Args:
        ranks: the ranks, with an open communicator; the dispatcher, not this object, leaves it.
        layout: which rank has which experts.
        options: options of the dispatcher.
    """

    def __init__(self, ranks: RankGroup, layout: ExpertLayout, options: ExpertOptions) -> None:
        self._ranks, self._layout, self._options = ranks, layout, options
        self._overflow = RoomCheck(self._communicator.device, layout.world_size, options)
        self.dropped = self._overflow.total

    @property
    def _communicator(self) -> Communicator:
        communicator: Communicator = self._ranks.communicator
        return communicator

    @property
    def _memory(self) -> CallMemory:
        return self._ranks.memory

    def _admit(self, tokens: int) -> None:
        """Raise if this rank has more tokens than `max_tokens`; peers then raise the same error in their calls."""
        if tokens > self._layout.max_tokens:
            raise self._communicator.give_up(too_many(self._layout.rank, tokens, self._layout))

    def check(self) -> None:
        """Raise as `TokenMechanism.check` does; the error of exceeded capacity is raised once."""
        self._ranks.check()
        self._overflow.check_all()

    def close(self) -> None:
        """Raise as `TokenMechanism.close` does."""
        self._overflow.check_all()
