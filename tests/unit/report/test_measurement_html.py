"""The page of `counterpoint measure --html`: what is drawn where, and that nothing on it is interpreted."""

from __future__ import annotations

import re
from pathlib import Path

from counterpoint.report.measurement_html import figure, write_overlap_plot
from tests.support import example_measurement as measured


def page(tmp_path: Path, case: str) -> Path:
    path = tmp_path / f"{case}.html"
    write_overlap_plot(path, getattr(measured, case)())
    return path


def test_a_panel_per_collective_and_order() -> None:
    rows = (measured.row(), measured.row(order="comm_first"), measured.row(collective="all_reduce"))
    assert figure(rows)["layout"]["grid"] == {"rows": 2, "columns": 2, "pattern": "coupled"}


def test_the_line_goes_through_the_means() -> None:
    """Two rows that were asked for ratio 1 are one point of the line."""
    rows = (measured.row(together=1000.0), measured.row(together=2000.0), measured.row(comm=2000.0, ratio=2.0))
    line = next(trace for trace in figure(rows)["traces"] if trace["mode"] == "lines")
    assert (line["x"], line["y"]) == ((1.0, 2.0), (0.5, 1.5))


def test_what_hides_far_less_than_nothing_is_a_triangle_on_the_floor() -> None:
    """One bad mechanism does not flatten the others, and its real value is what a reader gets to see."""
    points = next(trace for trace in figure((measured.row(together=6000.0),))["traces"] if trace["mode"] == "markers")
    assert (points["y"], points["marker"]["symbol"], points["customdata"]) == ([-1.0], ["triangle-down"], [-4.0])


def test_a_marked_row_is_a_cross_and_off_the_line() -> None:
    modes = {trace["mode"]: trace for trace in figure((measured.row(marked="late"),))["traces"]}
    assert (list(modes), modes["markers"]["marker"]["symbol"]) == (["markers"], ["x"])


def test_a_mechanism_is_named_once_in_the_legend() -> None:
    rows = (measured.row(), measured.row(order="comm_first"), measured.row(collective="all_reduce"))
    assert sum(trace["showlegend"] for trace in figure(rows)["traces"]) == 1


def test_a_hostile_name_ends_no_script(tmp_path: Path) -> None:
    """The three scripts are ours; the name appears, escaped."""
    text = page(tmp_path, "hostile").read_text()
    assert (len(re.findall(r"<script[ >]", text)), "alert(1)" in text, "\x1b" in text) == (3, True, False)


def test_a_page_of_marked_rows_does_not_say_that_nothing_was_measured(tmp_path: Path) -> None:
    """The verdict is that none can be believed."""
    assert "No row can be believed" in page(tmp_path, "hostile").read_text()
