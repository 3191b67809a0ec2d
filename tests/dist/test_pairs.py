"""Real ranks over gloo: collectives are checked, trials keep their order, scenarios give sane rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import msgspec
import pytest

from counterpoint.measurement.collective import collectives
from counterpoint.records.measurement import Block, Outcome, Scenario
from tests.dist import pair_programs as programs
from tests.support.ranks import Ranks

SUMS = ("all_reduce", "reduce_scatter")


def test_the_pool_is_a_group(two_ranks: Ranks) -> None:
    """Both processes take part."""
    assert two_ranks.run(programs.ranks_seen) == [2, 2]


@pytest.mark.parametrize("collective", collectives())
@pytest.mark.parametrize("size_bytes", [1 << 10, 3 << 20])
def test_a_correct_collective_passes_its_check(three_ranks: Ranks, collective: str, size_bytes: int) -> None:
    """The data that `check` expects is what gloo delivers, in one chunk and in several."""
    assert three_ranks.run(programs.check_is_quiet, collective, size_bytes) == [""] * 3


@pytest.mark.parametrize("collective", [*(name for name in collectives() if name not in SUMS), *SUMS])
def test_one_wrong_element_is_seen(two_ranks: Ranks, collective: str) -> None:
    """The rank whose last element is off says so; the other does not."""
    said = two_ranks.run(programs.check_a_wrong_one, collective)
    assert (said[0], "wrong" in said[1]) == ("", True)


def test_a_collective_that_does_nothing_is_seen(two_ranks: Ranks) -> None:
    """What a former run left in the buffer does not pass for a result."""
    assert all("wrong data" in text for text in two_ranks.run(programs.check_a_missing_write))


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [("compute_first", "compute", "comm"), ("comm_first", "comm", "compute")],
)
def test_the_second_side_starts_later_and_beside_the_first(
    two_ranks: Ranks, what: str, first: str, second: str
) -> None:
    """The head start is real, and the second side starts before the end of the first, in most trials."""
    trials = [trial for _ in range(7) for trial in two_ranks.run(programs.slow_pair, what, 0.05, 0.05)]
    head = statistics.median(trial[f"{second}_start"] - trial[f"{first}_start"] for trial in trials)
    assert 1500 < head < 30_000 < min(trial[f"{first}_end"] for trial in trials)


def test_serial_is_one_after_the_other(two_ranks: Ranks) -> None:
    """The collective starts when the computation has ended."""
    for trial in two_ranks.run(programs.slow_pair, "serial", 0.03, 0.01):
        assert trial["comm_start"] >= trial["compute_end"]


def test_alone_runs_one_side(two_ranks: Ranks) -> None:
    """Nothing of the other side is in the trial."""
    assert all(
        set(trial) == {"comm_start", "comm_end", "late"}
        for trial in two_ranks.run(programs.slow_pair, "comm_alone", 0.01, 0.01)
    )


def test_ranks_that_differ_are_told_apart(two_ranks: Ranks) -> None:
    """Every rank raises, and the text names both values."""
    said = two_ranks.run(programs.agree, ("sweet", "sour"))
    assert [("sweet" in text, "sour" in text) for text in said] == [(True, True)] * 2


def test_one_rank_that_fails_stops_all(two_ranks: Ranks) -> None:
    """The failing rank raises its own error, the other says that another could not go on."""
    assert two_ranks.run(programs.fail_on, 1) == [
        "PeerFailed: rank 1: no room",
        "ValueError: no room",
    ]


SMALL = Scenario(
    name="small",
    workload="gemm 256x256x256*8",
    collective="all_gather",
    size_bytes=1 << 20,
    mechanisms=("gloo",),
)


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"])
def test_programs_are_a_mechanism(two_ranks: Ranks, collective: str) -> None:
    """Measured beside gloo in the same rounds, every element of its result checked before."""
    both = msgspec.structs.replace(SMALL, collective=collective, mechanisms=("gloo", "zero_sm"), orders=("together",))
    found = two_ranks.run(programs.scenario, both, 5)[0]
    assert isinstance(found, Outcome), found
    assert [row.mechanism for row in found.rows] == ["gloo", "zero_sm"]


def test_a_collective_that_programs_do_not_offer_says_so(two_ranks: Ranks) -> None:
    """The ring of send_recv is none of theirs yet."""
    asked = msgspec.structs.replace(SMALL, collective="send_recv", mechanisms=("zero_sm",))
    found = two_ranks.run(programs.scenario, asked, 5)[0]
    assert isinstance(found, Outcome), found
    assert (found.rows, "not send_recv" in found.unavailable["zero_sm"]) == ((), True)


@pytest.fixture(scope="module")
def outcome(two_ranks: Ranks) -> Outcome:
    """A small scenario, measured by both ranks: they return the same."""
    first, second = two_ranks.run(programs.scenario, SMALL, 8)
    assert isinstance(first, Outcome), first
    assert first == second
    return first


def test_a_scenario_has_a_row_per_order(outcome: Outcome) -> None:
    """All three launch orders of the one mechanism."""
    assert [row.order for row in outcome.rows] == ["together", "comm_first", "compute_first"]


def test_both_is_at_least_as_long_as_its_sides(outcome: Outcome) -> None:
    """T covers what each side took beside the other."""
    for row in outcome.rows:
        assert row.together.us >= 0.999 * max(row.compute_together.p10_us, row.comm_together.p10_us)


def test_head_starts_are_measured(outcome: Outcome) -> None:
    """None for `together`; at least what the delay sleeps for the others."""
    assert [row.head_start_us >= 1500 for row in outcome.rows] == [False, True, True]


def test_hidden_is_what_the_formula_says(outcome: Outcome) -> None:
    """Recomputed from the times of the row itself."""
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
    """One clear line each, and the pool still works afterwards: nobody hangs."""
    texts = two_ranks.run(programs.scenario, msgspec.structs.replace(SMALL, **change), 3)
    assert [str(text).startswith(kind) and said in text for text in texts] == [True, True]
    assert two_ranks.run(programs.ranks_seen) == [2, 2]


@pytest.mark.parametrize("program", [programs.scenario_that_rank_1_does_not_offer, programs.block_not_offered])
def test_what_one_rank_does_not_offer_is_left_out_on_all(two_ranks: Ranks, program: Callable[..., Outcome]) -> None:
    """No rows but the reason, on both ranks, and nobody waits in a collective for the other."""
    asked = SMALL if program is programs.scenario_that_rank_1_does_not_offer else BLOCK
    found = two_ranks.run(program, asked)
    assert [(one.rows, one.blocks, one.unavailable) for one in found] == [((), (), {"gloo": "rank 1 is too old"})] * 2


BLOCK = Block(name="b", what="all_reduce", mechanisms=("gloo",), sizes_bytes=(1 << 12, 1 << 14))


def test_a_collective_alone_by_size(two_ranks: Ranks) -> None:
    """A row per size, with the bandwidth that nccl-tests would say."""
    rows = two_ranks.run(programs.block, BLOCK)[0].blocks
    assert [row.size_bytes for row in rows] == [1 << 12, 1 << 14]
    assert [row.gb_per_s for row in rows] == pytest.approx([row.size_bytes / row.time.us / 1e3 for row in rows])


def test_a_setting_that_cannot_work_here_is_named(two_ranks: Ranks) -> None:
    """The others are measured."""
    asked = Block(name="b", what="gemm 64x64x64", mechanisms=("stock", "gemm_sms=8"))
    found = two_ranks.run(programs.block, asked)[0]
    assert ([row.mechanism for row in found.blocks], list(found.unavailable)) == (["stock"], ["gemm_sms=8"])


MATMULS = ("all_gather_matmul 1024x1024x512", "matmul_reduce_scatter 1024x512x1024")
WAYS = ("torch", "serial", "cuts", "auto")


def matmul(what: str, *mechanisms: str) -> Block:
    return Block(name="m", what=what, mechanisms=mechanisms)


@pytest.mark.parametrize("what", MATMULS)
def test_a_matmul_and_its_collective_by_every_mechanism(two_ranks: Ranks, what: str) -> None:
    """Each runs as it was asked to."""
    found = two_ranks.run(programs.block, matmul(what, *WAYS))[0]
    assert isinstance(found, Outcome), found
    rows = {row.mechanism: row for row in found.blocks}
    assert list(rows) == ["matmul alone", "gloo alone", *WAYS]
    assert [(rows[name].path, rows[name].marked) for name in WAYS[:3]] == [(name, None) for name in WAYS[:3]]
    assert (rows["auto"].path in ("serial", "cuts"), "is the simplest" in str(rows["auto"].why)) == (True, True)


def test_a_matmul_is_compared_with_the_longer_of_its_parts(two_ranks: Ranks) -> None:
    """The parts alone are compared with nothing."""
    alone, comm, row = two_ranks.run(programs.block, matmul("all_gather_matmul 256x64x64", "torch"))[0].blocks
    assert (alone.over_longer, comm.over_longer) == (None, None)
    assert row.over_longer == pytest.approx(row.time.us / max(alone.time.us, comm.time.us) - 1)
    assert comm.gb_per_s == pytest.approx(256 * 64 * 4 / 2 / comm.time.us / 1e3)


def test_a_matmul_that_went_another_way_is_marked(two_ranks: Ranks) -> None:
    """Rows of 12 bytes are left to torch; a small matmul is not worth a cut. What chooses by itself may do both."""
    odd = two_ranks.run(programs.block, matmul("all_gather_matmul 64x8x3", "serial", "cuts", "auto"))[0].blocks[2:]
    said = "ran as torch: rows of 12 bytes, which is no multiple of 16"
    assert [(row.path, row.marked) for row in odd] == [("torch", said), ("torch", said), ("torch", None)]
    (small,) = two_ranks.run(programs.block, matmul("matmul_reduce_scatter 64x32x16", "cuts"))[0].blocks[2:]
    assert (small.path, str(small.marked).startswith("ran as serial")) == ("serial", True)


@pytest.mark.parametrize("what", MATMULS)
def test_a_wrong_matmul_is_marked_on_all_ranks(two_ranks: Ranks, what: str) -> None:
    """By the rank that has it; an error of a thousandth is enough."""
    found = two_ranks.run(programs.wrong_matmul, matmul(what, "torch", "cuts"))
    marks = [str(row.marked) for outcome in found for row in outcome.blocks[2:]]
    assert ["wrong on rank" in text and "is allowed" in text for text in marks] == [True] * 4, marks


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("all_gather_matmul 63x8x8", "give a multiple of their number as M"),
        ("matmul_reduce_scatter 900000x900000x900000", "are free; choose a smaller size"),
        ("all_gather_matmul 8", "write one of: all_gather_matmul MxNxK"),
    ],
)
def test_matmuls_that_cannot_be_measured_are_refused(two_ranks: Ranks, what: str, said: str) -> None:
    """In one line, on every rank."""
    assert all(said in text for text in two_ranks.run(programs.block, matmul(what, "torch")))


def test_a_block_beyond_memory_is_refused(two_ranks: Ranks) -> None:
    """As a pair is: in one line, on every rank."""
    asked = Block(name="b", what="all_gather", mechanisms=("gloo",), sizes_bytes=(1 << 50,))
    assert all("are free; choose a smaller size" in text for text in two_ranks.run(programs.block, asked))


@pytest.mark.parametrize("what", ["launch kernel", "launch collective", "lasting gemm 64x64x64"])
def test_costs_of_a_machine_are_measured(two_ranks: Ranks, what: str) -> None:
    """One row with a time, the same on both ranks; of a GEMM with its rate."""
    found = two_ranks.run(programs.block, Block(name=what, what=what, mechanisms=("stock",)))
    assert found[0] == found[1]
    (row,) = found[0].blocks
    assert row.time.p10_us <= row.time.us <= row.time.p90_us
    assert (row.time.us > 0, row.tflops is not None) == (True, what.startswith("lasting"))


def test_the_sum_kernel_is_not_measured_on_cpus(two_ranks: Ranks) -> None:
    """It says so instead of timing something else."""
    found = two_ranks.run(programs.block, Block(name="sum", what="sum 4096", mechanisms=("stock",)))[0]
    assert (found.blocks, found.unavailable) == ((), {"stock": "the sum kernel runs on GPUs"})
