"""Run messages through mailboxes on a GPU: a queue with a stream of its own for each line (`program/messages.py`).

*Streams.* A stream that waits for another rank holds one of CUDA's hardware queues (`CUDA_DEVICE_MAX_CONNECTIONS`, 8 if
it is not set); streams that wait for nothing take turns on the others. Once as many streams wait as there are queues,
everything that this process queues later is held up, whatever its priority: the send, too, that a peer waits for
(measured: docs/log.md). So a rank is warned when its lines leave fewer than four queues to all else. Ranks whose sends
and receives, issued one after the other on a single queue, would come to their end are safe with any number of queues.

*Announcing.* Calls of a channel wait on the host until the peers are less than `DEPTH` calls behind, as their records
are needed until then. A message must not wait, since its sender may have to make the very call that the peer waits for;
so it is issued at once, and announced by the watch when its record is free.

A message that was captured fills the same slots at every replay. So sender and receiver either both capture it, and
replay it as often and in the same order among the messages of its line, or neither does.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from weakref import WeakSet

from counterpoint.collectives.cuda.call import Prepared
from counterpoint.collectives.cuda.channel import CallQueue
from counterpoint.collectives.cuda.context import STEPS, CudaContext
from counterpoint.collectives.cuda.driver import Executor, hardware_queues
from counterpoint.collectives.cuda.lower import WORD_BYTES, Addresses, lower
from counterpoint.collectives.host.status import RankStatus
from counterpoint.collectives.memory.pool import Location
from counterpoint.collectives.program.messages import Mailbox, message_program
from counterpoint.collectives.submit.submission import Submission

_FOR_OTHERS = 4  # hardware queues left to kernels, calls and copies
_MOST_PREPARED = 64  # by line; to find the one to evict takes 0.5 us for each


class MailboxRoom:
    """Holds the mailbox memory of a communicator and its lines. All ranks make it together.

    `executor` makes the streams.
    """

    def __init__(self, context: CudaContext, executor: Executor, mailbox: Mailbox) -> None:
        self._context, self._executor, self._mailbox = context, executor, mailbox
        memory = context.memory
        room = Location(context.growth.create("the mailboxes", mailbox.num_bytes), 0)
        ranks = range(memory.world_size)
        self._addresses = Addresses(
            mailbox=tuple(memory.address(rank, room, mailbox.num_bytes) for rank in ranks),
            mailbox_flags=tuple(memory.address(rank, context.flags.of_mailbox, WORD_BYTES) for rank in ranks),
        )
        self._lines: dict[tuple[int, int], MailboxLine] = {}

    def line(self, channel: int, peer: int) -> tuple[MailboxLine, bool]:
        """Return the line with a peer that this channel of the status counts, and whether it was made now."""
        found = self._lines.get((channel, peer))
        if found is not None:
            return found, False
        with self._context.gpu.relaxed():
            stream = int(self._executor.stream())
        made = MailboxLine(self._context, self._executor, stream, channel, self._mailbox, self._addresses)
        self._lines[channel, peer] = made
        return made, True


class MailboxLine(CallQueue):
    """Issues the messages from this rank to one other, or from one other to this rank."""

    def __init__(
        self,
        context: CudaContext,
        executor: Executor,
        stream: int,
        channel: int,
        mailbox: Mailbox,
        addresses: Addresses,
    ) -> None:
        super().__init__(context, executor, stream, channel, most_prepared=_MOST_PREPARED)
        self._mailbox, self._addresses = mailbox, addresses
        self._first = 0  # slot of the next message's first piece
        _open_lines.add(self)
        _warn_if_queues_are_few()

    def close(self) -> None:
        """Free events; only when all messages have run."""
        super().close()
        _open_lines.discard(self)

    def show(self) -> None:
        """Announce the messages in `unshown` whose records are free; raise if a peer's message is a different one."""
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
        message, mailbox, rank = submission.message, self._mailbox, self.context.memory.rank
        assert message is not None
        first = self._first
        self._first = (first + mailbox.pieces(message.num_bytes)) % mailbox.slots
        key = first, message.num_bytes, submission.input, submission.output
        prepared = self._cache.get(key)
        if prepared is None:
            program = message_program(replace(message, first=first), rank, mailbox)
            output = tuple(submission.output if one == rank else 0 for one in range(mailbox.world_size))
            addresses = replace(self._addresses, input=submission.input, output=output)
            # no graphs: their launches may use other hardware queues than the stream's
            prepared = Prepared(program, lower(program, addresses), self.executor, None, graphs=False)
            self._cache.put(key, prepared)
        return prepared


_open_lines: WeakSet[MailboxLine] = WeakSet()  # of this process


def _warn_if_queues_are_few() -> None:
    """Warn where all lines of this process may wait at once and leave too few hardware queues to all else."""
    queues, lines = hardware_queues(), len(_open_lines)
    if lines > queues - _FOR_OTHERS:
        warnings.warn(
            f"{lines} streams of messages may wait at once, and CUDA has {queues} hardware queues: once as many wait, "
            "nothing else runs on this rank; set CUDA_DEVICE_MAX_CONNECTIONS=32 before the program starts, or let all "
            "ranks begin their messages in an order in which each could end before the next begins",
            stacklevel=2,
        )
