"""The replay against step times worked out by hand. A launch reaches the GPU after 10 µs in all of these jobs."""

from __future__ import annotations

import random

import numpy as np
import pytest

from counterpoint.diagnosis.analysis.replay import replay
from counterpoint.diagnosis.api import diagnose_digests
from counterpoint.diagnosis.reading.traced_job import TracedJob
from counterpoint.records.diagnosis import Replay
from counterpoint.trace.timeline import HostKind, Kind
from tests.support.job_builder import (
    COMM_STREAM,
    COMPUTE_STREAM,
    Host,
    Op,
    Rank,
    comm,
    digested,
    host,
    job,
    op,
    rank,
)

NAN = float("nan")


def step_us(played: Replay | None, name: str) -> float:
    """What the step would take."""
    assert played is not None
    return {w.name: w.step_us for w in played.what_if}[name]


def replayed_us(played: Replay | None) -> float:
    assert played is not None
    return played.replayed_us


def worker(late_us: float) -> Rank:
    """A kernel of 100 µs, launched `late_us` into the step; an all-reduce waits for it, both ranks leave it at 260."""
    return rank(
        op("matmul", late_us + 10, late_us + 110, launch=late_us),
        host("cudaStreamWaitEvent", late_us + 2, late_us + 3),
        comm("all_reduce", late_us + 110, 260, launch=late_us + 5),
    )


LATE_RANK = (worker(0), worker(50))  # the last rank arrives at 160; 100 µs of transfer


def test_unchanged_replay_gives_the_measured_step() -> None:
    """The late rank's arrival at 160 and 100 µs of transfer make the step of 260 µs again."""
    assert replayed_us(replay(job(*LATE_RANK))) == pytest.approx(260)


@pytest.mark.parametrize("apart", [0, 40, 200])
def test_measured_step_is_that_of_the_account(apart: int) -> None:
    """Also where one rank's step begins before the other's: the mean of 260 µs, and of so much more."""
    ranks = [rank(*w.ops, *w.hosts, steps=[(at, 60)]) for w, at in zip(LATE_RANK, (-apart, 0), strict=True)]
    told = diagnose_digests([digested(r, number, 2) for number, r in enumerate(ranks)], ["0", "1"]).diagnosis
    assert told.replay is not None
    assert told.replay.measured_us == pytest.approx(260 + apart / 2)
    assert [told.replay.replayed_us, told.totals.duration_us] == pytest.approx([told.replay.measured_us] * 2)


def test_ranks_that_nothing_joins_do_not_wait_for_each_other() -> None:
    """Replicas of 2100 and 6100 µs, whose host pauses 4 ms: without the pause 2100 each, not the longer one's share."""
    one = rank(*(op("matmul", 10 + 100 * n, 110 + 100 * n, launch=5.0 * n) for n in range(21)), steps=((0.0, 2110),))
    late = rank(
        *(op("matmul", 4010 + 100 * n, 4110 + 100 * n, launch=4000 + 5.0 * n) for n in range(1, 21)),
        op("matmul", 10, 110, launch=0.0),
        steps=((0.0, 6110),),
    )
    played = replay(job(one, late))
    assert replayed_us(played) == pytest.approx((2110 + 6110) / 2, rel=0.01)
    assert step_us(played, "no stall on any rank") == pytest.approx(2110, rel=0.01)
    assert step_us(played, "hosts free (CUDA graphs)") == pytest.approx(2110, rel=0.01)
    told = diagnose_digests([digested(one, 0, 2), digested(late, 1, 2)], ["0", "1"]).diagnosis
    assert told.findings[0].cost_us == pytest.approx(2000, rel=0.03)
    assert "the others wait" not in str(told.findings)


def test_communication_twice_as_fast_halves_the_transfer_only() -> None:
    """160 until the last rank is there, then 50 instead of 100."""
    assert step_us(replay(job(*LATE_RANK)), "communication twice as fast") == pytest.approx(210)


def test_free_communication_still_waits_for_the_late_rank() -> None:
    """Nothing to transfer, but nobody leaves before the late rank arrives."""
    assert step_us(replay(job(*LATE_RANK)), "communication free") == pytest.approx(160)


def test_no_straggler_gives_the_late_host_the_pace_of_the_typical_one() -> None:
    """Both arrive at 110, then 100 of transfer."""
    assert step_us(replay(job(*LATE_RANK), typical={1: 0}), "no straggler") == pytest.approx(210)


def test_no_straggler_gives_slow_kernels_the_time_of_the_typical_ones() -> None:
    """The slow rank needs two kernels of 100 where the typical one needs one of 100: scaled to arrive at 110 too."""
    slow = rank(
        op("matmul a", 10, 110, launch=0),
        op("matmul b", 110, 210, launch=2),
        host("cudaStreamWaitEvent", 3, 4),
        comm("all_reduce", 210, 260, launch=5),
    )
    assert step_us(replay(job(worker(0), slow), typical={1: 0}), "no straggler") == pytest.approx(160)


def test_no_straggler_takes_kernels_one_by_one_where_both_ranks_have_as_many() -> None:
    """The collective waits for the first kernel only: 50 as on the typical rank. It ends before the second does."""
    asks = host("cudaStreamWaitEvent", 0.5, 1)
    typical = rank(op("a", 10, 60, launch=0), op("b", 60, 260, launch=2), asks, comm("all_reduce", 60, 410, launch=5))
    slow = rank(op("a", 10, 310, launch=0), op("b", 310, 360, launch=2), asks, comm("all_reduce", 310, 410, launch=5))
    assert step_us(replay(job(typical, slow), typical={1: 0}), "no straggler") == pytest.approx(260)


def test_no_straggler_never_makes_a_rank_slower() -> None:
    """The rank's kernel of 100 stays although the typical one takes 200: only then its own 300 µs begin."""
    alone = rank(
        op("matmul", 10, 110, launch=0), host("cudaStreamWaitEvent", 1, 2), comm("send", 110, 410, launch=3, seq=9)
    )
    typical = rank(op("matmul", 10, 210, launch=0))
    assert step_us(replay(job(typical, alone), typical={1: 0}), "no straggler") == pytest.approx((410 + 210) / 2)


def test_scenarios_without_a_cause_are_not_replayed() -> None:
    """No straggler, contention, blocked collective, stall or copy: questions about communication and launches only."""
    played = replay(job(*LATE_RANK), blocked=[np.zeros(2, bool)] * 2)
    assert played is not None
    assert [w.name for w in played.what_if] == [
        "communication twice as fast",
        "communication free",
        "hosts free (CUDA graphs)",
    ]


DEPENDENT = rank(  # the second kernel begins 2 µs after the collective, long after the first kernel
    op("matmul", 10, 110, launch=0),
    comm("all_gather", 11, 211, launch=1),
    op("matmul", 213, 313, launch=2),
)


def test_kernel_follows_the_collective_it_began_after() -> None:
    """Half of 200: it ends at 111, the kernel runs from 113."""
    assert step_us(replay(job(DEPENDENT)), "communication twice as fast") == pytest.approx(213)


def test_kernel_follows_its_stream_once_the_collective_is_free() -> None:
    """The first kernel ends at 110, the second runs from 112."""
    assert step_us(replay(job(DEPENDENT)), "communication free") == pytest.approx(212)


def test_free_communication_does_not_help_a_step_that_waits_for_launches() -> None:
    """A launch every 50 µs: the last kernel ends at 115, however fast the collective (a subtraction would say 105)."""
    bound = rank(
        op("copy", 10, 15, launch=0),
        comm("all_reduce", 60, 70, launch=50),
        op("copy", 110, 115, launch=100),
    )
    assert step_us(replay(job(bound)), "communication free") == pytest.approx(115)


SYNCHRONISED = rank(  # the host waits from 20 to 215 for the collective, and works for 10 µs before the next launch
    comm("all_reduce", 10, 210, launch=0),
    host("cudaStreamSynchronize", 20, 215),
    op("matmul", 235, 335, launch=225),
)


@pytest.mark.parametrize(("name", "expected"), [("communication twice as fast", 235), ("communication free", 145)])
def test_host_that_waits_for_the_gpu_returns_earlier(name: str, expected: float) -> None:
    """It returns 5 µs after the collective, or after its own call at 20; then 10 + 10 + 100."""
    assert step_us(replay(job(SYNCHRONISED)), name) == pytest.approx(expected)


def test_host_that_waits_for_the_end_of_the_step_returns_earlier_too() -> None:
    """Its call seems to return 0.2 µs after the step, as clocks are rounded; it waited all the same."""
    last = rank(comm("all_reduce", 10, 210, launch=0), host("cudaStreamSynchronize", 20, 215), steps=[(0, 214.8)])
    assert step_us(replay(job(last)), "communication free") == pytest.approx(20, abs=10)


def test_launch_that_met_a_full_queue_returns_earlier() -> None:
    """It returned 2 µs after the long kernel; if that takes 500 instead of 1000 µs, all that follows is 500 earlier."""
    full = rank(
        op("long", 10, 1010, launch=0),
        op("short", 1010, 1020, launch=20, call_us=992),
        op("last", 1030, 3030, launch=1020, stream=9),
    )
    played = replay(job(full), alone_us=[np.array([500.0, NAN, NAN])])
    assert step_us(played, "no contention") == pytest.approx(2530)


LAUNCH_BOUND = rank(op("add", 10, 20, launch=0), op("add", 60, 70, launch=50), op("add", 110, 120, launch=100))


def test_hosts_free_leaves_the_kernels() -> None:
    """10 µs to the first, then three of 10."""
    assert step_us(replay(job(LAUNCH_BOUND)), "hosts free (CUDA graphs)") == pytest.approx(40)


def test_hosts_free_still_wait_for_the_gpu_where_they_did() -> None:
    """The host returns 5 µs after the collective's end at 210, and the kernel begins 10 µs after its launch."""
    assert step_us(replay(job(SYNCHRONISED)), "hosts free (CUDA graphs)") == pytest.approx(325)


def test_hosts_free_keep_the_order_that_no_event_shows() -> None:
    """The collective began after the kernel it was launched after; it may need its result: 10 + 100 + 50."""
    unordered = rank(op("matmul", 10, 110, launch=0), comm("all_reduce", 310, 360, launch=300))
    assert step_us(replay(job(unordered)), "hosts free (CUDA graphs)") == pytest.approx(160)


def test_no_stall_goes_on_at_the_usual_pace() -> None:
    """A pause of 3000 µs becomes one of 50: the last kernel ends at 170."""
    stalled = rank(
        op("add", 10, 20, launch=0),
        op("add", 60, 70, launch=50),
        op("add", 110, 120, launch=100),
        op("add", 3110, 3120, launch=3100),
    )
    assert step_us(replay(job(stalled)), "no stall on any rank") == pytest.approx(170)


def test_a_call_that_copies_is_no_stall() -> None:
    """From pageable memory the host copies itself, and returns long after the GPU has the last part."""
    copied = rank(
        op("Memcpy HtoD (Pageable -> Device)", 10, 410, kind=Kind.MEMCPY, launch=0, call_us=3000),
        op("matmul", 3040, 3140, launch=3030),
    )
    played = replay(job(copied))
    assert played is not None
    assert "no stall on any rank" not in {w.name for w in played.what_if}


def test_no_copies_free_the_host_that_they_blocked() -> None:
    """The copy and its call take 400 µs: the kernel is launched 20 µs after the copy's call began."""
    blocked = rank(
        op("Memcpy HtoD (Pageable -> Device)", 10, 410, kind=Kind.MEMCPY, launch=0, call_us=400),
        op("matmul", 430, 530, launch=420),
    )
    assert step_us(replay(job(blocked)), "no copies") == pytest.approx(130)


BLOCKED = rank(  # the collective begins as the kernel's last blocks leave
    op("nvjet", 10, 210, launch=0),
    comm("all_gather", 200, 300, launch=20),
)


def test_launch_order_fixed_frees_a_blocked_collective() -> None:
    """It runs from 30 to 130 beside the kernel that ends at 210."""
    played = replay(job(BLOCKED), blocked=[np.array([False, True])])
    assert step_us(played, "launch order fixed") == pytest.approx(210)


def test_collective_behind_a_kernel_stays_there_in_other_scenarios() -> None:
    """Twice as fast, it still begins at 200."""
    assert step_us(replay(job(BLOCKED)), "communication twice as fast") == pytest.approx(250)


def test_collective_behind_a_kernel_follows_its_end() -> None:
    """The kernel takes 100 instead of 200: the collective begins 10 µs before its end, at 100."""
    assert step_us(replay(job(BLOCKED), alone_us=[np.array([100.0, NAN])]), "no contention") == pytest.approx(200)


def test_launch_order_fixed_drops_a_wait_that_nothing_explains() -> None:
    """It begins 40 µs after the kernel, 220 after its launch came through; fixed, at most 20: it ends at 150."""
    late = rank(op("nvjet", 10, 210, launch=0), comm("all_gather", 250, 350, launch=20))
    played = replay(job(late), blocked=[np.array([False, True])])
    assert step_us(played, "launch order fixed") == pytest.approx(210)


def test_launch_order_fixed_keeps_true_dependencies() -> None:
    """The collective waits for a copy that ends at 110, which the trace shows by a stream wait: 110 to 210, not 30."""
    blocked = rank(
        op("copy", 10, 110, launch=0, stream=9),
        host("cudaStreamWaitEvent", 3, 4),
        comm("all_gather", 300, 400, launch=20),
        op("nvjet", 105, 305, launch=25),
    )
    played = replay(job(blocked), blocked=[np.array([False, False, True])])
    assert step_us(played, "launch order fixed") == pytest.approx(305)


def test_no_contention_takes_the_time_alone_where_it_is_known() -> None:
    """60 instead of 100 for the first kernel, the second as measured."""
    busy = rank(op("matmul", 10, 110, launch=0), op("norm", 112, 152, launch=1))
    assert step_us(replay(job(busy), alone_us=[np.array([60.0, NAN])]), "no contention") == pytest.approx(112)


def test_wait_that_did_not_bind_holds_once_it_would() -> None:
    """The second kernel asked for the collective that ends at 111; a shorter first kernel lets it begin there."""
    slack = rank(
        op("matmul", 10, 160, launch=0),
        comm("all_gather", 11, 111, launch=1),
        host("cudaStreamWaitEvent", 2, 3),
        op("matmul", 160, 260, launch=5),
    )
    played = replay(job(slack), alone_us=[np.array([50.0, NAN, NAN])])
    assert step_us(played, "no contention") == pytest.approx(211)


def test_root_of_a_broadcast_does_not_wait_for_the_last_rank() -> None:
    """The root works 300 µs after sending, the other comes at 100. Free: launched at 3, it works from 13 to 313.

    The steps end at 360 and 150, and on a rank take as much of the 360 as before.
    """
    root = rank(comm("broadcast", 10, 60, launch=0), host("cudaStreamWaitEvent", 1, 2), op("m", 60, 360, launch=3))
    other = rank(comm("broadcast", 100, 150, launch=90))
    assert step_us(replay(job(root, other)), "communication free") == pytest.approx(313 * (360 + 150) / 2 / 360)


def test_collective_that_one_trace_lacks_joins_the_others() -> None:
    """Ranks 0 and 2 arrive at 110 and 160; rank 1 has no such kernel and only its own work, until 110 as before."""
    absent = rank(op("matmul", 10, 110, launch=0))
    assert step_us(replay(job(worker(0), absent, worker(50))), "communication free") == pytest.approx(
        (160 + 110 + 160) / 3
    )


def test_host_that_outlasts_the_gpu_ends_the_step() -> None:
    """The host works until 500 whatever the GPU does."""
    assert (
        step_us(replay(job(rank(comm("all_reduce", 10, 210, launch=0), steps=[(0, 500)]))), "communication free") == 500
    )


def three_steps() -> TracedJob:
    """Steps of 100, 300 and 100 µs, each one collective between two synchronisations."""
    begins, lengths = (0, 100, 400), (100, 300, 100)
    parts = [comm("all_reduce", a + 10, a + n - 5, launch=a) for a, n in zip(begins, lengths, strict=True)]
    syncs = [host("cudaDeviceSynchronize", a + 6, a + n - 2) for a, n in zip(begins, lengths, strict=True)]
    return job(rank(*parts, *syncs, steps=[(a, a + n) for a, n in zip(begins, lengths, strict=True)]))


@pytest.mark.parametrize(("limit", "steps", "mean_us"), [(0, 1, 300), (1, 1, 300), (2, 2, 200), (3, 3, 500 / 3)])
def test_as_many_steps_are_replayed_as_fit(limit: int, steps: int, mean_us: float) -> None:
    """From the middle one, always at least that, and the mean over them."""
    played = replay(three_steps(), limit=limit)
    assert played is not None
    assert played.steps == steps
    assert [played.measured_us, played.replayed_us] == pytest.approx([mean_us, mean_us])


def test_time_before_the_window_does_not_count() -> None:
    """The host is a step ahead: the middle step's kernel, launched at 11, runs from 111 to 211."""
    parts = [op("matmul", 11 + 100 * i, 111 + 100 * i, launch=1 + 10 * i) for i in range(3)]
    played = replay(job(rank(*parts, steps=[(0, 10), (10, 20), (20, 30)])), limit=1)
    assert replayed_us(played) == pytest.approx(100)


def test_steps_follow_one_another_in_the_simulation() -> None:
    """With free collectives a step is 10 µs to the collective, 3 to the return and 2 to the next launch."""
    assert step_us(replay(three_steps()), "communication free") == pytest.approx(15)


def test_unexplained_wait_is_left_out_and_shows_in_the_error() -> None:
    """50 µs after all that is known, of which 20 pass for a gap: 30 of 10 060 µs."""
    late = rank(op("long", 10, 10_000, launch=0), op("short", 10_050, 10_060, launch=1))
    played = replay(job(late))
    assert played is not None
    assert played.error == pytest.approx(-30 / 10_060)


def test_trace_that_the_graph_cannot_explain_keeps_its_waits() -> None:
    """A wait of 500 in a step of 700 µs is kept as measured."""
    assert replayed_us(replay(job(rank(op("a", 10, 100, launch=0), op("b", 600, 700, launch=1))))) == pytest.approx(700)


def test_operations_without_launches_follow_their_streams() -> None:
    """Launches unknown: the kernel follows the collective that it began after, the end of the step the last kernel."""
    unknown = rank(comm("all_gather", 10, 210, launch=NAN), op("matmul", 212, 312, launch=NAN), steps=[(0, 330)])
    assert step_us(replay(job(unknown)), "communication twice as fast") == pytest.approx(230)


def test_job_without_gpu_operations_is_not_replayed() -> None:
    assert replay(job(rank(host("aten::mm", 0, 10)))) is None


def test_hosts_free_take_an_unexplained_wait_once() -> None:
    """The collective began at 310, 200 µs after the kernel that it follows: not 200 µs and what came before it."""
    late = rank(op("matmul", 10, 110, launch=0), comm("all_reduce", 310, 360, launch=5))
    assert step_us(replay(job(late)), "hosts free (CUDA graphs)") == pytest.approx(360)


def test_steps_apart_are_not_replayed_together() -> None:
    """Of five steps a pause of 9 ms parts two from three: those are replayed, and the pause belongs to none."""
    begins = (0, 100, 9_200, 9_300, 9_400)
    ops = [op("matmul", at + 10, at + 90, launch=at) for at in begins]
    ranges = [host(f"step {n}", at, at + 100, HostKind.ANNOTATION) for n, at in enumerate(begins)]
    played = replay(job(rank(*ops, *ranges, steps=())))
    assert played is not None
    assert played.steps == 3
    assert [played.measured_us, played.replayed_us] == pytest.approx([100, 100])


def clockwork(seed: int, ranks: int = 2) -> TracedJob:
    """Random work of two streams a rank, waits that the trace does not show among it, and collectives of all ranks."""
    draw = random.Random(seed)
    hosts, free = [0.0] * ranks, [{COMPUTE_STREAM: 0.0, COMM_STREAM: 0.0, 9: 0.0} for _ in range(ranks)]
    parts: list[list[Op | Host]] = [[] for _ in range(ranks)]
    for number in range(60):
        together = draw.random() < 0.25
        begins = []
        stream = COMM_STREAM if together else draw.choice([COMPUTE_STREAM, COMPUTE_STREAM, 9])
        for r in range(ranks):
            hosts[r] += draw.choice([3.0, 10.0, 50.0, 700.0])
            begin = max(hosts[r] + 10, free[r][stream])
            if draw.random() < 0.5:
                begin = max(begin, draw.choice([*free[r].values()]) + draw.choice([0.0, 1.5]))
            begins.append(begin + draw.choice([0.0, 0.0, 0.0, 2.0, 40.0, 300.0]))
        us = draw.uniform(5, 200)
        for r, begin in enumerate(begins):
            end = (max(begins) if together else begin) + us
            make = comm("all_reduce", begin, end, launch=hosts[r]) if together else None
            parts[r].append(make or op(f"k{number % 5}", begin, end, launch=hosts[r], stream=stream))
            free[r][stream] = end
            if draw.random() < 0.05:
                back = max(hosts[r] + 1, end)
                parts[r].append(host("cudaStreamSynchronize", hosts[r] + 1, back + 3))
                hosts[r] = back + 3
    return job(*(rank(*p) for p in parts))


@pytest.mark.parametrize("seed", range(40))
def test_a_step_without_a_constraint_takes_no_longer(seed: int) -> None:
    """Faster communication, free hosts, no stalls: never slower than unchanged, whatever was guessed to wait."""
    played = replay(clockwork(seed))
    assert played is not None
    slower = {w.name: w.step_us for w in played.what_if if w.step_us > played.replayed_us + 1e-6}
    assert not slower


def test_an_operation_that_follows_at_once_waited_although_rounding_has_it_begin_first() -> None:
    """No latency, times rounded: the collective begins 0.3 µs before the end of the kernel that it waits for."""
    jobs = rank(
        op("matmul", 10, 110, launch=0), comm("all_reduce", 109.7, 209.7, launch=1), op("add", 209.5, 259.5, launch=2)
    )
    assert step_us(replay(job(jobs)), "communication twice as fast") == pytest.approx(209.5, abs=0.5)
    assert step_us(replay(job(jobs)), "hosts free (CUDA graphs)") == pytest.approx(259.5, abs=0.5)
