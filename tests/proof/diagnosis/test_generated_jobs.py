"""Made-up jobs of three kinds of machines with known truth: right rank, cause and transfer, no false alarm."""

import tempfile
from pathlib import Path
from typing import Any

import pytest

from counterpoint.diagnosis.api import diagnose
from counterpoint.diagnosis.reading.digest import Engine
from counterpoint.records.diagnosis import Diagnosis
from tests.support.job_generator import Fault, JobPlan, Truth, varied, write_job

STYLES = ("ddp", "fsdp", "copies")
SLOW = Fault(kind="slow", rank=3, factor=1.2)
TRANSFER_TOLERANCE = 0.02  # what the diagnosis promises

FAULTS = {
    "stall_named": (Fault(kind="stall", rank=3, us=20_000, steps=(2,), name="tokenizer.encode"), "host_stall"),
    "stall_unnamed_every_step": (Fault(kind="stall", rank=3, us=8_000), "host_stall"),
    "synchronise": (Fault(kind="sync", rank=3, us=8_000), "host_stall"),
    "allocator": (Fault(kind="allocator", rank=3, us=8_000), "host_stall"),
    "garbage_collection": (Fault(kind="gc", rank=3, us=20_000, steps=(1,)), "host_stall"),
    "late_input": (Fault(kind="late_input", rank=3, us=8_000), "late_input"),
    "slow_by_a_tenth": (Fault(kind="slow", rank=3, factor=1.1), "slow_kernels"),
    "slow_by_a_third": (Fault(kind="slow", rank=3, factor=1.33), "slow_kernels"),
    "larger_grids": (Fault(kind="work", rank=3, factor=1.3), "more_work"),
}
DETAILS = {
    "stall_named": "tokenizer.encode",
    "stall_unnamed_every_step": None,
    "synchronise": "cudaDeviceSynchronize",
    "allocator": "allocator",
    "garbage_collection": "garbage_collection",
}


def run(plan: JobPlan) -> tuple[Diagnosis, Truth]:
    with tempfile.TemporaryDirectory() as folder:
        truth = write_job(plan, Path(folder))
        return diagnose(folder, engine=Engine(workers=1)).diagnosis, truth


def suspects(d: Diagnosis) -> list[tuple[int, str]]:
    return [(s.rank, s.cause) for s in d.stragglers]


def transfer_error(d: Diagnosis, truth: Truth) -> float:
    """Largest relative error of any collective; all of one stream start in the program's order."""
    assert len(d.collectives) == len(truth.transfer_us), "a collective was torn apart or is missing"
    return max(abs(c.transfer_us / t - 1) for c, t in zip(d.collectives, truth.transfer_us, strict=True))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("fault", FAULTS)
def test_rank_and_cause_of_a_planted_fault(style: str, fault: str) -> None:
    planted, cause = FAULTS[fault]
    d, _ = run(JobPlan(style=style, faults=(planted,)))
    assert suspects(d) == [(3, cause)]
    assert fault not in DETAILS or d.stragglers[0].detail == DETAILS[fault]


@pytest.mark.parametrize("style", ["fsdp", "copies"])
def test_more_work_in_equal_grids_shows_in_the_shapes(style: str) -> None:
    """A persistent matmul's grid says nothing; the input shapes do."""
    d, _ = run(JobPlan(style=style, faults=(Fault(kind="work_shapes", rank=3, factor=1.3),)))
    assert suspects(d) == [(3, "more_work")]


@pytest.mark.parametrize("style", STYLES)
def test_delay_is_what_the_others_felt(style: str) -> None:
    """20 ms in the second step, of which the GPU had work for the first few: between 70 and 100 % are felt."""
    fault = Fault(kind="stall", rank=3, us=20_000, steps=(1,))
    d, _ = run(JobPlan(style=style, faults=(fault,)))
    assert 0.7 * fault.us < d.stragglers[0].delay_us <= fault.us


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("faulty", [False, True])
def test_transfer_is_right(style: str, faulty: bool) -> None:
    d, truth = run(JobPlan(style=style, faults=(SLOW,) if faulty else ()))
    assert transfer_error(d, truth) < TRANSFER_TOLERANCE


DAMAGE: list[dict[str, Any]] = [
    *({"shift_us": {shifted: us}} for shifted in (0, 2, 3) for us in (5_000.0, -5_000.0)),
    *({"steps": steps, "drift_ppm": {5: ppm}} for steps in (4, 8, 30) for ppm in (50.0, -50.0)),
    {"lost": ((5, 3), (5, 4))},
    {"lost": ((5, 2), (5, 6))},
    {"lost": ((5, 2), (1, 6))},
    {"lost": ((0, 3), (5, 3))},
    {"lost": ((0, 1), (2, 5), (7, 6))},
]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("damage", DAMAGE, ids=str)
def test_clocks_that_are_off_and_lost_collectives_change_nothing(style: str, damage: dict[str, Any]) -> None:
    d, truth = run(JobPlan(style=style, faults=(SLOW,), **damage))
    assert (suspects(d), transfer_error(d, truth) < TRANSFER_TOLERANCE) == ([(3, "slow_kernels")], True)


@pytest.mark.parametrize("style", STYLES)
def test_clock_faults_alone_raise_no_alarm(style: str) -> None:
    d, _ = run(JobPlan(style=style, shift_us={1: 5_000.0, 4: -5_000.0}, drift_ppm={6: 50.0}))
    assert d.stragglers == ()


@pytest.mark.parametrize(("style", "count"), [("ddp", 8), ("fsdp", 48), ("copies", 48)])
def test_deleted_collective_shifts_nothing(style: str, count: int) -> None:
    """Whichever one trace lacks, the others keep their transfers and the verdict stays."""
    places = range(count) if style == "ddp" else (0, 1, 5, 6, 11, 12, 23, 40, 46, 47)
    plan = JobPlan(style=style, faults=(SLOW,))
    wrong = []
    for lost in places:
        d, truth = run(varied(plan, lost=((5, lost),)))
        if suspects(d) != [(3, "slow_kernels")] or transfer_error(d, truth) >= TRANSFER_TOLERANCE:
            wrong.append(lost)
    assert wrong == []


def test_equal_collectives_of_which_every_rank_lacks_another() -> None:
    """Eight sequences of equal length and equal tokens: only their rhythm tells that each lacks another one."""
    lost = tuple((rank, 2 * rank) for rank in range(8))
    d, truth = run(JobPlan(style="ddp", steps=8, lost=lost))
    assert transfer_error(d, truth) < TRANSFER_TOLERANCE


def test_loss_is_noted() -> None:
    d, _ = run(JobPlan(lost=((5, 7),)))
    assert "rank 5: 1 collective of the other ranks not in its trace; the rest is matched" in d.notes


@pytest.mark.parametrize("style", STYLES)
def test_two_faults_on_two_ranks(style: str) -> None:
    d, _ = run(JobPlan(style=style, faults=(SLOW, Fault(kind="stall", rank=6, us=20_000, steps=(2,)))))
    assert sorted(suspects(d)) == [(3, "slow_kernels"), (6, "host_stall")]


@pytest.mark.parametrize("style", STYLES)
def test_stall_that_the_queue_hides_is_no_alarm(style: str) -> None:
    """A host that loses 1 ms while its GPU has more than that queued delays nobody."""
    d, _ = run(JobPlan(style=style, faults=(Fault(kind="stall", rank=3, us=1_000),)))
    assert d.stragglers == ()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("ranks", [2, 16])
def test_other_world_sizes(style: str, ranks: int) -> None:
    d, truth = run(JobPlan(style=style, ranks=ranks, faults=(Fault(kind="slow", rank=ranks - 1, factor=1.2),)))
    assert (suspects(d), transfer_error(d, truth) < TRANSFER_TOLERANCE) == ([(ranks - 1, "slow_kernels")], True)


@pytest.mark.parametrize("style", STYLES)
def test_one_step_is_enough(style: str) -> None:
    d, _ = run(JobPlan(style=style, steps=1, faults=(Fault(kind="stall", rank=3, us=20_000),)))
    assert suspects(d) == [(3, "host_stall")]


@pytest.mark.parametrize("loss_item", [True, False])
@pytest.mark.parametrize(("style", "how"), [("ddp", "repetition"), ("fsdp", "ProfilerStep")])
def test_steps_are_counted(style: str, how: str, loss_item: bool) -> None:
    """Four, by ProfilerStep or by repetition although layers repeat inside them, with and without a waiting host."""
    d, _ = run(JobPlan(style=style, loss_item=loss_item))
    assert (len(d.steps), ("repetition" in d.steps[0].name) == (how == "repetition")) == (4, True)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("slower", [1.0, 1.01])
def test_no_false_alarm_on_a_healthy_job(style: str, slower: float) -> None:
    """20 seeds of 2 % jitter per kind of job, also with one GPU 1 % slower: nobody is blamed."""
    alarms = []
    for seed in range(20):
        fault = (Fault(kind="slow", rank=seed % 8, factor=slower),)
        d, _ = run(JobPlan(style=style, steps=2, layers=3, jitter=0.02, seed=seed, faults=fault))
        alarms += [(seed, *s) for s in suspects(d)]
    assert alarms == []


def test_old_kernels_without_metadata_are_told_by_their_name() -> None:
    """`ncclKernel_AllReduce_RING_LL_Sum_float` on V100 is an all_reduce; its size is not known."""
    d, _ = run(JobPlan(style="ddp"))
    assert {(c.op, c.bytes, c.joined_by) for c in d.collectives} == {("all_reduce", None, "order")}


def test_peer_copies_take_no_sm_and_state_their_size() -> None:
    """Seven copies of 32 MiB by copy engines are one collective of 8 x 32 MiB on 0 CTAs."""
    d, _ = run(JobPlan(style="copies"))
    copies = [c for c in d.collectives if c.op == "peer_copy"]
    assert {(c.bytes, c.num_ctas) for c in copies} == {(8 * (32 << 20), 0)}


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (Fault(kind="stall", rank=3, us=20_000, steps=(2,)), "host_stall"),
        (Fault(kind="late_input", rank=3, us=8_000), "late_input"),
        (SLOW, "slow_kernels"),
    ],
    ids=["stall", "late_input", "slow"],
)
def test_copies_that_wait_before_they_begin(fault: Fault, cause: str) -> None:
    """The stream holds every rank's copies until the last is ready: its launch tells who that was."""
    d, _ = run(JobPlan(style="copies", copies_wait="before", faults=(fault,)))
    assert suspects(d) == [(3, cause)]


def test_copies_that_wait_before_they_begin_raise_no_alarm() -> None:
    d, _ = run(JobPlan(style="copies", copies_wait="before"))
    assert d.stragglers == ()
