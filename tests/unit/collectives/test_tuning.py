"""The best tuning is never slower than the plain one, the same for all who ask, and what the sizes make one expect."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.collectives.program import operations
from counterpoint.collectives.program.calls import Call
from counterpoint.collectives.program.clock import SimulatedCall, simulate
from counterpoint.collectives.program.operations import (
    DEFAULT,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    most_staging_bytes,
    plan_all,
    reduce_scatter,
)
from counterpoint.collectives.program.steps import Copy, Program, Tuning
from counterpoint.collectives.program.tuning import MAX_SLICES, best_tuning, candidates, with_staging_slices
from counterpoint.errors import Misconfigured
from counterpoint.machine.profile import Rates, default_profile
from tests.support.cases import NAMES, case
from tests.support.check import check

H200 = default_profile().rates
MIB = 1 << 20
SIZES = tuple(1 << power for power in (20, 22, 24, 26, 28, 30))  # of the full array


def us(call: Call, tuning: Tuning, rates: Rates = H200) -> float:
    return simulate(plan_all(call, tuning), rates).us


def reduction(operation: str, world_size: int, num_bytes: int) -> Call:
    if operation == "all_reduce":
        return all_reduce(world_size, num_bytes)
    return reduce_scatter(world_size, num_bytes // world_size)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["all_gather", "all_reduce", "reduce_scatter", "broadcast", "all_to_all"]),
    world_size=st.integers(1, 8),
    size=st.integers(0, 1 << 24),
    copy_us=st.floats(0, 20),
    hbm_gb_per_s=st.floats(100, 5000),
)
def test_it_is_never_slower_than_the_default(
    name: str, world_size: int, size: int, copy_us: float, hbm_gb_per_s: float
) -> None:
    """On the clock, for any size and rates, where blocks have one size."""
    rates = msgspec.structs.replace(H200, copy_us=copy_us, hbm_gb_per_s=hbm_gb_per_s)
    call = {
        "all_gather": all_gather(world_size, size),
        "all_reduce": all_reduce(world_size, size),
        "reduce_scatter": reduce_scatter(world_size, size),
        "broadcast": broadcast(world_size, size),
        "all_to_all": all_to_all([[size] * world_size] * world_size),
    }[name]
    assert us(call, best_tuning(call, rates), rates) <= us(call, DEFAULT, rates)


def test_calls_with_splits_are_not_simulated_and_equal_calls_get_equal_answers() -> None:
    """They may differ from call to call, and nothing is to be chosen."""
    assert len(candidates(all_to_all([[1, 2], [3, 4]]))) == 1
    asked = [best_tuning.__wrapped__(reduce_scatter(8, 128 * MIB)) for _ in range(2)]
    assert asked[0] == asked[1]


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("name", NAMES)
def test_every_candidate_is_right(name: str, world_size: int) -> None:
    call, _ = case(name, world_size)
    assert check([plan_all(call, tuning) for tuning in candidates(call)]).violations == ()


def test_a_call_that_was_seen_before_is_looked_up() -> None:
    first = best_tuning(all_reduce(8, 1024 * MIB))
    worked_out = best_tuning.cache_info().misses
    assert (best_tuning(all_reduce(8, 1024 * MIB)) is first, best_tuning.cache_info().misses) == (True, worked_out)


def test_it_asks_for_no_more_chunks_than_there_are_flags_and_needs_room_for_one() -> None:
    assert best_tuning(reduce_scatter(8, 128 * MIB), max_chunks=1) == DEFAULT
    with pytest.raises(Misconfigured, match="give 1 or more"):
        best_tuning(barrier(2), max_chunks=0)


def idle_us(prediction: SimulatedCall, rank: int) -> float:
    """How long the engine of `rank` stood still between its first copy and its last."""
    copies = [timed for timed in prediction.steps if timed.rank == rank and isinstance(timed.step, Copy)]
    return copies[-1].end_us - copies[0].start_us - sum(timed.end_us - timed.start_us for timed in copies)


def programs(operation: str, world_size: int, num_bytes: int) -> tuple[Program, ...]:
    call = reduction(operation, world_size, num_bytes)
    return plan_all(call, best_tuning(call))


@pytest.mark.parametrize("num_bytes", [256 * MIB, 1024 * MIB])
@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("operation", ["reduce_scatter", "all_reduce"])
def test_links_do_not_wait_for_reductions(operation: str, world_size: int, num_bytes: int) -> None:
    """Between two copies there is the time of batches and events, never that of the reduction of a whole shard."""
    made = programs(operation, world_size, num_bytes)
    prediction, steps = simulate(made), len(made[0].cycle())
    flags_us = steps * (H200.batch_us + H200.signal_us + H200.event_us) + H200.kernel_us
    reduction_us = (world_size + 1) * num_bytes / world_size / H200.hbm_gb_per_s / 1000
    assert idle_us(prediction, 0) < max(flags_us, 0.2 * reduction_us)


@pytest.mark.parametrize(
    ("operation", "world_size", "num_bytes", "share"),
    [
        *(("reduce_scatter", size, 1024 * MIB, 0.925) for size in (2, 4, 8)),
        *(("all_reduce", size, 1024 * MIB, 0.96) for size in (2, 4)),
        ("all_reduce", 8, 1024 * MIB, 0.945),
        *(("all_reduce", size, 4096 * MIB, 0.98) for size in (2, 4, 8)),
        *(("reduce_scatter", size, 4096 * MIB, 0.96) for size in (2, 4, 8)),
    ],
)
def test_large_reductions_are_close_to_the_bound(operation: str, world_size: int, num_bytes: int, share: float) -> None:
    """The bound is the larger of the time of the bytes on the link and of the reductions in memory."""
    shard = num_bytes / world_size
    link_us = (2 if operation == "all_reduce" else 1) * (world_size - 1) * shard / H200.push_gb_per_s / 1000
    reduce_us = (world_size + 1) * shard / H200.hbm_gb_per_s / 1000
    assert max(link_us, reduce_us) > share * simulate(programs(operation, world_size, num_bytes)).us


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("num_bytes", SIZES)
def test_everything_that_needs_no_sum_is_pushed_while_a_gemm_holds_the_sms(operation: str, num_bytes: int) -> None:
    made, free_us = programs(operation, 8, num_bytes), 1e5
    prediction = simulate(made, sms_free_us=free_us)
    copies = [timed for timed in prediction.steps if isinstance(timed.step, Copy)]
    sliced = [timed.end_us for timed in copies if timed.step.target.buffer == "staging"]  # type: ignore[union-attr]
    assert max(sliced) < free_us


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_more_slices_than_can_be_planned_are_refused(world_size: int) -> None:
    """With the least staging that is not, which comes in as many slices as there may be."""
    call = reduce_scatter(world_size, MIB + 5)
    with pytest.raises(Misconfigured, match=rf"allowed are {MAX_SLICES}; give (\d+) or more") as refused:
        with_staging_slices(lambda _: DEFAULT, call, 100)
    least = int(str(refused.value).split("give ")[1].split()[0])
    assert with_staging_slices(lambda _: DEFAULT, call, least) == Tuning(staging_bytes=least)
    with pytest.raises(Misconfigured, match=f"{least} or more"):
        with_staging_slices(lambda _: DEFAULT, call, least - 1)


@pytest.mark.parametrize("sizes", [[160, 160, 160], [7, 100, 0], [0, 0, 0], [16, 48, 333]])
@pytest.mark.parametrize("tuning", [DEFAULT, Tuning(staging_bytes=64), Tuning(staging_bytes=1), Tuning(chunk_bytes=16)])
def test_staging_is_that_of_the_whole_program(sizes: list[int], tuning: Tuning) -> None:
    """Found from one slice, it is the largest of any rank's program."""
    call = reduce_scatter(3, sizes)
    assert most_staging_bytes(call, tuning) == max(program.staging_bytes for program in plan_all(call, tuning))


def test_staging_is_found_without_a_plan_of_every_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 ranks with 1024 slices each, programs of one slice are planned."""
    planned: list[Call] = []
    plan_whole = operations.plan_all

    def seen(call: Call, tuning: Tuning) -> tuple[Program, ...]:
        planned.append(call)
        return plan_whole(call, tuning)

    monkeypatch.setattr(operations, "plan_all", seen)
    call, tuning = reduce_scatter(8, 1 << 21), Tuning(chunk_bytes=1 << 16, staging_bytes=7 << 11)
    operations.most_staging_bytes.__wrapped__(call, tuning)
    assert [part.sizes[0][0] * 1000 < call.sizes[0][0] for part in planned] == [True]
