"""Run one channel of a GPU communicator: announce a call, compare it with the peers', and issue its driver calls.

*Where peers write.* We assume that each peer's output has the same region and offset as ours: pools give the same
places on all ranks that make and drop their tensors in the same order. We verify it, since the place is part of the
announced text (`CudaTransport.place`): a rank announces its call, then looks at the calls of the others
(host/announce.py), and only then queues work. So of two ranks with different places, the one that announces last raises
before it has queued its call, and none of its bytes and signals go out. The other one could not know yet and has queued
its call, but writes nothing at a wrong place: the checker proves that no program writes into an output before its owner
has begun the call and said so by a signal (`ready`, or in an all_reduce the arrival of slices), and this owner never
does. The watchdog ends its wait; by then both ranks have failed, and all buffers of the communicator are invalid, since
a released stream runs the rest of its queue. With an early release that signal was sent before the call; then the block
is compared, and a rank that uses another block may find it overwritten before it gets the error.

gather, send_recv, and all_to_all with split sizes have outputs of different sizes, or on some ranks only: there the
ranks meet on the host first, and read from each other's statuses where outputs are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from counterpoint.collectives.cuda.call import CudaWork, Prepared, PreparedCache
from counterpoint.collectives.cuda.context import STEPS, CudaContext
from counterpoint.collectives.cuda.driver import Executor, ReductionLauncher
from counterpoint.collectives.cuda.events import StreamPoint
from counterpoint.collectives.cuda.lower import Addresses, CopyAsync, DriverCall, lower
from counterpoint.collectives.cuda.partitioned import PartitionedCudaWork, PreparedPartitions
from counterpoint.collectives.host.announce import Announcer
from counterpoint.collectives.host.status import RankStatus
from counterpoint.collectives.memory.pool import GrowableRegion, Location
from counterpoint.collectives.program.operations import has_equal_outputs, most_staging_bytes
from counterpoint.collectives.program.partitions import partitions
from counterpoint.collectives.program.steps import COPY, Copy, Program
from counterpoint.collectives.submit.submission import NOWHERE, Submission, UnevenSplits, unfinished
from counterpoint.errors import Misconfigured

LANDING = Location(-2, 0)  # stands for an output that peers cannot write: they write the landing, which is copied
_MOST_KNOWN = 4096  # entries of each cache: needs by program, prepared calls by submission


@dataclass(frozen=True, slots=True)
class _Needs:
    """Holds what a program needs before it is lowered; all fields but `program` and `writes` are equal on all ranks."""

    program: Program
    staging_bytes: int
    landing_bytes: int
    meets: bool  # ranks must meet first to learn where the others' outputs are
    writes: bool  # this rank writes into peers' outputs


class CallQueue:
    """Issues calls in order, each on the stream that was current when it was made, or on the queue's own, `stream`."""

    def __init__(
        self, context: CudaContext, executor: Executor, stream: int, channel: int, *, most_prepared: int = 512
    ) -> None:
        self.context, self.executor = context, executor
        self.stream = stream  # of calls with async_op=True
        self.announcer = Announcer(context.waiter, channel, steps=STEPS)
        self.last: dict[int, StreamPoint] = {}  # end of the latest call by graph capture; 0: outside of captures
        self.under_way: deque[CudaWork] = deque()
        self.unshown: deque[tuple[Submission, int]] = deque()  # calls that are not yet announced, with their numbers
        self._cache = PreparedCache(context.events, most=most_prepared)

    def start(self, submission: Submission, number: int, keep: tuple[Any, ...]) -> tuple[CudaWork, int]:
        """Queue a call on the current stream, or with `async_op` on the channel's own stream after the current one.

        With `async_op` the call's work keeps the tensors of `keep` alive; others need not, as they run in stream order.

        Returns:
            The call's work, and the id of the graph capture that it became part of; 0: none.

        Raises:
            Misconfigured: the stream is in a graph capture, and the output is one of an early release.
        """
        context = self.context
        current = context.gpu.current_stream()
        capture = context.gpu.capture_of(context.events.handle(current))
        if not capture:
            return self._queue(submission, number, keep, current, 0), 0
        if submission.early is not None:
            raise Misconfigured(
                f"{submission.current(number)} in a capture into a tensor of empty(early_release=True): a graph would "
                "give its memory back at every replay; use empty() there"
            )
        with context.gpu.relaxed():
            return self._queue(submission, number, keep, current, capture), capture

    def show(self) -> None:
        """Announce the calls in `unshown`, as far as that is possible; the watch calls this again and again."""

    def close(self) -> None:
        """Free graphs and events; only when all calls have run."""
        self._cache.close()

    def _announced(self, submission: Submission, number: int) -> RankStatus:
        """Announce a call and compare it with the peers' calls; return its record."""
        record = self.announcer.announce(submission, number)
        self.announcer.compare(submission, number)
        return record

    def _prepared(self, submission: Submission, number: int, capture: int) -> Prepared:
        """Return the call's driver calls."""
        raise NotImplementedError

    def _queue(
        self, submission: Submission, number: int, keep: tuple[Any, ...], current: int, capture: int
    ) -> CudaWork:
        """Announce the call, compare it with the peers' calls, and only then issue it."""
        try:
            record = self._announced(submission, number)
            prepared = self._prepared(submission, number, capture)
            begin, end = self._issue(submission, prepared, current, capture)
        except BaseException as error:
            first = self.context.failure.set(error)
            if first is error:
                raise
            raise first from error
        if not submission.async_op:
            keep = ()
        if isinstance(prepared, PreparedPartitions):
            work: CudaWork = PartitionedCudaWork(self.context, submission, number, record, prepared, begin, end, keep)
        else:
            work = CudaWork(self.context, submission, number, record, prepared, begin, end, keep)
        if not capture:
            self.under_way.append(work)
        elif record.number == number:
            record.step = STEPS
        return work

    def _issue(
        self, submission: Submission, prepared: Prepared, current: int, capture: int
    ) -> tuple[StreamPoint, StreamPoint]:
        """Queue the call after the last one of the channel, and record its memory; return its begin and its end."""
        events = self.context.events
        stream = self.stream if submission.async_op else current
        last, begin = self._last(capture), None
        if stream != current:
            begin = events.record(current, capture)  # counts as the call's begin: its own stream runs only calls
            events.wait(stream, begin)
        if last is not None and last.stream not in (stream, current):  # `begin` comes after what `current` holds
            events.wait(stream, last)
        if submission.early is not None:
            submission.early.block.ready = False
        begin = begin or events.record(stream, capture)
        prepared.start(stream, events, capture)
        self._note(submission, prepared, stream, capture)
        if isinstance(prepared, PreparedPartitions):
            return begin, begin  # `finish` records the end
        end = self.last[capture] = prepared.last = events.record(stream, capture)
        return begin, end

    def _last(self, capture: int) -> StreamPoint | None:
        """Return the end of the latest call in this capture; at the first call in one, forget captures that ended."""
        if capture not in self.last:
            current, events = self.context.gpu.capture_of, self.context.events
            self.last = {
                number: point
                for number, point in self.last.items()
                if number in (0, current(events.handle(point.stream)))
            }
        return self.last.get(capture)

    def _note(self, submission: Submission, prepared: Prepared, stream: int, capture: int) -> None:
        """Record in `StreamOrder` which memory the call uses; repeated calls do so only after memory was freed."""
        order = self.context.order
        now = order.epoch, stream
        if now == prepared.noted and not capture:
            return
        for at in (submission.at, *submission.input_at):
            if at is not None:
                order.used(at, stream, capture)
        if not capture:
            prepared.noted = now


class CudaChannel(CallQueue):
    """Issues the calls of a channel, which all ranks make in the same order."""

    def __init__(self, context: CudaContext, index: int) -> None:
        executor = Executor(driver=context.gpu.driver)
        super().__init__(context, executor, int(executor.stream()), index)
        self.index = index
        self.staging, self.landing = (
            GrowableRegion(partial(context.growth.create, f"{what} of channel {index}"))
            for what in ("staging", "landing")
        )
        self._latest: dict[tuple[Submission, bool], Prepared] = {}  # by handshake; only calls that need no meeting
        self._epoch = 0  # epoch of memory in which `_latest` is valid
        self._needs: dict[int, _Needs] = {}
        self._cut: PartitionedCudaWork | None = None  # the latest call in partitions

    def close(self) -> None:
        """Free graphs, events and streams; only when all calls have run."""
        super().close()
        self.executor.close()

    def start(self, submission: Submission, number: int, keep: tuple[Any, ...]) -> tuple[CudaWork, int]:
        """Queue a call; raise `Misconfigured` while one in partitions is not finished. See `CallQueue.start`."""
        cut = self._cut
        if cut is not None:
            if not cut.is_finished:
                raise unfinished(cut.current)
            self.last[cut.ended.capture] = cut.ended
            self._cut = None
        work, capture = super().start(submission, number, keep)
        if isinstance(work, PartitionedCudaWork):
            self._cut = work
        return work, capture

    def _prepared(self, submission: Submission, number: int, capture: int) -> Prepared:
        """Return the call's driver calls: cached ones, unless an address or size that they depend on has changed."""
        handshake = submission.early is None or submission.early.handshake
        if self._epoch != self.context.growth.epoch or len(self._latest) > _MOST_KNOWN:
            self._latest.clear()  # staging or landing may have been replaced
            self._epoch = self.context.growth.epoch
        prepared = self._latest.get((submission, handshake))
        if prepared is not None and not prepared.evicted:
            return prepared
        known = None if submission.program is None else self._needed(submission.program)
        needs, met = self._agreed(submission, number, known, capture)
        early = None if submission.early is None else (submission.early.block.number, handshake)
        rooms = self.staging.region, self.landing.region
        key = (
            id(needs.program), submission.input, submission.output, submission.local, early, submission.reduction,
            rooms, *met.items(),
        )  # fmt: skip
        prepared = self._cache.get(key)
        if prepared is None:
            prepared = self._prepare(submission, needs, met, handshake)
            self._cache.put(key, prepared)
        if known is not None and not (known.meets or submission.meets):
            self._latest[submission, handshake] = prepared
        return prepared

    def _agreed(
        self, submission: Submission, number: int, known: _Needs | None, capture: int
    ) -> tuple[_Needs, dict[int, Location]]:
        """Return a call's needs, and where peers' outputs are; meet the ranks first to allocate or to learn these."""
        own = submission.shown_at
        grows = known is not None and not self.staging.fits(known.staging_bytes)
        lands = known is not None and own == LANDING and has_equal_outputs(known.program.call)
        grows |= known is not None and lands and not self.landing.fits(known.landing_bytes)
        if known is not None and not (grows or known.meets or submission.meets):
            return known, {}
        records = self.announcer.met(submission, number)
        where = {peer: Location(record.output_region, record.output_offset) for peer, record in records.items()}
        needs = known
        if needs is None:
            ranks = range(self.context.memory.world_size)
            rows = [list(records[rank].row) if rank in records else list(submission.row) for rank in ranks]
            assert isinstance(submission.call, UnevenSplits)
            call, early = submission.call.call(rows), submission.early is not None
            needs = self._needed(self.context.programs.get(call, early, submission.layout))
        told = needs.meets or bool(submission.row)
        lands |= told and LANDING in (own, *where.values())
        for room, num_bytes in (
            (self.staging, needs.staging_bytes),
            (self.landing, needs.landing_bytes if lands else 0),
        ):
            if capture and not room.fits(num_bytes):
                raise Misconfigured(
                    f"{submission.current(number)} needs {num_bytes} bytes more of symmetric memory, which cannot be "
                    "made in a capture; make the same call once before it"
                )
            room.grow_to(num_bytes)
        return needs, where if told else {}

    def _needed(self, program: Program) -> _Needs:
        """Return the cached needs of a program."""
        found = self._needs.get(id(program))
        if found is None or found.program is not program:
            if len(self._needs) >= _MOST_KNOWN:
                self._needs.clear()
            found = self._needs[id(program)] = _needs_of(program)
        return found

    def _prepare(self, submission: Submission, needs: _Needs, met: Mapping[int, Location], handshake: bool) -> Prepared:
        """Lower the program to driver calls at real addresses, and add the copy from the landing if there is one."""
        addresses = self._addresses(submission, needs, met)
        if submission.partitioned != "no":
            return PreparedPartitions(
                needs.program,
                partitions(needs.program, early_release=not handshake),
                partial(lower, needs.program, addresses),
                self.executor,
                supplied=submission.partitioned == "output",
                graphs=self.context.options.graphs is not False,
            )
        steps = needs.program.cycle(early_release=not handshake)
        calls: tuple[DriverCall, ...] = lower(needs.program, addresses, steps)
        own = addresses.output[needs.program.rank]
        if own != submission.output:
            calls += (CopyAsync(submission.output, own, submission.output_bytes, COPY, local=True),)
        options, reduction = self.context.options, None
        if submission.reduction is not None:
            reduction = ReductionLauncher(self.context.gpu, replace(submission.reduction, num_sms=options.sum_sms))
        return Prepared(needs.program, calls, self.executor, reduction, graphs=options.graphs is not False)

    def _addresses(self, submission: Submission, needs: _Needs, met: Mapping[int, Location]) -> Addresses:
        """Return the addresses of all buffers and flags of a call; 0 for outputs that this rank does not write."""
        memory, flags, block = self.context.memory, self.context.flags, None
        if submission.early is not None:
            block = submission.early.block
        ranks, staged = range(memory.world_size), needs.staging_bytes
        written = [rank for rank in ranks if needs.writes or rank == memory.rank]
        output_flags = flags.of_channel(self.index) if block is None else flags.of_block(block.number)
        return Addresses(
            input=submission.input,
            output=tuple(self._output_of(rank, submission, needs, met) if rank in written else 0 for rank in ranks),
            staging=self._everywhere(Location(self.staging.region, 0), staged) if staged else (),
            output_flags=self._everywhere(output_flags, 4),
            staging_flags=self._everywhere(flags.of_staging(self.index), 4),
            local=dict(submission.local),
        )

    def _everywhere(self, at: Location, num_bytes: int) -> tuple[int, ...]:
        memory = self.context.memory
        return tuple(memory.address(rank, at, num_bytes) for rank in range(memory.world_size))

    def _output_of(self, rank: int, submission: Submission, needs: _Needs, met: Mapping[int, Location]) -> int:
        """Return the address at which this rank has the output of `rank` mapped; 0 if `rank` has no output."""
        memory = self.context.memory
        if rank == memory.rank and not (submission.at is None and needs.program.receives):
            return submission.output
        own = LANDING if submission.at is None else submission.at
        at = met.get(rank, NOWHERE) if met and rank != memory.rank else own
        num_bytes = needs.program.call.output_bytes(rank)
        if at.region == NOWHERE.region or not num_bytes:
            return 0
        return memory.address(rank, Location(self.landing.region, 0) if at == LANDING else at, num_bytes)


def _needs_of(program: Program) -> _Needs:
    call, ranks = program.call, range(program.world_size)
    writes = any(isinstance(step, Copy) and step.target.buffer == "output" for step in program.steps)
    return _Needs(
        program=program,
        staging_bytes=most_staging_bytes(call, program.tuning),
        landing_bytes=max(call.output_bytes(rank) for rank in ranks),
        meets=call.layout.writes_outputs and not has_equal_outputs(call),
        writes=writes,
    )
