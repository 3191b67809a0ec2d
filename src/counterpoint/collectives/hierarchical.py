"""Collectives over several hosts as data: zero-SM inside a host, another library (NCCL) between hosts.

A call of all ranks becomes a few phases for each rank, and every phase is an ordinary call of one of its two groups,
on a piece of its buffers: `inside`, the ranks of its host, or `between`, the ranks of the same local index on all
hosts (its rail: each has a network card of its own). Ranks count host by host.

Every byte that has to leave a host does so once, split evenly over the rails. Phases are cut so that what one leaves
is where the next one wants it: no phase copies anything from one place of a rank to another, but for own blocks in an
all_to_all, and in an all_gather out of place. To gather blocks of all hosts in order would need a copy if one call
brought them all; so the hosts exchange them pair by pair, straight to their places, and the blocks of each host are
passed on inside while those of the next one come. What goes on while what:

| operation | phases | at the same time |
|---|---|---|
| all_gather | between: own block to each host; inside: all_gather of each host's | both, by hosts |
| reduce_scatter | inside: reduce_scatter for each host; between: reduce_scatter | nothing |
| all_reduce | inside: reduce_scatter; between: all_reduce of the shard; inside: all_gather | all, by slices |
| all_to_all | inside: to the rail of the target; between: to its host | both, by hosts |
| broadcast | inside the root's host; between: a part on each rail; inside the others: all_gather | all, by slices |
| barrier | inside; between | nothing |

`flattened` makes one program for all ranks out of all phases, with what happens between hosts as programs, too, on
lanes of their own: what `check` proves and `simulate` times. `HierarchicalCommunicator` runs the phases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from counterpoint.collectives import calls
from counterpoint.collectives.calls import source_span
from counterpoint.collectives.program import ALIGNMENT, Buffer, Call, Operation, Span
from counterpoint.errors import Misconfigured

__all__ = ["LEVELS", "Grid", "Level", "Phase", "phases", "phases_all", "scratch_bytes"]

Level = Literal["inside", "between"]
LEVELS: tuple[Level, ...] = ("inside", "between")


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """`hosts` of `local` ranks each; rank = host * local + index.

    Raises:
        Misconfigured: one of them is not positive.
    """

    hosts: int
    local: int

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.local < 1:
            raise Misconfigured(f"{self.hosts} hosts of {self.local} ranks: give at least one of each")

    @property
    def world_size(self) -> int:
        return self.hosts * self.local

    def members(self, level: Level, rank: int) -> tuple[int, ...]:
        """The ranks of the group of `rank` on this level, in its order."""
        host, index = divmod(rank, self.local)
        if level == "inside":
            return tuple(range(host * self.local, (host + 1) * self.local))
        return tuple(range(index, self.world_size, self.local))


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One call of one group.

    Args:
        level: which group.
        call: of its ranks, counted within the group.
        input: where its input lies in the rank's buffers; of a call in place the same as `output`.
        output: where its output lies.
        after: phases of this rank, by their number, that have to end before it begins. Those of one level run one
            after the other anyway, in the order of the list, which is the same for all ranks of a group.
    """

    level: Level
    call: Call
    input: Span
    output: Span
    after: tuple[int, ...] = ()


@lru_cache(maxsize=1024)
def phases(call: Call, grid: Grid, rank: int, *, slice_bytes: int | None = None) -> tuple[Phase, ...]:
    """What `rank` does for `call`, of all ranks of the grid.

    Args:
        call: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast or barrier; blocks of equal sizes.
        grid: where the ranks are.
        rank: of all.
        slice_bytes: all_reduce and broadcast work on slices of about this size, so that the levels run at the same
            time; None: on the whole.

    Raises:
        Misconfigured: another operation, blocks that differ, or numbers that do not fit.
    """
    if call.world_size != grid.world_size or not 0 <= rank < grid.world_size:
        raise Misconfigured(
            f"rank {rank} of a call of {call.world_size} ranks on {grid.hosts} hosts of {grid.local}: they do not fit"
        )
    if call.operation not in _PHASES:
        raise Misconfigured(f"{call.operation} over several hosts: allowed are {', '.join(_PHASES)}")
    if call.operation in ("all_gather", "reduce_scatter", "all_to_all") and len({s for r in call.sizes for s in r}) > 1:
        raise Misconfigured(f"{call.operation} of different blocks over several hosts: give blocks of one size")
    if slice_bytes is not None and slice_bytes < 1:
        raise Misconfigured(f"slice_bytes={slice_bytes}: give a positive number, or None for one slice")
    if call.operation != "barrier" and not any(map(any, call.sizes)):
        return ()
    plan = _Plan(call, grid, rank, slice_bytes)
    _PHASES[call.operation](plan)
    return tuple(plan.phases)


def phases_all(call: Call, grid: Grid, *, slice_bytes: int | None = None) -> tuple[tuple[Phase, ...], ...]:
    """Those of every rank, for the checker and the clock."""
    return tuple(phases(call, grid, rank, slice_bytes=slice_bytes) for rank in range(grid.world_size))


def scratch_bytes(found: Sequence[Phase]) -> int:
    """What these phases need to keep between them."""
    spans = [span for phase in found for span in (phase.input, phase.output) if span.buffer == "scratch"]
    return max((span.offset + span.num_bytes for span in spans), default=0)


class _Plan:
    """The phases of one rank, as they are put down."""

    def __init__(self, call: Call, grid: Grid, rank: int, slice_bytes: int | None) -> None:
        self.call, self.grid, self.rank, self.slice_bytes = call, grid, rank, slice_bytes
        self.hosts, self.local = grid.hosts, grid.local
        self.host, self.index = divmod(rank, grid.local)
        self.phases: list[Phase] = []

    def add(self, level: Level, call: Call, source: Span, target: Span, *after: int) -> int:
        """Its number."""
        self.phases.append(Phase(level=level, call=call, input=source, output=target, after=after))
        return len(self.phases) - 1

    def row(self, buffer: Buffer, host: int, block: int) -> Span:
        """The blocks of all ranks of a host, which lie side by side."""
        return Span(buffer, host * self.local * block, self.local * block)

    def away(self) -> Iterator[tuple[int, int, int]]:
        """For each distance: the host to send to, and the one to receive from. Nobody meets at a receiver."""
        for distance in range(1, self.hosts):
            yield distance, (self.host + distance) % self.hosts, (self.host - distance) % self.hosts

    def exchange(self, distance: int, num_bytes: int, source: Span, target: Span, *after: int) -> int:
        """Every host sends to the one at this distance."""
        hosts = range(self.hosts)
        sizes = [[num_bytes if to == (host + distance) % self.hosts else 0 for to in hosts] for host in hosts]
        return self.add("between", calls.send_recv(sizes), source, target, *after)

    def slices(self) -> tuple[list[Span], Span]:
        """The array in slices that can be cut into an aligned block for each local rank, and the rest, a few bytes."""
        size = calls.output_bytes(self.call, self.rank)
        unit = ALIGNMENT * self.local
        step = max(1, (self.slice_bytes or size) // unit) * unit
        whole = size // unit * unit
        starts = range(0, whole, step)
        return [Span("output", at, min(step, whole - at)) for at in starts], Span("output", whole, size - whole)

    def part(self, whole: Span) -> Span:
        """This rank's block of a slice."""
        block = whole.num_bytes // self.local
        return Span(whole.buffer, whole.offset + self.index * block, block)


def _all_gather(plan: _Plan) -> None:
    """The own host's blocks first: they are there. Then those of each host, as they come."""
    block, local = plan.call.sizes[0][0], plan.local
    own = source_span(plan.call, plan.rank, plan.rank)
    come = {}
    for distance, _, giver in plan.away():
        place = Span("output", (giver * local + plan.index) * block, block)
        come[giver] = plan.exchange(distance, block, own, place)
    home = plan.row("output", plan.host, block)
    plan.add("inside", calls.all_gather(local, block, own=plan.call.own), own, home)
    for giver, number in come.items():
        row = plan.row("output", giver, block)
        plan.add("inside", calls.all_gather(local, block), row, row, number)


def _reduce_scatter(plan: _Plan) -> None:
    """Sums of the own host for every host, one after the other; after the last, one reduce_scatter of these."""
    block, hosts = plan.call.sizes[0][0], plan.hosts
    inside = calls.reduce_scatter(plan.local, block)
    kept = Span("scratch" if hosts > 1 else "output", 0, hosts * block)
    done = [
        plan.add("inside", inside, plan.row("input", host, block), Span(kept.buffer, host * block, block))
        for host in range(hosts)
    ]
    if hosts > 1:
        plan.add("between", calls.reduce_scatter(hosts, block), kept, Span("output", 0, block), done[-1])


def _all_reduce(plan: _Plan) -> None:
    """All slices are summed inside first, so that the rails never wait for what comes back."""
    source: Buffer = source_span(plan.call, plan.rank, 0).buffer
    slices, rest = plan.slices()
    summed = []
    for whole in slices:
        part = plan.part(whole)
        scatter = calls.reduce_scatter(plan.local, part.num_bytes)
        number = plan.add("inside", scatter, Span(source, whole.offset, whole.num_bytes), part)
        summed.append(_sum_between(plan, part, number))
    for whole, number in zip(slices, summed, strict=True):
        plan.add("inside", calls.all_gather(plan.local, whole.num_bytes // plan.local), whole, whole, number)
    if rest.num_bytes:  # on one rail, and from there to all: the same bits everywhere
        inside = calls.all_reduce(plan.local, rest.num_bytes, own=plan.call.own)
        number = plan.add("inside", inside, Span(source, rest.offset, rest.num_bytes), rest)
        if plan.hosts > 1:
            after = [_sum_between(plan, rest, number)] if plan.index == 0 else []
            plan.add("inside", calls.broadcast(plan.local, rest.num_bytes), rest, rest, *after)


def _sum_between(plan: _Plan, span: Span, number: int) -> int:
    if plan.hosts == 1:
        return number
    return plan.add("between", calls.all_reduce(plan.hosts, span.num_bytes), span, span, number)


def _all_to_all(plan: _Plan) -> None:
    """Blocks for a host go to the local rank on whose rail their target is, and from there over the network."""
    block, local = plan.call.sizes[0][0], plan.local
    inside = calls.all_to_all([[block] * local] * local)
    for distance, to, giver in plan.away():
        kept = plan.row("scratch", distance - 1, block)
        number = plan.add("inside", inside, plan.row("input", to, block), kept)
        plan.exchange(distance, kept.num_bytes, kept, plan.row("output", giver, block), number)
    home = calls.all_to_all([[block] * local] * local, own=plan.call.own)
    plan.add("inside", home, plan.row("input", plan.host, block), plan.row("output", plan.host, block))


def _broadcast(plan: _Plan) -> None:
    """On the root's host to all; then each of them sends its part of a slice to the other hosts, which gather it."""
    assert plan.call.root is not None
    root_host, root_index = divmod(plan.call.root, plan.local)
    slices, rest = plan.slices()
    home = plan.host == root_host
    sent = []
    for piece in [*slices, *([rest] if rest.num_bytes else [])]:
        after = []
        if home:
            inside = calls.broadcast(plan.local, piece.num_bytes, root=root_index)
            number = plan.add("inside", inside, piece, piece)
            after = [] if plan.rank == plan.call.root else [number]
        part = plan.part(piece) if piece != rest else rest
        if plan.hosts > 1 and (piece != rest or plan.index == 0):
            between = calls.broadcast(plan.hosts, part.num_bytes, root=root_host)
            after = [plan.add("between", between, part, part, *after)]
        sent.append((piece, after))
    for piece, after in sent if not home else ():
        gathered = calls.all_gather(plan.local, piece.num_bytes // plan.local)
        told = calls.broadcast(plan.local, piece.num_bytes)
        plan.add("inside", told if piece == rest else gathered, piece, piece, *after)


def _barrier(plan: _Plan) -> None:
    """After the second, every host's ranks of this rail have come, and before them all others of their hosts."""
    nothing = Span("output", 0, 0)
    number = plan.add("inside", calls.barrier(plan.local), nothing, nothing)
    if plan.hosts > 1:
        plan.add("between", calls.barrier(plan.hosts), nothing, nothing, number)


_PHASES: dict[Operation, Callable[[_Plan], None]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "barrier": _barrier,
}
