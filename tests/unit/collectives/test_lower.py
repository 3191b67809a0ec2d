"""Lowered calls, replayed on a machine of bytes, do what torch's operations do; and they are as few as can be."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.collectives.cuda.lower import (
    MAX_OPERATIONS,
    Addresses,
    CopyAsync,
    MemoryOperation,
    MemoryOperations,
    ReduceLaunch,
    awaited,
    lower,
)
from counterpoint.collectives.program.operations import all_gather, all_reduce, barrier, plan, plan_all
from counterpoint.collectives.program.steps import AwaitEvent, Batch, Flag, Program, RecordEvent, Signal, Tuning, Wait
from counterpoint.errors import Misconfigured
from tests.support.cases import NAMES, case
from tests.support.driver_replay import Deadlock, Machine, replayed


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("name", NAMES)
def test_replayed_calls_give_what_the_operation_is(name: str, world_size: int) -> None:
    call, tuning = case(name, world_size)
    for seed in range(4):
        replayed(plan_all(call, tuning), seed=seed)


@given(name=st.sampled_from(NAMES), world_size=st.integers(1, 6), seed=st.integers(0, 1 << 30), early=st.booleans())
@settings(max_examples=80, deadline=None)
def test_any_order_of_any_world_size(name: str, world_size: int, seed: int, early: bool) -> None:
    call, tuning = case(name, world_size)
    replayed(plan_all(call, tuning), seed=seed, early=early)


@pytest.mark.parametrize("name", NAMES)
def test_one_hardware_queue_is_enough(name: str) -> None:
    """Where CUDA puts all lanes of a rank on one queue, in the order of issue, no rank waits for ever."""
    call, tuning = case(name, 3)
    replayed(plan_all(call, tuning), seed=1, one_queue=True)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "barrier"])
def test_replay_sees_a_missing_wait(name: str) -> None:
    """The machine itself: without the waits of one rank some order gives a wrong output, loses a signal or hangs."""
    call, tuning = case(name, 3)
    programs = list(plan_all(call, tuning))
    victim = next(rank for rank in range(3) if _waits(programs[rank]))
    programs[victim] = _without_waits(programs[victim])
    with pytest.raises((AssertionError, Deadlock)):
        any(replayed(tuple(programs), seed=seed) for seed in range(40))


def _waits(program: Program) -> int:
    return sum(isinstance(op, Wait) for step in program.cycle() if isinstance(step, Batch) for op in step.operations)


def _without_waits(program: Program) -> Program:
    def bare(steps: tuple[object, ...]) -> tuple[object, ...]:
        return tuple(
            replace(step, operations=tuple(op for op in step.operations if isinstance(op, Signal)))
            if isinstance(step, Batch)
            else step
            for step in steps
        )

    return replace(
        program, release=bare(program.release), steps=bare(program.steps), finish=bare(program.finish)  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("name", [name for name in NAMES if "slices" not in name])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_no_two_calls_could_be_one(name: str, world_size: int) -> None:
    """No lane issues two batches of memory operations with nothing between them; but between slices, where staging has
    to be given back before the next slice is pushed, even if both lanes are behind each other in one queue."""
    call, tuning = case(name, world_size)
    for program in plan_all(call, tuning):
        lowered = lower(program, Machine(plan_all(call, tuning)).addresses(program.rank))
        for lane in program.lanes:
            kinds = [isinstance(call_, MemoryOperations) for call_ in lowered if call_.lane == lane]
            assert not any(first and second for first, second in pairwise(kinds))


def test_all_gather_in_place_needs_no_sm_and_a_small_one_nine_calls() -> None:
    """Eight ranks in place: 7 copies to peers, batches of memory operations, and nothing else."""
    program = plan(all_gather(8, 1 << 20), 3)
    calls = lower(program, _addresses(8))
    assert {type(call) for call in calls} == {CopyAsync, MemoryOperations}
    assert [call.local for call in calls if isinstance(call, CopyAsync)] == [False] * 7
    # one arrival for all copies: ready and take in one batch, 7 copies, arrive and wait in one batch
    program = plan(all_gather(8, 4096), 0, Tuning(arrivals="together"))
    assert len(lower(program, _addresses(8))) == 9


def test_a_wait_is_followed_by_its_reset() -> None:
    """Every word that is waited for is set back to 0 by the next operation of the same batch."""
    for name in NAMES:
        call, tuning = case(name, 4)
        for lowered in lower(plan(call, 1, tuning), _addresses(4)):
            operations = lowered.operations if isinstance(lowered, MemoryOperations) else ()
            for index, operation in enumerate(operations):
                if operation.kind == "wait":
                    assert operations[index + 1] == MemoryOperation("write", operation.address, 0)


def test_signals_go_to_the_peer_and_waits_stay_here() -> None:
    program = plan(barrier(3), 1)
    addresses = _addresses(3)
    operations = [
        op for call in lower(program, addresses) if isinstance(call, MemoryOperations) for op in call.operations
    ]
    signalled = {op.address for op in operations if op.value == 1 and op.kind == "write"}
    assert signalled == {addresses.output_flags[peer] + 4 * (row * 3 + 1) for peer in (0, 2) for row in (0, 2)}
    assert set(awaited(lower(program, addresses))) == {
        addresses.output_flags[1] + 4 * (row * 3 + peer) for peer in (0, 2) for row in (0, 2)
    }  # fmt: skip


def test_a_batch_is_cut_where_the_driver_wants_it() -> None:
    signals = tuple(Signal(1, Flag("output", "arrived", 0, chunk)) for chunk in range(600))
    calls = lower(plan(barrier(2), 0), _addresses(2), [Batch(signals)])
    sizes = [len(call.operations) for call in calls if isinstance(call, MemoryOperations)]
    words = [op.address for call in calls if isinstance(call, MemoryOperations) for op in call.operations]
    assert (max(sizes), sum(sizes), words) == (MAX_OPERATIONS, 600, sorted(words))


def test_reductions_keep_rank_order() -> None:
    program = plan(all_reduce(4, 256, own="copy"), 2)
    (launch,) = [call for call in lower(program, _addresses(4)) if isinstance(call, ReduceLaunch)]
    base = _addresses(4).staging[2]
    assert launch.sources == (base, base + 64, _addresses(4).input + 2 * 64, base + 2 * 64)


def test_events_keep_their_lanes() -> None:
    """A pipelined reduce_scatter forks and joins by events: every one waited for was recorded before, elsewhere."""
    call, tuning = case("reduce_scatter, chunks", 3)
    recorded: dict[int, int] = {}
    for lowered in lower(plan(call, 0, tuning), _addresses(3)):
        if isinstance(lowered, RecordEvent):
            recorded[lowered.event] = lowered.lane
        elif isinstance(lowered, AwaitEvent):
            assert recorded[lowered.event] != lowered.lane
    assert recorded


def test_addresses_that_are_missing_or_not_aligned_are_refused() -> None:
    with pytest.raises(Misconfigured, match="needs output of rank 2, and no address was given"):
        lower(plan(all_gather(3, 16), 0), replace(_addresses(3), output=(1 << 20, 1 << 21, 0)))
    with pytest.raises(Misconfigured, match="multiples of 4 bytes"):
        Addresses(output_flags=(4096, 4098))


def _addresses(world_size: int) -> Addresses:
    ranks = range(1, world_size + 1)
    return Addresses(
        input=1 << 30, output=tuple(rank << 32 for rank in ranks), staging=tuple(rank << 40 for rank in ranks),
        output_flags=tuple(rank << 48 for rank in ranks), staging_flags=tuple(rank << 52 for rank in ranks),
    )  # fmt: skip
