"""One call on its way: what a rank does on CPUs, from showing it on its board to the last copy.

What a GPU does with copy engines and stream memory operations is done here by `memmove`, by stores and by polling.
Order and visibility are those of board.py.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from typing import Any

from counterpoint.collectives.announce import Notice
from counterpoint.collectives.board import flag_index
from counterpoint.collectives.cpu_channel import Channel
from counterpoint.collectives.early import EarlyUse
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
    Record,
    Reduce,
    Signal,
    Span,
    Step,
    Wait,
    flag_word,
)
from counterpoint.collectives.reduce import DTYPES, Reduction, reference
from counterpoint.collectives.symmetric import Location
from counterpoint.collectives.transport import Job
from counterpoint.collectives.watchdog import mismatch
from counterpoint.errors import CounterpointError

__all__ = ["Run"]

_DYING_S = 1.0  # from the moment when a process gives up its memory to that when it is seen to be dead


class Run:
    """One program on its way.

    Args:
        channel: that it runs on.
        job: the call.
        notice: what it is announced as.
        number: of the call on its line.
        handshake: it begins with telling the peers that its output is free.
    """

    def __init__(self, channel: Channel, job: Job, notice: Notice, number: int, handshake: bool) -> None:
        self.channel, self.job, self.notice, self.handshake = channel, job, notice, handshake
        self.doing = notice.doing(number)
        self.memory, self.watchdog, self.rank = channel.memory, channel.watchdog, channel.rank
        self.peers = self.watchdog.peers(self.doing.line)
        self.early = job.early
        self.events: dict[int, threading.Event] = {}
        self.base: dict[Buffer, int] = {"input": job.input, "output": job.output}
        self.reduced = threading.Event()
        self.reduced.set()

    def do(self) -> None:
        """Announces the call, plans it, runs its lanes, and compares it with what the others did."""
        job, channel = self.job, self.channel
        self.record = channel.announcer.announce(self.notice, self.doing.number, job.row)
        self.program = job.program(self._met() if job.meet else ())
        self.steps = self.program.cycle(early_release=not self.handshake)
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

    def _met(self) -> list[list[int]]:
        """Waits until every rank has announced this call; their rows."""
        rows: list[list[int]] = [list(self.job.row)] * self.memory.world_size
        for peer, record in self.channel.announcer.met(self.notice, self.doing.number).items():
            rows[peer] = list(record.row)
        return rows

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
            self.channel.fail(error)  # which ends the wait of the other lane
        finally:
            self.reduced.set()

    def _lane(self, lane: int) -> None:
        before_step = self.channel.before_step
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
                        words, index = self._word(operation.peer, operation.flag)
                        words[index] = 1
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
        words, index = self._word(self.rank, flag)
        self.channel.until(lambda: words[index] == 1, self.doing, flag.peer)
        words[index] = 0

    def _word(self, rank: int, flag: Flag) -> tuple[Any, int]:
        """Where `flag` of `rank` is: an array, and the index in it."""
        board = self.memory.boards[rank]
        if self.early is not None and flag.buffer == "output":
            return board.early[self.early.block.number], flag_word(flag, self.memory.world_size)
        return board.channels[self.channel.index].words, flag_index(flag, self.memory.world_size)

    def _here(self, span: Span) -> int:
        return self.base[span.buffer] + span.offset

    def _at_peer(self, peer: int, span: Span) -> int:
        """Where the span of `peer` is mapped here. It was shown before the signal that it may be written."""
        if span.buffer == "staging":
            at = self._staging_of(peer)
        elif self.early is not None:
            at = self._early_of(peer, self.early)
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

    def _early_of(self, peer: int, early: EarlyUse) -> Location:
        """`peer` may not have come to this call yet, and not even have made its region."""
        regions, part = self.memory.boards[peer].early_regions, early.block.part
        self.channel.until(lambda: regions[part] >= 0, self.doing, peer)
        return Location(regions[part], early.block.at.offset + early.offset)


def combine(sources: Sequence[int], target: int, num_bytes: int, reduction: Reduction) -> None:
    """Combines `num_bytes` at each address of `sources`, in this order, into `target`, which may be one of them."""
    import torch

    count = num_bytes // reduction.item_bytes

    def elements(address: int, dtype: str) -> Any:
        size = count * DTYPES[dtype][0]
        return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=getattr(torch, dtype))

    combined = reference([elements(source, reduction.dtype) for source in sources], reduction)
    elements(target, reduction.result_dtype).copy_(combined)
