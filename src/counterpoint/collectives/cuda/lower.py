"""Lower a program to driver calls, with addresses in place of buffer names; the calls are data and need no device.

What the driver guarantees, and the programs rely on (CUDA driver API, "Stream Memory Operations"):

- The operations of one `cuStreamBatchMemOp` are enqueued in the order in which they appear in it; fewer than 256.
- A write provides a memory fence before it, with the semantics of `__threadfence_system()` for its stream: whoever sees
  a signal also sees what copies pushed before it on that lane. (`CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER` is gone from
  the v2 API.)
- `CU_STREAM_WAIT_VALUE_FLUSH` is about writes of third parties that the receiving GPU may reorder. Peers' copies are
  fenced by their writer, so it is not used; NCCL's copy-engine collectives do not use it either (2.28).
- A wait is for `>= 1`, not `== 1`: a watchdog that gives up may write any positive value to release the stream.
- Order made by these operations is invisible to CUDA, which may put two streams on one hardware queue. So calls are
  issued in the order of the program's list, in which every rank could also run on one queue without a deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from counterpoint.collectives.program.calls import Buffer, Span
from counterpoint.collectives.program.coalesced import TensorAddresses
from counterpoint.collectives.program.steps import (
    COPY,
    REDUCE,
    AwaitEvent,
    Batch,
    Copy,
    Flag,
    LocalCopy,
    Program,
    RecordEvent,
    Reduce,
    Signal,
    Step,
    Wait,
    flag_word,
)
from counterpoint.errors import Misconfigured

MAX_OPERATIONS = 255  # of one cuStreamBatchMemOp
WORD_BYTES = 4  # of a flag


@dataclass(frozen=True, kw_only=True, slots=True)
class Addresses:
    """Holds the addresses at which one rank has mapped all ranks' buffers and flags of a call.

    Raises:
        Misconfigured: the address of flags is no multiple of 4 bytes.
    """

    input: int = 0  # of this rank only; not needed if the call is in place
    output: tuple[int, ...] = ()  # by rank; 0 for a rank whose output this rank does not write
    staging: tuple[int, ...] = ()  # by rank, for calls that reduce
    output_flags: tuple[int, ...] = ()  # by rank, flag words of `output`
    staging_flags: tuple[int, ...] = ()  # by rank, flag words of `staging`
    mailbox: tuple[int, ...] = ()  # by rank, for messages
    mailbox_flags: tuple[int, ...] = ()  # by rank, flag words of `mailbox`
    local: Mapping[Buffer, TensorAddresses] = field(default_factory=dict)  # own buffers that are several tensors

    def __post_init__(self) -> None:
        flags = self.output_flags + self.staging_flags + self.mailbox_flags
        odd = [address for address in flags if address % WORD_BYTES]
        if odd:
            raise Misconfigured(f"flags at {odd[0]:#x}: stream memory operations need multiples of {WORD_BYTES} bytes")

    def span(self, rank: int, span: Span, me: int) -> int:
        """Return the address of `span` in the buffers of `rank`; `me` is the number of this rank."""
        if rank == me and span.buffer in self.local:
            return self.local[span.buffer].at(span.offset)
        if span.buffer == "input":
            bases: tuple[int, ...] = (self.input,) if rank == me else ()
            rank = 0
        else:
            bases = {"output": self.output, "mailbox": self.mailbox}.get(span.buffer, self.staging)
        return _base(bases, rank, span.buffer) + span.offset

    def word(self, rank: int, flag: Flag, world_size: int) -> int:
        """Return the address of the word that holds `flag` of `rank`."""
        bases = {"output": self.output_flags, "mailbox": self.mailbox_flags}.get(flag.buffer, self.staging_flags)
        return _base(bases, rank, f"the flags of {flag.buffer}") + WORD_BYTES * flag_word(flag, world_size)


def _base(bases: Sequence[int], rank: int, what: str) -> int:
    if rank >= len(bases) or not bases[rank]:
        raise Misconfigured(f"the program needs {what} of rank {rank}, and no address was given; map it first")
    return bases[rank]


@dataclass(frozen=True, slots=True)
class CopyAsync:
    """Represents one `cuMemcpyDtoDAsync`; a `local` copy, within this device, is the only kind that needs SMs."""

    target: int
    source: int
    num_bytes: int
    lane: int
    local: bool = False


@dataclass(frozen=True, slots=True)
class MemoryOperation:
    """Writes `value` into the word at `address`, or waits until that word is `value` or more."""

    kind: Literal["write", "wait"]
    address: int
    value: int


@dataclass(frozen=True, slots=True)
class MemoryOperations:
    """Represents one `cuStreamBatchMemOp`, which runs `operations` in order."""

    operations: tuple[MemoryOperation, ...]
    lane: int


@dataclass(frozen=True, slots=True)
class ReduceLaunch:
    """Represents one kernel that combines `num_bytes` at each of `sources`, in this order, into `target`."""

    sources: tuple[int, ...]
    target: int
    num_bytes: int
    lane: int


DriverCall: TypeAlias = CopyAsync | MemoryOperations | ReduceLaunch | RecordEvent | AwaitEvent
"""Types the calls of a program; the steps on events stand for one `cuEventRecord` and one `cuStreamWaitEvent`."""


def lower(program: Program, addresses: Addresses, steps: Iterable[Step] | None = None) -> tuple[DriverCall, ...]:
    """Return the driver calls of a program, in the order in which they have to be issued.

    `steps` limits this to some of its steps (None: the whole cycle): `program.release` alone for an early release, or
    single waits of `program.finish` for a consumer that starts on the first shard. `Misconfigured` is raised for a
    buffer without an address, or a program that goes beyond one host (`flatten`).
    """
    chosen = program.cycle() if steps is None else steps
    return tuple(call for step in chosen for call in _calls(step, program, addresses))


def awaited(calls: Iterable[DriverCall]) -> tuple[int, ...]:
    """Return the addresses, ascending, of the flags that `calls` wait for; setting them releases stuck streams."""
    batches = (call.operations for call in calls if isinstance(call, MemoryOperations))
    waits = [operation for batch in batches for operation in batch if operation.kind == "wait"]
    return tuple(sorted({wait.address for wait in waits}))


def _calls(step: Step, program: Program, addresses: Addresses) -> Iterator[DriverCall]:
    me = program.rank
    if step.lane not in (COPY, REDUCE):
        raise Misconfigured(
            f"lane {step.lane}, which goes between hosts: run the phases one by one, not this model of all"
        )
    match step:
        case Copy(peer, source, target, lane):
            yield CopyAsync(addresses.span(peer, target, me), addresses.span(me, source, me), source.num_bytes, lane)
        case LocalCopy(source, target, lane):
            where = addresses.span(me, target, me)
            yield CopyAsync(where, addresses.span(me, source, me), source.num_bytes, lane, local=True)
        case Batch(operations, lane):
            flat = list(_operations(operations, program, addresses))
            for start in range(0, len(flat), MAX_OPERATIONS):  # order holds across calls: it is one stream
                yield MemoryOperations(tuple(flat[start : start + MAX_OPERATIONS]), lane)
        case Reduce(sources, target, lane):
            where = addresses.span(me, target, me)
            yield ReduceLaunch(tuple(addresses.span(me, s, me) for s in sources), where, target.num_bytes, lane)
        case RecordEvent() | AwaitEvent():
            yield step


def _operations(
    operations: Sequence[Signal | Wait], program: Program, addresses: Addresses
) -> Iterator[MemoryOperation]:
    """Yield the memory operations of a batch in order; a write follows each wait and resets the wait's flag to 0.

    The reset cannot erase the peer's next signal, since the peer sends that only after a later signal from this rank.

    Yields:
        Operations of `cuStreamBatchMemOp`.
    """
    for operation in operations:
        if isinstance(operation, Signal):
            yield MemoryOperation("write", addresses.word(operation.peer, operation.flag, program.world_size), 1)
            continue
        word = addresses.word(program.rank, operation.flag, program.world_size)
        yield MemoryOperation("wait", word, 1)
        yield MemoryOperation("write", word, 0)
