"""The page of `counterpoint measure --html`: what is drawn where, and that nothing on it is interpreted."""

from pathlib import Path

from counterpoint.rendering.measurement_html import figure, write_overlap_plot
from tests.support import example_measurement as measured


def page(tmp_path: Path, case: str) -> Path:
    path = tmp_path / f"{case}.html"
    write_overlap_plot(path, getattr(measured, case)())
    return path


def test_a_panel_per_collective_and_order() -> None:
    """In rows and columns, also where a pair was not measured."""
    rows = (measured.row(), measured.row(order="comm_first"), measured.row(collective="all_reduce"))
    drawn = figure(rows)
    assert (drawn.columns, [panel.title for panel in drawn.panels]) == (
        2,
        ["all_gather, together", "all_gather, comm first", "all_reduce, together", "all_reduce, comm first"],
    )
    assert [len(panel.marks) for panel in drawn.panels] == [2, 2, 2, 0]


def test_the_line_goes_through_the_means() -> None:
    """Two rows that were asked for ratio 1 are one point of the line."""
    rows = (measured.row(together=1000.0), measured.row(together=2000.0), measured.row(comm=2000.0, ratio=2.0))
    line = next(marks for marks in figure(rows).panels[0].marks if marks.kind == "line")
    assert (list(line.x), list(line.y)) == ([1.0, 2.0], [0.5, 1.5])


def test_what_hides_far_less_than_nothing_is_a_triangle_on_the_floor() -> None:
    """One bad mechanism does not flatten the others, and its real value is what a reader gets to see."""
    _, points = figure((measured.row(together=6000.0),)).panels[0].marks
    assert (points.y, points.symbols) == ([-1.0], ["triangle"])
    assert points.texts[0].startswith("hidden -4.00 at T_c/T_g 1.00: gemm")


def test_a_marked_row_is_a_cross_and_off_the_line() -> None:
    (points,) = figure((measured.row(marked="late"),)).panels[0].marks
    assert (points.kind, points.symbols) == ("points", ["cross"])
    assert points.texts[0].endswith("MARKED: late")


def test_a_mechanism_is_named_once_in_the_legend() -> None:
    rows = (measured.row(), measured.row(order="comm_first"), measured.row("zero_sm", collective="all_reduce"))
    assert [look.name for look in figure(rows).looks] == ["nccl", "zero_sm"]


def test_twenty_mechanisms_look_different() -> None:
    looks = figure([measured.row(f"mechanism {number}") for number in range(20)]).looks
    assert len({(look.colour, look.dash) for look in looks}) == 20


def test_what_was_measured_lies_inside_the_axis() -> None:
    x = figure((measured.row(comm=100.0), measured.row(comm=9000.0))).panels[0].x
    assert 0.0 < x.low < 0.1 < 9.0 < x.high


def test_a_page_of_marked_rows_does_not_say_that_nothing_was_measured(tmp_path: Path) -> None:
    """The verdict is that none can be believed."""
    assert "No row can be believed" in page(tmp_path, "hostile").read_text()
