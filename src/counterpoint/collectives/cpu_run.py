"""One call on its way: what a rank does on CPUs, from showing it on its board to the last copy.

What a GPU does with copy engines and stream memory operations is done here by `memmove`, by stores and by polling.
Order and visibility are those of board.py.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from counterpoint.collectives.board import DEPTH, Board, flag_index
from counterpoint.collectives.plan import plan
from counterpoint.collectives.program import (
    COPY,
    REDUCE,
    Await,
    Batch,
    Buffer,
    Copy,
    Flag,
    LocalCopy,
    Program,
    Record,
    Reduce,
    Signal,
    Span,
    Step,
    Wait,
)
from counterpoint.collectives.reduce import Reduction, reference
from counterpoint.collectives.shared_memory import SharedMemory
from counterpoint.collectives.symmetric import Location
from counterpoint.collectives.watchdog import Doing, mismatch
from counterpoint.errors import CounterpointError

if TYPE_CHECKING:
    from counterpoint.collectives.cpu import Channel

__all__ = ["Job", "Room", "Run"]

_SMALLEST_REGION = 1 << 16  # bytes
_DYING_S = 1.0  # from the moment when a process gives up its memory to that when it is seen to be dead


@dataclass(kw_only=True)
class Job:
    """One call of this rank.

    Args:
        doing: what it is, and where it stands in the order of calls.
        row: bytes for each rank, if only this rank knows; then all meet first, and `program` gets everyone's.
        meet: all ranks of the call compare it before it begins.
        program: rows of all ranks (or none) to this rank's program.
        input: address; 0 if there is none.
        output: address; 0 if there is none.
        output_bytes: size of the output.
        at: where the output lies in symmetric memory; None if it does not.
        reduction: of calls that reduce.
        keep: tensors that have to live until the end.
    """

    doing: Doing
    program: Callable[[Sequence[Sequence[int]]], Program]
    row: tuple[int, ...] = ()
    meet: bool = False
    input: int = 0
    output: int = 0
    output_bytes: int = 0
    at: Location | None = None
    reduction: Reduction | None = None
    keep: tuple[Any, ...] = ()


class Room:
    """A region that grows: a new one takes the place of the last when that is too small."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self.region = -1
        self.num_bytes = 0

    def make(self, num_bytes: int) -> bool:
        """Room for `num_bytes`; whether that needed a new region, which follows from the sizes asked for alone."""
        if num_bytes <= self.num_bytes:
            return False
        if self.region >= 0:
            self._memory.release(self.region)
        self.num_bytes = max(_SMALLEST_REGION, 1 << (num_bytes - 1).bit_length())
        self.region = self._memory.create(self.num_bytes)
        return True


class Run:
    """One program on its way."""

    def __init__(self, channel: Channel, job: Job) -> None:
        self.channel, self.job, self.doing = channel, job, job.doing
        self.memory, self.watchdog, self.rank = channel.memory, channel.watchdog, channel.rank
        self.peers = self.watchdog.peers(self.doing.line)
        self.events: dict[int, threading.Event] = {}
        self.base: dict[Buffer, int] = {"input": job.input, "output": job.output}
        self.reduced = threading.Event()
        self.reduced.set()

    def do(self) -> None:
        """Announces the call, plans it, runs its lanes, and compares it with what the others did."""
        job, channel = self.job, self.channel
        self.record = self._announce()
        self.program = job.program(self._met() if job.meet else ())
        self.steps = self.program.cycle()
        self.record.steps = len(self.steps) + 1
        self._place_output()
        self._grow_staging()
        self.events = {step.event: threading.Event() for step in self.steps if isinstance(step, Record)}
        if REDUCE in self.program.lanes:
            self.reduced.clear()
            channel.lanes[REDUCE].put(self._reduce_lane)
        self._lane(COPY)
        channel.until(self.reduced.is_set, self.doing, None)
        for peer in self.peers:
            self._compare(peer)
        if self.base["output"] != job.output:
            ctypes.memmove(job.output, self.base["output"], job.output_bytes)
        self.record.step = self.record.steps

    def wait_for_lanes(self) -> None:
        """Until no thread uses the tensors any more."""
        self.reduced.wait()

    def _announce(self) -> Board:
        """Shows the call on the board, once the slot that it takes is of interest to nobody."""
        doing, line = self.doing, self.channel.board.lines[self.doing.line]
        for peer in self.peers:
            self.channel.until(partial(self._is_close, peer), doing, peer)
        record = line.records[doing.number % DEPTH]
        record.text, record.step, record.steps, record.output_region = doing.text.encode()[:159], 0, 1, -1
        record.row[: len(self.job.row)] = list(self.job.row)
        record.number = doing.number
        self.channel.board.line = doing.line
        line.latest = doing.number  # last: whoever sees it sees the record
        return record

    def _met(self) -> list[list[int]]:
        """Waits until every rank has announced this call; their rows."""
        rows: list[list[int]] = [list(self.job.row)] * self.memory.world_size
        for peer in self.peers:
            self.channel.until(partial(self._has_come, peer), self.doing, peer)
            self._compare(peer)
            rows[peer] = list(self.watchdog.record(self.doing, peer).row)
        return rows

    def _is_close(self, peer: int) -> bool:
        return self.watchdog.latest(self.doing, peer) > self.doing.number - DEPTH

    def _has_come(self, peer: int) -> bool:
        return self.watchdog.latest(self.doing, peer) >= self.doing.number

    def _compare(self, peer: int) -> None:
        """Raises Misconfigured if `peer` has made another call; it may not have made any yet."""
        same = self.watchdog.same(self.doing, peer)
        if same is not None and same != self.doing.text:
            raise mismatch(self.doing, peer, same)

    def _place_output(self) -> None:
        """Peers write the output where they have it mapped: in the tensor, or in a landing from which it is copied."""
        job = self.job
        if not job.output_bytes or not any(
            isinstance(op, Wait) and (op.flag.buffer, op.flag.kind) == ("output", "arrived")
            for op in self._operations()
        ):
            return
        if job.at is None:
            self.channel.landing.make(job.output_bytes)
            at = Location(self.channel.landing.region, 0)
            self.base["output"] = self.memory.address(self.rank, at, job.output_bytes)
        else:
            at = job.at
        self.record.output_offset, self.record.output_region = at.offset, at.region

    def _operations(self) -> list[Signal | Wait]:
        return [op for step in self.steps if isinstance(step, Batch) for op in step.operations]

    def _grow_staging(self) -> None:
        """All ranks replace their staging at the same call, since they all know what each of them needs."""
        call, tuning, channel = self.program.call, self.program.tuning, self.channel
        if not call.reduces:
            return
        needed = max(plan(call, rank, tuning).staging_bytes for rank in range(call.world_size))
        if needed and channel.staging.make(needed):
            channel.board.staging_region = channel.staging.region
            channel.board.staging += 1  # last: whoever sees it sees the region
        if needed:
            self.base["staging"] = self.memory.address(self.rank, Location(channel.staging.region, 0), needed)

    def _reduce_lane(self) -> None:
        try:
            self._lane(REDUCE)
        except BaseException as error:
            self.channel.executor.fail(error)  # which ends the wait of the other lane
        finally:
            self.reduced.set()

    def _lane(self, lane: int) -> None:
        before_step = self.channel.executor.before_step
        for number, step in enumerate(self.steps):
            if step.lane != lane:
                continue
            if before_step is not None:
                before_step(self.program, step)
            if lane == COPY:
                self.record.step = number
            self._step(step)

    def _step(self, step: Step) -> None:
        match step:
            case Copy():
                ctypes.memmove(self._at_peer(step.peer, step.target), self._here(step.source), step.source.num_bytes)
            case LocalCopy():
                ctypes.memmove(self._here(step.target), self._here(step.source), step.source.num_bytes)
            case Batch():
                for operation in step.operations:
                    if isinstance(operation, Signal):
                        self._words(operation.peer)[self._index(operation.flag)] = 1
                    else:
                        self._wait(operation.flag)
            case Reduce():
                assert self.job.reduction is not None
                sources = [self._here(span) for span in step.sources]
                combine(sources, self._here(step.target), step.target.num_bytes, self.job.reduction)
            case Record():
                self.events[step.event].set()
            case Await():
                self.channel.until(self.events[step.event].is_set, self.doing, None)

    def _wait(self, flag: Flag) -> None:
        words, index = self._words(self.rank), self._index(flag)
        self.channel.until(lambda: words[index] == 1, self.doing, flag.peer)
        words[index] = 0

    def _words(self, rank: int) -> Board:
        return self.memory.boards[rank].channels[self.channel.index].words

    def _index(self, flag: Flag) -> int:
        return flag_index(flag, self.memory.world_size)

    def _here(self, span: Span) -> int:
        return self.base[span.buffer] + span.offset

    def _at_peer(self, peer: int, span: Span) -> int:
        """Where the span of `peer` is mapped here. It was shown before the signal that it may be written."""
        if span.buffer == "staging":
            at = self._staging_of(peer)
        else:
            record = self.watchdog.record(self.doing, peer)
            if record.number != self.doing.number:  # the signal was of another call
                raise mismatch(self.doing, peer, self.watchdog.shown(self.doing.channel, peer))
            self._compare(peer)
            at = Location(record.output_region, record.output_offset)
        try:
            return self.memory.address(peer, at + span.offset, span.num_bytes)
        except CounterpointError:  # who is dying or has given up has no memory any more: soon it can be told
            soon = time.monotonic() + _DYING_S
            self.channel.until(lambda: time.monotonic() > soon, self.doing, peer)
            raise

    def _staging_of(self, peer: int) -> Location:
        """`peer` may not have come to this call yet, and so not have replaced its staging."""
        board = self.memory.boards[peer].channels[self.channel.index]
        self.channel.until(lambda: board.staging >= self.channel.board.staging, self.doing, peer)
        return Location(board.staging_region, 0)


def combine(sources: Sequence[int], target: int, num_bytes: int, reduction: Reduction) -> None:
    """Combines `num_bytes` at each address of `sources`, in this order, into `target`, which may be one of them."""
    import torch

    dtype = getattr(torch, reduction.dtype)

    def elements(address: int) -> Any:
        return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=dtype)

    elements(target).copy_(reference([elements(source) for source in sources], reduction))
