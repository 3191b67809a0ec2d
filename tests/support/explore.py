"""Walks every interleaving of small programs, one by one: `check` must come to the same result without that.

A state is how far each lane is, which copies and reductions are under way, which words are set, and what is in
memory. A copy takes two moves, its begin and its end, so that others may touch its bytes in between.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from counterpoint.collectives.program.steps import COPY, AwaitEvent, Program, Signal, Wait
from counterpoint.errors import CounterpointError
from tests.support.symbolic import (
    Action,
    CallSequence,
    Consume,
    Lane,
    Memory,
    ProofReport,
    Violation,
    Word,
    accesses,
    out_of_bounds,
    performed,
)


@dataclass(frozen=True, slots=True)
class _State:
    position: tuple[int, ...]  # of each lane
    under_way: frozenset[int]  # lanes that have begun their next action
    words: frozenset[Word]
    memory: Memory

    def key(self) -> tuple[object, ...]:
        return self.position, self.under_way, self.words, tuple(sorted(self.memory.items()))


def explore(
    rounds: Sequence[Sequence[Program]], *, early_release: bool = False, max_states: int = 1_000_000
) -> ProofReport:
    """Check as `check` does, by walking all interleavings; end at the first violation."""
    search = _Search(CallSequence(rounds, early_release=early_release))
    search.found = search.rounds.malformed()
    start = _State(tuple(0 for _ in search.lanes), frozenset(), search.rounds.at_rest, {})
    seen, todo = {start.key()}, [start]
    while todo and not search.found:
        state = todo.pop()
        successors = list(search.successors(state))
        if not successors and not search.found:
            search.found = search.ended(state)
        for successor in successors:
            key = successor.key()
            if key not in seen:
                seen.add(key)
                todo.append(successor)
        if len(seen) > max_states:
            raise CounterpointError(
                f"more than {max_states} states: take fewer ranks, rounds or chunks, or `check`, which needs one run"
            )
    return ProofReport(visited=len(seen), violations=tuple(search.found))


class _Search:
    def __init__(self, rounds: CallSequence) -> None:
        self.rounds = rounds
        self.lanes: list[Lane] = list(rounds.lanes)
        self.queues: list[list[Action]] = list(rounds.lanes.values())
        self.touched = [[accesses(action) for action in queue] for queue in self.queues]
        self.found: list[Violation] = []

    def report(self, number: int, action: Action, kind: str, reason: str) -> None:
        self.found.append(self.rounds.violation(self.lanes[number], action, kind, reason))

    def successors(self, state: _State) -> Iterator[_State]:
        for number, queue in enumerate(self.queues):
            at = state.position[number]
            if at == len(queue) or self.blocked(state, queue[at]):
                continue
            if self.touched[number][at] and number not in state.under_way:
                self.begin(state, number, queue[at])
                yield replace(state, under_way=state.under_way | {number})
            else:
                yield self.done(state, number, queue[at])

    def blocked(self, state: _State, action: Action) -> bool:
        if isinstance(action.what, Wait):
            return (action.rank, action.what.flag) not in state.words
        if isinstance(action.what, AwaitEvent):
            lane, index = self.rounds.recorded[action.rank, action.round, action.what.event]
            return state.position[self.lanes.index(lane)] <= index
        return False

    def begin(self, state: _State, number: int, action: Action) -> None:
        """Begin a copy, and report others under way that it must not meet."""
        for access in self.touched[number][state.position[number]]:
            wrong = out_of_bounds(access, self.rounds.programs[action.round])
            if wrong is not None:
                self.report(number, action, "bounds", wrong)
            for other in state.under_way:
                if any(access.conflicts(theirs) for theirs in self.touched[other][state.position[other]]):
                    self.report(number, action, "race", f"while rank {self.lanes[other][0]} is at the same bytes")

    def done(self, state: _State, number: int, action: Action) -> _State:
        words = state.words
        if isinstance(action.what, Signal):
            word = (action.what.peer, action.what.flag)
            if word in words:
                self.report(number, action, "lost_signal", f"rank {word[0]} has not taken the last one")
            words |= {word}
        elif isinstance(action.what, Wait):
            words -= {(action.rank, action.what.flag)}
        elif isinstance(action.what, Consume) and not action.program.call.layout.has_data:
            self.passed_barrier(state, number, action)
        memory, wrong = performed(state.memory, action)
        if wrong is not None:
            self.report(number, action, "content", wrong)
        position = (*state.position[:number], state.position[number] + 1, *state.position[number + 1 :])
        return _State(position, state.under_way - {number}, words, memory)

    def passed_barrier(self, state: _State, number: int, action: Action) -> None:
        for other, (peer, lane) in enumerate(self.lanes):
            at = state.position[other]
            if lane == COPY and not any(done.round == action.round for done in self.queues[other][:at]):
                self.report(number, action, "content", f"passed before rank {peer} has come to the barrier")

    def ended(self, state: _State) -> list[Violation]:
        """Return what is wrong at an end: a lane that is stuck, or words that are not at rest."""
        position = dict(zip(self.lanes, state.position, strict=True))
        return self.rounds.stuck(position) or self.rounds.not_at_rest(state.words)
