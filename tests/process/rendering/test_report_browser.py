"""The page of a diagnosis in a real browser: its policy holds, its timeline moves, its labels are text."""

from pathlib import Path

import pytest

from counterpoint.rendering.diagnosis_html import write_html
from tests.support import example_diagnosis as example
from tests.support.chromium import Chromium, Page

pytestmark = pytest.mark.needs("browser")

RANGE = "(({ from, to }) => [Number(from), Number(to)])(document.getElementById('timeline').dataset)"
SETTLE = "new Promise(done => setTimeout(done, 400))"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    cases = {"training": (example.training(), example.lanes()), "hostile": example.hostile()}
    for name, (diagnosis, lanes) in cases.items():
        write_html(folder / f"{name}.html", diagnosis, lanes)
    return {name: folder / f"{name}.html" for name in cases}


@pytest.fixture
def opened(browser: Chromium, pages: dict[str, Path]) -> Page:
    return browser.open(pages["training"])


def timeline(browser: Chromium, page: Page) -> tuple[float, float]:
    box = "document.getElementById('timeline')"
    browser.evaluate(page, f"{box}.scrollIntoView({{behavior: 'instant'}})")
    left, top = browser.evaluate(page, f"(r => [r.left, r.top])({box}.getBoundingClientRect())")
    return float(left), float(top)


def test_browser_reports_a_request_and_its_failure(browser: Chromium, tmp_path: Path) -> None:
    (tmp_path / "open.html").write_text('<!doctype html><img src="http://127.0.0.1:9/a.png" alt="">')
    page = browser.open(tmp_path / "open.html")
    assert page.requests == ["http://127.0.0.1:9/a.png"]
    assert page.complaints


def test_map_of_many_ranks_fits_a_phone(browser: Chromium, tmp_path: Path) -> None:
    write_html(tmp_path / "many.html", example.of_256_ranks(), [])
    page = browser.open(tmp_path / "many.html", width=390, height=844)
    widths = "[...document.querySelectorAll('.scroll[aria-labelledby=above-2]')]"
    assert browser.evaluate(page, f"{widths}.map(box => box.scrollWidth - box.clientWidth)") == [0]


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
    for colour in ("--compute", "--transfer", "--wait", "--memcpy"):
        assert browser.shown(opened, "#timeline", colour)[0] > 100, colour


def test_timeline_takes_the_colours_of_the_dark_page(browser: Chromium, pages: dict[str, Path]) -> None:
    page = browser.open(pages["training"])
    light = browser.evaluate(page, "getComputedStyle(document.documentElement).getPropertyValue('--compute')")
    scheme = {"name": "prefers-color-scheme", "value": "dark"}
    browser.call("Emulation.setEmulatedMedia", page, features=[scheme])
    browser.evaluate(page, SETTLE)
    dark = browser.evaluate(page, "getComputedStyle(document.documentElement).getPropertyValue('--compute')")
    assert dark != light
    assert browser.shown(page, "#timeline", "--compute")[0] > 100


def test_timeline_writes_names_into_bars_that_have_room(browser: Chromium, opened: Page) -> None:
    labels = "Number(document.getElementById('timeline').dataset.labels)"
    for _ in range(4):
        browser.evaluate(opened, "document.querySelector('[data-move=in]').click()")
    browser.evaluate(opened, SETTLE)
    assert browser.evaluate(opened, labels) > 5


def test_timeline_is_as_wide_as_the_page_after_a_change(browser: Chromium, opened: Page) -> None:
    screen = {"width": 700, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.call("Emulation.setDeviceMetricsOverride", opened, **screen)
    browser.evaluate(opened, SETTLE)
    wide = "document.querySelector('#timeline canvas').getBoundingClientRect().width"
    assert browser.evaluate(opened, wide) == browser.evaluate(opened, "document.getElementById('timeline').clientWidth")
    assert browser.evaluate(opened, "document.documentElement.scrollWidth") == 700


def test_keys_move_and_zoom_the_timeline(browser: Chromium, opened: Page) -> None:
    browser.evaluate(opened, "document.getElementById('timeline').focus()")
    whole = browser.evaluate(opened, RANGE)
    width = whole[1] - whole[0]
    for key, expected in (
        ("+", (whole[0] + width / 4, whole[1] - width / 4)),
        ("ArrowLeft", (whole[0], whole[1] - width / 2)),
        ("ArrowRight", (whole[0] + width / 4, whole[1] - width / 4)),
        ("-", tuple(whole)),
    ):
        browser.call("Input.dispatchKeyEvent", opened, type="keyDown", key=key)
        browser.evaluate(opened, SETTLE)
        assert browser.evaluate(opened, RANGE) == pytest.approx(expected), key


def test_timeline_draws_no_more_than_the_screen_holds(browser: Chromium, tmp_path: Path) -> None:
    write_html(tmp_path / "many.html", example.training(), example.lanes(100_000))
    page = browser.open(tmp_path / "many.html")
    for _ in range(2):
        bars = browser.evaluate(page, "Number(document.getElementById('timeline').dataset.bars)")
        assert 0 < bars < 4 * 8 * 1280  # lanes a rank, ranks, pixels
        browser.evaluate(page, "document.querySelector('[data-move=in]').click()")


def test_button_of_a_finding_zooms_to_its_range(browser: Chromium, opened: Page) -> None:
    browser.evaluate(opened, "document.querySelector('.show').click()")
    browser.evaluate(opened, SETTLE)
    assert browser.evaluate(opened, RANGE) == pytest.approx([37.0 - 3.2, 43.4 + 3.2])


def test_dragging_zooms_and_double_click_shows_everything(browser: Chromium, opened: Page) -> None:
    left, top = timeline(browser, opened)
    whole = browser.evaluate(opened, RANGE)
    browser.drag(opened, (left + 300, top + 100), (left + 500, top + 100))
    zoomed = browser.evaluate(opened, RANGE)
    wide = browser.evaluate(opened, "document.querySelector('#timeline .u-over').clientWidth")
    assert zoomed[1] - zoomed[0] == pytest.approx(200 / wide * (whole[1] - whole[0]), rel=0.02)
    browser.double_click(opened, left + 300, top + 100)
    assert browser.evaluate(opened, RANGE) == pytest.approx(whole)


def test_label_under_the_pointer_is_text(browser: Chromium, pages: dict[str, Path]) -> None:
    page = browser.open(pages["hostile"])
    browser.move(page, *browser.shown(page, "#timeline", "--compute")[1:])
    assert browser.evaluate(page, "document.querySelectorAll('.tip:not([hidden]) *').length") == 2
    assert browser.evaluate(page, "document.querySelector('.tip b').textContent").startswith("<script>alert(1)")


def test_table_sorts_by_the_column_that_is_clicked(browser: Chromium, opened: Page) -> None:
    click = "document.querySelector('.dense thead th:nth-child(6) button').click()"
    column = "[...document.querySelectorAll('.dense tbody td:nth-child(6)')].map(cell => Number(cell.dataset.value))"
    browser.evaluate(opened, click)
    values = browser.evaluate(opened, column)
    assert values == sorted(values, reverse=True)
    assert len(set(values)) > 1
