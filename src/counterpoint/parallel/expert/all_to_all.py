"""Move tokens by torch's all_to_all_single, whose sizes the host waits for: the reference, and what is left to torch.

Each rank sends a row for each choice, in the order of experts, and gets as many back, which it weighs and adds up in
the order of choices. It works between any ranks, and cannot be captured in a graph.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.collectives.host.group import gather_values, torch_function
from counterpoint.collectives.host.shared_memory import ProcessCard, why_not
from counterpoint.collectives.host.watchdog import Watchdog
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.collectives.submit.tensors import flat_bytes
from counterpoint.errors import PeerTimeout, Unsupported
from counterpoint.parallel.expert.options import ExpertLayout, no_room, too_many
from counterpoint.parallel.expert.permute import Assignment, assign, combine, permute, weight_grads
from counterpoint.parallel.expert.wire import narrowed
from counterpoint.parallel.options import ExpertOptions
from counterpoint.parallel.report import RoutedPath

_DYING_S = 1.0  # from the end of a process's connections, of which torch hears, to its own


@dataclass
class _Exchange:
    """Holds rows under way from all ranks, and what has to be waited for."""

    rows: Tensor
    work: Any
    named: Callable[[], AbstractContextManager[None]]

    def wait(self) -> Tensor:
        with self.named():
            self.work.wait()
        return self.rows


@dataclass
class _Route:
    """Holds where rows go: at home by expert, at the experts by expert, rank, token and choice."""

    weights: Tensor
    home: Assignment
    sent: list[int]  # rows for each rank
    received: list[int]  # rows of each rank
    there: Assignment  # tokens are the rows that come, in the order in which they do
    dtype: torch.dtype
    arriving: list[_Exchange]  # rows, and their scales if they are narrow


@dataclass
class _Pending:
    route: _Route
    arriving: _Exchange
    weighted: bool = False
    grads: Tensor | None = None


class AllToAll:
    """Moves tokens by torch's all_to_all_single; all ranks make it together. See `TokenMechanism`."""

    name: RoutedPath = "torch"

    def __init__(self, group: Any, layout: ExpertLayout, options: ExpertOptions) -> None:
        self._group, self._layout, self._options = group, layout, options
        cards = gather_values(group, ProcessCard.of_this_process())
        self._watchdog: Watchdog | None = None
        if why_not(cards) is None:  # else there are processes that this one cannot see
            pids = [card.pid for card in cards]
            timeout_s = (options.communicator or CommunicatorOptions()).timeout_s
            self._watchdog = Watchdog((), rank=layout.rank, pids=pids, timeout_s=timeout_s)
            weakref.finalize(self, self._watchdog.close)
        self._dropped = 0

    def dispatch_start(self, x: Tensor, ids: Tensor, weights: Tensor) -> _Route:
        """Exchange counts, let the host wait for them, and begin to send a row for each choice."""
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise Unsupported("mechanism 'torch' in a graph capture: the host waits for counts; take 'gather'")
        layout = self._layout
        weights = weights.float()
        home = assign(ids, first_expert=0, num_experts=layout.experts, capacity=ids.numel())
        mine = home.offsets.diff(prepend=home.offsets.new_zeros(1)).view(layout.world_size, -1)
        if len(x) > layout.max_tokens:
            mine.fill_(-len(x))  # no count: all ranks raise
        everyone = mine.new_empty(layout.world_size, *mine.shape)
        with self._named():
            torch_function("all_gather")(everyone.view(-1), mine.view(-1), group=self._group)
        chosen = everyone.tolist()  # by rank, the rows for each rank's experts
        for rank, counts in enumerate(chosen):
            if counts[0][0] < 0:
                raise too_many(rank, -counts[0][0], layout)
        block = layout.block(len(x), self._options)
        self._check_room(chosen, block)
        sent = [sum(rows) for rows in chosen[layout.rank]]
        counts = [rows[layout.rank] for rows in chosen]
        received = [sum(rows) for rows in counts]
        order = torch.arange(layout.local_experts, dtype=ids.dtype, device="cpu").repeat(layout.world_size)
        experts = order.repeat_interleave(torch.tensor([count for row in counts for count in row], device="cpu"))
        needed = layout.padded(len(experts), self._options.pad_multiple)
        there = assign(
            experts[:, None].to(ids.device),
            first_expert=0,
            num_experts=layout.local_experts,
            capacity=min(needed, layout.capacity(block, self._options)),
            pad_multiple=self._options.pad_multiple,
        )
        self._dropped += int(there.missing)
        rows, narrow = permute(x, home, zero_tail=False)[: sum(sent)], self._options.wire_dtype
        leaving = (rows,) if narrow is None else narrowed(rows, narrow)
        arriving = [self._exchange(part, sent, received) for part in leaving]
        return _Route(weights, home, sent, received, there, x.dtype, arriving)

    def dispatch_finish(self, route: _Route) -> tuple[Tensor, Tensor]:
        """Put the rows that came in the order of experts."""
        rows, *scales = [part.wait() for part in route.arriving]
        route.arriving = []
        return self._permuted(rows, route, *scales), route.there.offsets

    def combine_start(self, rows: Tensor, route: _Route, *, weighted: bool) -> _Pending:
        """Begin to send each row back to where it came from."""
        back = combine(rows, route.there)  # one choice each: a permutation
        return _Pending(route, self._exchange(back, route.received, route.sent), weighted)

    def combine_finish(self, pending: _Pending) -> tuple[Tensor, Tensor | None]:
        """Add up the rows of each token."""
        route = pending.route
        rows = self._whole(pending.arriving.wait(), route.home)
        sums = combine(rows, route.home, weights=route.weights if pending.weighted else None)
        return sums, rows if pending.weighted else None

    def spread_start(self, grads: Tensor, route: _Route) -> _Pending:
        """Begin to send the derivative of each row, times its weight."""
        rows = permute(grads, route.home, weights=route.weights, zero_tail=False)[: sum(route.sent)]
        return _Pending(route, self._exchange(rows, route.sent, route.received), grads=grads)

    def spread_finish(self, pending: _Pending, kept: Tensor | None) -> tuple[Tensor, Any]:
        """Put what came in the order of experts; what is needed for the weights is at home."""
        rows = self._permuted(pending.arriving.wait(), pending.route)
        return rows, None if kept is None else (kept, pending)

    def weight_grads_finish(self, pending: tuple[Tensor, _Pending]) -> Tensor:
        """Multiply what came back by the derivatives of the sums."""
        rows, spread = pending
        assert spread.grads is not None
        return weight_grads(rows, spread.grads, spread.route.home)

    def dropped(self) -> int:
        """Return how many rows had no room so far."""
        return self._dropped

    def check(self) -> None:
        """Do nothing: torch's own watchdog does it."""

    def close(self) -> None:
        """Do nothing: the process group is not this object's."""

    def _permuted(self, rows: Tensor, route: _Route, scales: Tensor | None = None) -> Tensor:
        """Return rows that came in the order of experts."""
        out = rows.new_empty(route.there.capacity, rows.shape[1], dtype=route.dtype)
        return permute(rows, route.there, weights=scales, out=out, zero_tail=self._options.zero_tail)

    def _check_room(self, chosen: list[list[list[int]]], block: int) -> None:
        """Raise, on all ranks together, if the experts of one have not enough room and that is asked for."""
        pad, capacity = self._options.pad_multiple, self._layout.capacity(block, self._options)
        rows = [
            sum(-(-sum(counts) // pad) * pad for counts in zip(*(source[rank] for source in chosen), strict=True))
            for rank in range(self._layout.world_size)
        ]
        if max(rows) > capacity and self._options.overflow == "raise":
            raise no_room(max(rows) - capacity, self._options)

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> _Exchange:
        out = rows.new_empty(sum(received), rows.shape[1])
        width = rows.shape[1] * rows.element_size()
        with self._named():
            work = dist.all_to_all_single(
                flat_bytes(out),
                flat_bytes(rows.contiguous()),
                [count * width for count in received],
                [count * width for count in sent],
                group=self._group,
                async_op=True,
            )
        return _Exchange(out, work, self._named)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the ranks that died, where a call of torch fails, whose error names none."""
        try:
            yield
        except RuntimeError as error:
            end = time.monotonic() + _DYING_S
            dead: tuple[int, ...] = ()
            while self._watchdog and not (dead := self._watchdog.dead_ranks()) and time.monotonic() < end:
                time.sleep(0.01)
            if not dead:
                raise
            names = ", ".join(f"rank {rank}" for rank in dead)
            raise PeerTimeout(f"{names} died; torch says: {error}", ranks=dead) from error

    @staticmethod
    def _whole(rows: Tensor, assignment: Assignment) -> Tensor:
        """Return rows as long as an assignment has slots."""
        missing = assignment.capacity - len(rows)
        return rows if not missing else torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])
