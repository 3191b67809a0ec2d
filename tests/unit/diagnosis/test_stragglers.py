"""Who is blamed, and who is not, in jobs of a few operations."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from counterpoint.diagnosis.analysis.analysis import Analysis
from counterpoint.diagnosis.api import diagnose
from counterpoint.diagnosis.findings.advice import advise_straggler
from counterpoint.diagnosis.reading.traced_job import TracedJob, TracedStack
from counterpoint.records.diagnosis import Diagnosis, Straggler
from counterpoint.trace.timeline import CollectiveInfo, HostKind, Kind
from tests.support.job_builder import Host, Op, Rank, host, job, op, rank
from tests.support.job_generator import Fault, JobPlan, write_job


def stragglers(j: TracedJob) -> tuple[Straggler, ...]:
    return Analysis(j).stragglers


def blamed(*ranks: Rank) -> list[tuple[int, str]]:
    return [(s.rank, s.cause) for s in stragglers(job(*ranks))]


def reduce(start: float, end: float, *, members: str = "[0, 1, 2, 3]", group: str = "dp", **more: object) -> Op:
    size = {"in_nelems": 1024, "out_nelems": 1024}
    info = CollectiveInfo(op="all_reduce", group=group, group_ranks=members, dtype="Float", **size)  # type: ignore[arg-type]
    return Op(name="ncclDevKernel_AllReduce", start=start, end=end, kind=Kind.COMM, stream=20, info=info, **more)  # type: ignore[arg-type]


def worker(
    matmul: float, *around: Host, stall: float = 0.0, until: float, shape: str | None = None, grid: int = 132
) -> Rank:
    """A kernel from 0, a pause of the host, a kernel of 100 µs, and the all-reduce, which ends for all at `until`."""
    first = op("matmul", 10, 10 + matmul, launch=0.0, shape=shape, grid=(grid, 1, 1))
    second = op("matmul", 10 + matmul + stall, 110 + matmul + stall, launch=matmul + stall, shape=shape)
    hosts: tuple[Host, ...] = around
    if stall:
        hosts += (host("tokenizer.encode", 20, matmul + stall - 5, HostKind.ANNOTATION),)
    arrives = 110 + matmul + stall
    return rank(first, second, *hosts, reduce(arrives, until, launch=arrives - 20))


def test_named_stall() -> None:
    """Rank 2's host sits 600 µs in the tokenizer while its GPU has nothing."""
    ranks = [worker(200, stall=600.0 * (r == 2), until=1000) for r in range(4)]
    found = stragglers(job(*ranks))
    assert [(s.rank, s.cause, s.detail, s.delay_us) for s in found] == [(2, "host_stall", "tokenizer.encode", 600.0)]


def test_a_stall_is_told_with_phase_and_module() -> None:
    """Of the host, while the GPU idles; the all-reduce that the others wait in is of the backward pass."""
    ranges = [
        host("nn.Module: Embedding_0", 15, 700, HostKind.PYTHON),
        host("FSDP::post_backward_reduce (layers.3)", 705, 900, HostKind.ANNOTATION),
    ]
    ranks = [worker(200, *ranges, stall=600.0 * (r == 2), until=1000) for r in range(4)]
    (found,) = stragglers(job(*ranks))
    assert (found.phase, found.module) == ("forward", "Embedding_0")
    assert "in tokenizer.encode, in forward of Embedding_0; they" in found.evidence
    assert found.evidence.endswith("they waited longest in all_reduce #0 (dp), in backward of layers.3")


def test_slow_kernels_are_told_with_the_module_that_is_slow() -> None:
    """The kernel that is slow is launched in one module, the other in another."""
    ranges = [host("nn.Module: MLP_3", -5, 5, HostKind.PYTHON), host("nn.Module: Norm_4", 100, 900, HostKind.PYTHON)]
    found = stragglers(job(*[worker(800 if r == 1 else 200, *ranges, until=1000) for r in range(4)]))
    assert [(s.cause, s.phase, s.module) for s in found] == [("slow_kernels", "forward", "MLP_3")]
    assert "mostly in forward of MLP_3" in found[0].evidence


def test_one_slow_kernel_is_not_a_slow_gpu() -> None:
    """Attention takes 4 x as long in the same grid, the matmuls as long as elsewhere."""

    def one(attention: float) -> Rank:
        parts = [op("matmul", 10, 210), op("flash_fwd", 210, 210 + attention)]
        return rank(*parts, op("matmul", 210 + attention, 410 + attention), reduce(410 + attention, 1300))

    found = stragglers(job(*[one(800.0 if r == 1 else 200.0) for r in range(4)]))
    assert [(s.rank, s.cause, s.detail) for s in found] == [(1, "slow_kernel", "flash_fwd")]
    assert "flash_fwd takes 4.00 x as long as on rank" in found[0].evidence
    assert "all its other kernels 1.00 x" in found[0].evidence
    advice = advise_straggler(found[0], TracedStack(vendor="nvidia", nccl=True, fsdp=False, fsdp2=False, ddp=False))
    assert "drain" not in advice
    assert "what flash_fwd works on" in advice


LARGE, SMALL = "[[8192, 4096], [4096, 4096]]", "[[2048, 4096], [4096, 4096]]"


@pytest.mark.parametrize(
    ("late", "other", "cause"),
    [
        ({}, {}, "slow_kernels"),  # the same kernel takes 800 instead of 200 µs
        ({"grid": 528}, {}, "more_work"),  # four times the blocks, four times the time
        ({"shape": LARGE}, {"shape": SMALL}, "more_work"),  # a persistent kernel's grid is always the device
    ],
)
def test_a_rank_whose_kernel_takes_longer(late: dict[str, Any], other: dict[str, Any], cause: str) -> None:
    ranks = [worker(800, **late, until=1000) if r == 1 else worker(200, **other, until=1000) for r in range(4)]
    assert blamed(*ranks) == [(1, cause)]


def two_ranks_in_turn(first_us: float, then_us: float) -> list[tuple[int, str]]:
    """Return who is blamed where rank 1 is late for one all_reduce and then rank 0 for another."""
    middle, end = 200 + first_us, 400 + first_us + then_us

    def turn(before_us: float, after_us: float) -> Rank:
        early, late = op("matmul", 10, 110, launch=0.0), op("matmul", middle, middle + 100, launch=middle - 5)
        return rank(early, reduce(110 + before_us, middle), late, reduce(middle + 100 + after_us, end))

    return blamed(turn(0.0, then_us), turn(first_us, 0.0))


def test_of_two_ranks_that_are_both_late_the_later_one() -> None:
    """That rank's own lateness does not hide one which costs a quarter of the steps more; in turn nobody stands out."""
    assert two_ranks_in_turn(600.0, 250.0) == [(1, "host_stall")]
    assert two_ranks_in_turn(300.0, 250.0) == []


@pytest.mark.parametrize(("late", "expected"), [((4, 5, 6, 7), 4), ((1, 6), 2), ((3,), 1)])
def test_ranks_that_are_late_together_are_one_straggler(late: tuple[int, ...], expected: int) -> None:
    """Each of them comes last in one of the collectives, by a few µs; without one of them the others would."""
    parts: list[list[Op | Host]] = [[] for _ in range(8)]
    for i in range(len(late)):
        at = 2000.0 * i
        for r, own in enumerate(parts):
            behind = 800.0 + 20.0 * (late.index(r) == i) if r in late else 0.0
            own += [op("matmul", at + 10 + behind, at + 110 + behind, launch=at + behind)]
            own += [reduce(at + 110 + behind, at + 1500, members="[0, 1, 2, 3, 4, 5, 6, 7]", launch=at + behind + 5)]
            if behind:
                own.append(host("tokenizer.encode", at + 1, at + behind - 5, HostKind.ANNOTATION))
    (found,) = stragglers(job(*[rank(*own) for own in parts]))
    assert (found.ranks, len(found.ranks)) == (late, expected)
    assert (found.cause, found.detail, found.times_last) == ("host_stall", "tokenizer.encode", len(late))
    assert found.delay_us == pytest.approx(810.0 * len(late), rel=0.02)


@pytest.mark.parametrize("ranks", [1, 4])
def test_equal_ranks(ranks: int) -> None:
    assert blamed(*[worker(200, until=400)] * ranks) == []


def test_wait_that_compute_hides_blames_nobody() -> None:
    """The others compute for as long as they wait."""
    late = rank(op("matmul", 10, 510, launch=0.0), reduce(510, 600), op("matmul", 600, 700))
    busy = rank(op("matmul", 10, 110, launch=0.0), reduce(110, 600), op("matmul", 110, 600, stream=9),
                op("matmul", 600, 700))  # fmt: skip
    assert blamed(late, busy, busy, busy) == []


def crossed(r: int, between: float, end: float) -> Rank:
    """Rank `r` of 2 x 2, where rank 0 stalls for 790 µs: an all-reduce in one group, a kernel, one in the other."""
    tp, dp = ("[0, 1]", "[2, 3]")[r // 2], ("[0, 2]", "[1, 3]")[r % 2]
    stall = 790.0 if r == 0 else 0.0
    begin, together = 10 + stall, 950 if r < 2 else 350
    parts: list[Op | Host] = [op("warm", 0, 10, launch=-10.0), op("matmul", begin, begin + 100, launch=begin - 10)]
    parts += [host("tokenizer.encode", 20, 790, HostKind.ANNOTATION)] if stall else []
    parts += [reduce(begin + 100, together, members=tp, group="tp", launch=begin)]
    parts += [op("matmul", together, together + between, launch=begin + 1)] if between else []
    parts += [reduce(together + between, end, members=dp, group="dp", launch=begin + 2)]
    return rank(*parts, steps=[(0, end)])


def test_inherited_delay_is_not_blamed() -> None:
    """Rank 1 waits for rank 0 in their group and is late for rank 3 in the other: only rank 0 is blamed."""
    assert [b[0] for b in blamed(*[crossed(r, 50, 1100) for r in range(4)])] == [0]


def test_nobody_stands_still_for_longer_than_it_waits() -> None:
    """In one group rank 1 waits for rank 0, in the next rank 2 does, no rank in both."""
    (late,) = stragglers(job(*[crossed(r, 0, 1000) for r in range(4)]))
    assert late.rank == 0
    assert late.delay_us == pytest.approx(790.0)


@pytest.mark.parametrize("name", ["send", "recv"])
def test_pipeline_waits_by_design(name: str) -> None:
    """A stage that receives late is no straggler."""

    def stage(at: float) -> Rank:
        info = CollectiveInfo(op=name, group="pp", in_nelems=8, out_nelems=8, dtype="Float")
        p2p = Op(name="ncclDevKernel_SendRecv", start=at, end=1000, kind=Kind.COMM, stream=20, info=info)
        return rank(op("matmul", 10, at, launch=0.0), p2p)

    assert blamed(stage(200), stage(900)) == []


LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


def paused(*pauses: tuple[str, float], recorded: bool = True) -> list[Rank]:
    """Return four ranks, the last with these things of the host in µs in each of three steps, before an all-reduce."""
    kinds = {LOADER: HostKind.ANNOTATION, "cudaMalloc": HostKind.RUNTIME}
    parts: list[list[Op | Host]] = [[], [], [], []]
    late, steps = sum(us for _, us in pauses), list[tuple[float, float]]()
    for i in range(3):
        start = 100.0 + i * (late + 3000.0)
        steps.append((start, start + late + 2990.0))
        for number, own in enumerate(parts):
            at = start + 10.0
            for name, us in pauses if number == 3 else ():
                own.append(host(name, at, at + us - 8.0, kinds.get(name, HostKind.OP)))
                own.append(op("short", at + us, at + us + 5.0, launch=at + us - 4.0))
                at += us
            own.append(op("matmul", at + 10.0, at + 1010.0, launch=at + 6.0))
            own.append(reduce(at + 1010.0, start + late + 2900.0, launch=at + 8.0))
    if not recorded:
        parts = [[replace(o, launch=float("nan")) for o in own if isinstance(o, Op)] for own in parts]
    return [rank(*own, steps=steps) for own in parts]


@pytest.mark.parametrize(
    ("pauses", "cause", "second"),
    [
        ([(LOADER, 3000.0), ("a", 2500.0), ("b", 2500.0)], "host_stall", None),
        ([(LOADER, 3000.0), ("a", 1200.0), ("b", 1200.0)], "late_input", None),
        ([(LOADER, 3000.0), ("a", 2000.0), ("cudaMalloc", 2000.0)], "late_input", "long host operation"),
    ],
)
def test_the_cause_is_what_most_of_the_lateness_is(
    pauses: list[tuple[str, float]], cause: str, second: str | None
) -> None:
    """The longest pause is for input; pauses in several operations may add up to more. Under half, two are named."""
    (late,) = stragglers(job(*paused(*pauses)))
    assert (late.rank, late.cause, f" ms: {second})" in late.evidence) == (3, cause, second is not None)


def test_without_host_events_no_cause_is_claimed() -> None:
    (late,) = stragglers(job(*paused(("anything", 5000.0), recorded=False)))
    assert (late.rank, late.cause) == (3, "no_host_events")
    assert "ProfilerActivity.CPU" in advise_straggler(
        late, TracedStack(vendor="nvidia", nccl=True, fsdp=False, fsdp2=False, ddp=False)
    )


def test_a_late_rank_costs_what_its_stall_does_where_its_stand_in_waits_too(tmp_path: Path) -> None:
    """The hosts of the others wait for the GPU in the same stretch, so that their time as a stand-in saves nothing."""

    def step_us(*faults: Fault) -> tuple[float, Diagnosis]:
        folder = tmp_path / str(len(faults))
        write_job(JobPlan(style="ddp", ranks=4, transfer_us=300.0, faults=faults), folder)
        found = diagnose(folder).diagnosis
        return found.totals.duration_us / len(found.steps), found

    healthy, _ = step_us()
    stalled, found = step_us(Fault(kind="stall", rank=2, us=8000.0))
    assert (found.findings[0].kind, found.findings[0].rank) == ("straggler", 2)
    assert found.findings[0].cost_us == pytest.approx(stalled - healthy, rel=0.05)
