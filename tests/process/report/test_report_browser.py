"""The page in a real browser: silent, offline, usable at every width, inert."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from counterpoint.records.diagnosis import Diagnosis, TimelineLane
from counterpoint.report.diagnosis_html import write_html
from tests.support import example_diagnosis as example
from tests.support.chromium import Chromium, Page

pytestmark = pytest.mark.needs("browser")

CASES: dict[str, Callable[[], tuple[Diagnosis, list[TimelineLane]]]] = {
    "training": lambda: (example.training(), example.lanes()),
    "empty": lambda: (example.empty(), []),
    "hostile": example.hostile,
    "lane without spans": lambda: (
        example.empty(),
        [TimelineLane(rank=0, name="host", start_us=(), duration_us=(), labels=())],
    ),
}
RANGE = "document.getElementById('timeline').layout.xaxis.range"
SETTLE = "new Promise(done => setTimeout(done, 400))"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    for name, case in CASES.items():
        diagnosis, lanes = case()
        write_html(folder / f"{name}.html", diagnosis, lanes)
    return {name: folder / f"{name}.html" for name in CASES}


@pytest.fixture(scope="module")
def visits(browser: Chromium, pages: dict[str, Path]) -> dict[str, Page]:
    return {name: browser.open(file) for name, file in pages.items()}


@pytest.fixture
def opened(browser: Chromium, pages: dict[str, Path]) -> Page:
    return browser.open(pages["training"])


def timeline(browser: Chromium, page: Page) -> tuple[float, float]:
    """Scroll the timeline into view; its left and top edge."""
    box = "document.getElementById('timeline')"
    browser.evaluate(page, f"{box}.scrollIntoView({{behavior: 'instant'}})")
    left, top = browser.evaluate(page, f"(r => [r.left, r.top])({box}.getBoundingClientRect())")
    return float(left), float(top)


def mouse(browser: Chromium, page: Page, kind: str, x: float, y: float, clicks: int = 0) -> None:
    button, held = ("left", 1) if clicks else ("none", 0)
    browser.call("Input.dispatchMouseEvent", page, type=kind, x=x, y=y, button=button, buttons=held, clickCount=clicks)


@pytest.mark.parametrize("case", list(CASES))
def test_page_opens_without_a_complaint(visits: dict[str, Page], case: str) -> None:
    assert visits[case].complaints == []


@pytest.mark.parametrize("case", list(CASES))
def test_page_asks_the_network_for_nothing(visits: dict[str, Page], case: str) -> None:
    assert visits[case].requests == []


def test_browser_reports_a_request_and_its_failure(browser: Chromium, tmp_path: Path) -> None:
    (tmp_path / "open.html").write_text('<!doctype html><img src="http://127.0.0.1:9/a.png" alt="">')
    page = browser.open(tmp_path / "open.html")
    assert page.requests == ["http://127.0.0.1:9/a.png"]
    assert page.complaints


@pytest.mark.parametrize("case", list(CASES))
def test_phone_does_not_scroll_sideways(browser: Chromium, pages: dict[str, Path], case: str) -> None:
    page = browser.open(pages[case], width=390, height=844)
    assert browser.evaluate(page, "document.documentElement.scrollWidth") == 390


def test_policy_stops_a_script_that_got_in(browser: Chromium, opened: Page) -> None:
    add = "s = document.createElement('script'); s.textContent = 'window.broken = 1'; document.body.append(s)"
    browser.evaluate(opened, add)
    assert browser.evaluate(opened, "window.broken === undefined")


def test_policy_stops_a_request(browser: Chromium, opened: Page) -> None:
    refused = "fetch('https://example.invalid/').then(() => 'sent', () => 'stopped')"
    browser.evaluate(opened, refused)
    browser.evaluate(opened, SETTLE)
    assert any("Content Security Policy" in complaint for complaint in opened.complaints)


def test_timeline_draws_every_kind_of_lane(browser: Chromium, opened: Page) -> None:
    points = "document.getElementById('timeline').data.slice(0, 4).map(trace => trace.x.length > 0)"
    assert browser.evaluate(opened, points) == [True] * 4


def test_timeline_draws_no_more_than_the_screen_holds(browser: Chromium, tmp_path: Path) -> None:
    write_html(tmp_path / "many.html", example.training(), example.lanes(100_000))
    page = browser.open(tmp_path / "many.html")
    points = browser.evaluate(page, "document.getElementById('timeline').data.reduce((n, t) => n + t.x.length, 0)")
    assert points < 3 * 4 * 8 * 1280  # points a segment, lanes a rank, ranks, pixels


def test_button_of_a_finding_zooms_to_its_range(browser: Chromium, opened: Page) -> None:
    browser.evaluate(opened, "document.querySelector('.show').click()")
    browser.evaluate(opened, SETTLE)
    assert browser.evaluate(opened, RANGE) == pytest.approx([37.0 - 3.2, 43.4 + 3.2])


def test_dragging_zooms_and_double_click_shows_everything(browser: Chromium, opened: Page) -> None:
    left, top = timeline(browser, opened)
    whole = browser.evaluate(opened, RANGE)
    mouse(browser, opened, "mousePressed", left + 300, top + 100, 1)
    mouse(browser, opened, "mouseMoved", left + 500, top + 100, 1)
    mouse(browser, opened, "mouseReleased", left + 500, top + 100, 1)
    browser.evaluate(opened, SETTLE)
    zoomed = browser.evaluate(opened, RANGE)
    assert zoomed[1] - zoomed[0] == pytest.approx(200 / (1096 - 68) * (whole[1] - whole[0]), rel=0.02)
    for clicks in (1, 2):
        mouse(browser, opened, "mousePressed", left + 300, top + 100, clicks)
        mouse(browser, opened, "mouseReleased", left + 300, top + 100, clicks)
    browser.evaluate(opened, SETTLE)
    assert browser.evaluate(opened, RANGE) == pytest.approx(whole)


def test_label_under_the_pointer_is_text(browser: Chromium, pages: dict[str, Path]) -> None:
    page = browser.open(pages["hostile"])
    left, top = timeline(browser, page)
    mouse(browser, page, "mouseMoved", left + 60, top + 26 + 5 + 6)
    browser.evaluate(page, SETTLE)
    assert browser.evaluate(page, "document.querySelector('#tip b').textContent").startswith("<script>alert(1)")


def test_table_sorts_by_the_column_that_is_clicked(browser: Chromium, opened: Page) -> None:
    click = "document.querySelector('.dense thead th:nth-child(6) button').click()"
    column = "[...document.querySelectorAll('.dense tbody td:nth-child(6)')].map(cell => Number(cell.dataset.value))"
    browser.evaluate(opened, click)
    values = browser.evaluate(opened, column)
    assert values == sorted(values, reverse=True)
    assert len(set(values)) > 1
