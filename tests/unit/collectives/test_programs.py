"""Programs put every byte where torch's operation puts it, for any group, size, split and chunking, in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
from cases import NAMES, case
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import Group, reference

from counterpoint.collectives import calls
from counterpoint.collectives.calls import input_bytes, source_span, target_span
from counterpoint.collectives.movement import chunked
from counterpoint.collectives.plan import DEFAULT, DOUBLING, plan, plan_all
from counterpoint.collectives.program import Batch, Call, Copy, LocalCopy, Own, Reduce, Span, Tuning, Wait, flag_word
from counterpoint.errors import Misconfigured

SIZES = st.one_of(st.integers(0, 5), st.integers(0, 70))
OWN: st.SearchStrategy[Literal["copy", "consumer"]] = st.sampled_from(["copy", "consumer"])
ANY_OWN: st.SearchStrategy[Own] = st.sampled_from(["in_place", "copy", "consumer"])
TUNINGS = st.builds(
    Tuning,
    chunk_bytes=st.sampled_from([None, 16, 32]),
    arrivals=st.sampled_from(["each", "together"]),
    last_bytes=st.sampled_from([None, 16, 32]),
    relay_bytes=st.sampled_from([0, 40]),
    turn_bytes=st.sampled_from([None, 1, 20]),
)
DOUBLES = Tuning(algorithm="doubling")


@st.composite
def any_call(draw: st.DrawFn) -> Call:
    """Any operation, any sizes, 1 to 8 ranks."""
    world_size = draw(st.integers(1, 8))
    root, per_rank = draw(st.integers(0, world_size - 1)), st.lists(SIZES, min_size=world_size, max_size=world_size)
    match draw(st.sampled_from(["gather", "all_gather", "scatter", "matrix", "reduce", "broadcast", "barrier"])):
        case "gather":
            return calls.gather(world_size, draw(per_rank), root=root, own=draw(ANY_OWN))
        case "all_gather":
            return calls.all_gather(world_size, draw(per_rank), own=draw(ANY_OWN))
        case "scatter":
            return calls.scatter(world_size, draw(per_rank), root=root, own=draw(ANY_OWN))
        case "matrix":
            splits = draw(st.lists(per_rank, min_size=world_size, max_size=world_size))
            make = draw(st.sampled_from([calls.all_to_all, calls.send_recv]))
            return make(splits, own=draw(OWN))
        case "reduce":
            if draw(st.booleans()):
                return calls.reduce_scatter(world_size, draw(per_rank))
            return calls.all_reduce(world_size, draw(st.integers(0, 300)), own=draw(ANY_OWN))
        case "broadcast":
            return calls.broadcast(world_size, draw(st.integers(0, 300)), root=root)
    return calls.barrier(world_size)


def without_own(call: Call, rank: int, output: bytes) -> bytes:
    """The output, less the block that the consumer takes from input."""
    if call.reduces or call.own != "consumer":
        return output
    own = target_span(call, rank, rank)
    return output[: own.offset] + output[own.offset + own.num_bytes :]


@settings(max_examples=300, deadline=None)
@given(call=any_call(), tuning=st.one_of(TUNINGS, st.just(DOUBLES)), seed=st.integers(0, 1 << 16))
def test_every_byte_arrives_where_torch_puts_it(call: Call, tuning: Tuning, seed: int) -> None:
    """Two calls in a row on the same memory and flags give the reference, whatever order chance picks."""
    if call.operation not in DOUBLING and tuning == DOUBLES:
        tuning = DEFAULT
    group, ranks = Group(call.world_size, seed), range(call.world_size)
    for _ in range(2):
        inputs = [group.random.randbytes(input_bytes(call, rank)) for rank in ranks]
        outputs = group.call(plan_all(call, tuning), inputs)
        wanted = reference(call, inputs)
        assert [without_own(call, rank, outputs[rank]) for rank in ranks] == [
            without_own(call, rank, wanted[rank]) for rank in ranks
        ]


@settings(max_examples=100, deadline=None)
@given(call=any_call(), tuning=TUNINGS, seed=st.integers(0, 1 << 16))
def test_flags_are_at_rest_afterwards(call: Call, tuning: Tuning, seed: int) -> None:
    """After any call every word is as it was before, so that the same program can be replayed for ever."""
    group = Group(call.world_size, seed)
    group.call(plan_all(call, tuning), [bytes(input_bytes(call, rank)) for rank in range(call.world_size)])
    assert group.words == group.at_rest


@given(call=any_call(), tuning=TUNINGS)
@settings(max_examples=100, deadline=None)
def test_all_waits_fit_into_the_flags_that_the_program_asks_for(call: Call, tuning: Tuning) -> None:
    """Words have different places, all below `num_flags`: two flags in one word would release each other's waits."""
    for program in plan_all(call, tuning):
        flags = {op.flag for step in program.cycle() if isinstance(step, Batch) for op in step.operations}
        places = {(flag.buffer, flag_word(flag, call.world_size)) for flag in flags}
        assert len(places) == len(flags)
        assert all(word < program.num_flags[buffer] for buffer, word in places)


@pytest.mark.parametrize("world_size", range(2, 9))
def test_pushes_of_one_moment_are_a_permutation(world_size: int) -> None:
    """The i-th copies of all ranks of an all_to_all go to different ranks: no two meet at a receiver."""
    programs = plan_all(calls.all_to_all([[8] * world_size] * world_size))
    peers = [[step.peer for step in program.steps if isinstance(step, Copy)] for program in programs]
    assert all(len(set(moment)) == world_size for moment in zip(*peers, strict=True))


@pytest.mark.parametrize("relays", [3, 5, 7])
def test_relays_of_a_broadcast_do_not_meet(relays: int) -> None:
    """At every moment the root and an odd number of relays push to different ranks, each relay after its part came."""
    programs = plan_all(calls.broadcast(relays + 1, 1 << 20), Tuning(relay_bytes=1))
    moments: dict[int, list[int]] = {}
    for program in programs:
        start = program.rank  # relay r has its part after the r-th copy of the root
        for offset, step in enumerate(step for step in program.steps if isinstance(step, Copy)):
            moments.setdefault(start + offset, []).append(step.peer)
    assert all(len(set(peers)) == len(peers) for peers in moments.values())


@pytest.mark.parametrize("name", [name for name in NAMES if "in place" in name or "left" in name])
def test_in_place_calls_copy_nothing_locally(name: str) -> None:
    """What is in place, or left to the consumer, needs no SM."""
    steps = [step for program in plan_all(*case(name, 4)) for step in program.cycle()]
    assert not any(isinstance(step, LocalCopy | Reduce) for step in steps)


def test_a_wait_says_what_it_brings() -> None:
    """A consumer that starts on the first shard learns from the program where it lies: all waits together bring all."""
    program = plan(calls.all_gather(4, 40), 1, Tuning(chunk_bytes=16))
    brought = {
        (op.brings.offset, op.brings.num_bytes)
        for step in program.finish
        if isinstance(step, Batch)
        for op in step.operations
        if isinstance(op, Wait) and op.brings is not None
    }
    assert brought == {(shard * 40 + at, size) for shard in (0, 2, 3) for at, size in ((0, 16), (16, 16), (32, 8))}


def test_a_small_call_is_one_batch_before_and_one_after_its_copies() -> None:
    """Signals and waits that are neighbours are one step: 7 copies to 7 peers take 9 calls of the host."""
    kinds = [type(step) for step in plan(calls.all_gather(8, 64), 0, Tuning(arrivals="together")).cycle()]
    assert kinds == [Batch, *[Copy] * 7, Batch]


@pytest.mark.parametrize("world_size", range(2, 17))
@pytest.mark.parametrize("make", [calls.all_gather, calls.all_reduce, calls.broadcast])
def test_doubling_takes_log2_rounds(make: Callable[[int, int], Call], world_size: int) -> None:
    """No rank pushes to more peers than that, each once, and where ranks pair off it takes one copy."""
    rounds = (world_size - 1).bit_length()
    for program in plan_all(make(world_size, 64), DOUBLES):
        peers = [step.peer for step in program.cycle() if isinstance(step, Copy)]
        assert len(set(peers)) <= rounds
        assert len(peers) <= (2 * rounds if make is calls.all_reduce or world_size & (world_size - 1) else rounds)


def test_a_doubled_all_gather_pushes_no_byte_twice() -> None:
    """Every rank takes in what it lacks, and no more."""
    for world_size in range(2, 10):
        into: dict[int, int] = {}
        for program in plan_all(calls.all_gather(world_size, 5), DOUBLES):
            for step in program.cycle():
                if isinstance(step, Copy):
                    into[step.peer] = into.get(step.peer, 0) + step.source.num_bytes
        assert into == dict.fromkeys(range(world_size), 5 * (world_size - 1))


def test_the_last_chunk_is_as_small_as_asked_for() -> None:
    """What is before it is cut as without it; the cut is a multiple of 16."""
    spans = chunked(Span("output", 8, 100), Tuning(chunk_bytes=32, last_bytes=16))
    assert [span.num_bytes for span in spans] == [32, 32, 32, 4]
    assert [span.offset for span in spans] == [8, 40, 72, 104]


def test_early_release_leaves_only_the_waits_before_the_copies() -> None:
    """The ready signals are not in the cycle when they went out with the release of the buffer."""
    program = plan(calls.all_gather(4, 64), 0)
    first = program.cycle(early_release=True)[0]
    assert isinstance(first, Batch)
    assert all(isinstance(op, Wait) for op in first.operations)


def test_an_all_reduce_needs_no_word_about_its_output() -> None:
    """Its pushes say that output is free, so nobody pushes before a release."""
    assert plan(calls.all_reduce(4, 256), 0).pushers == frozenset()


@pytest.mark.parametrize("name", NAMES)
def test_programs_are_hashable_and_cached(name: str) -> None:
    """The same call gives the same object, so that an executor can build its parameters once."""
    call, tuning = case(name, 3)
    assert {plan(call, 1, tuning): 1}[plan(call, 1, tuning)] == 1
    assert plan(call, 1, tuning) is plan(call, 1, tuning)


def test_one_rank_alone_needs_no_flags() -> None:
    """A group of one has nobody to signal to."""
    assert all(plan(case(name, 1)[0], 0, case(name, 1)[1]).symmetric == frozenset() for name in NAMES)


def test_own_blocks_have_the_same_size_on_both_sides() -> None:
    """Source and target of every pair of ranks are equally long."""
    for name in NAMES:
        call = case(name, 4)[0]
        assert all(
            source_span(call, s, t).num_bytes == target_span(call, s, t).num_bytes for s in range(4) for t in range(4)
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: calls.all_gather(0, 4), "at least one"),
        (lambda: calls.all_gather(2, [1, 2, 3]), "3 shards for 2 ranks"),
        (lambda: calls.all_to_all([[1, 2], [3]]), "a row of sizes for each"),
        (lambda: calls.all_to_all([[1, -2], [3, 4]]), "negative"),
        (lambda: calls.all_to_all([[1]], own="in_place"), "allowed are 'copy' and 'consumer'"),
        (lambda: calls.send_recv([[1]], own="in_place"), "allowed are 'copy' and 'consumer'"),
        (lambda: calls.broadcast(2, 4, root=2), "allowed are 0 to 1"),
        (lambda: calls.gather(2, 4, own="move"), "allowed are 'in_place', 'copy' and 'consumer'"),  # type: ignore[arg-type]
        (lambda: plan(calls.barrier(2), 2), "allowed are 0 to 1"),
        (lambda: Tuning(chunk_bytes=10), "multiple of 16"),
        (lambda: Tuning(last_bytes=0), "last_bytes=0"),
        (lambda: Tuning(algorithm="doubling", chunk_bytes=16), "its rounds are its chunks"),
        (lambda: Tuning(algorithm="doubling", arrivals="together"), "its rounds are its chunks"),
        (lambda: plan(calls.gather(2, 4), 0, DOUBLES), "all_gather, broadcast, all_reduce have it"),
    ],
)
def test_a_call_that_cannot_mean_anything_is_refused(make: object, message: str) -> None:
    """The text says what is allowed."""
    assert callable(make)
    with pytest.raises(Misconfigured, match=message):
        make()
