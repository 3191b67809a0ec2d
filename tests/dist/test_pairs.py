"""Real ranks over gloo: collectives are checked, trials keep their order, scenarios give sane rows."""

import dataclasses
import math
import statistics
import time
from functools import partial

import msgspec
import pytest
import torch
import torch.distributed as dist

from counterpoint.errors import CounterpointError
from counterpoint.measurement.collective import Comm, allocate, collectives, elements_of
from counterpoint.measurement.mechanisms import Mechanism
from counterpoint.measurement.pairs import Calibration
from counterpoint.measurement.session import Session
from counterpoint.measurement.worker import measure_part
from counterpoint.parallel.tensor.overlapped import Weight
from counterpoint.records.measurement import Block, Outcome, Plan, Scenario
from tests.support.ranks import Ranks, error_of


def opened(session: Session, collective: str, size_bytes: int) -> Comm:
    numel = elements_of(size_bytes, session.dtype.itemsize, session.world_size)
    buffers = allocate(
        collective, numel=numel, rank=session.rank, world_size=session.world_size, dtype=session.dtype, seed=3,
        empty=partial(torch.empty, dtype=session.dtype, device=session.device),
    )  # fmt: skip
    return Comm(buffers=buffers, group=session.world)


def check_is_quiet(session: Session, collective: str, size_bytes: int) -> str:
    """The check of a correct collective; its text if it complains."""
    return error_of(opened(session, collective, size_bytes).check)


def check_a_wrong_one(session: Session, collective: str) -> str:
    """The check of a collective whose last element comes out one unit in the last place too large, on rank 1 only."""
    right = Comm.launch

    def wrong(comm: Comm) -> None:
        right(comm)
        if session.rank == 1:
            comm.buffers.recv[-1] *= 1.5

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comm, "launch", wrong)
        return check_is_quiet(session, collective, 4096)


def check_a_missing_write(session: Session) -> str:
    """The check of an all_gather that does nothing after a first good one."""
    comm = opened(session, "all_gather", 4096)
    comm.check()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comm, "launch", lambda comm: None)
        return error_of(comm.check)


def slow_pair(session: Session, what: str, compute_s: float, comm_s: float) -> dict[str, float]:
    """One trial of a pair that only sleeps."""
    lanes = session.lanes(lambda: time.sleep(compute_s), lambda: time.sleep(comm_s))
    trial = session.stage.run(lanes, what)  # type: ignore[arg-type]
    return {name: value for name, value in dataclasses.asdict(trial).items() if not math.isnan(value)}


def agree(session: Session, values: tuple[str, ...]) -> str:
    return error_of(lambda: session.check_agreement("the flavour", values[session.rank]))


def fail_on(session: Session, rank: int) -> str:
    def action() -> None:
        if session.rank == rank:
            raise ValueError("no room")

    return error_of(lambda: session.raise_together(action))


def measured(session: Session, asked: Scenario | Block, rounds: int = 5) -> Outcome | str:
    """A measured scenario or its building blocks, or the text of what it raised."""
    plan = Plan(
        suite="test", device="cpu", world_size=session.world_size, parts=(asked,), rounds=rounds, results="", errors=""
    )
    try:
        return measure_part(session, asked, plan, Calibration())
    except CounterpointError as error:
        return f"{type(error).__name__}: {error}"


def wrong_matmul(session: Session, asked: Block) -> Outcome | str:
    """Measured matmuls whose every element is off, on rank 1 only."""
    right = Weight.multiply

    def wrong(weight: Weight, rows: torch.Tensor, out: torch.Tensor, row_scale: torch.Tensor | None = None) -> None:
        right(weight, rows, out, row_scale)
        if session.rank == 1:
            out.mul_(1.001)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Weight, "multiply", wrong)
        return measured(session, asked)


def not_offered_by_rank_1(session: Session, asked: Scenario | Block) -> Outcome | str:
    with pytest.MonkeyPatch.context() as patch:
        if session.rank == 1:
            patch.setattr(Mechanism, "why_unavailable", lambda self, collective: "rank 1 is too old")
        return measured(session, asked)


def ranks_seen(session: Session) -> int:
    """Sum of ones over the group: how many ranks really take part."""
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return int(ones)


@pytest.mark.parametrize("collective", collectives())
@pytest.mark.parametrize("size_bytes", [1 << 10, 3 << 20])
def test_a_correct_collective_passes_its_check(three_ranks: Ranks, collective: str, size_bytes: int) -> None:
    assert three_ranks.run(check_is_quiet, collective, size_bytes) == ["nothing"] * 3


@pytest.mark.parametrize("collective", collectives())
def test_one_wrong_element_is_seen(two_ranks: Ranks, collective: str) -> None:
    said = two_ranks.run(check_a_wrong_one, collective)
    assert (said[0], "wrong" in said[1]) == ("nothing", True)


def test_a_collective_that_does_nothing_is_seen(two_ranks: Ranks) -> None:
    assert all("wrong data" in text for text in two_ranks.run(check_a_missing_write))


@pytest.mark.parametrize(
    ("what", "first", "second"), [("compute_first", "compute", "comm"), ("comm_first", "comm", "compute")]
)
def test_the_second_side_starts_later_and_beside_the_first(
    two_ranks: Ranks, what: str, first: str, second: str
) -> None:
    trials = [trial for _ in range(7) for trial in two_ranks.run(slow_pair, what, 0.05, 0.05)]
    head = statistics.median(trial[f"{second}_start"] - trial[f"{first}_start"] for trial in trials)
    assert 1500 < head < 30_000 < min(trial[f"{first}_end"] for trial in trials)


def test_serial_is_one_after_the_other(two_ranks: Ranks) -> None:
    for trial in two_ranks.run(slow_pair, "serial", 0.03, 0.01):
        assert trial["comm_start"] >= trial["compute_end"]


def test_alone_runs_one_side(two_ranks: Ranks) -> None:
    assert all(
        set(trial) == {"comm_start", "comm_end", "late"} for trial in two_ranks.run(slow_pair, "comm_alone", 0.01, 0.01)
    )


def test_ranks_that_differ_are_told_apart(two_ranks: Ranks) -> None:
    said = two_ranks.run(agree, ("sweet", "sour"))
    assert [("sweet" in text, "sour" in text) for text in said] == [(True, True)] * 2


def test_one_rank_that_fails_stops_all(two_ranks: Ranks) -> None:
    assert two_ranks.run(fail_on, 1) == ["PeerFailed: rank 1: no room", "ValueError: no room"]


SMALL = Scenario(
    name="small", workload="gemm 256x256x256*8", collective="all_gather", size_bytes=1 << 20, mechanisms=("gloo",)
)


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"])
def test_programs_are_a_mechanism(two_ranks: Ranks, collective: str) -> None:
    both = msgspec.structs.replace(SMALL, collective=collective, mechanisms=("gloo", "zero_sm"), orders=("together",))
    found = two_ranks.run(measured, both)[0]
    assert isinstance(found, Outcome), found
    assert [row.mechanism for row in found.rows] == ["gloo", "zero_sm"]


def test_a_collective_that_programs_do_not_offer_says_so(two_ranks: Ranks) -> None:
    """The ring of send_recv is none of theirs yet."""
    asked = msgspec.structs.replace(SMALL, collective="send_recv", mechanisms=("zero_sm",))
    found = two_ranks.run(measured, asked)[0]
    assert isinstance(found, Outcome), found
    assert (found.rows, "not send_recv" in found.unavailable["zero_sm"]) == ((), True)


def test_a_scenario_has_a_row_per_order(two_ranks: Ranks) -> None:
    """Both sides together take at least as long as each, head starts are measured, and `hidden` is by its formula."""
    outcome, second = two_ranks.run(measured, SMALL, 8)
    assert isinstance(outcome, Outcome), outcome
    assert outcome == second
    assert [row.order for row in outcome.rows] == ["together", "comm_first", "compute_first"]
    for row in outcome.rows:
        assert row.together.us >= 0.999 * max(row.compute_together.p10_us, row.comm_together.p10_us)
    assert [row.head_start_us >= 1500 for row in outcome.rows] == [False, True, True]
    row = outcome.rows[0]
    serial = row.compute_alone.us + row.best_comm_alone_us
    assert row.hidden == pytest.approx(
        (serial - row.together.us) / min(row.compute_alone.us, row.best_comm_alone_us), rel=1e-9
    )


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"size_bytes": 1 << 50}, "NotEnoughMemory", "are free; choose a smaller size"),
        ({"workload": "gemm 900000x900000x900000"}, "NotEnoughMemory", "are free; choose a smaller size"),
        ({"workload": "fft 3"}, "Misconfigured", "there is no workload"),
        ({"collective": "all_gossip"}, "Misconfigured", "there is no collective"),
        ({"mechanisms": ("nccl",)}, "Misconfigured", "no mechanism 'nccl' on cpu"),
        ({"mechanisms": ("gloo+priority=high",)}, "Misconfigured", "control of GPUs"),
        ({"size_bytes": None}, "Misconfigured", "give size_bytes or ratio"),
    ],
)
def test_what_cannot_be_measured_is_refused_on_every_rank(
    two_ranks: Ranks, change: dict[str, object], kind: str, said: str
) -> None:
    texts = two_ranks.run(measured, msgspec.structs.replace(SMALL, **change), 3)
    assert [str(text).startswith(kind) and said in text for text in texts] == [True, True]
    assert two_ranks.run(ranks_seen) == [2, 2]


BLOCK = Block(name="b", what="all_reduce", mechanisms=("gloo",), sizes_bytes=(1 << 12, 1 << 14))


@pytest.mark.parametrize("asked", [SMALL, BLOCK], ids=["scenario", "block"])
def test_what_one_rank_does_not_offer_is_left_out_on_all(two_ranks: Ranks, asked: Scenario | Block) -> None:
    found = two_ranks.run(not_offered_by_rank_1, asked)
    assert [(one.rows, one.blocks, one.unavailable) for one in found] == [((), (), {"gloo": "rank 1 is too old"})] * 2


def test_a_collective_alone_by_size(two_ranks: Ranks) -> None:
    rows = two_ranks.run(measured, BLOCK)[0].blocks
    assert [row.size_bytes for row in rows] == [1 << 12, 1 << 14]
    assert [row.gb_per_s for row in rows] == pytest.approx([row.size_bytes / row.time.us / 1e3 for row in rows])


def test_a_setting_that_cannot_work_here_is_named(two_ranks: Ranks) -> None:
    asked = Block(name="b", what="gemm 64x64x64", mechanisms=("stock", "gemm_sms=8"))
    found = two_ranks.run(measured, asked)[0]
    assert ([row.mechanism for row in found.blocks], list(found.unavailable)) == (["stock"], ["gemm_sms=8"])


MATMULS = ("all_gather_matmul 1024x1024x512", "matmul_reduce_scatter 1024x512x1024")
WAYS = ("torch", "serial", "cuts", "auto")


def matmul(what: str, *mechanisms: str) -> Block:
    return Block(name="m", what=what, mechanisms=mechanisms)


@pytest.mark.parametrize("what", MATMULS)
def test_a_matmul_and_its_collective_by_every_mechanism(two_ranks: Ranks, what: str) -> None:
    found = two_ranks.run(measured, matmul(what, *WAYS))[0]
    assert isinstance(found, Outcome), found
    rows = {row.mechanism: row for row in found.blocks}
    assert list(rows) == ["matmul alone", "gloo alone", *WAYS]
    assert [(rows[name].path, rows[name].marked) for name in WAYS[:3]] == [(name, None) for name in WAYS[:3]]
    assert (rows["auto"].path in ("serial", "cuts"), "is the simplest" in str(rows["auto"].why)) == (True, True)


def test_a_matmul_is_compared_with_the_longer_of_its_parts(two_ranks: Ranks) -> None:
    """The parts alone are compared with nothing."""
    alone, comm, row = two_ranks.run(measured, matmul("all_gather_matmul 256x64x64", "torch"))[0].blocks
    assert (alone.over_longer, comm.over_longer) == (None, None)
    assert row.over_longer == pytest.approx(row.time.us / max(alone.time.us, comm.time.us) - 1)
    assert comm.gb_per_s == pytest.approx(256 * 64 * 4 / 2 / comm.time.us / 1e3)


def test_a_matmul_that_went_another_way_is_marked(two_ranks: Ranks) -> None:
    """Rows of 12 bytes are left to torch; a small matmul is not worth a cut. What chooses by itself may do both."""
    odd = two_ranks.run(measured, matmul("all_gather_matmul 64x8x3", "serial", "cuts", "auto"))[0].blocks[2:]
    said = "ran as torch: rows of 12 bytes, which is no multiple of 16"
    assert [(row.path, row.marked) for row in odd] == [("torch", said), ("torch", said), ("torch", None)]
    (small,) = two_ranks.run(measured, matmul("matmul_reduce_scatter 64x32x16", "cuts"))[0].blocks[2:]
    assert (small.path, str(small.marked).startswith("ran as serial")) == ("serial", True)


@pytest.mark.parametrize("what", MATMULS)
def test_a_wrong_matmul_is_marked_on_all_ranks(two_ranks: Ranks, what: str) -> None:
    """By the rank that has it; an error of a thousandth is enough."""
    found = two_ranks.run(wrong_matmul, matmul(what, "torch", "cuts"))
    marks = [str(row.marked) for outcome in found for row in outcome.blocks[2:]]
    assert ["wrong on rank" in text and "is allowed" in text for text in marks] == [True] * 4, marks


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (matmul("all_gather_matmul 63x8x8", "torch"), "give a multiple of their number as M"),
        (matmul("matmul_reduce_scatter 900000x900000x900000", "torch"), "are free; choose a smaller size"),
        (matmul("all_gather_matmul 8", "torch"), "write one of: all_gather_matmul MxNxK"),
        (msgspec.structs.replace(BLOCK, sizes_bytes=(1 << 50,)), "are free; choose a smaller size"),
    ],
)
def test_blocks_that_cannot_be_measured_are_refused(two_ranks: Ranks, asked: Block, said: str) -> None:
    """In one line, on every rank."""
    assert all(said in text for text in two_ranks.run(measured, asked))


@pytest.mark.parametrize("what", ["launch kernel", "launch collective", "lasting gemm 64x64x64"])
def test_costs_of_a_machine_are_measured(two_ranks: Ranks, what: str) -> None:
    found = two_ranks.run(measured, Block(name=what, what=what, mechanisms=("stock",)))
    assert found[0] == found[1]
    (row,) = found[0].blocks
    assert row.time.p10_us <= row.time.us <= row.time.p90_us
    assert (row.time.us > 0, row.tflops is not None) == (True, what.startswith("lasting"))


def test_the_sum_kernel_is_not_measured_on_cpus(two_ranks: Ranks) -> None:
    found = two_ranks.run(measured, Block(name="sum", what="sum 4096", mechanisms=("stock",)))[0]
    assert (found.blocks, found.unavailable) == ((), {"stock": "the sum kernel runs on GPUs"})
