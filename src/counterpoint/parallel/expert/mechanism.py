"""Define what a mechanism does that carries tokens to their experts, and what those that bring a communicator share."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from counterpoint.collectives.communicator import Communicator
from counterpoint.parallel.call_memory import CallMemory
from counterpoint.parallel.expert.options import ExpertLayout, no_room, too_many
from counterpoint.parallel.group import RankGroup
from counterpoint.parallel.options import ExpertOptions
from counterpoint.parallel.report import RoutedPath


class TokenMechanism(Protocol):
    """Represents one way to move tokens; it works on plain tensors and knows nothing of autograd.

    Every operation has two halves. The first begins the communication, the second waits for it: on a GPU the current
    stream waits, not the host. Second halves come in the order of the first ones of their kind, not always at once:
    several dispatches and combines may be under way. All ranks make the same calls in the same order.

    A token's sum is made in float32: `weight * row` of its choices in a fixed order, rounded once if they come from
    one rank.
    """

    name: RoutedPath

    def dispatch_start(self, x: Tensor, ids: Tensor, weights: Tensor) -> Any:
        """Begin to send tokens `[tokens, hidden]` to the experts `ids`, `[tokens, top_k]`, of which -1 is none.

        Tokens are contiguous; ids are int32 or int64, and `weights`, `[tokens, top_k]`, of any floating dtype, both
        of any strides; sums are made with them in float32. Return the route: all that later halves have to know, and
        nothing large once the dispatch has ended, since it is kept until derivatives are made. If a rank has more than
        `max_tokens`, all ranks get an error.
        """

    def dispatch_finish(self, route: Any) -> tuple[Tensor, Tensor]:
        """Return rows and offsets.

        Rows are `[capacity, hidden]`, by local expert, then by rank, token and choice. Offsets are int32
        `[local_experts]`, where each expert's rows end; those past the last are not used.
        """

    def combine_start(self, rows: Tensor, route: Any, *, weighted: bool) -> Any:
        """Begin to send home what experts made of rows, of which each token's are added up; return what is pending.

        Not `weighted`, it is the derivative of a dispatch.
        """

    def combine_finish(self, pending: Any) -> tuple[Tensor, Tensor | None]:
        """Return the sums `[tokens, hidden]`, in the dtype of rows.

        The second value is what `spread_finish` needs for the derivative of the weights, if the combine was weighted.
        """

    def spread_start(self, grads: Tensor, route: Any) -> Any:
        """Begin to send the derivatives of the sums, `[tokens, hidden]`, to the rows; return what is pending."""

    def spread_finish(self, pending: Any, kept: Tensor | None) -> tuple[Tensor, Any]:
        """Return the derivative of rows `[capacity, hidden]`, each times its weight, and what is pending of weights.

        With `kept`, which `combine_finish` returned, the derivative of the weights begins to go home; else None.
        """

    def weight_grads_finish(self, pending: Any) -> Tensor:
        """Return the derivative of the weights, float32 `[tokens, top_k]`."""

    def dropped(self) -> int:
        """Return how many choices this rank found no room for so far; this waits for the device."""

    def check(self) -> None:
        """Raise the error that ended its communication, or of choices without room; all ranks call it."""

    def close(self) -> None:
        """Give back what it holds; all ranks call it."""


class OwnCommunication:
    """Holds the ranks of a mechanism, whose communicator it uses, and counts choices without room.

    Args:
        ranks: whose communicator is open; its user leaves it after `close`.
        layout: which experts are where.
        options: of the dispatcher.
    """

    def __init__(self, ranks: RankGroup, layout: ExpertLayout, options: ExpertOptions) -> None:
        self._ranks, self._layout, self._options = ranks, layout, options
        self._overflow = Overflow(self._communicator.device, layout, options)

    @property
    def _communicator(self) -> Communicator:
        communicator: Communicator = self._ranks.communicator
        return communicator

    @property
    def _memory(self) -> CallMemory:
        return self._ranks.memory

    def _admit(self, tokens: int) -> None:
        """Raise if this rank has more tokens than were agreed on: its peers hear of that in their calls."""
        if tokens > self._layout.max_tokens:
            raise self._communicator.give_up(too_many(self._layout.rank, tokens, self._layout))

    def dropped(self) -> int:
        """Return how many choices had no room so far; this waits for the device."""
        return self._overflow.total()

    def check(self) -> None:
        """Raise the error that ended the communicator, or of a call without room, if that was not told yet."""
        self._ranks.check()
        self._overflow.check_all()

    def close(self) -> None:
        """Raise if a call had no room, that was not allowed, and not told yet."""
        self._overflow.check_all()


class Overflow:
    """Counts choices without room on the device, and tells the host of those of all ranks, without a wait to know."""

    def __init__(self, device: torch.device, layout: ExpertLayout, options: ExpertOptions) -> None:
        on_gpu = device.type == "cuda"
        self._options = options
        self._total = torch.zeros(1, dtype=torch.int64, device=device)
        self._most = torch.zeros(layout.world_size, dtype=torch.int64, device=device)  # of each rank, since it was told
        self._copy = torch.zeros_like(self._most, device="cpu", pin_memory=True) if on_gpu else self._most
        self._copied = torch.cuda.Event() if on_gpu else None

    def add(self, choices: Tensor) -> None:
        """Count choices of this rank."""
        self._total += choices

    def note(self, choices: Tensor) -> None:
        """Note what a later check is to raise, given the choices of each rank that had no room in a call."""
        if self._options.overflow != "raise":
            return
        torch.maximum(self._most, choices, out=self._most)
        # the host cannot wait for a graph
        if self._copied is not None and not torch.cuda.is_current_stream_capturing():
            self._copy.copy_(self._most, non_blocking=True)
            self._copied.record()

    def check(self) -> None:
        """Raise if a call outside of graphs had not enough room: on all ranks, as the host waits for the last one."""
        if self._copied is not None and self._options.overflow == "raise":
            self._copied.synchronize()
        self._tell(self._copy)

    def check_all(self) -> None:
        """Raise if any call had not enough room, with those in graphs, whose replays this waits for."""
        self._tell(self._most)

    def total(self) -> int:
        """Return how many choices of this rank had no room; this waits for the device."""
        return int(self._total)

    def _tell(self, noted: Tensor) -> None:
        """Raise if something is noted, and forget it: it is told once."""
        if self._options.overflow == "raise" and (most := int(noted.max())):
            self._most.zero_()
            self._copy.zero_()
            raise no_room(most, self._options)
