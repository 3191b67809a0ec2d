"""Prove, for given calls, that no interleaving of the ranks' programs can go wrong.

Every word of flags has one writer and one waiter, and waits are the only steps that block. If in one run no two
accesses to the same memory (one of them a write) are unordered, and no signal can meet a word that is still set, then
every interleaving does the same steps on the same values: all are linear extensions of one partial order
(Mazurkiewicz 1977), and dynamic partial-order reduction (Flanagan and Godefroid, POPL 2005) ends after this one run.
So `check` makes one run, keeps a vector clock per lane, and reports every pair of steps that nothing orders. The tests
compare it with an exhaustive search (tests/support/explore.py), which walks all interleavings without that argument.

We assume that a lane is in order; that a copy is complete, and visible to all who see a later signal of its lane,
before the next step; and that a wait and its reset are one action. (On a GPU they are two writes. A signal between them
would, in another interleaving, come just before the wait and meet a set word, which is reported.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

from counterpoint.collectives.program.steps import COPY, AwaitEvent, Program, RecordEvent, Signal, Wait
from tests.support.symbolic import (
    Access,
    Action,
    CallSequence,
    Consume,
    Fill,
    Lane,
    Memory,
    ProofReport,
    Violation,
    Word,
    accesses,
    describe,
    out_of_bounds,
    performed,
)

Clock = dict[Lane, int]  # vector clock: for each lane the index of its last action that came before
MAX_VIOLATIONS = 8


def check(rounds: Sequence[Sequence[Program]], *, early_release: bool = False) -> ProofReport:
    """Return what can go wrong in any interleaving of calls that are made one after the other on the same buffers.

    `rounds` has the programs of all ranks for each call, as `plan_all` returns them; `Misconfigured` is raised if the
    number of ranks differs. Use small sizes and chunks, since each byte is tracked. In every round the caller writes
    the input, runs the cycle, and reads the output, all on lane `COPY`. With `early_release`, `release` comes after
    the output was read, instead of at the start of the next cycle.
    """
    all_rounds = CallSequence(rounds, early_release=early_release)
    malformed = all_rounds.malformed()
    if malformed:
        return ProofReport(visited=0, violations=tuple(malformed))
    run = _Run(all_rounds)
    while run.turn() and len(run.found) < MAX_VIOLATIONS:
        pass
    if not run.found:
        run.found = all_rounds.stuck(run.position) or all_rounds.not_at_rest(frozenset(run.words))
    return ProofReport(visited=sum(run.position.values()), violations=tuple(run.found[:MAX_VIOLATIONS]))


@dataclass(frozen=True, slots=True)
class _PastAccess:
    """Records an earlier memory access, with the lane and the index of the action in it that made it."""

    access: Access
    lane: Lane
    index: int
    what: str


class _Run:
    """Runs all ranks once, and keeps vector clocks of which action happens before which."""

    def __init__(self, rounds: CallSequence) -> None:
        self.rounds = rounds
        self.position = dict.fromkeys(rounds.lanes, 0)
        self.clocks: dict[Lane, Clock] = {lane: {lane: -1} for lane in rounds.lanes}
        self.words: dict[Word, Clock] = {word: {} for word in rounds.at_rest}  # set words: what came before the signal
        self.resets: dict[Word, tuple[Lane, int]] = {}  # the last wait for each word
        self.events: dict[tuple[int, int, int], Clock] = {}
        self.begun: dict[tuple[int, int], int] = {}  # rank, round: when the caller came
        self.past: dict[tuple[int, str], list[_PastAccess]] = {}
        self.memory: Memory = {}
        self.found: list[Violation] = []

    def turn(self) -> bool:
        """Let every lane run until it has to wait; return False if no lane could run."""
        moved = False
        for lane, queue in self.rounds.lanes.items():
            while self.position[lane] < len(queue) and not self.blocked(lane, queue[self.position[lane]]):
                self.do(lane, self.position[lane], queue[self.position[lane]])
                self.position[lane] += 1
                moved = True
        return moved

    def blocked(self, lane: Lane, action: Action) -> bool:
        if isinstance(action.what, Wait):
            return (lane[0], action.what.flag) not in self.words
        return isinstance(action.what, AwaitEvent) and (action.rank, action.round, action.what.event) not in self.events

    def knows(self, lane: Lane, moment: tuple[Lane, int]) -> bool:
        """Return whether the action `moment` (lane, index) comes before the present one of `lane` in every order."""
        return self.clocks[lane].get(moment[0], -1) >= moment[1]

    def do(self, lane: Lane, index: int, action: Action) -> None:
        self.clocks[lane][lane] = index
        match action.what:
            case Signal():
                self.signal((action.what.peer, action.what.flag), lane, action)
            case Wait():
                self.wait((lane[0], action.what.flag), lane, index, action)
            case RecordEvent(event):
                self.events[action.rank, action.round, event] = dict(self.clocks[lane])
            case AwaitEvent(event):
                self.merge(lane, self.events[action.rank, action.round, event])
            case Fill():
                self.begun[lane[0], action.round] = index
            case Consume() if not action.program.call.layout.has_data:
                self.passed_barrier(lane, action)
        self.touch(lane, index, action)

    def merge(self, lane: Lane, other: Clock) -> None:
        clock = self.clocks[lane]
        for who, index in other.items():
            clock[who] = max(clock.get(who, -1), index)

    def report(self, lane: Lane, action: Action, kind: str, reason: str) -> None:
        self.found.append(self.rounds.violation(lane, action, kind, reason))

    def signal(self, word: Word, lane: Lane, action: Action) -> None:
        if word in self.words:
            self.report(lane, action, "lost_signal", f"rank {word[0]} has not taken the last one")
        elif word in self.resets and not self.knows(lane, self.resets[word]):
            self.report(lane, action, "lost_signal", f"nothing makes it wait until rank {word[0]} took the last one")
        self.words[word] = dict(self.clocks[lane])

    def wait(self, word: Word, lane: Lane, index: int, action: Action) -> None:
        self.merge(lane, self.words.pop(word))
        if word in self.resets and not self.knows(lane, self.resets[word]):
            self.report(lane, action, "race", "two lanes wait for the same word, and nothing orders them")
        self.resets[word] = (lane, index)

    def passed_barrier(self, lane: Lane, action: Action) -> None:
        for peer in range(self.rounds.world_size):
            begun = self.begun.get((peer, action.round))
            if begun is None or not self.knows(lane, ((peer, COPY), begun)):
                self.report(lane, action, "content", f"nothing makes it wait until rank {peer} has come to the barrier")

    def touch(self, lane: Lane, index: int, action: Action) -> None:
        """Report unordered earlier accesses to the bytes that an action reads or writes, then perform the action."""
        for access in accesses(action):
            wrong = out_of_bounds(access, self.rounds.programs[action.round])
            if wrong is not None:
                self.report(lane, action, "bounds", wrong)
                return
            there = self.past.setdefault((access.rank, access.span.buffer), [])
            for past in there:
                if access.conflicts(past.access) and not self.knows(lane, (past.lane, past.index)):
                    where = f"{access.span.buffer} of rank {access.rank}"
                    self.report(
                        lane, action, "race", f"nothing orders it and {past.what} of rank {past.lane[0]}, on {where}"
                    )
            if access.write:  # what comes after this write comes after what it covers
                there[:] = [past for past in there if not access.covers(past.access)]
            there.append(_PastAccess(access, lane, index, describe(action.what)))
        self.memory, wrong = performed(self.memory, action)
        if wrong is not None:
            self.report(lane, action, "content", wrong)
