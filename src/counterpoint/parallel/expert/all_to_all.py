"""Move tokens by torch's all_to_all_single, after exchanging counts on the host: mechanism `torch`, the reference.

Each rank sends one row for each choice, in the order of experts, and gets equally many rows back, which it multiplies
by their weights and adds up in the order of choices. This works between any ranks, but not in a captured CUDA graph.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
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
from counterpoint.parallel.expert.overflow import no_room
from counterpoint.parallel.expert.permute import Assignment, assign, combine, narrowed, permute, weight_grads
from counterpoint.parallel.expert.token_mechanism import ExpertLayout, Halves, TokenMechanism, too_many
from counterpoint.parallel.options import ExpertOptions
from counterpoint.parallel.report import RoutedPath

_DYING_S = 1.0  # seconds in which a process may still end after its connections, whose end torch reports


@dataclass(frozen=True)
class _Route:
    """Holds to which ranks this rank's token rows go, and to which local experts arriving rows go."""

    weights: Tensor
    sending: Assignment  # assigns choices to the experts of all ranks
    sent: list[int]  # number of rows sent to each rank
    received: list[int]  # number of rows received from each rank
    arriving: Assignment  # assigns arriving rows, each with one choice, to this rank's experts
    dtype: torch.dtype


class AllToAll(TokenMechanism):
    """Moves tokens by torch's all_to_all_single; all ranks construct it together."""

    name: RoutedPath = "torch"

    def __init__(self, group: Any, layout: ExpertLayout, options: ExpertOptions) -> None:
        self._group, self._layout, self._options = group, layout, options
        cards = gather_values(group, ProcessCard.of_this_process())
        self._watchdog: Watchdog | None = None
        if why_not(cards) is None:  # otherwise some ranks' processes are invisible from here
            pids = [card.pid for card in cards]
            timeout_s = (options.communicator or CommunicatorOptions()).timeout_s
            self._watchdog = Watchdog((), rank=layout.rank, pids=pids, timeout_s=timeout_s)
            weakref.finalize(self, self._watchdog.close)
        self._dropped = 0

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> Halves[tuple[Tensor, Tensor, _Route]]:
        """Exchange row counts, wait for them on the host, then send each token to the ranks of its experts."""
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise Unsupported("mechanism 'torch' in a graph capture: the host waits for counts; take 'gather'")
        layout, narrow = self._layout, self._options.wire_dtype
        sending = assign(ids, first_expert=0, num_experts=layout.experts, capacity=ids.numel())
        chosen = self._counts(sending, len(x))
        block = layout.block(len(x), self._options)
        self._check_room(chosen, block)
        sent = [sum(rows) for rows in chosen[layout.rank]]
        counts = [rows[layout.rank] for rows in chosen]
        order = torch.arange(layout.local_experts, dtype=ids.dtype, device="cpu").repeat(layout.world_size)
        experts = order.repeat_interleave(torch.tensor([count for row in counts for count in row], device="cpu"))
        needed = layout.padded(len(experts), self._options.pad_multiple)
        arriving = assign(
            experts[:, None].to(ids.device),
            first_expert=0,
            num_experts=layout.local_experts,
            capacity=min(needed, layout.capacity(block, self._options)),
            pad_multiple=self._options.pad_multiple,
        )
        self._dropped += int(arriving.missing)
        route = _Route(weights.float(), sending, sent, [sum(rows) for rows in counts], arriving, x.dtype)
        rows = permute(x, sending, zero_tail=False)[: sum(sent)]
        calls = [self._exchange(part, sent, route.received) for part in (narrowed(rows, narrow) if narrow else (rows,))]
        yield
        received, *scales = [self._waited(*call) for call in calls]
        return self._permuted(received, route, *scales), arriving.offsets, route

    def combine(self, rows: Tensor, route: _Route, *, weighted: bool) -> Halves[tuple[Tensor, Tensor | None]]:
        """Send each expert's output row back to the rank of its token, and add up the rows of each token."""
        call = self._exchange(combine(rows, route.arriving), route.received, route.sent)  # each row has one choice
        del rows  # frees their memory while they travel
        yield
        back, capacity = self._waited(*call), route.sending.capacity
        if len(back) < capacity:
            back = torch.cat([back, back.new_zeros(capacity - len(back), back.shape[1])])
        sums = combine(back, route.sending, weights=route.weights if weighted else None)
        return sums, back if weighted else None

    def spread(self, grads: Tensor, route: _Route, saved: Tensor | None) -> Halves[tuple[Tensor, Any]]:
        """Send each row's derivative times its weight to the rank of its expert; derivatives of weights stay local."""
        rows = permute(grads, route.sending, weights=route.weights, zero_tail=False)[: sum(route.sent)]
        call = self._exchange(rows, route.sent, route.received)
        yield
        weights = None if saved is None else self._weights_grad(saved, grads, route)
        if weights is not None:
            next(weights)
        return self._permuted(self._waited(*call), route), weights

    @staticmethod
    def _weights_grad(rows: Tensor, grads: Tensor, route: _Route) -> Halves[Tensor]:
        yield
        return weight_grads(rows, grads, route.sending)

    def dropped(self) -> int:
        """Return how many rows have exceeded the capacity of this rank's experts so far, counted on the host."""
        return self._dropped

    def _counts(self, sending: Assignment, tokens: int) -> list[list[list[int]]]:
        """Exchange row counts, `[source rank][rank][expert]`; raise on all ranks if one has too many tokens."""
        layout = self._layout
        mine = sending.offsets.diff(prepend=sending.offsets.new_zeros(1)).view(layout.world_size, -1)
        if tokens > layout.max_tokens:
            mine.fill_(-tokens)  # negative, so no count: an error mark
        everyone = mine.new_empty(layout.world_size, *mine.shape)
        with self._named():
            torch_function("all_gather")(everyone.view(-1), mine.view(-1), group=self._group)
        chosen: list[list[list[int]]] = everyone.tolist()
        for rank, counts in enumerate(chosen):
            if counts[0][0] < 0:
                raise too_many(rank, -counts[0][0], layout)
        return chosen

    def _permuted(self, rows: Tensor, route: _Route, scales: Tensor | None = None) -> Tensor:
        """Return arrived rows sorted by expert."""
        out = rows.new_empty(route.arriving.capacity, rows.shape[1], dtype=route.dtype)
        return permute(rows, route.arriving, weights=scales, out=out, zero_tail=self._options.zero_tail)

    def _check_room(self, chosen: list[list[list[int]]], block: int) -> None:
        """Raise on all ranks if the rows for any rank's experts exceed their capacity and `overflow` is `raise`."""
        pad, capacity = self._options.pad_multiple, self._layout.capacity(block, self._options)
        rows = [
            sum(-(-sum(counts) // pad) * pad for counts in zip(*(source[rank] for source in chosen), strict=True))
            for rank in range(self._layout.world_size)
        ]
        if max(rows) > capacity and self._options.overflow == "raise":
            raise no_room(max(rows) - capacity, self._options)

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> tuple[Tensor, Any]:
        """Start to send `sent[r]` rows to each rank r and receive `received[r]`; return the output and torch's work."""
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
        return out, work

    def _waited(self, rows: Tensor, work: Any) -> Tensor:
        """Wait for the exchange `work`, and return the received `rows`."""
        with self._named():
            work.wait()
        return rows

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Turn torch's errors in the `with` block into a `PeerTimeout` that names the ranks that died, if any did."""
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
