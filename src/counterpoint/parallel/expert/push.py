"""Move tokens by copies of exact sizes: each rank pushes the rows that it has for every other one, and no more.

A rank knows on its device how many rows it has for each other rank; `Communicator.all_to_all_vdev` takes the sizes from
there, while the caller's stream already waits for what comes. Rows go to a place of their own for each source, with
room for all that may come, and back to where they lie at home, whose first row the tables tell. So this mechanism sends
the least of all and no choice lacks room, but a graph cannot hold it, and it takes most memory: `world_size` times the
rows of a rank's choices while tokens travel to their experts.

A `capacity_factor` with `overflow` of `raise` or `drop` makes room for so many rows only, as in `slabs.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoint.collectives.work import Work
from counterpoint.errors import Misconfigured
from counterpoint.parallel.backend.report import RoutedPath
from counterpoint.parallel.expert.packing import FIRST, moved
from counterpoint.parallel.expert.permute import Assignment, permute
from counterpoint.parallel.expert.slabs import BACK, OUT, Leaving, Route, SlabRound, Slabs


class Push(Slabs):
    """Moves tokens by copies of exact sizes. See `TokenMechanism`."""

    name: RoutedPath = "push"
    gaps = False

    def dispatch_start(self, x: Tensor, ids: Tensor, weights: Tensor) -> Route:
        """Begin to send tables, and rows when the device has counted them; raise if an earlier call had no room."""
        if self._memory.is_capturing():
            raise Misconfigured(
                "mechanism 'push' in a graph capture: a thread of the host issues its copies, whose sizes change with "
                "every replay; take 'gather' or 'slabs' there"
            )
        return super().dispatch_start(x, ids, weights)

    def _sizes(self, block: int) -> tuple[int, int]:
        first, room = super()._sizes(block)
        return (room, room) if self._options.overflow == "second_round" else (first, room)

    def _home(self, route: Route) -> Assignment:
        """Return where a token's rows are among those that come home: where they were when they left."""
        return moved(route.packing.home, route.block * self._layout.top_k)

    def _leaving(self, route: Route, one: SlabRound) -> Leaving:
        packing = route.packing
        return Leaving(moved(packing.others, packing.others.numel()), moved(packing.own, one.rows))

    def _exchange(self, received: Tensor, packed: Tensor, route: Route, one: SlabRound) -> Work:
        """Begin to send all rows; those without room stay behind."""
        packing, me = route.packing, self._layout.rank
        counts = packing.counts.clamp(max=one.rows)
        blocks = torch.stack([packing.starts, torch.full_like(counts, me * one.rows), counts], dim=1).long()
        return self._communicator.all_to_all_vdev(received, packed, blocks, channel=OUT)

    def _return(self, rows: Tensor, route: Route, one: SlabRound) -> tuple[Tensor, Work, Tensor]:
        """Put rows together by rank, and begin to send them to where they lie at home."""
        incoming, me = route.known(), self._layout.rank
        sources, counts = incoming.there.sources.long(), incoming.counts
        ranks, places = sources.clamp(min=0) // route.room, sources.clamp(min=0) % route.room
        starts = counts.cumsum(0) - counts
        is_used, is_own = sources >= 0, ranks == me
        home = incoming.head[:, FIRST].long()

        def slots(which: Tensor, first: Tensor) -> Tensor:
            return torch.where(which, first + places, -1).int()[:, None]

        leaving = rows.new_empty(rows.shape)
        permute(rows, moved(slots(is_used & ~is_own, starts[ranks]), len(rows)), out=leaving, zero_tail=False)
        back = self._memory.empty(route.block * self._layout.top_k, rows.shape[1], dtype=rows.dtype)
        permute(rows, moved(slots(is_used & is_own, home[me]), len(back)), out=back, zero_tail=False)
        blocks = torch.stack([starts, home, counts], dim=1)
        return back, self._communicator.all_to_all_vdev(back, leaving, blocks, channel=BACK), leaving
