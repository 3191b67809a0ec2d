"""Describe a collective as data: a short list of steps for each rank, which needs no device and no torch.

A **Call** is what was asked for, the same on every rank. A **Program** is what one rank does for it: `plan(call, rank)`
makes it, executors run it (copy engines, threads, a clock), `check` proves it. All are frozen and hashable.

*Buffers.* Steps name memory by role: `input` and `output` of the call, and `staging` and `mailbox`, which belong to the
communicator. A copy always pushes own memory into a peer's `output`, `staging` or `mailbox`, so only these have to be
mapped by the peers (`Program.symmetric`). In a call in place, input is a view of output and steps name `output` alone.
Calls over several hosts keep what goes from one phase to the next in `scratch`, and what is done between hosts has a
staging of its own, `network` (`multihost/`).

*Flags.* Each symmetric buffer carries 32-bit words, 0 or 1, in its owner's memory. `ready[p]`: rank p's buffer may be
written (p writes 1 here). `arrived[p, chunk]`: rank p's chunk is here (p writes 1 here). `Signal` writes 1 into a
peer's word; `Wait` waits until an own word is 1 and sets it to 0. Every word has one writer and one waiter, and is
back at rest after every cycle, so a program is valid for ever: eager, again and again, or replayed from a graph.

*Order.* A lane is one stream: its steps run one after the other in list order; a copy is complete, and visible to all
who see a later signal of its lane, before the next step begins. Lanes are tied together by `RecordEvent` and
`AwaitEvent` only (CUDA events; every `AwaitEvent` comes after its `RecordEvent`, so issuing the list in order is
right). `COPY` is the lane of copies and flags, the one that the caller's stream waits for; `REDUCE` runs reductions,
and the waits for what they need, at the same time.

*The cycle.* `release`, `steps`, `finish`, the consumer reads, `release`, ... `release` tells the ranks that push into
this one that `output` is free. Where the cycle is cut is the caller's choice: before `release` (handshake; at rest
every `ready` of output is 0; any mix of calls may share the flags), or after it (early release; at rest `ready` is 1,
set when the buffer is made; it saves a round trip, but all calls on that buffer must have the same `Program.pushers`
on every rank). `ready` of staging and of a mailbox is always early: at rest it is 1, and programs give it back
themselves.

*Partitions.* `partitions` cuts a program so that its caller can supply the input and take the output piece by piece,
which MPI calls partitioned communication. A matmul whose rows come from peers takes the blocks that have arrived, while
others are under way; one whose product is scattered gives away each block as soon as it is computed. All programs of
`exchange` can be cut: they push chunk by chunk, each with a signal of its own (`arrivals="each"`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, TypeAlias

from counterpoint.collectives.program.calls import ALIGNMENT, Buffer, Call, Span
from counterpoint.errors import Misconfigured

Symmetric = Literal["output", "staging", "mailbox"]
COPY, REDUCE = 0, 1  # lanes
BETWEEN, BETWEEN_REDUCE = 2, 3  # lanes of another library between hosts; only in models that are never executed
HERE = 4  # lane in which a rank adds up data from other hosts; in models only


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """Says how a program cuts copies into chunks and signals their arrival; equal on all ranks.

    Args:
        chunk_bytes: a shard is sent in pieces of this size, each with its own arrival; None: in one. Multiple of 16.
        last_bytes: the last chunk has at most this size, and `chunk_bytes` cuts what is before it; None: as the others.
            Nothing hides the reduction of the last chunk. Multiple of 16.
        arrivals: `each`: a signal after every copy, so that a consumer can start on it; `together`: the signals of a
            chunk in one batch, after its last copy: fewer steps. Reductions need all ranks' chunks: always together.
        peers_first: with `arrivals="each"`, push all chunks for one peer before chunks for the next.
        relay_bytes: from this size on, a broadcast gives each rank one part, and that rank passes it on to the others.
        turn_bytes: chunks of this size and more are pushed in turns, so that ranks which do not begin together never
            push to one receiver at once (`LinkTurns`), where every rank sends as much to every other; None: no chunk.
        staging_bytes: most staging that a reduce_scatter takes: larger shards come in slices, each sent when all ranks
            have added up the one before; None: the whole shard at once.

    Raises:
        Misconfigured: a size that is no positive multiple of 16, or staging of no bytes.
    """

    chunk_bytes: int | None = None
    last_bytes: int | None = None
    arrivals: Literal["each", "together"] = "each"
    peers_first: bool = False
    relay_bytes: int = 1 << 18
    turn_bytes: int | None = None
    staging_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, size in (("chunk_bytes", self.chunk_bytes), ("last_bytes", self.last_bytes)):
            if size is not None and (size <= 0 or size % ALIGNMENT):
                raise Misconfigured(
                    f"{name}={size}: give a positive multiple of {ALIGNMENT}, so that no element is cut"
                )
        if self.staging_bytes is not None and self.staging_bytes < 1:
            raise Misconfigured(f"staging_bytes={self.staging_bytes}: give 1 or more, or None for what a call needs")
        if self.peers_first and (self.arrivals != "each" or self.turn_bytes is not None):
            raise Misconfigured(
                "peers_first with arrivals together or in turns, which go round by round: leave one out"
            )


@dataclass(frozen=True, slots=True)
class Flag:
    """Names a 32-bit word of `buffer`, in the memory of the rank that waits for the word.

    `ready`: `peer`, which writes 1 into it, may be pushed to; `arrived`: its chunk is there; `turn`: the link
    into `peer` is free, as the rank that pushed before says (`LinkTurns`). In a mailbox, `chunk` is the slot.
    """

    buffer: Symmetric
    kind: Literal["ready", "turn", "arrived"]
    peer: int
    chunk: int = 0


def flag_word(flag: Flag, world_size: int) -> int:
    """Return the index of a flag's word among a buffer's words, in rows `ready`, `turn`, then `arrived` by chunk.

    A mailbox has two rows for each slot: `ready`, then `arrived`.
    """
    if flag.buffer == "mailbox":
        return (2 * flag.chunk + (flag.kind == "arrived")) * world_size + flag.peer
    row = {"ready": 0, "turn": 1, "arrived": 2 + flag.chunk}[flag.kind]
    return row * world_size + flag.peer


def flag_words(world_size: int, *, max_chunks: int) -> int:
    """Return how many flag words a buffer needs if each block arrives in up to `max_chunks` chunks."""
    return (2 + max_chunks) * world_size


@dataclass(frozen=True, slots=True)
class Copy:
    """Pushes this rank's span `source` into span `target` of `peer`, by a copy engine without SMs; never zero bytes."""

    peer: int
    source: Span
    target: Span
    lane: int = COPY


@dataclass(frozen=True, slots=True)
class LocalCopy:
    """Copies data within this rank: the only copy that needs an SM, and so waits for a resident GEMM."""

    source: Span
    target: Span
    lane: int = COPY


@dataclass(frozen=True, slots=True)
class Signal:
    """Writes 1 into the word `flag` of `peer`."""

    peer: int
    flag: Flag


@dataclass(frozen=True, slots=True)
class Wait:
    """Waits until this rank's word `flag` is 1, then resets it to 0; from then on the span `brings` may be read."""

    flag: Flag
    brings: Span | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Holds signals and waits that one `cuStreamBatchMemOp` carries out in this order."""

    operations: tuple[Signal | Wait, ...]
    lane: int = COPY


@dataclass(frozen=True, slots=True)
class Reduce:
    """Combines `sources` element by element, in this order (ranks ascending: equal sums everywhere), into `target`.

    One source may be the target itself. Only the executor knows what combining means (sum, avg, max, premul_sum;
    dtype). Chunks are cut at multiples of 16 bytes of a shard, so no element is cut.
    """

    sources: tuple[Span, ...]
    target: Span
    lane: int = REDUCE


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """Records the event number `event` on the lane, behind the lane's earlier steps."""

    event: int
    lane: int


@dataclass(frozen=True, slots=True)
class AwaitEvent:
    """Makes the lane wait until another lane has reached its `RecordEvent` of `event`."""

    event: int
    lane: int


Step: TypeAlias = Copy | LocalCopy | Batch | Reduce | RecordEvent | AwaitEvent


@dataclass(frozen=True, kw_only=True)
class Program:
    """Lists the steps of `rank` for `call`: `release` (at the start, or early), then `steps`, then `finish`.

    After `finish` the output may be read and the input overwritten on lane `COPY`. A consumer that wants to start on
    the first shard runs the waits of `finish` one at a time, in any order, all of them before the next cycle.
    """

    call: Call
    tuning: Tuning
    rank: int
    release: tuple[Step, ...] = ()
    steps: tuple[Step, ...] = ()
    finish: tuple[Step, ...] = ()
    scratch_bytes: int = 0
    mailbox_bytes: int = 0

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.call.world_size

    def cycle(self, *, early_release: bool = False) -> tuple[Step, ...]:
        """Return all steps in the order in which to issue them, batches merged; an early release omits `release`."""
        return merge_batches((() if early_release else self.release) + self.steps + self.finish)

    @cached_property
    def staging_bytes(self) -> int:
        """Return how many bytes of staging this rank needs: peers write them, and its reductions read them."""
        return self.reduced_bytes("staging")

    def reduced_bytes(self, buffer: Buffer) -> int:
        """Return how many bytes of a buffer this rank needs: up to the last byte that its reductions read."""
        read = (span for step in self.steps if isinstance(step, Reduce) for span in step.sources)
        return max((span.offset + span.num_bytes for span in read if span.buffer == buffer), default=0)

    @cached_property
    def pushers(self) -> frozenset[int]:
        """Return the ranks that wait for this rank's `release` before they write into its output."""
        return frozenset(op.peer for op in _operations(self.release) if isinstance(op, Signal))

    @cached_property
    def receives(self) -> bool:
        """Return whether peers write into this rank's output."""
        flags = [op.flag for op in _operations(self.cycle()) if isinstance(op, Wait)]
        return any((flag.buffer, flag.kind) == ("output", "arrived") for flag in flags)

    @cached_property
    def num_flags(self) -> dict[str, int]:
        """Return how many flag words every rank must have for this program, by symmetric buffer."""
        words: dict[str, int] = {}
        for op in _operations(self.cycle()):
            need = flag_word(op.flag, self.world_size) + 1
            words[op.flag.buffer] = max(words.get(op.flag.buffer, 0), need)
        return words

    @cached_property
    def awaits_ready(self) -> frozenset[Flag]:
        """Return the flags that tell this rank when it may write into peers' buffers."""
        flags = [op.flag for op in _operations(self.cycle()) if isinstance(op, Wait)]
        return frozenset(flag for flag in flags if flag.kind == "ready")

    @cached_property
    def symmetric(self) -> frozenset[Buffer]:
        """Return the buffers that must be symmetric memory, since peers write into them on some rank."""
        return frozenset(op.flag.buffer for op in _operations(self.cycle()))

    @cached_property
    def lanes(self) -> tuple[int, ...]:
        """Return the lanes that steps of this program use, ascending."""
        return tuple(sorted({step.lane for step in self.cycle()}))


def _operations(steps: tuple[Step, ...]) -> list[Signal | Wait]:
    return [op for step in steps if isinstance(step, Batch) for op in step.operations]


def merge_batches(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Return `steps` with neighbouring batches of one lane merged, and empty batches left out."""
    result: list[Step] = []
    for step in steps:
        last = result[-1] if result else None
        if isinstance(step, Batch) and isinstance(last, Batch) and last.lane == step.lane:
            result[-1] = Batch(last.operations + step.operations, step.lane)
        elif not isinstance(step, Batch) or step.operations:
            result.append(step)
    return tuple(result)


@dataclass(frozen=True, slots=True)
class BlockPartition:
    """Names a chunk of the block that a rank sends to `peer` or receives from `peer`."""

    peer: int
    chunk: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Partitions:
    """Holds the steps of a program by partition, in the order in which partitions are sent and arrive."""

    begin: tuple[Step, ...]  # before the first push: `release` without early release, and waits until peers are ready
    sent: tuple[BlockPartition, ...]  # partitions of the input
    sends: tuple[tuple[Step, ...], ...]  # steps that push each; may run when the caller has written the partition
    received: tuple[BlockPartition, ...]  # partitions of the output
    receives: tuple[tuple[Step, ...], ...]  # steps that wait for each; after them the caller may read the partition

    @property
    def steps(self) -> tuple[Step, ...]:
        """Return all steps, in an order in which one lane could run them without a deadlock."""
        return (
            *self.begin,
            *(step for steps in self.sends for step in steps),
            *(step for steps in self.receives for step in steps),
        )


@lru_cache(maxsize=1024)
def partitions(program: Program, *, early_release: bool = False) -> Partitions:
    """Return the partitions of a program; with `early_release` the steps begin without the handshake.

    Raises:
        Misconfigured: the program does something between or after its pushes, as reductions and relays do.
    """
    begin = () if early_release else program.release
    sent: list[BlockPartition] = []
    sends: list[tuple[Step, ...]] = []
    group: list[Step] = []
    for step in program.steps:
        group.append(step)
        signals = _arrivals_signalled(step)
        if len(signals) > 1 or (signals and not isinstance(step, Batch)):
            raise Misconfigured(
                f"{program.call.operation} signals several chunks at once: plan it with arrivals='each'"
            )
        if signals:
            sent.append(signals[0])
            sends.append(tuple(group))
            group = []
        elif not sent and isinstance(step, Batch):
            begin += (step,)
            group = []
    if group:
        raise Misconfigured(f"{program.call.operation} has steps after its last push: it cannot be cut into partitions")
    waits = [one for step in program.finish if isinstance(step, Batch) for one in step.operations]
    return Partitions(
        begin=begin,
        sent=tuple(sent),
        sends=tuple(sends),
        received=tuple(BlockPartition(one.flag.peer, one.flag.chunk) for one in waits if isinstance(one, Wait)),
        receives=tuple((Batch((one,)),) for one in waits),
    )


def _arrivals_signalled(step: Step) -> list[BlockPartition]:
    if not isinstance(step, Batch):
        return []
    signals = (one for one in step.operations if isinstance(one, Signal) and one.flag.kind == "arrived")
    return [BlockPartition(signal.peer, signal.flag.chunk) for signal in signals]
