"""Describe collectives over several hosts as data: zero-SM inside a host, another library (NCCL) between hosts.

A call of all ranks becomes a few phases for each rank, and every phase is an ordinary call of one of its two groups,
on a piece of its buffers: `inside`, the ranks of its host, or `between`, the ranks of the same local index on all
hosts (its rail: each has a network card of its own). A phase `here` adds up what came from other hosts. Ranks count
host by host.

Every byte that has to leave a host does so once, split evenly over the rails. The output of a phase lies where the next
phase reads it: no phase copies data within a rank, except for own blocks in an all_to_all and in an all_gather out of
place. If one call gathered the blocks of all hosts, a copy would be needed to put them in order; so the hosts exchange
them pair by pair, straight to their places, and the blocks of each host are passed on inside while the next host's
arrive. The phases, and which of them run at the same time:

| operation | phases | at the same time |
|---|---|---|
| all_gather | between: own block to each host; inside: all_gather of each host's blocks | both, by hosts |
| reduce_scatter | inside: reduce_scatter for each host; between: to that host; here: sum | both, by hosts |
| all_reduce | inside: reduce_scatter; between: all_reduce of the shard; inside: all_gather | all, by slices |
| all_to_all | inside: to the rail of the target; between: to its host | both, by hosts |
| broadcast | inside the root's host; between: a part on each rail; inside the others: all_gather | all, by slices |
| barrier | inside; between | nothing |

`HierarchicalCommunicator` runs the phases. The tests make programs of them, with what happens between hosts as programs
on lanes of their own, which a checker proves and `simulate` times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from counterpoint.collectives.program import operations
from counterpoint.collectives.program.calls import ALIGNMENT, Buffer, Call, Span
from counterpoint.errors import Misconfigured

Level = Literal["inside", "between", "here"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Describes `hosts` of `local` ranks each, both 1 or more; rank = host · local + index in the host."""

    hosts: int
    local: int

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.local < 1:
            raise Misconfigured(f"{self.hosts} hosts of {self.local} ranks: give at least one of each")

    @property
    def world_size(self) -> int:
        """Return the number of ranks on all hosts."""
        return self.hosts * self.local

    def members(self, level: Level, rank: int) -> tuple[int, ...]:
        """Return the ranks of the group in which `rank` runs phases of `level`: "inside", "between" or "here"."""
        host, index = divmod(rank, self.local)
        if level == "here":
            return (rank,)
        if level == "inside":
            return tuple(range(host * self.local, (host + 1) * self.local))
        return tuple(range(index, self.world_size, self.local))


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Describes one part of a call over several hosts: a call of one of this rank's two groups, or a local sum.

    Phases of one level run in the order of the list, which is the same for all ranks of a group.
    """

    level: Level  # which of the rank's two groups makes the call; here: none, this rank adds up `summands`
    call: Call  # the collective; its ranks are counted within the group
    input: Span  # where the phase's input lies in the rank's buffers; the same as `output` if the call is in place
    output: Span  # where the phase's output lies
    after: tuple[int, ...] = ()  # numbers of this rank's phases that have to end before this phase begins
    place: int = 0  # in a phase `here`: how many parts of the input come before the output in the sum

    def summands(self) -> tuple[Span, ...]:
        """Return the spans that a local sum adds up, in host order: other hosts' in input, this host's in output."""
        size = self.output.num_bytes
        starts = range(self.input.offset, self.input.offset + self.input.num_bytes, size)
        parts = [Span(self.input.buffer, start, size) for start in starts]
        return (*parts[: self.place], self.output, *parts[self.place :])


@lru_cache(maxsize=1024)
def phases(call: Call, grid: Grid, rank: int, *, slice_bytes: int | None = None) -> tuple[Phase, ...]:
    """Return the phases that `rank` runs for `call`, a collective of all ranks of the grid.

    Args:
        call: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast or barrier; blocks of equal sizes.
        grid: on which hosts the ranks are.
        rank: rank among all ranks of the grid.
        slice_bytes: rough size of slices on which all_reduce and broadcast work, so that both levels run at the same
            time; None: they work on the whole array.

    Raises:
        Misconfigured: another operation, blocks of different sizes, or a rank or grid that does not fit the call.
    """
    if call.world_size != grid.world_size or not 0 <= rank < grid.world_size:
        raise Misconfigured(
            f"rank {rank} of a call of {call.world_size} ranks on {grid.hosts} hosts of {grid.local}: they do not fit"
        )
    if call.operation not in _PHASES:
        raise Misconfigured(f"{call.operation} over several hosts: allowed are {', '.join(_PHASES)}")
    if slice_bytes is not None and slice_bytes < 1:
        raise Misconfigured(f"slice_bytes={slice_bytes}: give a positive number, or None for one slice")
    if call.layout.has_data and not any(map(any, call.sizes)):
        return ()
    plan = _PhaseList(call, grid, rank, slice_bytes)
    _PHASES[call.operation](plan)
    return tuple(plan.phases)


def best_slice_bytes(num_bytes: int) -> int:
    """Return the slice size in bytes with which an all_reduce or broadcast of `num_bytes` is about fastest (simulated).

    Two slices, or from 512 MiB four, let both levels run at the same time; below 32 MiB a second slice costs as
    much as it saves.
    """
    if num_bytes < 32 << 20:
        return max(num_bytes, 1)
    return max(num_bytes // 4, min(num_bytes // 2, 128 << 20))


def scratch_bytes(found: Sequence[Phase]) -> int:
    """Return how many bytes of scratch buffer these phases need to pass data to each other."""
    spans = [span for phase in found for span in (phase.input, phase.output) if span.buffer == "scratch"]
    return max((span.offset + span.num_bytes for span in spans), default=0)


class _PhaseList:
    """Collects the phases of one rank's call."""

    def __init__(self, call: Call, grid: Grid, rank: int, slice_bytes: int | None) -> None:
        self.call, self.grid, self.rank, self.slice_bytes = call, grid, rank, slice_bytes
        self.hosts, self.local = grid.hosts, grid.local
        self.host, self.index = divmod(rank, grid.local)
        self.phases: list[Phase] = []

    def add(self, level: Level, call: Call, source: Span, target: Span, *after: int, place: int = 0) -> int:
        """Add a phase that starts when the phases `after` have ended, and return its number."""
        self.phases.append(Phase(level=level, call=call, input=source, output=target, after=after, place=place))
        return len(self.phases) - 1

    def even_block(self) -> int:
        """Return the size in bytes that all blocks have; raise if blocks differ in size."""
        found = {size for row in self.call.sizes for size in row}
        if len(found) > 1:
            raise Misconfigured(
                f"{self.call.operation} of different blocks over several hosts: give blocks of one size"
            )
        return found.pop()

    def row(self, buffer: Buffer, host: int, block: int) -> Span:
        """Return the span of the blocks of all ranks of a host, which lie side by side in `buffer`."""
        return Span(buffer, host * self.local * block, self.local * block)

    def away(self) -> Iterator[tuple[int, int, int]]:
        """Yield (distance, host to send to, host to receive from) for each distance between this host and another."""
        for distance in range(1, self.hosts):
            yield distance, (self.host + distance) % self.hosts, (self.host - distance) % self.hosts

    def exchange(self, distance: int, num_bytes: int, source: Span, target: Span, *after: int) -> int:
        """Add a phase in which every host sends `num_bytes` to the host `distance` further on; return its number."""
        hosts = range(self.hosts)
        sizes = [[num_bytes if to == (host + distance) % self.hosts else 0 for to in hosts] for host in hosts]
        return self.add("between", operations.send_recv(sizes), source, target, *after)

    def slices(self) -> tuple[list[Span], Span]:
        """Return slices of the array, each divisible into an aligned block per local rank, and the span left over."""
        size = self.call.output_bytes(self.rank)
        unit = ALIGNMENT * self.local
        step = max(1, (self.slice_bytes or size) // unit) * unit
        whole = size // unit * unit
        starts = range(0, whole, step)
        return [Span("output", at, min(step, whole - at)) for at in starts], Span("output", whole, size - whole)

    def part(self, whole: Span) -> Span:
        """Return the span of this rank's block in `whole`, a slice that is cut evenly among the ranks of a host."""
        block = whole.num_bytes // self.local
        return Span(whole.buffer, whole.offset + self.index * block, block)


def _all_gather(plan: _PhaseList) -> None:
    """Add the phases of an all_gather: this host's blocks first, without network, then each other host's blocks."""
    block, local = plan.even_block(), plan.local
    own = plan.call.source_span(plan.rank, plan.rank)
    come = {}
    for distance, _, giver in plan.away():
        place = Span("output", (giver * local + plan.index) * block, block)
        come[giver] = plan.exchange(distance, block, own, place)
    home = plan.row("output", plan.host, block)
    plan.add("inside", operations.all_gather(local, block, own=plan.call.own), own, home)
    for giver, number in come.items():
        row = plan.row("output", giver, block)
        plan.add("inside", operations.all_gather(local, block), row, row, number)


def _reduce_scatter(plan: _PhaseList) -> None:
    """Add the phases of a reduce_scatter: reduce other hosts' blocks, send the sums, reduce own blocks, add up sums."""
    block, hosts = plan.even_block(), plan.hosts
    inside, output = operations.reduce_scatter(plan.local, block), Span("output", 0, block)
    come = []
    for distance, to, giver in plan.away():
        sent = Span("scratch", (hosts - 2 + distance) * block, block)
        place = Span("scratch", (giver - (giver > plan.host)) * block, block)  # in the order of hosts
        number = plan.add("inside", inside, plan.row("input", to, block), sent)
        come.append(plan.exchange(distance, block, sent, place, number))
    own = plan.add("inside", inside, plan.row("input", plan.host, block), output)
    if come:
        parts = Span("scratch", 0, len(come) * block)
        plan.add("here", operations.reduce_scatter(1, block), parts, output, own, *come, place=plan.host)


def _all_reduce(plan: _PhaseList) -> None:
    """Add the phases of an all_reduce: reduce_scatters of all slices first, all_gathers last, so that no sum waits."""
    source: Buffer = plan.call.source_span(plan.rank, 0).buffer
    slices, rest = plan.slices()
    summed = []
    for whole in slices:
        part = plan.part(whole)
        scatter = operations.reduce_scatter(plan.local, part.num_bytes)
        number = plan.add("inside", scatter, Span(source, whole.offset, whole.num_bytes), part)
        summed.append(_sum_between(plan, part, number))
    for whole, number in zip(slices, summed, strict=True):
        plan.add("inside", operations.all_gather(plan.local, whole.num_bytes // plan.local), whole, whole, number)
    if rest.num_bytes:  # summed on one rail and broadcast from there: the same bits everywhere
        inside = operations.all_reduce(plan.local, rest.num_bytes, own=plan.call.own)
        number = plan.add("inside", inside, Span(source, rest.offset, rest.num_bytes), rest)
        if plan.hosts > 1:
            after = [_sum_between(plan, rest, number)] if plan.index == 0 else []
            plan.add("inside", operations.broadcast(plan.local, rest.num_bytes), rest, rest, *after)


def _sum_between(plan: _PhaseList, span: Span, number: int) -> int:
    if plan.hosts == 1:
        return number
    return plan.add("between", operations.all_reduce(plan.hosts, span.num_bytes), span, span, number)


def _all_to_all(plan: _PhaseList) -> None:
    """Add an all_to_all's phases: each block goes to the local rank with the target's index, then to the target."""
    block, local = plan.even_block(), plan.local
    inside = operations.all_to_all([[block] * local] * local)
    for distance, to, giver in plan.away():
        kept = plan.row("scratch", distance - 1, block)
        number = plan.add("inside", inside, plan.row("input", to, block), kept)
        plan.exchange(distance, kept.num_bytes, kept, plan.row("output", giver, block), number)
    home = operations.all_to_all([[block] * local] * local, own=plan.call.own)
    plan.add("inside", home, plan.row("input", plan.host, block), plan.row("output", plan.host, block))


def _broadcast(plan: _PhaseList) -> None:
    """Add a broadcast's phases: on the root's host, one part per rank to the other hosts, all_gather on other hosts."""
    assert plan.call.root is not None
    root_host, root_index = divmod(plan.call.root, plan.local)
    slices, rest = plan.slices()
    home = plan.host == root_host
    sent = []
    for piece in [*slices, *([rest] if rest.num_bytes else [])]:
        after = []
        if home:
            inside = operations.broadcast(plan.local, piece.num_bytes, root=root_index)
            number = plan.add("inside", inside, piece, piece)
            after = [] if plan.rank == plan.call.root else [number]
        part = plan.part(piece) if piece != rest else rest
        if plan.hosts > 1 and (piece != rest or plan.index == 0):
            between = operations.broadcast(plan.hosts, part.num_bytes, root=root_host)
            after = [plan.add("between", between, part, part, *after)]
        sent.append((piece, after))
    for piece, after in sent if not home else ():
        gathered = operations.all_gather(plan.local, piece.num_bytes // plan.local)
        whole = operations.broadcast(plan.local, piece.num_bytes)
        plan.add("inside", whole if piece == rest else gathered, piece, piece, *after)


def _barrier(plan: _PhaseList) -> None:
    """Add the phases of a barrier: one barrier inside each host, then one between hosts."""
    nothing = Span("output", 0, 0)
    number = plan.add("inside", operations.barrier(plan.local), nothing, nothing)
    if plan.hosts > 1:
        plan.add("between", operations.barrier(plan.hosts), nothing, nothing, number)


_PHASES: dict[str, Callable[[_PhaseList], None]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "barrier": _barrier,
}
