"""Build programs of messages from one rank to one other, which may be sent before the receiver asks for them.

Each rank has a mailbox: some slots of memory for each other rank, which that rank fills in turn. A message goes in
pieces of up to a slot. The sender waits until the next slot is free (`ready`, a credit), pushes a piece into it and
signals its arrival; the receiver waits for that, copies the piece to its output, and signals that the slot is free. So
the sender needs no SM, and goes on until all slots are full, whatever the receiver does.

The messages from one rank to another form a line: the n-th one sent is the n-th one received. Both ranks count pieces,
so they know in which slot a message begins. Lines share neither slots nor flags, and each has a stream of its own: no
line waits for another, and ranks need no common order of messages on different lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from counterpoint.collectives.program.calls import ALIGNMENT, Span
from counterpoint.collectives.program.operations import send_recv
from counterpoint.collectives.program.steps import (
    COPY,
    Batch,
    Copy,
    Flag,
    LocalCopy,
    Program,
    Signal,
    Step,
    Tuning,
    Wait,
    merge_batches,
)
from counterpoint.errors import Misconfigured

SLOTS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Mailbox:
    """Says how the mailboxes of a group are laid out; equal on all ranks.

    `Misconfigured` is raised if a slot has no bytes, or no whole elements of every dtype.
    """

    world_size: int
    slot_bytes: int  # size of a slot, the largest piece of a message
    slots: int = SLOTS  # slots for each other rank

    def __post_init__(self) -> None:
        if self.slots < 1 or self.slot_bytes < 1 or self.slot_bytes % ALIGNMENT:
            raise Misconfigured(
                f"mailbox of {self.slots} slots of {self.slot_bytes} bytes: give one or more, of a multiple of "
                f"{ALIGNMENT} bytes"
            )

    @property
    def num_bytes(self) -> int:
        """Return the size in bytes of a rank's mailbox."""
        return (self.world_size - 1) * self.slots * self.slot_bytes

    def pieces(self, num_bytes: int) -> int:
        """Return how many slots a message of `num_bytes` fills; an empty message fills one."""
        return max(1, -(-num_bytes // self.slot_bytes))

    def slot(self, source: int, target: int, slot: int, num_bytes: int) -> Span:
        """Return the span, in the mailbox of `target`, of a piece that `source` pushes into slot number `slot`."""
        row = source - (source > target)
        return Span("mailbox", (row * self.slots + slot) * self.slot_bytes, num_bytes)


@dataclass(frozen=True, slots=True)
class Message:
    """Represents a message between two ranks; slot `first` takes the first piece, the next slots take the others."""

    source: int
    target: int
    num_bytes: int
    first: int = 0


@lru_cache(maxsize=4096)
def message_program(message: Message, rank: int, mailbox: Mailbox) -> Program:
    """Return the program of `rank` for a message; ranks other than the message's source and target have no steps."""
    sizes = [[0] * mailbox.world_size for _ in range(mailbox.world_size)]
    sizes[message.source][message.target] = message.num_bytes
    whole = Span("input" if rank == message.source else "output", 0, message.num_bytes)
    steps = message_steps(message, rank, mailbox, whole, COPY) if rank in (message.source, message.target) else ()
    return program_of_steps(sizes, rank, mailbox, steps)


def program_of_steps(
    sizes: Sequence[Sequence[int]], rank: int, mailbox: Mailbox, steps: Iterator[Step] | tuple[()]
) -> Program:
    """Return the program of `rank` with these steps, where rank s sends `sizes[s][t]` bytes to rank t."""
    return Program(
        call=send_recv(sizes),
        tuning=Tuning(),
        rank=rank,
        steps=merge_batches(tuple(steps)),
        mailbox_bytes=mailbox.num_bytes,
    )


def message_steps(message: Message, rank: int, mailbox: Mailbox, whole: Span, lane: int) -> Iterator[Step]:
    """Yield the steps that send or receive a message; `whole` is the message's span in input or output of `rank`."""
    source, target = message.source, message.target
    for piece in range(mailbox.pieces(message.num_bytes)):
        slot = (message.first + piece) % mailbox.slots
        low = piece * mailbox.slot_bytes
        size = min(mailbox.slot_bytes, message.num_bytes - low)
        there = mailbox.slot(source, target, slot, size)
        part = Span(whole.buffer, whole.offset + low, size)
        ready, arrived = Flag("mailbox", "ready", target, slot), Flag("mailbox", "arrived", source, slot)
        if rank == source:
            yield Batch((Wait(ready),), lane)
            if size:
                yield Copy(target, part, there, lane)
            yield Batch((Signal(target, arrived),), lane)
        else:
            yield Batch((Wait(arrived),), lane)
            if size:
                yield LocalCopy(there, part, lane)
            yield Batch((Signal(source, ready),), lane)
