"""A prediction on a terminal and as a page: what is shown where, and that nothing in it is interpreted."""

from __future__ import annotations

import io
import re
from pathlib import Path

import msgspec
from rich.console import Console

from counterpoint.records.prediction import Prediction
from counterpoint.rendering.plan_html import curves_figure, timeline_figure, write_plan_page
from counterpoint.rendering.plan_terminal import headline, render_prediction
from tests.support import example_prediction as predicted


def page(tmp_path: Path, case: str) -> Path:
    path = tmp_path / f"{case}.html"
    write_plan_page(path, getattr(predicted, case)())
    return path


def printed(found: Prediction, width: int = 100) -> str:
    out = io.StringIO()
    render_prediction(found, Console(file=out, width=width, force_terminal=False))
    return out.getvalue()


def test_the_headline_has_the_step_the_mfu_and_what_is_exposed() -> None:
    assert headline(predicted.bare()) == (
        "small on 16 × H100: 10.0 ms a step, MFU 40.0%, 30% of it exposed communication"
    )


def test_a_table_has_every_part_with_its_share() -> None:
    """And what it means."""
    rows = [line for line in printed(predicted.bare()).splitlines() if line.startswith("matmul")]
    assert len(rows) == 1
    assert re.search(r"7\.0\s+70\.0%\s+█+\s+matrix products", rows[0])


def test_a_value_that_cannot_be_says_why_and_one_too_large_says_so() -> None:
    text = printed(predicted.usual())
    assert "3 does not divide 16" in text
    assert re.search(r"^4 .*does not fit", text, re.MULTILINE)


def test_what_does_not_fit_is_said_first() -> None:
    """Above the parts."""
    lines = printed(msgspec.structs.replace(predicted.bare(), fits=False, verdict="does not fit: 90 GiB")).splitlines()
    assert lines[1] == "does not fit: 90 GiB"


def test_a_hostile_name_moves_no_cursor() -> None:
    """Escapes are shown, not sent."""
    assert "\x1b" not in printed(predicted.hostile())


def test_the_timeline_has_a_bar_for_each_slot_and_a_row_for_each_stage() -> None:
    drawn = timeline_figure(predicted.usual().timeline)
    (panel,) = drawn.panels
    assert {drawn.looks[marks.look].name: len(marks.x) for marks in panel.marks} == {"forward": 4, "backward": 2}
    assert (panel.y.ticks, panel.y.down) == ([(0, "0"), (1, "1")], True)
    assert panel.x.high == max(end for marks in panel.marks for end in marks.ends)


def test_a_curve_leaves_out_what_cannot_be() -> None:
    """Three lines of two points."""
    panels = curves_figure(predicted.usual().curves[0]).panels
    assert [panel.title for panel in panels] == ["step, ms", "MFU", "exposed"]
    assert [(len(marks.x), panel.x.ticks) for panel in panels for marks in panel.marks] == [
        (2, [(0, "2"), (1, "4")])
    ] * 6


def test_a_curve_without_a_gpu_of_known_speed_has_no_points_of_mfu() -> None:
    curve = predicted.usual().curves[0]
    unknown = [msgspec.structs.replace(point, mfu=None) for point in curve.points]
    panels = curves_figure(msgspec.structs.replace(curve, points=tuple(unknown))).panels
    assert [len(panel.marks[0].x) for panel in panels] == [2, 0, 2]


def test_a_curve_of_which_nothing_can_be_has_a_table_and_no_figure(tmp_path: Path) -> None:
    whole = predicted.usual()
    curve = msgspec.structs.replace(whole.curves[0], points=(whole.curves[0].points[1],))
    write_plan_page(tmp_path / "page.html", msgspec.structs.replace(whole, curves=(curve,)))
    text = (tmp_path / "page.html").read_text()
    assert ("3 does not divide 16" in text, 'id="curve-0"' in text) == (True, False)


def test_a_hostile_name_ends_no_script(tmp_path: Path) -> None:
    """The three scripts are ours; the name appears, escaped."""
    text = page(tmp_path, "hostile").read_text()
    assert (len(re.findall(r"<script[ >]", text)), "alert(1)" in text, "\x1b" in text) == (3, True, False)
