"""A measurement on a terminal, the table next to it and the last line: what they say, and that names stay inert."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from counterpoint.records.measurement import Measurement, Usage
from counterpoint.rendering.measurement_text import (
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


def rung(*words: str) -> list[str]:
    """The cells of the first line that holds all `words`."""
    found = next(line for line in lines_of(measured.usual()) if all(word in line for word in words))
    return found.split()


def test_hidden_is_the_first_column() -> None:
    assert rung("step", "order")[0] == "hidden"


@pytest.mark.parametrize(
    ("words", "cells"),
    [
        (("compute alone",), ["compute", "alone", "1.000"]),
        (("nccl alone",), ["nccl", "alone", "1.000"]),
        (("serial", "2.000"), ["0.00", "serial", "2.000", "1.00"]),
        (("nccl", "together"), ["0.50", "nccl", "together", "1.500", "1.33", "30%", "91%", "83%"]),
        (("nccl", "compute first"), ["-0.10", "nccl", "compute", "first", "2.100", "0.95", "30%", "91%", "83%"]),
        (("ideal", "1.000"), ["1.00", "ideal", "1.000", "2.00"]),
    ],
)
def test_every_line_of_a_pair(words: tuple[str, ...], cells: list[str]) -> None:
    """Alone, serial, together and ideal, each with its time and its speed-up over serial."""
    assert rung(*words) == cells


def test_a_marked_row_says_why() -> None:
    assert "  ! nccl+max_ctas=8, compute first: max_ctas=8 had no effect: 24 CTAs ran" in lines_of(measured.usual())


def test_summaries_leave_marked_rows_out() -> None:
    """Mean and lowest of nccl from two rows, of the other from the one that may be believed; best first."""
    found = [
        (it.mechanism, it.hidden, it.lowest, it.rows, it.marked) for it in mechanism_summaries(measured.usual().rows)
    ]
    assert found == [("nccl+max_ctas=8", 0.5, 0.5, 1, 1), ("nccl", pytest.approx(0.2), -0.1, 2, 0)]


def test_speedup_is_a_geometric_mean() -> None:
    """Of 2000/1000 and 2000/4000 it is 1."""
    rows = (measured.row(together=1000.0), measured.row(together=4000.0))
    assert mechanism_summaries(rows)[0].speedup == pytest.approx(1.0)


def test_a_head_start_counts_as_serial_time() -> None:
    """T_g + T_c + h over T."""
    assert measured.row(order="comm_first", head_start_us=100.0, together=1050.0).speedup == pytest.approx(2.0)


def test_means_by_collective_leave_marked_rows_out() -> None:
    """The mean of each mechanism over the rows of each collective, of those that may be believed."""
    rows = (*measured.usual().rows, measured.row(collective="all_reduce", together=1900.0))
    found = mean_hidden(rows, lambda row: row.collective)
    assert found == {
        "nccl": {"all_gather": pytest.approx(0.2), "all_reduce": pytest.approx(0.1)},
        "nccl+max_ctas=8": {"all_gather": 0.5},
    }


def test_waves_mfu_and_ctas_are_shown_where_a_profiler_looked() -> None:
    """Alone, and beside the collective's CTAs."""
    usage = Usage(compute_blocks=132, comm_ctas=24, waves_alone=1, waves_together=2)
    shown = [" ".join(line.split()) for line in lines_of(measured.measurement(
        measured.row(usage=usage, mfu_alone=0.8, mfu_together=0.47)))]  # fmt: skip
    assert "compute alone 1.000 80% 1" in shown
    assert "0.50 nccl together 1.500 1.33 30% 91% 83% 47% 2 24" in shown


def test_a_mechanism_with_only_marked_rows_has_no_figures() -> None:
    it = mechanism_summaries((measured.row(marked="late"),))[0]
    assert (it.hidden, it.lowest, it.speedup, it.marked) == (None, None, None, 1)


def test_what_was_not_measured_is_said() -> None:
    assert "· nccl+green=108: the driver is too old" in lines_of(measured.usual())


def test_building_blocks_have_their_table() -> None:
    lines = [" ".join(line.split()) for line in lines_of(measured.blocks())]
    assert "all_gather nccl+max_ctas=8 1.0 MiB 8 0.022 47.7" in lines


def test_matmuls_have_their_ladder() -> None:
    """What is over the longer part, how much faster than torch, and which way it ran."""
    lines = [" ".join(line.split()) for line in lines_of(measured.matmuls())]
    wanted = (
        "all_gather_matmul 8192x7168x8192 its communication can hide", "matmul alone 1.000 700.0",
        "nccl alone 0.400 350.0", "+50.0% torch 1.500 1.00 torch", "+20.0% cuts 1.200 1.25 cuts",
        "· auto: cuts is the simplest", "matmul_reduce_scatter 8192x8192x1280 its communication cannot hide",
        "! -4.0% cuts 1.200 1.25 torch", "! cuts: ran as torch: no shared memory",
    )  # fmt: skip
    assert [line for line in wanted if line not in lines] == []
    assert "Building blocks each alone" not in lines


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


def test_legs_are_one_collective_each_in_means() -> None:
    """Whatever the layer, tokens and routing are."""
    assert list(mean_hidden(measured.exchanges().rows, lambda row: row.operation)["torch"]) == ["dispatch", "combine"]


def test_matmuls_have_their_tables_in_markdown() -> None:
    """A row for each measurement, none among the building blocks."""
    page = markdown(measured.matmuls())
    assert (page.count("| all\\_gather\\_matmul 8192x7168x8192 | yes |"), "## Building blocks" in page) == (5, False)


@pytest.mark.parametrize(
    "case", [measured.usual, measured.blocks, measured.matmuls, measured.exchanges, measured.hostile]
)
def test_it_fits_a_terminal(case: object) -> None:
    """No table is wider than 80 columns; only explanations may wrap by the terminal."""
    assert callable(case)
    assert max(len(line) for line in lines_of(case(), 80) if not line.lstrip().startswith(("!", "·"))) <= 80


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert "\x1b" not in "\n".join(lines_of(measured.hostile()))


def test_names_stay_in_their_cells_in_markdown() -> None:
    """A hostile name makes neither a column nor a tag."""
    table = [line for line in markdown(measured.hostile()).splitlines() if "alert" in line]
    assert [("<script" in line.replace("\\<", ""), "\x1b" in line) for line in table] == [(False, False)] * len(table)


def test_markdown_holds_every_row() -> None:
    """Four rows of one workload."""
    assert markdown(measured.usual()).count("| gemm 8192x8192x8192 |") == 4


def test_the_last_line_holds_the_figures() -> None:
    found = summary(measured.usual(), "x.json")
    wanted = {"suite": "quick", "world_size": 8, "gpu": "NVIDIA H200", "rows": 4, "marked": 1, "out": "x.json"}
    assert (wanted.items() <= found.items(), found["hidden"]) == (True, {"nccl+max_ctas=8": 0.5, "nccl": 0.2})


def test_nothing_is_said_to_be_minus_zero() -> None:
    """A mean of -0.001 is 0.00."""
    assert not any("-0.00" in line for line in lines_of(measured.measurement(measured.row(together=2001.0))))
