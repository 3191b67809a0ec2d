"""A prediction on a terminal and as a page: what is shown where, and that nothing in it is interpreted."""

from __future__ import annotations

import io
import re
from pathlib import Path

import msgspec
from rich.console import Console

from counterpoint.records.prediction import Prediction
from counterpoint.report.plan_html import curves_figure, timeline_figure, write_plan_page
from counterpoint.report.plan_terminal import headline, render_prediction
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
    assert {trace["name"]: len(trace["x"]) for trace in drawn["traces"]} == {"forward": 4, "backward": 2}
    assert drawn["layout"]["yaxis"]["tickvals"] == [0, 1]


def test_a_curve_leaves_out_what_cannot_be() -> None:
    """Three lines of two points."""
    drawn = curves_figure(predicted.usual().curves[0])
    assert [(trace["name"], trace["x"]) for trace in drawn["traces"]] == [
        (name, ["2", "4"]) for name in ("step, ms", "MFU", "exposed")
    ]


def test_a_hostile_name_ends_no_script(tmp_path: Path) -> None:
    """The three scripts are ours; the name appears, escaped."""
    text = page(tmp_path, "hostile").read_text()
    assert (len(re.findall(r"<script[ >]", text)), "alert(1)" in text, "\x1b" in text) == (3, True, False)
