"""Run the calls of one channel on CPUs, in two threads: one for each lane (`COPY` and `REDUCE`).

Instead of a GPU's copy engines and stream memory operations this uses `memmove`, stores and polling. The order in which
peers see stores is described in host/shared_memory.py. In a call in partitions the channel's thread pushes supplied
partitions, and the caller's thread waits for arrivals.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, TypeAlias

from counterpoint.collectives.host.announce import Announcer
from counterpoint.collectives.host.shared_memory import SharedMemory, flag_index
from counterpoint.collectives.host.watchdog import Failure, PeerWaiter, mismatch
from counterpoint.collectives.memory import EarlyUse, GrowableRegion, Location
from counterpoint.collectives.program.calls import Buffer, Span
from counterpoint.collectives.program.operations import most_staging_bytes
from counterpoint.collectives.program.reductions import DTYPES, Reduction
from counterpoint.collectives.program.steps import (
    COPY,
    REDUCE,
    AwaitEvent,
    Batch,
    BlockPartition,
    Copy,
    Flag,
    LocalCopy,
    Program,
    RecordEvent,
    Reduce,
    Signal,
    Step,
    flag_word,
    partitions,
)
from counterpoint.collectives.submit.submission import Programs, Submission, UnevenSplits
from counterpoint.collectives.work import HostWork
from counterpoint.errors import CounterpointError

BeforeStep: TypeAlias = Callable[[Program, Step], None]
"""Types a function that is called in the lane's thread before every step; tests use it to delay or kill a rank."""
_DYING_S = 1.0  # seconds that a peer whose memory is gone may take until it is seen to be dead


class Lane:
    """Runs one lane (`COPY` or `REDUCE`) of a channel's calls in order, in a thread that the first call starts."""

    def __init__(self, channel: int, lane: int) -> None:
        self._lane = lane
        self._queue: SimpleQueue[CpuCall | None] = SimpleQueue()
        name = f"counterpoint channel {channel} lane {lane}"
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def put(self, work: CpuCall) -> None:
        """Queue the call `work` for this lane's thread, behind earlier calls; the caller holds a lock."""
        self._queue.put(work)
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """End the thread when it has run all queued calls."""
        self._queue.put(None)
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            work.run_lane(self._lane)
            del work  # or its tensors would live until the next call comes


class Channel:
    """Runs a channel's calls in order; holds lanes, staging, and a buffer (landing) for outputs in plain memory."""

    def __init__(
        self,
        memory: SharedMemory,
        waiter: PeerWaiter,
        index: int,
        *,
        failure: Failure,
        programs: Programs,
        before_step: BeforeStep | None,
    ) -> None:
        self.memory, self.index, self.rank = memory, index, memory.rank
        self.failure, self.programs, self.before_step = failure, programs, before_step
        self.waiter, self.watchdog = waiter, waiter.watchdog
        self.announcer = Announcer(waiter, index, steps=1)
        self.status = self.announcer.status
        self.lanes = {lane: Lane(index, lane) for lane in (COPY, REDUCE)}
        self.staging = GrowableRegion(memory.create, memory.release)
        self.landing = GrowableRegion(memory.create, memory.release)
        self.cut: CpuCall | None = None  # the latest call in partitions

    def close(self) -> None:
        """End the threads of both lanes."""
        for lane in self.lanes.values():
            lane.close()


class CpuCall(HostWork):
    """Represents one submitted call that the two threads of its channel run; see `Work` and `PartitionedWork`.

    With `handshake` it first signals the peers that the output is free. The tensors of `keep` live until the call has
    been waited for.
    """

    sent: tuple[BlockPartition, ...] = ()
    received: tuple[BlockPartition, ...] = ()
    _ready = _taken = 0  # partitions that the caller has supplied, and has taken

    def __init__(
        self, channel: Channel, submission: Submission, number: int, *, handshake: bool, keep: tuple[Any, ...]
    ) -> None:
        self.current = submission.current(number)
        super().__init__(self.current, keep=keep)
        self.channel, self.submission, self.handshake = channel, submission, handshake
        self.memory, self.watchdog, self.rank = channel.memory, channel.watchdog, channel.rank
        self.early = submission.early
        self.events: dict[int, threading.Event] = {}
        self.base: dict[Buffer, int] = {"input": submission.input, "output": submission.output}
        self.local = dict(submission.local)
        self.reduced = threading.Event()
        self.reduced.set()
        self.is_finished = submission.partitioned == "no"
        if not self.is_finished:
            assert submission.program is not None
            self._cut = partitions(submission.program, early_release=not handshake)
            self.sent, self.received = self._cut.sent, self._cut.received
            self._ready = len(self.sent) if submission.partitioned == "output" else 0
            self._begun = threading.Event()  # the output's place is known, so that arrivals can be waited for

    def ready(self, count: int) -> None:
        """Record that the first `count` partitions of the input are written; see `PartitionedWork`."""
        self._ready = max(self._ready, count)

    def arrived(self, count: int) -> None:
        """Wait until the first `count` partitions of the output have arrived; see `PartitionedWork`."""
        try:
            self.channel.waiter.wait_until(lambda: self._begun.is_set() or self.is_completed(), self.current, None)
            while self._taken < min(count, len(self.received)):
                if self.is_completed():  # before its partitions were taken: it failed
                    self.wait()
                for step in self._cut.receives[self._taken]:
                    self._step(step)
                self._taken += 1
        except BaseException as error:
            self.channel.failure.set(error)  # so that neither the channel's thread nor a peer waits for ever
            raise

    def finish(self) -> None:
        """Send the remaining partitions of the input, and wait for all of the output; see `PartitionedWork`."""
        self.ready(len(self.sent))
        self.arrived(len(self.received))
        self.is_finished = True
        self.wait()

    def run_lane(self, lane: int) -> None:
        """Run one lane of this call, in that lane's thread; `COPY` also announces the call and starts `REDUCE`."""
        if lane == REDUCE:
            self._reduce_lane()
            return
        try:
            self.channel.failure.check()
            self._do()
            self.end()
        except BaseException as error:
            self.end(self.channel.failure.set(error))
        finally:
            self.reduced.wait()  # until then the other lane uses the tensors

    def _do(self) -> None:
        """Announce the call, plan it, run its lanes, and compare it with the peers' calls."""
        submission, channel = self.submission, self.channel
        self.record = channel.announcer.announce(submission, self.current.number)
        self.program = self._program()
        self.steps = self.program.cycle(early_release=not self.handshake)
        self.record.steps = len(self.steps) + 1
        self._place_output()
        self._grow_staging()
        self.events = {step.event: threading.Event() for step in self.steps if isinstance(step, RecordEvent)}
        if REDUCE in self.program.lanes:
            self.reduced.clear()
            channel.lanes[REDUCE].put(self)
        if submission.partitioned == "no":
            self._lane(COPY)
        else:
            self._push_partitions()
        channel.waiter.wait_until(self.reduced.is_set, self.current, None)
        for peer in self.watchdog.peers(self.current.line):
            self._compare(peer)
        if self.base["output"] != submission.output:
            ctypes.memmove(submission.output, self.base["output"], submission.output_bytes)
        self.record.step = self.record.steps

    def _program(self) -> Program:
        """Return this rank's program; in debug mode or with split sizes, first wait for all ranks' announcements."""
        rows = self._met() if self.submission.meets else []
        if self.submission.program is not None:
            return self.submission.program
        assert isinstance(self.submission.call, UnevenSplits)
        call = self.submission.call.call(rows)
        return self.channel.programs.get(call, self.early is not None, self.submission.layout)

    def _met(self) -> list[list[int]]:
        """Wait until every rank has announced this call; return the bytes sent between ranks, `[sender][receiver]`."""
        rows: list[list[int]] = [list(self.submission.row)] * self.memory.world_size
        for peer, record in self.channel.announcer.met(self.submission, self.current.number).items():
            rows[peer] = list(record.row)
        return rows

    def _compare(self, peer: int) -> None:
        """Raise Misconfigured if `peer` has made a different call under this number (it may have made none yet)."""
        same = self.watchdog.same(self.current, peer)
        if same is not None and same != self.current.text:
            raise mismatch(self.current, self.watchdog.names[peer], same)

    def _place_output(self) -> None:
        """Publish where peers write the output: the tensor if it is in symmetric memory, else the landing buffer."""
        submission = self.submission
        if not submission.output_bytes or not self.program.receives:
            return
        if submission.at is None:
            self.channel.landing.grow_to(submission.output_bytes)
            at = Location(self.channel.landing.region, 0)
            self.base["output"] = self.memory.address(self.rank, at, submission.output_bytes)
        else:
            at = submission.at
        self.record.output_offset, self.record.output_region = at.offset, at.region

    def _grow_staging(self) -> None:
        """Replace the staging buffer if it is too small, at the same call on all ranks: they compute equal sizes."""
        call, tuning, channel = self.program.call, self.program.tuning, self.channel
        if not call.reduces:
            return
        needed = most_staging_bytes(call, tuning)
        if needed and channel.staging.grow_to(needed):
            channel.status.staging_region = channel.staging.region
            channel.status.staging += 1  # last: whoever sees it sees the region
        if needed:
            self.base["staging"] = self.memory.address(self.rank, Location(channel.staging.region, 0), needed)

    def _reduce_lane(self) -> None:
        try:
            self._lane(REDUCE)
        except BaseException as error:
            self.channel.failure.set(error)  # which ends the wait of the other lane
        finally:
            self.reduced.set()

    def _lane(self, lane: int) -> None:
        for number, step in enumerate(self.steps):
            if step.lane == lane:
                self._step_of_lane(step, number)

    def _push_partitions(self) -> None:
        """Run the steps before the first push, push partitions as they are supplied, and wait for the arrivals."""
        self._begun.set()
        wait_until, number = self.channel.waiter.wait_until, 0
        for index, steps in enumerate((self._cut.begin, *self._cut.sends)):
            wait_until(lambda index=index: self._ready >= index, self.current, None)  # type: ignore[misc]
            for step in steps:
                self._step_of_lane(step, number)
                number += 1
        wait_until(lambda: self._taken == len(self.received), self.current, None)

    def _step_of_lane(self, step: Step, number: int) -> None:
        if self.channel.before_step is not None:
            self.channel.before_step(self.program, step)
        if step.lane == COPY:
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
                assert self.submission.reduction is not None
                sources = [self._here(span) for span in step.sources]
                combine(sources, self._here(step.target), step.target.num_bytes, self.submission.reduction)
            case RecordEvent():
                self.events[step.event].set()
            case AwaitEvent():
                self.channel.waiter.wait_until(self.events[step.event].is_set, self.current, None)

    def _wait(self, flag: Flag) -> None:
        words, index = self._word(self.rank, flag)
        self.channel.waiter.wait_until(lambda: words[index] == 1, self.current, flag.peer)
        words[index] = 0

    def _word(self, rank: int, flag: Flag) -> tuple[Any, int]:
        """Return the array of words that holds `flag` of `rank`, and the flag's index in that array."""
        board = self.memory.statuses[rank]
        if self.early is not None and flag.buffer == "output":
            return board.early[self.early.block.number], flag_word(flag, self.memory.world_size)
        return board.channels[self.channel.index].words, flag_index(flag, self.memory.world_size)

    def _here(self, span: Span) -> int:
        tensors = self.local.get(span.buffer)
        if tensors is not None:
            return tensors.at(span.offset)
        return self.base[span.buffer] + span.offset

    def _at_peer(self, peer: int, span: Span) -> int:
        """Return the address of `span` of `peer` in this process; `peer` published it before signalling `ready`."""
        if span.buffer == "staging":
            at = self._staging_of(peer)
        elif self.early is not None:
            at = self._early_of(peer, self.early)
        else:
            record = self.watchdog.record(self.current, peer)
            if record.number != self.current.number:  # the signal was of another call
                shown = self.watchdog.shown(self.current.channel, peer)
                raise mismatch(self.current, self.watchdog.names[peer], shown)
            self._compare(peer)
            at = Location(record.output_region, record.output_offset)
        try:
            return self.memory.address(peer, at + span.offset, span.num_bytes)
        except CounterpointError:  # a peer that is dying or has failed has no memory: wait for the better error
            soon = time.monotonic() + _DYING_S
            self.channel.waiter.wait_until(lambda: time.monotonic() > soon, self.current, peer)
            raise

    def _staging_of(self, peer: int) -> Location:
        """Wait until `peer` has replaced its staging as often as this rank; return where the staging of `peer` lies."""
        board = self.memory.statuses[peer].channels[self.channel.index]
        self.channel.waiter.wait_until(lambda: board.staging >= self.channel.status.staging, self.current, peer)
        return Location(board.staging_region, 0)

    def _early_of(self, peer: int, early: EarlyUse) -> Location:
        """Wait until `peer` has made its early-release region; return the location of the output of `peer` in it."""
        regions, part = self.memory.statuses[peer].early_regions, early.block.part
        self.channel.waiter.wait_until(lambda: regions[part] >= 0, self.current, peer)
        return Location(regions[part], early.block.at.offset + early.offset)


def combine(sources: Sequence[int], target: int, num_bytes: int, reduction: Reduction) -> None:
    """Combine `num_bytes` at each source address, in this order, into the target, which may be one of the sources."""
    import torch

    count = num_bytes // reduction.item_bytes

    def elements(address: int, dtype: str) -> Any:
        size = count * DTYPES[dtype][0]
        return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=getattr(torch, dtype))

    combined = reference([elements(source, reduction.dtype) for source in sources], reduction)
    elements(target, reduction.result_dtype).copy_(combined)


def reference(sources: Sequence[Any], reduction: Reduction) -> Any:
    """Combine tensors of one shape in plain torch as the GPU kernel does: in the same order and accumulator dtype."""
    import torch

    wide = [source.to(getattr(torch, reduction.accumulator)) for source in sources]
    if reduction.op == "premul_sum":
        wide = [source * reduction.factor for source in wide]
    total = wide[0]
    for value in wide[1:]:
        match reduction.op:
            case "max":
                total = torch.maximum(total, value)
            case "min":
                total = torch.minimum(total, value)
            case _:
                total = total + value
    if reduction.op == "avg":  # torch turns division by a number into a product on GPUs, which rounds differently
        total = total / torch.full_like(total, len(wide))
    return total.to(getattr(torch, reduction.result_dtype))
