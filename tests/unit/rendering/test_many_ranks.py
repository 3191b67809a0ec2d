"""A job of 256 ranks: all on the page, the late one drawn and framed; and one line where a diagnosis is printed."""

import re
from pathlib import Path

import msgspec
import pytest

from counterpoint.records.diagnosis import Diagnosis, TimelineLane
from counterpoint.rendering.diagnosis_html import write_html
from tests.support import example_diagnosis as example

WORLD, LATE = example.MANY, example.LATE_OF_MANY


@pytest.fixture(name="page", scope="module")
def page_fixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_html(path, example.of_256_ranks(), example.lanes(spans=200_000, world=WORLD))
    return path.read_text()


def test_page_of_256_ranks_is_below_a_megabyte(page: str) -> None:
    assert len(page.encode()) < 1_000_000


def test_every_rank_is_on_the_map_eight_in_a_row(page: str) -> None:
    """With the late one framed, by the note in its cell."""
    rows = re.findall(r"<tr>.*?</tr>", page.split("Every rank</h2>")[1].split("</table>")[0], re.DOTALL)
    assert [row.count("<td") for row in rows] == [8] * (WORLD // 8)
    assert [row.count("<small>") for row in rows].index(1) == LATE // 8
    assert f"<small>{LATE}: 6.4 late</small>" in rows[LATE // 8]


def test_the_late_rank_is_the_first_of_the_bars(page: str) -> None:
    body = page.split("Where the time goes</h2>")[1].split("<tbody>")[1].lstrip()
    assert body.startswith(f'<tr class="strong"><th scope="row" data-value="{LATE}">{LATE}</th><td><span class="bar">')


def test_a_small_job_has_no_map(tmp_path: Path, training: Diagnosis, lanes: list[TimelineLane]) -> None:
    write_html(tmp_path / "report.html", training, lanes)
    assert "Every rank" not in (tmp_path / "report.html").read_text()


def test_a_diagnosis_prints_as_one_line_with_its_verdict(training: Diagnosis) -> None:
    assert training.verdict in repr(training)
    assert "\n" not in repr(training)
    assert len(repr(training)) < 400


def test_names_of_traces_are_inert_in_a_notebook(hostile: tuple[Diagnosis, list[TimelineLane]]) -> None:
    finding = msgspec.structs.replace(example.training().findings[0], title="<script>alert(1)</script>")
    html = msgspec.structs.replace(hostile[0], findings=(finding,))._repr_html_()
    assert "<script" not in html
    assert "&lt;script&gt;" in html
