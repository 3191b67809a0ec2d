"""Run messages through mailboxes on a GPU: a queue with a stream of its own for each line (`program/mailbox.py`).

*Streams.* CUDA may put several streams on one hardware queue, in which a wait holds up what was queued behind it. So
that a receive that waits for a message cannot hold up the send that the peer waits for, streams of sends and those of
receives have priorities of their own, which no other streams of this package have: CUDA keeps streams of different
priority on different queues. With more lines in one direction than queues (`CUDA_DEVICE_MAX_CONNECTIONS`, 8 if it is
not set) a send may still wait for another one, to another rank.

*Announcing.* Calls of a channel wait on the host until the peers are less than `DEPTH` calls behind, as their records
are needed until then. A message must not wait, since its sender may have to make the very call that the peer waits for;
so it is issued at once, and announced by the watch when its record is free.

A message that was captured fills the same slots at every replay. So sender and receiver either both capture it, and
replay it as often and in the same order among the messages of its line, or neither does.
"""

from __future__ import annotations

from dataclasses import replace

from counterpoint.collectives.cuda.call import Prepared
from counterpoint.collectives.cuda.channel import CallQueue
from counterpoint.collectives.cuda.context import STEPS, CudaContext
from counterpoint.collectives.cuda.driver import Executor
from counterpoint.collectives.cuda.lower import WORD_BYTES, Addresses, lower
from counterpoint.collectives.host.status import RankStatus
from counterpoint.collectives.memory.pool import Location
from counterpoint.collectives.program.mailbox import Mailbox, message_program
from counterpoint.collectives.submit.submission import Submission

_SENDS, _RECEIVES = 1, 2  # levels of priority below the highest, that of calls
_MOST_PREPARED = 64  # by line; to find the one to evict takes 0.5 us for each


class MailboxRoom:
    """Holds the mailbox memory of a communicator and its lines. All ranks make it together.

    `executor` makes the streams. `channel` is the first of two channels of the status: messages to lower ranks, and
    messages to higher ones.
    """

    def __init__(self, context: CudaContext, executor: Executor, mailbox: Mailbox, channel: int) -> None:
        self._context, self._executor, self._mailbox, self._channel = context, executor, mailbox, channel
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
        goes_up = channel > self._channel
        level = _SENDS if goes_up == (self._context.memory.rank < peer) else _RECEIVES
        with self._context.gpu.relaxed():
            stream = int(self._executor.stream(below_highest=level))
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
