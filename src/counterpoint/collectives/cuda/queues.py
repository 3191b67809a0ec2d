"""Issue a GPU communicator's calls in order: announce each call, compare it with peers' calls, queue driver calls.

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

*Messages* (`program/messages.py`) have a queue with a stream of its own for each line. A stream that waits for another
rank holds one of CUDA's hardware queues (`CUDA_DEVICE_MAX_CONNECTIONS`, 8 if it is not set); streams that wait for
nothing take turns on the others. Once as many streams wait as there are queues, everything that this process queues
later is held up, whatever its priority: the send, too, that a peer waits for (measured: docs/log.md). So a rank is
warned when its lines leave fewer than four queues to all else. Ranks whose sends and receives, issued one after the
other on a single queue, would come to their end are safe with any number of queues.

Calls of a channel wait on the host until the peers are less than `DEPTH` calls behind, as their records are needed
until then. A message must not wait, since its sender may have to make the very call that the peer waits for; so it is
issued at once, and announced by the watch when its record is free. A message that was captured fills the same slots at
every replay. So sender and receiver either both capture it, and replay it as often and in the same order among the
messages of its line, or neither does.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakSet

from counterpoint.collectives.cuda.call import STEPS, CudaContext, CudaWork, Prepared, PreparedCache
from counterpoint.collectives.cuda.driver import BindReduction, Executor, StreamPoint, hardware_queues
from counterpoint.collectives.cuda.lower import WORD_BYTES, Addresses, CopyAsync, DriverCall, lower
from counterpoint.collectives.host.announce import Announcer
from counterpoint.collectives.host.shared_memory import RankStatus
from counterpoint.collectives.memory import GrowableRegion, Location
from counterpoint.collectives.program.messages import Mailbox, message_program
from counterpoint.collectives.program.operations import has_equal_outputs, most_staging_bytes
from counterpoint.collectives.program.steps import COPY, Copy, Program, partitions
from counterpoint.collectives.submit.submission import NOWHERE, Submission, UnevenSplits, unfinished
from counterpoint.errors import Misconfigured

LANDING = Location(-2, 0)  # stands for an output that peers cannot write: they write the landing, which is copied
_FOR_OTHERS = 4  # hardware queues left to kernels, calls and copies
_MOST_MESSAGES = 64  # prepared messages that a line caches; finding the one to evict takes 0.5 µs for each


class CallQueue:
    """Issues calls in order, each on the stream current at the time of the call, or on the queue's own `stream`."""

    def __init__(
        self, context: CudaContext, executor: Executor, stream: int, channel: int, *, most_prepared: int = 512
    ) -> None:
        self.context, self.executor = context, executor
        self.stream = stream  # of calls with async_op=True
        self.announcer = Announcer(context.waiter, channel, steps=STEPS)
        self.last: dict[int, StreamPoint] = {}  # the latest call's end, by id of the graph capture; 0: no capture
        self.under_way: deque[CudaWork] = deque()
        self.unshown: deque[tuple[Submission, int]] = deque()  # calls that are not yet announced, with their numbers
        self._cache = PreparedCache(context.events, most=most_prepared)
        self._cut: CudaWork | None = None  # the latest call in partitions

    def start(self, submission: Submission, number: int, keep: tuple[Any, ...]) -> CudaWork:
        """Queue a call on the current stream, or with `async_op` on the queue's own, behind the current stream's work.

        With `async_op` the call's work keeps the tensors of `keep` alive; without, stream order makes that needless.

        Returns:
            The call's work.

        Raises:
            Misconfigured: the stream is in a graph capture, and the output is one of an early release.
        """
        if self._cut is not None:
            self._end_partitions(self._cut)
        gpu = self.context.gpu
        current = gpu.current_stream()
        capture = gpu.capture_of(self.context.events.handles[current])
        if not capture:
            return self._queue(submission, number, keep, current, 0)
        if submission.early is not None:
            raise Misconfigured(
                f"{submission.current(number)} in a capture into a tensor of empty(early_release=True): a graph would "
                "give its memory back at every replay; use empty() there"
            )
        with gpu.relaxed():
            return self._queue(submission, number, keep, current, capture)

    def show(self) -> None:
        """Announce calls in `unshown` as far as records are free; the watching thread calls this again and again."""

    def close(self) -> None:
        """Free graphs and events; call this only when the GPU has finished all calls."""
        self._cache.close()

    def _end_partitions(self, cut: CudaWork) -> None:
        """Record the end of `cut`, a call in partitions, as the queue's latest end; raise if `cut` is not finished."""
        if not cut.is_finished:
            raise unfinished(cut.current)
        self.last[cut.ended.capture], self._cut = cut.ended, None

    def _announced(self, submission: Submission, number: int) -> RankStatus:
        """Announce a call in this rank's status and compare it with the peers' calls; return the status record."""
        record = self.announcer.announce(submission, number)
        self.announcer.compare(submission, number)
        return record

    def _prepared(self, submission: Submission, number: int, capture: int) -> Prepared:
        """Return the call's driver calls, prepared now or taken from the cache."""
        raise NotImplementedError

    def _queue(
        self, submission: Submission, number: int, keep: tuple[Any, ...], current: int, capture: int
    ) -> CudaWork:
        """Announce the call, compare it with the peers' calls, and only then issue the call's driver calls."""
        stream = self.stream if submission.async_op else current
        try:
            record = self._announced(submission, number)
            prepared = self._prepared(submission, number, capture)
            begin, end = self._issue(submission, prepared, stream, current, capture)
        except BaseException as error:
            first = self.context.failure.set(error)
            if first is error:
                raise
            raise first from error
        if not submission.async_op:
            keep = ()
        work = CudaWork(self.context, submission, number, record, prepared, stream, begin, end, keep)
        if not work.is_finished:
            self._cut = work
        if not capture:
            self.under_way.append(work)
        elif record.number == number:
            record.step = STEPS
        return work

    def _issue(
        self, submission: Submission, prepared: Prepared, stream: int, current: int, capture: int
    ) -> tuple[StreamPoint, StreamPoint]:
        """Queue the call after the channel's last call, record its memory use, and return its begin and end points."""
        events, begin = self.context.events, None
        if capture not in self.last:  # the first call in this capture
            self._forget_captures()
        last = self.last.get(capture)
        if stream != current:
            begin = events.record(current, capture)  # counts as the call's begin: its own stream runs only calls
            events.wait(stream, begin)
        if last is not None and last.stream not in (stream, current):  # `begin` comes after what `current` holds
            events.wait(stream, last)
        if submission.early is not None:
            submission.early.block.ready = False
        begin = begin or events.record(stream, capture)
        prepared.start(stream, events, capture)
        if capture or prepared.noted != (self.context.order.epoch, stream):
            self._note(submission, prepared, stream, capture)
        if prepared.cut is not None:
            return begin, begin  # `finish` records the end
        end = self.last[capture] = prepared.last = events.record(stream, capture)
        return begin, end

    def _forget_captures(self) -> None:
        """Forget the end points of calls in graph captures that have ended."""
        current, handles = self.context.gpu.capture_of, self.context.events.handles
        self.last = {
            number: point for number, point in self.last.items() if number in (0, current(handles[point.stream]))
        }

    def _note(self, submission: Submission, prepared: Prepared, stream: int, capture: int) -> None:
        """Record in `StreamOrder` which memory the call uses; a repeated call needs this only after a free."""
        order = self.context.order
        now = order.epoch, stream
        for at in (submission.at, *submission.input_at):
            if at is not None:
                order.used(at, stream, capture)
        if not capture:
            prepared.noted = now


@dataclass(frozen=True, slots=True)
class _Needs:
    """Holds a call's program and memory needs; all fields but `program` and `writes` are equal on all ranks."""

    program: Program
    staging_bytes: int
    landing_bytes: int
    meets: bool  # ranks must meet first to learn where the others' outputs are
    writes: bool  # this rank writes into peers' outputs


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


class CudaChannel(CallQueue):
    """Issues the calls of one channel, which all ranks make in the same order."""

    def __init__(self, context: CudaContext, index: int) -> None:
        executor = Executor(driver=context.gpu.driver)
        super().__init__(context, executor, int(executor.stream()), index)
        self.index = index
        self.staging, self.landing = (
            GrowableRegion(partial(context.growth.create, f"{what} of channel {index}"))
            for what in ("staging", "landing")
        )

    def close(self) -> None:
        """Free graphs, events and streams; call this only when the GPU has finished all calls."""
        super().close()
        self.executor.close()

    def _prepared(self, submission: Submission, number: int, capture: int) -> Prepared:
        """Return the call's driver calls, from its last start unless an address or size has changed since."""
        handshake = submission.early is None or not submission.early.block.ready
        prepared: Prepared | None = submission.prepared.get(handshake)
        if prepared is not None and prepared.epoch == self.context.growth.created:
            return prepared
        known = None if submission.program is None else _needs_of(submission.program)
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
            prepared.epoch = self.context.growth.created  # a new region may be the staging or landing from then on
            submission.prepared[handshake] = prepared
        return prepared

    def _agreed(
        self, submission: Submission, number: int, known: _Needs | None, capture: int
    ) -> tuple[_Needs, dict[int, Location]]:
        """Return a call's `_Needs` and peers' output locations; ranks meet first if memory or locations are missing."""
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
            needs = _needs_of(self.context.programs.get(call, early, submission.layout))
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

    def _prepare(self, submission: Submission, needs: _Needs, met: Mapping[int, Location], handshake: bool) -> Prepared:
        """Lower the program to driver calls; if peers write to the landing buffer, add a copy to the output."""
        addresses, program = self._addresses(submission, needs, met), needs.program
        options, early = self.context.options, not handshake
        graphs = options.graphs is not False
        lowered = partial(lower, program, addresses)
        if submission.partitioned != "no":
            cut, supplied = partitions(program, early_release=early), submission.partitioned == "output"
            calls = lowered(cut.steps)
            return Prepared(
                program, calls, self.executor, graphs=graphs, borrowed=self._borrowed(calls), cut=cut, lower=lowered,
                supplied=supplied,
            )  # fmt: skip
        calls = lowered(program.cycle(early_release=early))
        own = addresses.output[program.rank]
        if own != submission.output:
            calls += (CopyAsync(submission.output, own, submission.output_bytes, COPY, local=True),)
        reduction: BindReduction | None = None
        if submission.reduction is not None:
            how = replace(submission.reduction, num_sms=options.sum_sms)
            reduction = partial(self.context.gpu.bind_reduction, reduction=how)
        borrowed = self._borrowed(calls)
        return Prepared(program, calls, self.executor, reduction=reduction, graphs=graphs, borrowed=borrowed)

    def _borrowed(self, calls: Iterable[DriverCall]) -> tuple[tuple[int, int], ...]:
        """Return (address, bytes) of what `calls` copy from and to memory of this rank that is not symmetric."""
        copies = [call for call in calls if isinstance(call, CopyAsync)]
        here = {(copy.source, copy.num_bytes) for copy in copies}
        here |= {(copy.target, copy.num_bytes) for copy in copies if copy.local}
        return tuple(part for part in sorted(here) if self.context.memory.locate(*part) is None)

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


class MailboxRoom:
    """Holds a communicator's mailbox memory and message queues (lines), one per peer and direction.

    All ranks make it together. `executor` makes the streams; each new line is added to `queues`.
    """

    def __init__(self, context: CudaContext, executor: Executor, mailbox: Mailbox, queues: list[CallQueue]) -> None:
        self.context, self.executor, self.mailbox, self._queues = context, executor, mailbox, queues
        memory = context.memory
        room = Location(context.growth.create("the mailboxes", mailbox.num_bytes), 0)
        ranks = range(memory.world_size)
        self.addresses = Addresses(
            mailbox=tuple(memory.address(rank, room, mailbox.num_bytes) for rank in ranks),
            mailbox_flags=tuple(memory.address(rank, context.flags.of_mailbox, WORD_BYTES) for rank in ranks),
        )
        self._lines: dict[tuple[int, int], MailboxLine] = {}

    def line(self, channel: int, peer: int) -> MailboxLine:
        """Return the queue (line) of messages to or from `peer` that `channel` counts; make it at first use."""
        found = self._lines.get((channel, peer))
        if found is None:
            with self.context.gpu.relaxed():
                found = self._lines[channel, peer] = MailboxLine(self, channel)
            self._queues.append(found)
        return found


class MailboxLine(CallQueue):
    """Issues the messages of one line (queue): all messages to one peer, or all messages from one peer."""

    def __init__(self, room: MailboxRoom, channel: int) -> None:
        super().__init__(
            room.context, room.executor, int(room.executor.stream()), channel, most_prepared=_MOST_MESSAGES
        )
        self._room = room
        self._first = 0  # slot of the next message's first piece
        _open_lines.add(self)
        _warn_if_queues_are_few()

    def close(self) -> None:
        """Free events; call this only when the GPU has finished all messages."""
        super().close()
        _open_lines.discard(self)

    def show(self) -> None:
        """Announce the messages in `unshown` whose records are free; raise if the peer announced another message."""
        while self.unshown:
            submission, number = self.unshown[0]
            if not self.announcer.announce_if_free(submission, number):
                return
            self.announcer.compare(submission, number)
            if all(call.number != number for call in tuple(self.under_way)):
                self.announcer.record(submission, number).step = STEPS
            self.unshown.popleft()

    def _announced(self, submission: Submission, number: int) -> RankStatus:
        if self.unshown or not self.announcer.announce_if_free(submission, number):
            self.unshown.append((submission, number))
        else:
            self.announcer.compare(submission, number)
        return self.announcer.record(submission, number)

    def _prepared(self, submission: Submission, number: int, capture: int) -> Prepared:
        message, mailbox, rank = submission.message, self._room.mailbox, self.context.memory.rank
        assert message is not None
        first = self._first
        self._first = (first + mailbox.pieces(message.num_bytes)) % mailbox.slots
        key = first, message.num_bytes, submission.input, submission.output
        prepared = self._cache.get(key)
        if prepared is None:
            program = message_program(replace(message, first=first), rank, mailbox)
            output = tuple(submission.output if one == rank else 0 for one in range(mailbox.world_size))
            addresses = replace(self._room.addresses, input=submission.input, output=output)
            # no graphs: their launches may use other hardware queues than the stream's
            prepared = Prepared(program, lower(program, addresses), self.executor)
            self._cache.put(key, prepared)
        return prepared


_open_lines: WeakSet[MailboxLine] = WeakSet()  # of this process


def _warn_if_queues_are_few() -> None:
    """Warn if this process's message streams, all waiting at once, leave too few hardware queues to other work."""
    queues, lines = hardware_queues(), len(_open_lines)
    if lines > queues - _FOR_OTHERS:
        warnings.warn(
            f"{lines} streams of messages may wait at once, and CUDA has {queues} hardware queues: once as many wait, "
            "nothing else runs on this rank; set CUDA_DEVICE_MAX_CONNECTIONS=32 before the program starts, or let all "
            "ranks begin their messages in an order in which each could end before the next begins",
            stacklevel=2,
        )
