"""Messages through mailboxes: no interleaving goes wrong, and no order of them ends in a deadlock."""

import random
from collections import Counter
from dataclasses import replace
from itertools import permutations

import pytest

from counterpoint.collectives.program.clock import simulate
from counterpoint.collectives.program.messages import Mailbox, Message, message_program
from counterpoint.collectives.program.steps import Batch, Copy, LocalCopy, Program, Signal
from counterpoint.errors import CounterpointError
from tests.support.check import check
from tests.support.explore import explore
from tests.support.message_model import several_messages
from tests.support.mutants import mutants

SLOT = 16
Orders = list[list[tuple[Message, bool]]]


def in_turn(mailbox: Mailbox, *sizes: int, source: int = 0, target: int = 1) -> list[tuple[Program, ...]]:
    """A round for each message of one line."""
    rounds, first = [], 0
    for size in sizes:
        message = Message(source, target, size, first)
        rounds.append(tuple(message_program(message, rank, mailbox) for rank in range(mailbox.world_size)))
        first = (first + mailbox.pieces(size)) % mailbox.slots
    return rounds


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_every_interleaving_of_one_line_is_right(slots: int) -> None:
    """Walked one by one: messages of none, one and several pieces, more than there are slots."""
    mailbox = Mailbox(world_size=2, slot_bytes=SLOT, slots=slots)
    rounds = in_turn(mailbox, 5, 0, 3 * SLOT + 2, SLOT, 2 * SLOT)
    assert explore(rounds).violations == ()
    assert check(rounds).violations == ()


@pytest.mark.parametrize("first", ["sends", "receives"])
def test_every_interleaving_of_two_lines_is_right(first: str) -> None:
    """Both ranks begin with the same kind of call, which would end in a deadlock without credits or order."""
    mailbox = Mailbox(world_size=2, slot_bytes=SLOT, slots=2)
    to, back = Message(0, 1, 2 * SLOT), Message(1, 0, SLOT + 1)
    orders: Orders = [[(to, False), (back, False)], [(back, False), (to, False)]]
    if first == "receives":
        orders = [order[::-1] for order in orders]
    assert explore([several_messages(orders, mailbox)]).violations == ()


def test_every_interleaving_of_a_ring_of_blocking_sends_is_right() -> None:
    """All three send first, and wait for it: there are slots."""
    mailbox = Mailbox(world_size=3, slot_bytes=SLOT, slots=1)
    ring = [Message(rank, (rank + 1) % 3, SLOT) for rank in range(3)]
    orders: Orders = [[(ring[rank], True), (ring[rank - 1], True)] for rank in range(3)]
    assert explore([several_messages(orders, mailbox)]).violations == ()


def test_blocking_sends_beyond_the_slots_are_a_deadlock() -> None:
    """What no library can run without more memory is found, by all three."""
    mailbox = Mailbox(world_size=2, slot_bytes=SLOT, slots=1)
    both = Message(0, 1, 2 * SLOT), Message(1, 0, 2 * SLOT)
    orders: Orders = [[(both[0], True), (both[1], True)], [(both[1], True), (both[0], True)]]
    programs = several_messages(orders, mailbox)
    assert {violation.kind for violation in check([programs]).violations} == {"deadlock"}
    assert {violation.kind for violation in explore([programs]).violations} == {"deadlock"}
    with pytest.raises(CounterpointError, match="wait for ever"):
        simulate(programs)


def test_a_sender_does_nothing_that_needs_an_sm() -> None:
    """It pushes and signals; the receiver alone copies within its device."""
    sender, receiver = in_turn(Mailbox(world_size=2, slot_bytes=SLOT), 5 * SLOT)[0]
    assert {type(step) for step in sender.steps} == {Batch, Copy}
    assert {type(step) for step in receiver.steps} == {Batch, LocalCopy}


@pytest.mark.parametrize("fault", ["early", "no credit", "wrong slot"])
def test_faults_are_found(fault: str) -> None:
    """A slot given back before it was read, one that is never given back, and ranks that count differently."""
    mailbox = Mailbox(world_size=2, slot_bytes=SLOT, slots=2)
    rounds = in_turn(mailbox, *[SLOT] * 4)
    broken = []
    for sender, receiver in rounds:
        steps = list(receiver.steps)
        if fault == "early":
            steps[1], steps[2] = steps[2], steps[1]
        elif fault == "no credit":
            del steps[2]
        elif fault == "wrong slot":
            steps = list(message_program(Message(0, 1, SLOT, 1), 1, mailbox).steps)
        broken.append((sender, replace(receiver, steps=tuple(steps))))
    kinds = {violation.kind for violation in check(broken).violations}
    assert kinds & {"race", "deadlock", "content"}
    assert (fault == "early") == ("race" in kinds)


def random_orders(chance: random.Random, mailbox: Mailbox, count: int) -> Orders:
    """`count` messages on random lines, each rank's in an order of its own that keeps those of each line in turn.

    A rank waits for the end of a send only where the slots of its line suffice whatever the receiver does.
    """
    lines: dict[tuple[int, int], list[tuple[Message, bool]]] = {}
    pieces = Counter[tuple[int, int]]()
    for _ in range(count):
        source, target = line = chance.choice(list(permutations(range(mailbox.world_size), 2)))
        size = chance.choice((0, 1, SLOT - 1, SLOT, SLOT + 1, 3 * SLOT, chance.randrange(1, 9 * SLOT)))
        message = Message(source, target, size, pieces[line] % mailbox.slots)
        pieces[line] += mailbox.pieces(size)
        waits = pieces[line] <= mailbox.slots and chance.random() < 0.5
        lines.setdefault(line, []).append((message, waits))
    orders: Orders = []
    for rank in range(mailbox.world_size):
        mine = [line for line, messages in lines.items() if rank in line for _ in messages]
        chance.shuffle(mine)
        taken = {line: iter(messages) for line, messages in lines.items()}
        order = [next(taken[line]) for line in mine]
        orders.append([(message, message.source == rank and waits) for message, waits in order])
    return orders


@pytest.mark.parametrize("seed", range(8))
def test_no_random_order_is_a_deadlock(seed: int) -> None:
    """1,250 times on the clock with 2 to 8 ranks; of some, all interleavings: every byte at its place."""
    chance = random.Random(seed)
    for number in range(1250):
        mailbox = Mailbox(world_size=chance.randint(2, 8), slot_bytes=SLOT, slots=chance.randint(1, 4))
        orders = random_orders(chance, mailbox, chance.randint(1, 24))
        programs = several_messages(orders, mailbox)
        simulate(programs)
        if number % 25 == 0:
            assert check([programs]).violations == ()


def test_bytes_sent_are_bytes_received() -> None:
    """Every signal of a random order has a wait on the other side, and slots lie apart."""
    chance = random.Random(1)
    mailbox = Mailbox(world_size=4, slot_bytes=SLOT)
    programs = several_messages(random_orders(chance, mailbox, 40), mailbox)
    signals = Counter(
        (op.peer if isinstance(op, Signal) else program.rank, op.flag)
        for program in programs
        for step in program.steps
        if isinstance(step, Batch)
        for op in step.operations
    )
    assert all(count % 2 == 0 for count in signals.values())
    places = {mailbox.slot(s, 0, k, SLOT).offset for s in range(1, 4) for k in range(mailbox.slots)}
    assert places == set(range(0, mailbox.num_bytes, SLOT))


def test_every_mutant_of_a_message_is_found() -> None:
    """Every step of sender and receiver removed, changed, and swapped with the next."""
    programs = in_turn(Mailbox(world_size=2, slot_bytes=SLOT, slots=2), 2 * SLOT)[0]
    missed = []
    for rank, program in enumerate(programs):
        for mutant in mutants(program):
            one = tuple(mutant.program if other == rank else programs[other] for other in range(2))
            if check([one] * 3).ok:
                missed.append(mutant)
    assert missed == []
