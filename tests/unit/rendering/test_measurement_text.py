"""A measurement on a terminal, the table next to it and the last line: what they say, and that names stay inert."""

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from counterpoint.records.measurement import Measurement, Usage
from counterpoint.rendering.measurement_tables import (
    markdown,
    matmul_summaries,
    mean_hidden,
    mechanism_summaries,
    render,
    summary,
)
from tests.support import example_measurement as measured


def lines_of(measurement: Measurement, width: int = 120) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    render(measurement, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


USED = Usage(compute_blocks=132, comm_ctas=24, waves_alone=1, waves_together=2)
SAID = [  # a measurement, and lines of a terminal with one space between words
    (
        "usual",
        measured.usual,
        (
            "hidden step order ms × serial of ideal kept kept",
            "compute alone 1.000",
            "nccl alone 1.000",
            "0.00 serial 2.000 1.00",
            "0.50 nccl together 1.500 1.33 30% 91% 83%",
            "-0.10 nccl compute first 2.100 0.95 30% 91% 83%",
            "1.00 ideal 1.000 2.00",
            "! 1.00 nccl+max_ctas=8 compute first 1.000 2.00 30% 91% 83%",
            "· nccl+max_ctas=8, compute first: max_ctas=8 had no effect: 24 CTAs ran",
            "· nccl+green=108: the driver is too old",
        ),
    ),
    (
        "a profiler looked: waves, MFU and CTAs",
        lambda: measured.measurement(measured.row(usage=USED, mfu_alone=0.8, mfu_together=0.47)),
        ("compute alone 1.000 80% 1", "0.50 nccl together 1.500 1.33 30% 91% 83% 47% 2 24"),
    ),
    ("blocks", measured.blocks, ("all_gather nccl+max_ctas=8 1.0 MiB 8 0.022 47.7",)),
    (
        "matmuls: over the longer part, times torch, which way",
        measured.matmuls,
        (
            "all_gather_matmul 8192x7168x8192 its communication can hide",
            "matmul alone 1.000 700.0",
            "nccl alone 0.400 350.0",
            "+50.0% torch 1.500 1.00 torch",
            "+20.0% cuts 1.200 1.25 cuts",
            "· auto: cuts is the simplest",
            "matmul_reduce_scatter 8192x8192x1280 its communication cannot hide",
            "! -4.0% cuts 1.200 1.25 torch",
            "· cuts: ran as torch: no shared memory",
        ),
    ),
    (
        "a mean of -0.001 is no minus zero",
        lambda: measured.measurement(measured.row(together=2001.0)),
        ("0.00 nccl together 2.001 1.00 30% 91% 83%",),
    ),
]


@pytest.mark.parametrize(("case", "lines"), [it[1:] for it in SAID], ids=[it[0] for it in SAID])
def test_lines_of_a_terminal(case: Callable[[], Measurement], lines: tuple[str, ...]) -> None:
    """And each of its cells is in the Markdown page."""
    shown = [" ".join(line.split()) for line in lines_of(case())]
    assert [line for line in lines if line not in shown] == []
    page = " ".join(markdown(case()).replace("\\", "").replace("|", " ").split())
    assert [line for line in lines if not line.startswith("·") and line[0].isdigit() and line not in page] == []


def test_matmuls_are_no_building_blocks() -> None:
    assert "Building blocks" not in "\n".join(lines_of(measured.matmuls()))


def test_summaries_leave_marked_rows_out_and_of_marked_rows_alone_have_no_figures() -> None:
    """Mean and lowest of nccl from two rows, of the other from the one that may be believed; best first."""
    found = [
        (it.mechanism, it.hidden, it.lowest, it.rows, it.marked) for it in mechanism_summaries(measured.usual().rows)
    ]
    assert found == [("nccl+max_ctas=8", 0.5, 0.5, 1, 1), ("nccl", pytest.approx(0.2), -0.1, 2, 0)]
    it = mechanism_summaries((measured.row(marked="late"),))[0]
    assert (it.hidden, it.lowest, it.speedup, it.marked) == (None, None, None, 1)


def test_speedup_is_a_geometric_mean_and_a_head_start_counts_as_serial_time() -> None:
    """Of 2000/1000 and 2000/4000 it is 1."""
    rows = (measured.row(together=1000.0), measured.row(together=4000.0))
    assert mechanism_summaries(rows)[0].speedup == pytest.approx(1.0)
    # T_g + T_c + h over T
    assert measured.row(order="comm_first", head_start_us=100.0, together=1050.0).speedup == pytest.approx(2.0)


def test_means_by_collective_leave_marked_rows_out_and_take_legs_apart() -> None:
    """The mean of each mechanism over the rows of each collective, of those that may be believed."""
    rows = (*measured.usual().rows, measured.row(collective="all_reduce", together=1900.0))
    found = mean_hidden(rows, lambda row: row.collective)
    assert found == {
        "nccl": {"all_gather": pytest.approx(0.2), "all_reduce": pytest.approx(0.1)},
        "nccl+max_ctas=8": {"all_gather": 0.5},
    }
    assert list(mean_hidden(measured.exchanges().rows, lambda row: row.operation)["torch"]) == ["dispatch", "combine"]


def test_mechanisms_of_matmuls_are_summarized() -> None:
    """Those that can hide apart from those that cannot; marked rows do not count."""
    found = {it.mechanism: it for it in matmul_summaries(measured.matmuls().blocks)}
    assert list(found) == ["torch", "cuts", "auto"]
    cuts, auto = found["cuts"], found["auto"]
    assert [cuts.over_hiding, auto.over_hiding, auto.over_others] == pytest.approx([0.2, 0.2, -0.04])
    assert (cuts.over_others, cuts.rows, cuts.marked) == (None, 1, 1)
    assert [auto.times_torch, auto.lowest] == pytest.approx([1.25, 1.25])
    said = summary(measured.matmuls(), None)
    assert (said["blocks"], said["marked"], said["times_torch"]) == (10, 1, {"torch": 1.0, "cuts": 1.25, "auto": 1.25})


@pytest.mark.parametrize(
    "case", [measured.usual, measured.blocks, measured.matmuls, measured.exchanges, measured.hostile]
)
def test_it_fits_a_terminal(case: object) -> None:
    """No table is wider than 80 columns; only explanations may wrap by the terminal."""
    assert callable(case)
    assert max(len(line) for line in lines_of(case(), 80)) <= 80


def test_hostile_names_reach_no_terminal_and_stay_in_their_cells_in_markdown() -> None:
    assert "\x1b" not in "\n".join(lines_of(measured.hostile()))
    table = [line for line in markdown(measured.hostile()).splitlines() if "alert" in line]
    assert [("<script" in line.replace("\\<", ""), "\x1b" in line) for line in table] == [(False, False)] * len(table)


def test_the_last_line_holds_the_figures() -> None:
    found = summary(measured.usual(), "x.json")
    wanted = {"suite": "quick", "world_size": 8, "gpu": "NVIDIA H200", "rows": 4, "marked": 1, "out": "x.json"}
    assert (wanted.items() <= found.items(), found["hidden"]) == (True, {"nccl+max_ctas=8": 0.5, "nccl": 0.2})
