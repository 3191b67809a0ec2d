"""Programs put every byte where torch's operation puts it, for any group, size, split and chunking, in any order."""

from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.collectives.program import operations
from counterpoint.collectives.program.calls import Call, Own, Span
from counterpoint.collectives.program.direct import chunked
from counterpoint.collectives.program.operations import plan, plan_all
from counterpoint.collectives.program.steps import (
    Batch,
    Copy,
    LocalCopy,
    Reduce,
    Tuning,
    Wait,
    flag_word,
    merge_batches,
    partitions,
)
from counterpoint.errors import Misconfigured
from tests.support.cases import NAMES, case
from tests.support.driver_replay import replayed

SIZES = st.one_of(st.integers(0, 5), st.integers(0, 70))
OWN: st.SearchStrategy[Literal["copy", "consumer"]] = st.sampled_from(["copy", "consumer"])
ANY_OWN: st.SearchStrategy[Own] = st.sampled_from(["in_place", "copy", "consumer"])
TUNINGS = st.builds(
    Tuning, chunk_bytes=st.sampled_from([None, 16, 32]), arrivals=st.sampled_from(["each", "together"]),
    last_bytes=st.sampled_from([None, 16, 32]), relay_bytes=st.sampled_from([0, 40]),
    turn_bytes=st.sampled_from([None, 1, 20]),
)  # fmt: skip


@st.composite
def any_call(draw: st.DrawFn) -> Call:
    """Any operation, any sizes, 1 to 8 ranks."""
    world_size = draw(st.integers(1, 8))
    root, per_rank = draw(st.integers(0, world_size - 1)), st.lists(SIZES, min_size=world_size, max_size=world_size)
    match draw(st.sampled_from(["gather", "all_gather", "scatter", "matrix", "reduce", "broadcast", "barrier"])):
        case "gather":
            return operations.gather(world_size, draw(per_rank), root=root, own=draw(ANY_OWN))
        case "all_gather":
            return operations.all_gather(world_size, draw(per_rank), own=draw(ANY_OWN))
        case "scatter":
            return operations.scatter(world_size, draw(per_rank), root=root, own=draw(ANY_OWN))
        case "matrix":
            splits = draw(st.lists(per_rank, min_size=world_size, max_size=world_size))
            make = draw(st.sampled_from([operations.all_to_all, operations.send_recv]))
            return make(splits, own=draw(OWN))
        case "reduce":
            if draw(st.booleans()):
                return operations.reduce_scatter(world_size, draw(per_rank))
            return operations.all_reduce(world_size, draw(st.integers(0, 300)), own=draw(ANY_OWN))
        case "broadcast":
            return operations.broadcast(world_size, draw(st.integers(0, 300)), root=root)
    return operations.barrier(world_size)


@settings(max_examples=300, deadline=None)
@given(call=any_call(), tuning=TUNINGS, seed=st.integers(0, 1 << 16))
def test_every_byte_arrives_where_torch_puts_it(call: Call, tuning: Tuning, seed: int) -> None:
    """In calls that come back to back, after which flags are at rest."""
    replayed(plan_all(call, tuning), seed=seed)


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
    programs = plan_all(operations.all_to_all([[8] * world_size] * world_size))
    peers = [[step.peer for step in program.steps if isinstance(step, Copy)] for program in programs]
    assert all(len(set(moment)) == world_size for moment in zip(*peers, strict=True))


@pytest.mark.parametrize("relays", [3, 5, 7])
def test_relays_of_a_broadcast_do_not_meet(relays: int) -> None:
    """At every moment the root and an odd number of relays push to different ranks, each relay after its part came."""
    programs = plan_all(operations.broadcast(relays + 1, 1 << 20), Tuning(relay_bytes=1))
    moments: dict[int, list[int]] = {}
    for program in programs:
        start = program.rank  # relay r has its part after the r-th copy of the root
        for offset, step in enumerate(step for step in program.steps if isinstance(step, Copy)):
            moments.setdefault(start + offset, []).append(step.peer)
    assert all(len(set(peers)) == len(peers) for peers in moments.values())


@pytest.mark.parametrize("name", [name for name in NAMES if "in place" in name or "left" in name])
def test_in_place_calls_copy_nothing_locally(name: str) -> None:
    steps = [step for program in plan_all(*case(name, 4)) for step in program.cycle()]
    assert not any(isinstance(step, LocalCopy | Reduce) for step in steps)


def test_a_wait_says_what_it_brings() -> None:
    """A consumer that starts on the first shard learns from the program where it lies: all waits together bring all."""
    program = plan(operations.all_gather(4, 40), 1, Tuning(chunk_bytes=16))
    brought = {
        (op.brings.offset, op.brings.num_bytes)
        for step in program.finish
        if isinstance(step, Batch)
        for op in step.operations
        if isinstance(op, Wait) and op.brings is not None
    }
    assert brought == {(shard * 40 + at, size) for shard in (0, 2, 3) for at, size in ((0, 16), (16, 16), (32, 8))}


@pytest.mark.parametrize("early_release", [False, True], ids=["handshake", "early"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_partitions_are_the_program_in_pieces(world_size: int, early_release: bool) -> None:
    """One after the other they are its steps; they leave for rank + 1 first and come from rank - 1 first."""
    for call in (
        operations.all_gather(world_size, 40, own="consumer"),
        operations.all_to_all([[40] * world_size] * world_size, own="consumer"),
    ):
        for rank in range(world_size):
            program = plan(call, rank, Tuning(chunk_bytes=16, peers_first=True))
            cut = partitions(program, early_release=early_release)
            assert merge_batches(cut.steps) == program.cycle(early_release=early_release)
            peers = [(rank + turn) % world_size for turn in range(1, world_size)]
            assert [(one.peer, one.chunk) for one in cut.sent] == [(p, c) for p in peers for c in range(3)]
            assert [(one.peer, one.chunk) for one in cut.received] == [(p, c) for p in peers[::-1] for c in range(3)]


def test_batches_of_small_calls_and_of_early_release() -> None:
    """Signals and waits that are neighbours are one step: 7 copies to 7 peers take 9 calls of the host."""
    kinds = [type(step) for step in plan(operations.all_gather(8, 64), 0, Tuning(arrivals="together")).cycle()]
    assert kinds == [Batch, *[Copy] * 7, Batch]
    # the ready signals are not in the cycle when they went out with the release of the buffer
    program = plan(operations.all_gather(4, 64), 0)
    first = program.cycle(early_release=True)[0]
    assert isinstance(first, Batch)
    assert all(isinstance(op, Wait) for op in first.operations)
    # its pushes say that output is free, so nobody pushes before a release
    assert plan(operations.all_reduce(4, 256), 0).pushers == frozenset()


def test_the_last_chunk_is_as_small_as_asked_for() -> None:
    """What is before it is cut as without it; the cut is a multiple of 16."""
    spans = chunked(Span("output", 8, 100), Tuning(chunk_bytes=32, last_bytes=16))
    assert [span.num_bytes for span in spans] == [32, 32, 32, 4]
    assert [span.offset for span in spans] == [8, 40, 72, 104]


@pytest.mark.parametrize("name", NAMES)
def test_programs_are_cached(name: str) -> None:
    call, tuning = case(name, 3)
    assert plan(call, 1, tuning) is plan(call, 1, tuning)


def test_one_rank_alone_needs_no_flags() -> None:
    assert all(plan(case(name, 1)[0], 0, case(name, 1)[1]).symmetric == frozenset() for name in NAMES)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: operations.all_gather(0, 4), "at least one"),
        (lambda: operations.all_gather(2, [1, 2, 3]), "3 shards for 2 ranks"),
        (lambda: operations.all_to_all([[1, 2], [3]]), "a row of sizes for each"),
        (lambda: operations.all_to_all([[1, -2], [3, 4]]), "negative"),
        (lambda: operations.all_to_all([[1]], own="in_place"), "allowed are 'copy', 'consumer'"),
        (lambda: operations.send_recv([[1]], own="in_place"), "allowed are 'copy', 'consumer'"),
        (lambda: operations.broadcast(2, 4, root=2), "allowed are 0 to 1"),
        (lambda: operations.gather(2, 4, own="move"), "allowed are 'copy', 'in_place', 'consumer'"),  # type: ignore[arg-type]
        (lambda: plan(operations.barrier(2), 2), "allowed are 0 to 1"),
        (lambda: Tuning(chunk_bytes=10), "multiple of 16"),
        (lambda: Tuning(last_bytes=0), "last_bytes=0"),
        (lambda: plan(operations.gather(2, 4), 0, Tuning(staging_bytes=64)), "only reduce_scatter has slices"),
        (lambda: Tuning(peers_first=True, arrivals="together"), "leave one out"),
        (lambda: partitions(plan(operations.reduce_scatter(2, 4), 0)), "cannot be cut"),
        (lambda: partitions(plan(operations.all_gather(3, 4), 0, Tuning(arrivals="together"))), "several chunks"),
    ],
)
def test_a_call_that_cannot_mean_anything_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(Misconfigured, match=message):
        make()
