"""What is in every byte of every rank, followed by name: who wrote it, in which round, from where in their input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from counterpoint.collectives.calls import input_bytes, output_bytes, source_span, target_span
from counterpoint.collectives.program import Buffer, Call, Copy, LocalCopy, Program, Reduce, Span, Wait
from counterpoint.collectives.rounds import Action, Consume, Fill

__all__ = ["Access", "Memory", "accesses", "expected", "out_of_bounds", "performed"]

Value = tuple[tuple[int, int, int], ...] | None
"""What one byte holds: (round, rank, offset in that rank's input), several if combined; None: nothing yet."""
Memory = dict[tuple[int, Buffer], tuple[Value, ...]]


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes of a rank that one action reads or writes."""

    rank: int
    span: Span
    write: bool

    def conflicts(self, other: Access) -> bool:
        """Whether the order of the two matters."""
        mine, yours = self.span, other.span
        if not (self.write or other.write) or (self.rank, mine.buffer) != (other.rank, yours.buffer):
            return False
        return mine.offset < yours.offset + yours.num_bytes and yours.offset < mine.offset + mine.num_bytes

    def covers(self, other: Access) -> bool:
        """Whether every byte of `other`, in the same buffer, is also in this."""
        mine, yours = self.span, other.span
        return mine.offset <= yours.offset and yours.offset + yours.num_bytes <= mine.offset + mine.num_bytes


def accesses(action: Action) -> list[Access]:
    """What `action` reads and writes, of no byte being nothing."""
    rank, call = action.rank, action.program.call
    match action.what:
        case Copy(peer, source, target):
            found = [Access(rank, source, False), Access(peer, target, True)]
        case LocalCopy(source, target):
            found = [Access(rank, source, False), Access(rank, target, True)]
        case Reduce(sources, target):
            found = [*(Access(rank, source, False) for source in sources), Access(rank, target, True)]
        case Wait(_, Span() as brings):
            found = [Access(rank, brings, False)]
        case Fill():
            found = [Access(rank, span, True) for span, _ in _inputs(call, rank)]
        case Consume():
            found = [Access(rank, Span("output", 0, output_bytes(call, rank)), False)]
            found += [Access(rank, source_span(call, rank, rank), False)] if call.own == "consumer" else []
        case _:
            found = []
    return [access for access in found if access.span.num_bytes]


def out_of_bounds(access: Access, programs: Sequence[Program]) -> str | None:
    """Why `access` is not within a buffer of this call; None if it is."""
    program, span = programs[access.rank], access.span
    size = {
        "input": input_bytes(program.call, access.rank),
        "output": output_bytes(program.call, access.rank),
        "staging": program.staging_bytes,
        "scratch": program.scratch_bytes,
        "network": program.network_bytes,
    }[span.buffer]
    if span.offset >= 0 and span.offset + span.num_bytes <= size:
        return None
    end = span.offset + span.num_bytes
    return f"bytes {span.offset} to {end} of {span.buffer} of rank {access.rank}, which has {size}"


def performed(memory: Memory, action: Action) -> tuple[Memory, str | None]:
    """`memory` after `action`, and what is wrong with it, if the action reads the output."""
    rank = action.rank
    match action.what:
        case Copy(peer, source, target):
            return _written(memory, peer, target, _read(memory, rank, source)), None
        case LocalCopy(source, target):
            return _written(memory, rank, target, _read(memory, rank, source)), None
        case Reduce(sources, target):
            columns = zip(*(_read(memory, rank, source) for source in sources), strict=False)
            return _written(memory, rank, target, [_combined(column) for column in columns]), None
        case Fill():
            for span, base in _inputs(action.program.call, rank):
                values = [((action.round, rank, base + index),) for index in range(span.num_bytes)]
                memory = _written(memory, rank, span, values)
            return memory, None
        case Consume():
            return memory, _difference(memory, action)
    return memory, None


def _combined(column: Sequence[Value]) -> Value:
    """Everything that was added, in order; nothing, if something was missing."""
    return None if None in column else tuple(part for value in column if value is not None for part in value)


def _read(memory: Memory, rank: int, span: Span) -> list[Value]:
    there = memory.get((rank, span.buffer), ())
    values = list(there[span.offset : span.offset + span.num_bytes])
    return values + [None] * (span.num_bytes - len(values))


def _written(memory: Memory, rank: int, span: Span, values: Sequence[Value]) -> Memory:
    there = memory.get((rank, span.buffer), ())
    there += (None,) * (span.offset - len(there))
    return memory | {(rank, span.buffer): (*there[: span.offset], *values, *there[span.offset + len(values) :])}


def _inputs(call: Call, rank: int) -> list[tuple[Span, int]]:
    """Where the input of `rank` is, each span with its offset in the input."""
    if call.operation == "barrier" or (call.operation in ("broadcast", "scatter") and rank != call.root):
        return []
    own = source_span(call, rank, rank)
    if call.operation in ("all_gather", "gather", "broadcast"):
        return [(Span(own.buffer, own.offset, input_bytes(call, rank)), 0)]
    spans = [(Span(own.buffer, 0, input_bytes(call, rank)), 0)]
    if call.operation == "scatter" and call.own == "in_place":
        spans.append((target_span(call, rank, rank), own.offset))
    return spans


def expected(call: Call, rank: int, round_: int) -> list[Value]:
    """The output of `rank`; None where the consumer takes the own block from input."""
    shards = range(call.world_size) if call.operation == "all_reduce" else (rank,)
    if call.reduces:
        return [
            tuple((round_, source, sum(call.sizes[0][:shard]) + index) for source in range(call.world_size))
            for shard in shards
            for index in range(call.sizes[0][shard])
        ]
    whole = call.operation in ("all_gather", "gather", "broadcast")
    return [
        None
        if source == rank and call.own == "consumer"
        else ((round_, source, index + (0 if whole else sum(call.sizes[source][:rank]))),)
        for source in range(call.world_size)
        for index in range(call.sizes[source][rank])
    ]


def _difference(memory: Memory, action: Action) -> str | None:
    """The first byte of the output that is not what it must be."""
    want = expected(action.program.call, action.rank, action.round)
    have = _read(memory, action.rank, Span("output", 0, len(want)))
    for offset, (wanted, held) in enumerate(zip(want, have, strict=True)):
        if wanted is not None and wanted != held:
            return f"byte {offset} of output holds {_say(held)}; it must hold {_say(wanted)}"
    return None


def _say(value: Value) -> str:
    if value is None:
        return "nothing"
    return " + ".join(f"byte {offset} of rank {rank} of round {round_}" for round_, rank, offset in value)
