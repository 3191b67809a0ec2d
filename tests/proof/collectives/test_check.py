"""The checkers: right programs pass, also mixed and back to back; wrong ones are named; both checkers say the same."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.collectives.program.operations import all_gather, barrier, broadcast, plan_all, reduce_scatter
from counterpoint.collectives.program.steps import AwaitEvent, Batch, Copy, Flag, Program, Signal, Tuning, Wait
from counterpoint.errors import CounterpointError, Misconfigured
from tests.support.cases import NAMES, case
from tests.support.check import check
from tests.support.explore import explore


def programs(name: str, world_size: int) -> tuple[Program, ...]:
    return plan_all(*case(name, world_size))


@pytest.mark.parametrize("early_release", [False, True], ids=["handshake", "early"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_back_to_back_calls_are_right(name: str, world_size: int, early_release: bool) -> None:
    assert check([programs(name, world_size)] * 3, early_release=early_release).violations == ()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_pair_of_operations_may_follow_each_other(world_size: int) -> None:
    """With handshakes any call may come after any other on the same buffers and flags."""
    for first in NAMES:
        for second in NAMES:
            rounds = [programs(first, world_size), programs(second, world_size)] * 2
            assert check(rounds).violations == (), (first, second)


@settings(max_examples=40, deadline=None)
@given(names=st.lists(st.sampled_from(NAMES), min_size=2, max_size=6), world_size=st.integers(2, 4))
def test_any_mix_of_operations_is_right(names: list[str], world_size: int) -> None:
    assert check([programs(name, world_size) for name in names]).violations == ()


@pytest.mark.parametrize("early_release", [False, True], ids=["handshake", "early"])
@pytest.mark.parametrize("name", [name for name in NAMES if "chunks" not in name])
def test_every_interleaving_of_two_ranks_is_right(name: str, early_release: bool) -> None:
    assert explore([programs(name, 2)] * 2, early_release=early_release).violations == ()


@pytest.mark.parametrize(
    "name",
    [
        "all_gather", "all_to_all", "reduce_scatter", "all_reduce", "broadcast", "scatter", "gather", "send_recv",
        "barrier",
    ],
)  # fmt: skip
def test_every_interleaving_of_three_ranks_is_right(name: str) -> None:
    assert explore([programs(name, 3)] * 2).violations == ()


@pytest.mark.parametrize(
    ("name", "rounds"),
    [
        *((name, 2) for name in ("broadcast", "scatter", "gather", "send_recv", "barrier")),
        *(
            (name, 1)
            for name in ("broadcast, relayed", "all_gather, own block left", "all_to_all, own block left", "all_reduce")
        ),
    ],
)
def test_every_interleaving_of_four_ranks_is_right(name: str, rounds: int) -> None:
    """Walked one by one; where all talk to all there are too many interleavings of two rounds."""
    assert explore([programs(name, 4)] * rounds).violations == ()


def test_every_interleaving_of_a_mix_is_right() -> None:
    """Walked one by one: a reduction between two movements."""
    assert explore([programs(name, 2) for name in ("all_gather", "all_reduce", "broadcast")]).violations == ()


def test_too_many_states_are_no_proof() -> None:
    with pytest.raises(CounterpointError, match="more than 100 states"):
        explore([programs("all_gather", 3)] * 2, max_states=100)


def may_release_early(rounds: Sequence[Sequence[Program]]) -> bool:
    """Whether these calls, in any order, may follow each other on one output that is always released early.

    A release hands a credit to every rank in `pushers`. If the next call lets other ranks push, a credit that nobody
    took stays behind, and its holder would some day push while the output is read.
    """
    return len({tuple(program.pushers for program in programs) for programs in rounds}) <= 1


def test_early_release_needs_the_same_pushers() -> None:
    """A rank that did not push in the broadcast still holds a credit, and uses it while the output is being read."""
    rounds = [plan_all(broadcast(3, 9)), plan_all(all_gather(3, 3))]
    assert check(rounds).ok
    assert "race" in {violation.kind for violation in check(rounds, early_release=True).violations}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_calls_that_may_release_early_are_right(world_size: int) -> None:
    """Whatever `may_release_early` lets follow each other, twice around, the checker passes."""
    allowed = 0
    for first in NAMES:
        for second in NAMES:
            rounds = [programs(first, world_size), programs(second, world_size)]
            if may_release_early(rounds):
                allowed += first != second
                assert check(rounds * 2, early_release=True).violations == (), (first, second)
    assert allowed > 50


@pytest.mark.parametrize(
    ("first", "second"),
    [("broadcast", "all_gather"), ("all_reduce", "all_gather"), ("scatter", "all_to_all"), ("send_recv", "gather")],
)
def test_calls_that_may_not_release_early_would_be_wrong(first: str, second: str) -> None:
    """What it refuses, the checker refuses, too."""
    rounds = [programs(first, 3), programs(second, 3)]
    assert not may_release_early(rounds)
    assert not check(rounds * 2, early_release=True).ok


def one_round_barrier(world_size: int) -> list[Program]:
    """Everybody signals to everybody, once."""
    ranks, made = range(world_size), []
    for rank in ranks:
        signals = tuple(Signal(peer, Flag("output", "arrived", rank)) for peer in ranks if peer != rank)
        waits = tuple(Wait(Flag("output", "arrived", peer)) for peer in ranks if peer != rank)
        made.append(
            replace(plan_all(barrier(world_size))[rank], release=(), steps=(Batch(signals + waits),), finish=())
        )
    return made


@pytest.mark.parametrize("prove", [check, explore])
def test_a_barrier_of_one_round_loses_a_signal(prove: object) -> None:
    assert callable(prove)
    assert prove([one_round_barrier(3)]).ok
    assert "lost_signal" in {violation.kind for violation in prove([one_round_barrier(3)] * 2).violations}


def without(program: Program, kind: type) -> Program:
    """`program` without its copies, or whatever `kind` is."""
    return replace(program, steps=tuple(step for step in program.steps if not isinstance(step, kind)))


def test_a_barrier_that_waits_for_nobody_is_caught() -> None:
    """Nothing is read or written, and yet it is wrong."""
    nothing = [replace(program, release=(), steps=(), finish=()) for program in plan_all(barrier(2))]
    assert {violation.kind for violation in check([nothing]).violations} == {"content"}


def test_the_report_names_rank_step_and_reason() -> None:
    first, second = plan_all(all_gather(2, 4))
    report = check([[first, replace(second, release=())]])
    stuck = report.violations[0]
    assert (stuck.kind, stuck.rank, stuck.step) == ("deadlock", 0, "wait output ready[1, 0]")


def test_a_missing_copy_is_told_by_its_bytes() -> None:
    first, second = plan_all(all_gather(2, 4))
    reasons = [violation.reason for violation in check([[without(first, Copy), second]]).violations]
    assert reasons == ["byte 0 of output holds nothing; it must hold byte 0 of rank 0 of round 0"]


def test_old_data_is_not_taken_for_new() -> None:
    """Values know their round: without the copy of the second round the output still holds the first one's."""
    right = plan_all(all_gather(2, 4))
    report = check([right, [without(right[0], Copy), right[1]]])
    assert "holds byte 0 of rank 0 of round 0; it must hold byte 0 of rank 0 of round 1" in report.violations[0].reason


def test_awaiting_an_unrecorded_event_is_refused() -> None:
    chunked = plan_all(reduce_scatter(2, 32), Tuning(chunk_bytes=16))
    wrong = replace(chunked[0], steps=(AwaitEvent(7, 0), *chunked[0].steps))
    assert check([[wrong, chunked[1]]]).violations[0].kind == "malformed"


@pytest.mark.parametrize("rounds", [[], [[]], [plan_all(barrier(2)), plan_all(barrier(3))]])
def test_rounds_of_different_groups_are_refused(rounds: list[list[Program]]) -> None:
    with pytest.raises(Misconfigured, match="a program for each rank"):
        check(rounds)
