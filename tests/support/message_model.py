"""Model several messages of each rank as one program, for the checker and the clock."""

from collections import Counter
from collections.abc import Iterator, Sequence

from counterpoint.collectives.program.calls import Span
from counterpoint.collectives.program.messages import Mailbox, Message, message_steps, program_of_steps
from counterpoint.collectives.program.operations import send_recv
from counterpoint.collectives.program.steps import COPY, AwaitEvent, Program, RecordEvent, Step

LINES = 5  # from here on, a lane for each line of messages


def several_messages(orders: Sequence[Sequence[tuple[Message, bool]]], mailbox: Mailbox) -> tuple[Program, ...]:
    """Return a model of all ranks in which each begins its messages in the order given for it.

    The two ranks of a line have its messages in the same order. Of a pair, the second says whether the rank waits for
    the end of a message before it begins the next one. The programs are for the checker and the clock: nobody executes
    them, since a rank makes a call for each message. Input and output have a block for each peer, in which messages lie
    one after the other.
    """
    ranks = range(mailbox.world_size)
    sizes = [[0] * mailbox.world_size for _ in ranks]
    for rank, order in enumerate(orders):
        for message, _ in order:
            if message.source == rank:
                sizes[rank][message.target] += message.num_bytes
    return tuple(
        program_of_steps(sizes, rank, mailbox, _begun_in_order(order, rank, mailbox, sizes))
        for rank, order in enumerate(orders)
    )


def _begun_in_order(
    order: Sequence[tuple[Message, bool]], rank: int, mailbox: Mailbox, sizes: Sequence[Sequence[int]]
) -> Iterator[Step]:
    call, done, events = send_recv(sizes), Counter[tuple[int, int]](), 0
    pending: list[int] = []
    for message, waits in order:
        line = message.source, message.target
        block = call.source_span(*line) if rank == message.source else call.target_span(*line)
        whole = Span(block.buffer, block.offset + done[line], message.num_bytes)
        done[line] += message.num_bytes
        peer = message.target if rank == message.source else message.source
        lane = LINES + 2 * peer + (rank == message.source)
        yield RecordEvent(events, COPY)
        yield AwaitEvent(events, lane)
        yield from message_steps(message, rank, mailbox, whole, lane)
        yield RecordEvent(events + 1, lane)
        if waits:
            yield AwaitEvent(events + 1, COPY)
        else:
            pending.append(events + 1)
        events += 2
    for event in pending:
        yield AwaitEvent(event, COPY)
