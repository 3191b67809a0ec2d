"""The clock: close to what was measured, and right where the answer is known."""

from dataclasses import replace

import msgspec
import pytest

from counterpoint.collectives.program.calls import Call
from counterpoint.collectives.program.clock import simulate
from counterpoint.collectives.program.operations import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    plan_all,
    reduce_scatter,
)
from counterpoint.collectives.program.steps import Copy, Reduce, Tuning
from counterpoint.errors import CounterpointError, Misconfigured
from counterpoint.machine.bus_bandwidth import bus_gb_per_s
from counterpoint.machine.profile import Rates, default_profile

MIB = 1 << 20
H200 = default_profile().rates
TOGETHER = Tuning(arrivals="together")
FREE = Rates(
    push_gb_per_s=390, link_gb_per_s=390, hbm_gb_per_s=4200, copy_us=0, kernel_us=0, batch_us=0, signal_us=0,
    event_us=0, launch_us=0,
)  # fmt: skip
"""Nothing but bytes costs time."""


@pytest.mark.parametrize(("num_bytes", "measured_us"), [(MIB, 67.0), (16 * MIB, 125.0)])
def test_small_all_gathers_take_what_was_measured(num_bytes: int, measured_us: float) -> None:
    """8 × H200, own copy engines, 2026-11-20, within 15 %."""
    assert simulate(plan_all(all_gather(8, num_bytes // 8), TOGETHER)).us == pytest.approx(measured_us, rel=0.15)


@pytest.mark.parametrize(
    ("call", "tuning", "gb_per_s", "rel"),
    [
        (all_gather(8, 128 * MIB), TOGETHER, 380, 0.03),
        (reduce_scatter(8, 128 * MIB), Tuning(), 340, 0.05),  # reduced after the last arrival, and not fitted
    ],
)
def test_large_calls_have_the_measured_bandwidth(call: Call, tuning: Tuning, gb_per_s: float, rel: float) -> None:
    """1 GiB on 8 × H200."""
    us = simulate(plan_all(call, tuning)).us
    assert bus_gb_per_s(call.operation, 1024 * MIB, 8, us) == pytest.approx(gb_per_s, rel=rel)


@pytest.mark.parametrize(
    ("call", "us", "rel"),
    [
        # as long as all bytes need on one link: of each rank, of the root
        (all_gather(8, 39 * MIB), 7 * 39 * MIB / 390e3, 1e-6),
        (gather(8, 39 * MIB, own="consumer"), 7 * 39 * MIB / 390e3, 1e-6),
        # what is left after the transfer is the reduction of one chunk
        (reduce_scatter(8, 128 * MIB), 7 * 128 * MIB / 390e3 + 9 * 8 * MIB / 4200e3, 1e-3),
        # links never wait: twice the transfer of a reduce_scatter
        (all_reduce(8, 1024 * MIB), 2 * 7 * 128 * MIB / 390e3, 0.01),
    ],
    ids=["all_gather", "gather", "reduce_scatter", "all_reduce"],
)
def test_where_only_bytes_cost_time(call: Call, us: float, rel: float) -> None:
    tuning = Tuning(chunk_bytes=8 * MIB) if call.reduces else Tuning()
    assert simulate(plan_all(call, tuning), FREE).us == pytest.approx(us, rel=rel)


def test_pushes_that_meet_take_longer() -> None:
    """The same copies, all ranks in the order 0, 1, 2, ..., collide at the receivers."""
    right = plan_all(all_to_all([[8 * MIB] * 8] * 8, own="consumer"))
    meeting = [replace(program, steps=(*program.steps[:1], *sorted(program.steps[1:], key=_peer))) for program in right]
    assert simulate(meeting, FREE).us > 1.5 * simulate(right, FREE).us


def _peer(step: object) -> int:
    peer = step.peer if isinstance(step, Copy) else step.operations[0].peer  # type: ignore[attr-defined]
    return int(peer)


def test_a_relayed_broadcast_is_faster_than_a_direct_one() -> None:
    """The root's link carries the message about once instead of seven times."""
    call = broadcast(8, 1024 * MIB)
    direct = simulate(plan_all(call, Tuning(relay_bytes=1 << 40))).us
    assert simulate(plan_all(call, Tuning(chunk_bytes=16 * MIB))).us < direct / 3


def skewed(turn_bytes: int | None) -> float:
    """An all_gather of 8 ranks into released outputs, every second rank a copy late: µs after the last one came."""
    late = [0.0, 150.0] * 4
    programs = plan_all(all_gather(8, 54 * MIB), Tuning(arrivals="together", turn_bytes=turn_bytes))
    return simulate(programs, early_release=True, arrive_us=late).us - max(late)


def test_ranks_that_are_a_copy_apart_meet_without_turns_and_not_with_them() -> None:
    """Half of the links stand idle while the others carry two copies: half as long again, or more."""
    assert skewed(None) > 1.3 * skewed(1)
    # it takes what it would take alone on the links, and a signal for each copy
    alone = 7 * (54 * MIB / 384e3 + H200.copy_us) + 2 * H200.signal_us + H200.launch_us
    assert skewed(1) == pytest.approx(alone + 6 * H200.signal_us, rel=0.02)


def test_everybody_waits_for_the_last() -> None:
    prediction = simulate(plan_all(barrier(4)), arrive_us=(0, 0, 500, 0))
    assert all(500 < us < 530 for us in prediction.rank_us)


def test_early_release_takes_a_late_reader_off_the_path() -> None:
    """If rank 1 comes late, rank 0 has pushed its shard by then, and rank 1 only has to push its own."""
    programs, late = plan_all(all_gather(2, 39 * MIB)), (0.0, 200.0)
    early = simulate(programs, early_release=True, arrive_us=late)
    pushed = [timed for timed in early.steps if timed.rank == 0 and isinstance(timed.step, Copy)]
    assert pushed[0].end_us < 200
    assert simulate(programs, arrive_us=late).us >= early.us


def test_reductions_wait_for_a_resident_gemm_and_copies_do_not() -> None:
    """Until a GEMM gives its SMs back, everything is pushed and nothing is added."""
    prediction = simulate(plan_all(reduce_scatter(4, MIB)), sms_free_us=1000)
    copies = [timed.end_us for timed in prediction.steps if isinstance(timed.step, Copy)]
    reductions = [timed.end_us for timed in prediction.steps if isinstance(timed.step, Reduce)]
    assert max(copies) < 1000 < min(reductions)


def test_the_host_costs_time_for_every_step() -> None:
    """Nothing but the host: a call takes as many times `call_us` as it has steps."""
    programs = plan_all(all_gather(8, 0 * MIB + 8), TOGETHER)
    rates = msgspec.structs.replace(FREE, call_us=10)
    assert simulate(programs, rates).us == pytest.approx(10 * len(programs[0].cycle()), abs=0.01)


def test_programs_that_deadlock_and_times_of_too_few_ranks_are_errors() -> None:
    first, second = plan_all(all_gather(2, 4))
    with pytest.raises(CounterpointError, match=r"ranks \[0, 1\] wait for ever"):
        simulate([first, replace(second, release=())], H200)
    with pytest.raises(Misconfigured, match="one for each rank"):
        simulate(plan_all(barrier(2)), arrive_us=(1.0,))
