"""A prediction on a terminal and as a page: what is shown where, and that nothing in it is interpreted."""

import io
import re
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from counterpoint.records.prediction import Curve, PlanOutcome, Prediction
from counterpoint.rendering.plan_html import curves_figure, timeline_figure, write_plan_page
from counterpoint.rendering.plan_tables import curve_title, render_prediction, words
from tests.support import example_prediction as predicted


def page(tmp_path: Path, case: str) -> Path:
    path = tmp_path / f"{case}.html"
    write_plan_page(path, getattr(predicted, case)())
    return path


def printed(found: Prediction, width: int = 100) -> str:
    out = io.StringIO()
    render_prediction(found, Console(file=out, width=width, force_terminal=False))
    return out.getvalue()


USUAL = [  # of a terminal of 300 columns, with one space between words
    "small on 16 × H100: 10.0 ms a step (9.6 to 11.2 with 80% probability), MFU 40.0%, 30% of it exposed communication",
    "fits: 30.0 of 80 GiB; P(fits) = 97%",
    "interval: errors of 60 measured steps of 2 sources, 1.4 of them alike; with its source left out, 81% of steps "
    "like it lay within; 0.1 ms of it for the slowest rank",
    "P(fits): 200 configurations of papers",
    "matmul 7.0 70.0% ████████████████████████ matrix products",
    "2 10.0 9.6 to 11.2 40.0% 30% 1,000,000 30.0",  # nothing is said of memory where that is sure
    "3 3 does not divide 16",
    "4 6.0 5.7 to 6.6 35.0% 33% 2,000,000 90.0 does not fit, P = 30%",
    "NVLink, twice ████████████████████████ 9.0 -10.0%",
    "8 1 9.0 40.0 98% 45.0% 900,000 * fastest",
    "8 2 9.1 40.0 98% 45.0% 890,110 ≈ bubble +1.1%",
    "· ≈ is too close to the first to call: the ratio of two ways to run one model on as many GPUs was off by at most "
    "5.0% in 80% of 1,200 measured pairs of 4 sources",
]


@pytest.mark.parametrize("line", USUAL)
def test_lines_of_a_terminal(line: str) -> None:
    assert line in [" ".join(each.split()) for each in printed(predicted.usual(), 300).splitlines()]


def test_what_does_not_fit_is_said_first() -> None:
    """Above the parts, below a headline that without an interval says nothing of one."""
    lines = printed(msgspec.structs.replace(predicted.bare(), fits=False, verdict="does not fit: 90 GiB")).splitlines()
    assert lines[:2] == [
        "small on 16 × H100: 10.0 ms a step, MFU 40.0%, 30% of it exposed communication",
        "does not fit: 90 GiB",
    ]


def test_it_fits_a_terminal_and_a_hostile_name_moves_no_cursor() -> None:
    """Tables, also with hostile names; the lines above them are one each, for what is piped."""
    for found in (predicted.usual(), predicted.hostile()):
        tables = printed(found, 80).split("Where the step goes")[1]
        assert max(map(len, tables.splitlines())) <= 80
    assert "\x1b" not in printed(predicted.hostile())


def test_the_curve_of_the_step_has_a_band() -> None:
    """From P10 to P90, and room above it; without an interval there is none."""
    curve = predicted.usual().curves[0]
    step, *others = curves_figure(curve).panels
    (band,) = [marks for marks in step.marks if marks.kind == "band"]
    assert (band.x, band.y, band.ends) == ([0, 1], [9.6, 5.7], [11.2, 6.6])
    assert step.y.high > 11.2
    assert all(marks.kind != "band" for panel in others for marks in panel.marks)
    bare = [msgspec.structs.replace(point, low_us=None, high_us=None) for point in curve.points]
    without = curves_figure(msgspec.structs.replace(curve, points=tuple(bare))).panels[0]
    assert [marks.kind for marks in without.marks] == ["line", "points"]


def test_the_page_says_how_sure_it_is(tmp_path: Path) -> None:
    text = page(tmp_path, "usual").read_text()
    for said in (
        "80% of such steps, ms</dt><dd>9.6 to 11.2", "P(fits) = 97%", "60 measured steps of 2 sources",
        ">9.6 to 11.2</td>", "does not fit, P = 30%", '<td class="text">≈</td>', "too close to the first to call",
        "1,200 measured pairs",
    ):  # fmt: skip
        assert said in text


def test_the_timeline_has_a_bar_for_each_slot_and_a_row_for_each_stage() -> None:
    drawn = timeline_figure(predicted.usual().timeline)
    (panel,) = drawn.panels
    assert {drawn.looks[marks.look].name: len(marks.x) for marks in panel.marks} == {"forward": 4, "backward": 2}
    assert (panel.y.ticks, panel.y.down) == ([(0, "0"), (1, "1")], True)
    assert panel.x.high == max(end for marks in panel.marks for end in marks.ends)


def test_a_curve_leaves_out_what_cannot_be_and_mfu_where_no_speed_is_known() -> None:
    """Three lines of two points."""
    panels = curves_figure(predicted.usual().curves[0]).panels
    assert [panel.title for panel in panels] == ["step, ms", "MFU", "exposed"]
    assert [(len(marks.x), panel.x.ticks) for panel in panels for marks in panel.marks] == [
        (2, [(0, "2"), (1, "4")])
    ] * 7
    curve = predicted.usual().curves[0]
    unknown = [msgspec.structs.replace(point, mfu=None) for point in curve.points]
    panels = curves_figure(msgspec.structs.replace(curve, points=tuple(unknown))).panels
    assert [len(panel.marks[0].x) for panel in panels] == [2, 0, 2]


def test_a_curve_of_which_nothing_can_be_has_a_table_and_no_figure(tmp_path: Path) -> None:
    whole = predicted.usual()
    curve = msgspec.structs.replace(whole.curves[0], points=(whole.curves[0].points[1],))
    write_plan_page(tmp_path / "page.html", msgspec.structs.replace(whole, curves=(curve,)))
    text = (tmp_path / "page.html").read_text()
    assert ("3 does not divide 16" in text, text.count('class="panels"')) == (True, 1)  # the other is the timeline's


def test_what_is_varied_has_words() -> None:
    """A flag its sentence, a field its name; parts and axes no underscores."""
    weak = Curve(name="weak_nodes", means="Train on more nodes (weak scaling).", points=())
    assert (curve_title(weak), words(weak.name)) == ("Train on more nodes (weak scaling)", "nodes")
    assert curve_title(Curve(name="parallel.tp", means="On as many GPUs.", points=())) == "Over parallel.tp"
    assert words("memory_bound") == "memory bound"


def test_names_below_an_axis_have_room() -> None:
    """Long names are cut, the first and last of many are not beyond the edge, and long steps are in seconds."""
    points = tuple(PlanOutcome(label="9" * 30, gpus=8, step_us=2e8, mfu=0.1, exposed_comm_us=1e6) for _ in range(21))
    axis = (figure := curves_figure(Curve(name="training.global_batch", points=points))).panels[0].x
    assert {len(text) for _, text in axis.ticks} == {10}
    assert (round(axis.low, 6), round(axis.high, 6)) == (-1.2, 21.2)
    assert (figure.panels[0].title, figure.panels[0].marks[0].y[0]) == ("step, s", 200.0)


def test_points_say_how_many_gpus_they_have(tmp_path: Path) -> None:
    """In the terminal and on the page; a reason stands beside its value, where a phone shows it."""
    found = predicted.usual()
    curve = found.curves[0]
    points = tuple(msgspec.structs.replace(point, gpus=None if point.why_not else 4096) for point in curve.points)
    found = msgspec.structs.replace(found, curves=(msgspec.structs.replace(curve, points=points),))
    write_plan_page(tmp_path / "page.html", found)
    text = (tmp_path / "page.html").read_text()
    assert re.search(r'<th scope="row" class="text">2</th><td data-value="4096">4,096</td>', text)
    assert re.search(r'<th scope="row" class="text">3</th><td class="text" colspan="8"[^>]*>3 does not divide 16', text)
    assert re.search(r"^2 +4,096 +10\.0 ", printed(found, 120), re.MULTILINE)
