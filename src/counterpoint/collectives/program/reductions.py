"""Define how reductions combine values, and build the programs of the operations that reduce.

Sums are made in ascending rank order, in float32 for bfloat16 and float16 and in the dtype itself otherwise, and
rounded once at the end: the same bits on every rank and in every run. NCCL rounds at every hop.

Shards are pushed into staging chunk by chunk, and added up from staging as they arrive.
A chunk is reduced, on a lane of its own, as soon as it has arrived from every rank, while the next is on the links.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from counterpoint.collectives.program.calls import ALIGNMENT, Call, Span, make_call
from counterpoint.collectives.program.direct import (
    LinkTurns,
    arrival,
    arrivals,
    chunked,
    pushes,
    rotation,
    signal_ready,
    wait_ready,
)
from counterpoint.collectives.program.steps import (
    COPY,
    REDUCE,
    AwaitEvent,
    Batch,
    Copy,
    Flag,
    Program,
    RecordEvent,
    Reduce,
    Step,
    Tuning,
    Wait,
)
from counterpoint.errors import Misconfigured

ReductionOp = Literal["sum", "avg", "max", "min", "premul_sum"]
OPS: tuple[ReductionOp, ...] = ("sum", "avg", "max", "min", "premul_sum")
DTYPES: dict[str, tuple[int, str]] = {  # torch's name: bytes, what is added up in
    "bfloat16": (2, "float32"),
    "float16": (2, "float32"),
    "float32": (4, "float32"),
    "float64": (8, "float64"),
    "int8": (1, "int8"),
    "uint8": (1, "uint8"),
    "int16": (2, "int16"),
    "int32": (4, "int32"),
    "int64": (8, "int64"),
}
_BEGUN = 0  # event: the call has begun; event 1 + chunk: that chunk is reduced


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """Says how values are combined; raises `Misconfigured` if op, dtype and factor do not fit together.

    `avg` is the sum over the number of ranks; `premul_sum` multiplies every value by `factor` first. Both are for
    floating-point dtypes: an integer would have to be rounded, and libraries differ in how.
    """

    op: ReductionOp
    dtype: str  # torch's name without `torch.`
    factor: float = 1.0  # factor of `premul_sum`
    num_sms: int | None = None  # most SMs that the kernel uses, with one large block each; None: the whole GPU
    result: str = ""  # dtype of the result: `dtype` (or ""), or `accumulator`, which avoids rounding

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise Misconfigured(f"reduction {self.op!r}: allowed are {', '.join(OPS)}")
        if self.dtype not in DTYPES:
            raise Misconfigured(f"reduction of {self.dtype}: allowed are {', '.join(DTYPES)}; convert it first")
        if "int" in self.dtype and self.op in ("avg", "premul_sum"):
            raise Misconfigured(f"{self.op} of {self.dtype} would have to be rounded; use sum, max or min, or a float")
        if self.factor != 1.0 and self.op != "premul_sum":
            raise Misconfigured(f"factor={self.factor} has no meaning for {self.op}; use op='premul_sum'")
        if self.num_sms is not None and self.num_sms < 1:
            raise Misconfigured(f"num_sms={self.num_sms}: give 1 or more, or None for the whole GPU")
        if self.result not in ("", self.dtype, self.accumulator):
            allowed = " or ".join(sorted({self.dtype, self.accumulator}))
            raise Misconfigured(f"a reduction of {self.dtype} into {self.result}: allowed are {allowed}")

    @property
    def item_bytes(self) -> int:
        """Return the size of one input value in bytes."""
        return DTYPES[self.dtype][0]

    @property
    def result_dtype(self) -> str:
        """Return the dtype of the result."""
        return self.result or self.dtype

    @property
    def accumulator(self) -> str:
        """Return the dtype in which values are combined."""
        return DTYPES[self.dtype][1]


def widened(reduction: Reduction, dtype: str) -> Reduction:
    """Return `reduction` with results of `dtype`, which has to be the inputs' dtype or the accumulator's."""
    return reduction if dtype == reduction.dtype else replace(reduction, result=dtype)


def reduce_scatter(call: Call, rank: int, tuning: Tuning) -> Program:
    """Return a reduce_scatter's program: push shard t of the input to rank t's staging in chunks; rank t adds them up.

    With less staging than whole shards need, shards are sliced, and each slice is done like a call of its own: no rank
    pushes the next slice before every rank has added up the last. The steps have to stay in this order: two lanes may
    share one hardware queue.
    """
    if _trivial(call):
        return _alone(call, rank, tuning)
    slices, peers = _slices(call, tuning), rotation(rank, call.world_size)
    lane = REDUCE if len(slices) > 1 or len(_chunks(call, rank, tuning, slices[0])) > 1 else COPY
    steps = _fork(lane)
    for part in slices:
        steps += [wait_ready("staging", peers), *_scatter(call, rank, tuning, part)]
        for chunk in range(len(_chunks(call, rank, tuning, part))):
            steps += _reduced(call, rank, tuning, chunk, lane, part)
        steps.append(signal_ready("staging", rank, peers, lane))
    return Program(call=call, tuning=tuning, rank=rank, steps=tuple(steps), finish=tuple(_after(1, lane)))


def all_reduce(call: Call, rank: int, tuning: Tuning) -> Program:
    """Return an all_reduce's program: a reduce_scatter in chunks; each combined chunk is pushed to all ranks' outputs.

    All slices go out first: by the time the last is sent, the first chunks are combined, so the links never wait.
    Nobody has to say that output is free: a rank that pushed its slices is inside this call, and all slices of a chunk
    arrive before any of the chunk is pushed back. For the same reason it may be in place.
    """
    if _trivial(call):
        return _alone(call, rank, tuning)
    chunks, peers = _chunks(call, rank, tuning), rotation(rank, call.world_size)
    lane = REDUCE if len(chunks) > 1 else COPY
    turns = LinkTurns.of(call, rank, tuning, buffer="output", chunks=chunks)
    steps = [*_fork(lane), wait_ready("staging", peers), *_scatter(call, rank, tuning)]
    for chunk, span in enumerate(chunks):
        steps += _reduced(call, rank, tuning, chunk, lane)
        if chunk == len(chunks) - 1:
            steps.append(signal_ready("staging", rank, peers, lane))
        steps += _after(1 + chunk, lane)
        for peer in peers:
            steps.append(turns.before(peer, chunk))
            steps += [Copy(peer, span, span)] if span.num_bytes else []
            steps.append(turns.after(peer, chunk))
        steps.append(Batch(tuple(arrival(peer, span, rank, chunk) for peer in peers)))
    coming = {peer: call.target_span(peer, peer) for peer in reversed(peers)}
    return Program(call=call, tuning=tuning, rank=rank, steps=tuple(steps), finish=(arrivals(coming, tuning),))


def _trivial(call: Call) -> bool:
    return call.world_size == 1 or not any(call.sizes[0])


def _alone(call: Call, rank: int, tuning: Tuning) -> Program:
    """Build the program of a reduction with one rank or no data; one rank's input is still reduced, which scales it."""
    source, target = call.source_span(rank, rank), call.target_span(rank, rank)
    steps = (Reduce((source,), target, COPY),) if target.num_bytes else ()
    return Program(call=call, tuning=tuning, rank=rank, steps=steps)


@dataclass(frozen=True, slots=True)
class _Slice:
    """Names one range of bytes, the same in every shard; a shorter shard has fewer of these bytes, or none."""

    offset: int = 0
    num_bytes: int | None = None

    def of(self, shard: Span) -> Span:
        low = min(self.offset, shard.num_bytes)
        high = shard.num_bytes if self.num_bytes is None else min(low + self.num_bytes, shard.num_bytes)
        return Span(shard.buffer, shard.offset + low, high - low)


_WHOLE = _Slice()


def _slices(call: Call, tuning: Tuning) -> list[_Slice]:
    """Return the slices of shards, each of which fits into `tuning.staging_bytes`."""
    if tuning.staging_bytes is None:
        return [_WHOLE]
    size = slice_bytes(call.world_size, tuning.staging_bytes)
    return [_Slice(offset, size) for offset in range(0, max(map(max, call.sizes)), size)]


def slice_bytes(world_size: int, staging_bytes: int) -> int:
    """Return the size of a shard's slices, a multiple of 16 bytes, with which staging fits into `staging_bytes`."""
    return max(1, staging_bytes // (world_size - 1) // ALIGNMENT) * ALIGNMENT


def slice_of(call: Call, staging_bytes: int) -> Call:
    """Return the first (and largest) slice of a reduce_scatter as a call of its own."""
    size = slice_bytes(call.world_size, staging_bytes)
    return make_call(call.layout, [[min(size, shard) for shard in row] for row in call.sizes], own=call.own)


def _chunks(call: Call, rank: int, tuning: Tuning, part: _Slice = _WHOLE) -> list[Span]:
    """Return the spans of the output into which the chunks of this rank's shard are summed."""
    return chunked(part.of(call.target_span(rank, rank)), tuning)


def _staged(call: Call, source: int, target: int, part: _Slice = _WHOLE) -> Span:
    """Return the span in the staging of `target` for the slice from `source`; a rank's own slice stays in its input."""
    size = part.of(call.source_span(source, target)).num_bytes
    slot = -(-size // ALIGNMENT) * ALIGNMENT
    return Span("staging", slot * (source - (source > target)), size)


def _scatter(call: Call, rank: int, tuning: Tuning, part: _Slice = _WHOLE) -> Iterator[Step]:
    moves = {
        peer: (part.of(call.source_span(rank, peer)), _staged(call, rank, peer, part))
        for peer in rotation(rank, call.world_size)
    }
    return pushes(call, rank, moves, replace(tuning, arrivals="together"))


def _reduced(call: Call, rank: int, tuning: Tuning, chunk: int, lane: int, part: _Slice = _WHOLE) -> list[Step]:
    """Return the steps that wait for `chunk` of this rank's shard from all ranks and combine it in rank order."""
    ranks = range(call.world_size)
    spans = {peer: _staged(call, peer, rank, part) for peer in ranks} | {rank: part.of(call.source_span(rank, rank))}
    sources = tuple(chunked(spans[peer], tuning)[chunk] for peer in ranks)
    waits = tuple(Wait(Flag("staging", "arrived", peer, chunk)) for peer in ranks if peer != rank)
    target = _chunks(call, rank, tuning, part)[chunk]
    return [Batch(waits, lane), *([Reduce(sources, target, lane)] if target.num_bytes else [])]


def _fork(lane: int) -> list[Step]:
    """Return the steps that make `lane` wait for earlier work on the caller's stream."""
    return [] if lane == COPY else [RecordEvent(_BEGUN, COPY), AwaitEvent(_BEGUN, lane)]


def _after(event: int, lane: int) -> list[Step]:
    """Return the steps that make lane `COPY` wait until `lane` has run all its steps listed so far."""
    return [] if lane == COPY else [RecordEvent(event, lane), AwaitEvent(event, COPY)]
