"""The benchmarks' own machinery: made-up traces that hold together, and a run in small."""

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsdp_step
import killed_rank
import msgspec
import pairs_by_order
import profile_ranks
import pytest
import tensor_clock
import tune_machine
from synthetic_job import Job, write_traces

from counterpoint.machine.profile import profile_of

RESULTS = Path(__file__).parents[2] / "results"
Capture = pytest.CaptureFixture[str]
JOB = Job(world_size=2, steps=2, micro_batches=1, layers=2)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """The events of both ranks."""
    folder = tmp_path_factory.mktemp("job")
    write_traces(JOB, folder, range(2))
    return [json.loads((folder / f"rank{rank}.json").read_text())["traceEvents"] for rank in range(2)]


def kernels(events: list[dict[str, Any]], name: str = "") -> list[dict[str, Any]]:
    return [event for event in events if event.get("cat") == "kernel" and event["name"].startswith(name)]


def test_the_number_of_events_is_what_was_announced(tmp_path: Path) -> None:
    """`write_traces` returns how many events the file holds."""
    announced = write_traces(JOB, tmp_path, [1])
    assert announced == {1: len(json.loads((tmp_path / "rank1.json").read_text())["traceEvents"])}


def test_the_same_job_is_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_traces(JOB, tmp_path / name, [0])
    assert (tmp_path / "a" / "rank0.json").read_bytes() == (tmp_path / "b" / "rank0.json").read_bytes()


def test_kernels_of_a_stream_do_not_overlap(ranks: list[list[dict[str, Any]]]) -> None:
    by_stream: dict[int, list[tuple[float, float]]] = {}
    for kernel in kernels(ranks[0]):
        by_stream.setdefault(kernel["tid"], []).append((kernel["ts"], kernel["ts"] + kernel["dur"]))
    late = [
        (one, other)
        for spans in map(sorted, by_stream.values())
        for one, other in pairwise(spans)
        if one[1] > other[0] + 0.002  # two roundings of the file's 0.001 µs
    ]
    assert late == []


def test_a_collective_ends_on_both_ranks_together(ranks: list[list[dict[str, Any]]]) -> None:
    """Joined by `Seq`, the ends of one collective differ by at most the 3 µs that the job's clockwork allows."""
    ends = [{k["args"]["Seq"]: k["ts"] + k["dur"] for k in kernels(events, "nccl")} for events in ranks]
    assert max(abs(ends[0][seq] - ends[1][seq]) for seq in ends[0].keys() | ends[1].keys()) <= 3.002


def test_every_kernel_was_launched(ranks: list[list[dict[str, Any]]]) -> None:
    """The correlation of each kernel is that of a call that began before it."""
    calls = {
        event["args"]["correlation"]: event["ts"]
        for event in ranks[0]
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    assert all(calls[kernel["args"]["correlation"]] < kernel["ts"] for kernel in kernels(ranks[0]))


def test_the_clock_estimates_the_layers_of_a_model(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Without a measurement: 70B on 8 ranks, of which gate, up and down can hide."""
    monkeypatch.setattr(sys, "argv", ["tensor_clock.py", "--estimate", "--rows", "8192", "--ranks", "8"])
    tensor_clock.main()
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if "70B" in line]
    hides = {line[1].strip(): line[7].strip() for line in lines}
    assert hides == {"70B qkv": "", "70B gate, up": "yes", "70B o": "", "70B down": "yes"}


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_benchmarks_leave_nvlink_multicast_off(path: Path) -> None:
    """Whatever makes a process group of NCCL does so by `step_rig.start`, or sets the same variables."""
    text = path.read_text()
    assert "init_process_group(" not in text or "NO_MULTICAST" in text


def told(*ranks: int) -> dict[str, Any]:
    """What a rank was told in time, by an error that names these ranks."""
    return {"at": 11.5, "text": "PeerTimeout: gone", "ranks": ranks}


@pytest.mark.parametrize(
    ("others", "free", "wrong"),
    [
        ([told(1), told(1, 2)], ["free", "free"], False),
        ([told(1), told(2)], ["free", "free"], True),
        ([told(1), None], ["free", None], True),
        ([told(1), told(1)], ["free", None], True),
    ],
    ids=["all well", "another rank is named", "one was not told", "one still waits"],
)
def test_a_rank_that_was_not_told_well_is_wrong(others: list[Any], free: list[Any], wrong: bool) -> None:
    """The benchmark of killed ranks fails then."""
    row = killed_rank.row_of("all_gather", 1, 10.0, others, free)
    assert killed_rank.is_wrong(row, "cuda") is wrong
    assert row["slowest_s"] == 1.5


def test_neighbours_of_messages_name_who_ended() -> None:
    """A rank that exchanges nothing with the killed one hears of its own neighbour; of gloo's on CPUs nobody."""
    row = killed_rank.row_of(killed_rank.MESSAGES, 1, 10.0, [told(1), told(0)], ["free", "free"])
    assert not killed_rank.is_wrong(row, "cuda")
    silent = killed_rank.row_of(killed_rank.MESSAGES, 1, 10.0, [told(), told()], ["free", "free"])
    assert killed_rank.is_wrong(silent, "cuda")
    assert not killed_rank.is_wrong(silent, "cpu")


def test_the_published_pairs_by_order_are_what_the_code_gives() -> None:
    """Value by value; of zero-SM collectives only sums are short, for their GEMMs have fewer SMs."""
    published = json.loads((RESULTS / "pairs-by-order-4xh200.json").read_text())["rows"]
    mine = [list(line) for line in pairs_by_order.lines("pairs-4xh200", tune_machine.read("pairs-4xh200"))]
    assert [row for row in published if row[0] == "pairs-4xh200"] == mine
    bars = {row[2]: row[-1] for row in mine if row[-1]}
    assert bars == {
        "all_gather": "reached", "all_to_all": "reached", "all_reduce": "GEMM keeps less than 95%",
        "reduce_scatter": "GEMM keeps less than 95%",
    }  # fmt: skip


def test_orders_that_are_short_or_missing_are_named() -> None:
    """So is a pair that hides half or less."""
    row = msgspec.structs.replace(
        tune_machine.read("forum-4xh200").rows[0], mechanism="zero_sm", collective="all_gather", order="together",
        compute_kept=0.99, hidden=0.4, marked=None,
    )  # fmt: skip
    better = msgspec.structs.replace(row, order="comm_first", hidden=0.9)
    said = "together below 0.88; compute first was not measured; a pair at or below 0.5"
    assert pairs_by_order.bar([row, better]) == said
    assert pairs_by_order.bar([msgspec.structs.replace(row, marked="late")]) == "all rows are marked"


def test_crossovers_of_other_ranks_cost_what_the_slower_way_takes() -> None:
    """A call of 16 MiB that a profile gives to NCCL, and zero_sm is twice as fast: a regret of 100 %."""
    block = next(row for row in tune_machine.read("blocks-4xh200").blocks if row.what == "all_gather")
    timed = {"nccl": 200.0, "zero_sm": 100.0}
    rows = [
        msgspec.structs.replace(
            block, mechanism=name, size_bytes=1 << 24, time=msgspec.structs.replace(block.time, us=us)
        )
        for name, us in timed.items()
    ]
    shipped = profile_of(tune_machine.GPU)
    late = msgspec.structs.replace(shipped.nccl, crossover_bytes={"all_gather": 1 << 30})
    profiles = {"soon": shipped, "late": msgspec.structs.replace(shipped, nccl=late)}
    soon = shipped.nccl.crossover_bytes["all_gather"] <= 1 << 24
    lines = list(profile_ranks.alone_lines(rows, profiles))
    assert [line[4] for line in lines] == ["0.00%" if soon else "100.00%", "100.00%"]


def test_the_published_regret_of_profiles_is_what_the_code_gives() -> None:
    """The lines of the nine pairs of `forum`, by figures of two and of four GPUs."""
    published = json.loads((RESULTS / "profile-ranks.json").read_text())["rows"]
    profiles = {f"{ranks} GPUs": profile_ranks.fitted_alone(ranks) for ranks in (2, 4)}
    mine = [list(line) for line in profile_ranks.pair_lines(RESULTS / "forum-4xh200.json", profiles)]
    assert [row for row in published if row[0].startswith("forum")] == mine


@pytest.mark.parametrize("what", ["loss", "norm"])
@pytest.mark.parametrize("value", [1.02, float("nan")])
def test_an_fsdp_step_that_is_wrong_is_no_result(what: str, value: float) -> None:
    """Neither another loss nor other gradients; what rounding does to both is one."""
    looks = {"stock": {"loss": 1.0, "norm": 1.0}, "overlap": {"loss": 1.0001, "norm": 1.001}}
    fsdp_step.check_alike(looks)
    looks["overlap"][what] = value
    with pytest.raises(RuntimeError, match=f"overlap: the {what} is"):
        fsdp_step.check_alike(looks)
