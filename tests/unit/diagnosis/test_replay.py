"""The replay against step times worked out by hand. A launch reaches the GPU after 10 µs in all of these jobs."""

import random
from typing import Any

import numpy as np
import pytest

from counterpoint.diagnosis.analysis.replay import replay
from counterpoint.diagnosis.reading.traced_job import TracedJob
from counterpoint.records.diagnosis import Replay
from counterpoint.trace.timeline import HostKind, Kind
from tests.support.job_builder import COMM_STREAM, COMPUTE_STREAM, Host, Op, Rank, comm, diagnosed, host, job, op, rank

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
    told = diagnosed(*ranks)
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
    told = diagnosed(one, late)
    assert told.findings[0].cost_us == pytest.approx(2000, rel=0.03)
    assert "the others wait" not in str(told.findings)


DEPENDENT = rank(  # the second kernel begins 2 µs after the collective, long after the first kernel
    op("matmul", 10, 110, launch=0), comm("all_gather", 11, 211, launch=1), op("matmul", 213, 313, launch=2)
)
SYNCHRONISED = rank(  # the host waits from 20 to 215 for the collective, and works for 10 µs before the next launch
    comm("all_reduce", 10, 210, launch=0), host("cudaStreamSynchronize", 20, 215), op("matmul", 235, 335, launch=225)
)
LAUNCH_BOUND = rank(op("add", 10, 20, launch=0), op("add", 60, 70, launch=50), op("add", 110, 120, launch=100))
BLOCKED = rank(  # the collective begins as the kernel's last blocks leave
    op("nvjet", 10, 210, launch=0), comm("all_gather", 200, 300, launch=20)
)
ROUNDED = (
    rank(  # no latency, times rounded: the collective begins 0.3 µs before the end of the kernel that it waits for
        op("matmul", 10, 110, launch=0), comm("all_reduce", 109.7, 209.7, launch=1), op("add", 209.5, 259.5, launch=2)
    )
)
ASKS = host("cudaStreamWaitEvent", 0.5, 1)
TWICE, FREE = "communication twice as fast", "communication free"
HOSTS_FREE, NO_STALL = "hosts free (CUDA graphs)", "no stall on any rank"
FIXED, NO_CONTENTION, NO_STRAGGLER = "launch order fixed", "no contention", "no straggler"


def case(claim: str, name: str, us: float, *ranks: Rank, **given: Any) -> Any:
    """`us` is what the step of these ranks takes under the what-if `name`."""
    return pytest.param(name, us, ranks, given, id=claim)


@pytest.mark.parametrize(
    ("name", "us", "ranks", "given"),
    [
        case("160 until the last rank is there, then half the transfer", TWICE, 210, *LATE_RANK),
        case("without transfer nobody leaves before the late rank arrives", FREE, 160, *LATE_RANK),
        case("half of 200 ends at 111, and the kernel follows from 113", TWICE, 213, DEPENDENT),
        case("the first kernel ends at 110, and the second follows on its stream", FREE, 212, DEPENDENT),
        # a launch every 50 µs: the last kernel ends at 115, where a subtraction would say 105
        case("launches hold the step up however fast communication is", FREE, 115,
             rank(op("copy", 10, 15, launch=0), comm("all_reduce", 60, 70, launch=50),
                  op("copy", 110, 115, launch=100))),
        case("the host returns 5 µs after the shorter collective", TWICE, 235, SYNCHRONISED),
        case("the host returns at once, at 20, and 10 + 10 + 100 follow", FREE, 145, SYNCHRONISED),
        # the root works 300 µs after sending, the other comes at 100; launched at 3 the root works from 13 to 313.
        # Steps end at 360 and 150, and on a rank take as much of the 360 as before
        case("the root of a broadcast waits for nobody", FREE, 313 * (360 + 150) / 2 / 360,
             rank(comm("broadcast", 10, 60, launch=0), host("cudaStreamWaitEvent", 1, 2), op("m", 60, 360, launch=3)),
             rank(comm("broadcast", 100, 150, launch=90))),
        case("a rank without this collective has only its own work, the others join", FREE, (160 + 110 + 160) / 3,
             worker(0), rank(op("matmul", 10, 110, launch=0)), worker(50)),
        case("a host that outlasts the GPU ends the step", FREE, 500,
             rank(comm("all_reduce", 10, 210, launch=0), steps=[(0, 500)])),
        case("without launches a kernel follows what it began after", TWICE, 230,
             rank(comm("all_gather", 10, 210, launch=NAN), op("matmul", 212, 312, launch=NAN), steps=[(0, 330)])),
        # both arrive at 110, then 100 of transfer
        case("the late host has the pace of the typical one", NO_STRAGGLER, 210, *LATE_RANK, typical={1: 0}),
        case("two kernels are scaled to the time of the typical one", NO_STRAGGLER, 160, worker(0),
             rank(op("matmul a", 10, 110, launch=0), op("matmul b", 110, 210, launch=2),
                  host("cudaStreamWaitEvent", 3, 4), comm("all_reduce", 210, 260, launch=5)), typical={1: 0}),
        # the collective waits for the first kernel only, which takes 50 then, and ends before the second does
        case("as many kernels are taken one by one", NO_STRAGGLER, 260,
             rank(op("a", 10, 60, launch=0), op("b", 60, 260, launch=2), ASKS, comm("all_reduce", 60, 410, launch=5)),
             rank(op("a", 10, 310, launch=0), op("b", 310, 360, launch=2), ASKS,
                  comm("all_reduce", 310, 410, launch=5)), typical={1: 0}),
        case("kernels that take as long together stay", NO_STRAGGLER, 410,
             rank(op("a", 10, 60, launch=0), op("b", 60, 360, launch=2), ASKS, comm("all_reduce", 60, 410, launch=5)),
             rank(op("a", 10, 310, launch=0), op("b", 310, 360, launch=2), ASKS,
                  comm("all_reduce", 310, 410, launch=5)), typical={1: 0}),
        # the kernel of 100 stays although the typical one takes 200
        case("no rank gets slower", NO_STRAGGLER, (410 + 210) / 2, rank(op("matmul", 10, 210, launch=0)),
             rank(op("matmul", 10, 110, launch=0), host("cudaStreamWaitEvent", 1, 2),
                  comm("send", 110, 410, launch=3, seq=9)), typical={1: 0}),
        case("10 µs to the first kernel, then three of 10", HOSTS_FREE, 40, LAUNCH_BOUND),
        case("the host returns 5 µs after 210, the kernel begins 10 after its launch", HOSTS_FREE, 325, SYNCHRONISED),
        # it may need the result of the kernel that it was launched after: 10 + 100 + 50
        case("the order that no event shows stays", HOSTS_FREE, 160,
             rank(op("matmul", 10, 110, launch=0), comm("all_reduce", 310, 360, launch=300))),
        # begun at 310, 200 µs after the kernel that it follows: not 200 µs and what came before it
        case("an unexplained wait is taken once", HOSTS_FREE, 360,
             rank(op("matmul", 10, 110, launch=0), comm("all_reduce", 310, 360, launch=5))),
        case("a pause of 3000 µs becomes one of 50", NO_STALL, 170,
             rank(*LAUNCH_BOUND.ops, op("add", 3110, 3120, launch=3100))),
        # the copy and its call take 400 µs: the kernel is launched 20 µs after the call began
        case("without the copy its host goes on", "no copies", 130,
             rank(op("Memcpy HtoD (Pageable -> Device)", 10, 410, kind=Kind.MEMCPY, launch=0, call_us=400),
                  op("matmul", 430, 530, launch=420))),
        case("a blocked collective runs from 30 beside the kernel", FIXED, 210, BLOCKED,
             held={FIXED: [np.array([False, True])]}),
        case("twice as fast, a collective behind a kernel still begins at 200", TWICE, 250, BLOCKED),
        case("a kernel of half the time lets it begin at 100", NO_CONTENTION, 200, BLOCKED,
             alone_us=[np.array([100.0, NAN])]),
        # it begins 40 µs after the kernel, 220 after its launch came through; fixed, at most 20: it ends at 150
        case("a wait that nothing explains goes", FIXED, 210,
             rank(op("nvjet", 10, 210, launch=0), comm("all_gather", 250, 350, launch=20)),
             held={FIXED: [np.array([False, True])]}),
        # the trace shows by a stream wait that it needs a copy which ends at 110: 110 to 210, not 30
        case("true dependencies stay", FIXED, 305,
             rank(op("copy", 10, 110, launch=0, stream=9), host("cudaStreamWaitEvent", 3, 4),
                  comm("all_gather", 300, 400, launch=20), op("nvjet", 105, 305, launch=25)),
             held={FIXED: [np.array([False, False, True])]}),
        case("60 instead of 100 where the time alone is known", NO_CONTENTION, 112,
             rank(op("matmul", 10, 110, launch=0), op("norm", 112, 152, launch=1)), alone_us=[np.array([60.0, NAN])]),
        # the second kernel asked for the collective that ends at 111
        case("a wait that did not bind holds once it would", NO_CONTENTION, 211,
             rank(op("matmul", 10, 160, launch=0), comm("all_gather", 11, 111, launch=1),
                  host("cudaStreamWaitEvent", 2, 3), op("matmul", 160, 260, launch=5)),
             alone_us=[np.array([50.0, NAN, NAN])]),
        # its launch returned 2 µs after the long kernel, which takes 500 instead of 1000 µs
        case("a launch that met a full queue returns earlier", NO_CONTENTION, 2530,
             rank(op("long", 10, 1010, launch=0), op("short", 1010, 1020, launch=20, call_us=992),
                  op("last", 1030, 3030, launch=1020, stream=9)), alone_us=[np.array([500.0, NAN, NAN])]),
        case("who follows at once waited though it begins first", TWICE, 209.5, ROUNDED),
        case("and waits for what it followed where hosts are free", HOSTS_FREE, 259.5, ROUNDED),
    ],
)  # fmt: skip
def test_a_what_if_takes_what_is_worked_out(name: str, us: float, ranks: list[Rank], given: dict[str, Any]) -> None:
    assert step_us(replay(job(*ranks), **given), name) == pytest.approx(us, abs=0.5 if ranks[0] is ROUNDED else None)


def test_host_that_waits_for_the_end_of_the_step_returns_earlier_too() -> None:
    """Its call seems to return 0.2 µs after the step, as clocks are rounded; it waited all the same."""
    last = rank(comm("all_reduce", 10, 210, launch=0), host("cudaStreamSynchronize", 20, 215), steps=[(0, 214.8)])
    assert step_us(replay(job(last)), FREE) == pytest.approx(20, abs=10)


def test_scenarios_without_a_cause_are_not_replayed() -> None:
    """No straggler, contention, blocked collective, stall or copy: questions about communication and launches only."""
    played = replay(job(*LATE_RANK))
    assert played is not None
    assert [w.name for w in played.what_if] == [TWICE, FREE, HOSTS_FREE]


def test_a_call_that_copies_is_no_stall() -> None:
    """From pageable memory the host copies itself, and returns long after the GPU has the last part."""
    copied = rank(
        op("Memcpy HtoD (Pageable -> Device)", 10, 410, kind=Kind.MEMCPY, launch=0, call_us=3000),
        op("matmul", 3040, 3140, launch=3030),
    )
    played = replay(job(copied))
    assert played is not None
    assert "no stall on any rank" not in {w.name for w in played.what_if}


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
    assert step_us(replay(three_steps()), FREE) == pytest.approx(15)


def test_unexplained_wait_is_left_out_and_shows_in_the_error() -> None:
    """50 µs after all that is known, of which 20 pass for a gap: 30 of 10 060 µs."""
    late = rank(op("long", 10, 10_000, launch=0), op("short", 10_050, 10_060, launch=1))
    played = replay(job(late))
    assert played is not None
    assert played.error == pytest.approx(-30 / 10_060)


def test_trace_that_the_graph_cannot_explain_keeps_its_waits() -> None:
    """A wait of 500 in a step of 700 µs is kept as measured."""
    assert replayed_us(replay(job(rank(op("a", 10, 100, launch=0), op("b", 600, 700, launch=1))))) == pytest.approx(700)


def test_job_without_gpu_operations_is_not_replayed() -> None:
    assert replay(job(rank(host("aten::mm", 0, 10)))) is None


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
