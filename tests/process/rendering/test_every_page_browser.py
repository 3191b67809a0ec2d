"""Every page in a real browser: silent, offline, no wider than a phone; and what the pages of each command draw."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.chromium import Chromium, Page
from tests.support.pages import PAGES

pytestmark = pytest.mark.needs("browser")


def opened(browser: Chromium, folder: Path, name: str, **screen: Any) -> Page:
    PAGES[name](folder / "page.html")
    return browser.open(folder / "page.html", **screen)


@pytest.mark.parametrize("name", list(PAGES))
def test_a_page_is_silent_offline_and_fits_a_phone(tmp_path: Path, browser: Chromium, name: str) -> None:
    """No complaint in the console, no request, no script run from a name; no scrolling sideways at 390 pixels."""
    visit = opened(browser, tmp_path, name, width=390, height=844)
    assert (visit.complaints, visit.requests) == ([], [])
    assert browser.evaluate(visit, "document.documentElement.scrollWidth") == 390


def test_the_plot_is_drawn(tmp_path: Path, browser: Chromium) -> None:
    visit = opened(browser, tmp_path, "measurement")
    assert browser.evaluate(visit, "document.querySelectorAll('#part-1-plot canvas').length") == 2
    assert all(browser.shown(visit, "#part-1-plot", f"--series-{number}")[0] > 5 for number in (1, 2))


def test_the_pointer_shows_the_row(tmp_path: Path, browser: Chromium) -> None:
    visit = opened(browser, tmp_path, "measurement")
    _, x, y = browser.shown(visit, "#part-1-plot", "--series-2")
    browser.move(visit, x, y)
    tip = browser.evaluate(visit, "document.querySelector('.tip:not([hidden])').innerText")
    assert tip.splitlines()[0] == "nccl+max_ctas=8"
    assert tip.endswith("MARKED: max_ctas=8 had no effect: 24 CTAs ran")


def test_a_hostile_name_under_the_pointer_is_text(tmp_path: Path, browser: Chromium) -> None:
    visit = opened(browser, tmp_path, "hostile measurement")
    _, x, y = browser.shown(visit, "#part-1-plot", "--series-1")
    browser.move(visit, x, y)
    assert browser.evaluate(visit, "document.querySelector('.tip:not([hidden]) b').textContent").startswith("</script>")
    assert browser.evaluate(visit, "document.querySelectorAll('.tip:not([hidden]) *').length") == 2


def test_the_legend_hides_and_shows_a_mechanism(tmp_path: Path, browser: Chromium) -> None:
    visit = opened(browser, tmp_path, "measurement")
    click = "document.querySelector('.key').click()"
    browser.evaluate(visit, click)
    assert browser.evaluate(visit, "document.querySelector('.key').getAttribute('aria-pressed')") == "false"
    assert browser.shown(visit, "#part-1-plot", "--series-1")[0] == 0
    browser.evaluate(visit, click)
    assert browser.shown(visit, "#part-1-plot", "--series-1")[0] > 5


def test_dragging_zooms_all_panels_and_a_double_click_ends_it(tmp_path: Path, browser: Chromium) -> None:
    """What lies outside of the drag is no longer drawn."""
    visit = opened(browser, tmp_path, "measurement")
    pixels, x, y = browser.shown(visit, "#part-1-plot", "--series-1")
    browser.drag(visit, (x + 40, y), (x + 140, y))
    assert browser.shown(visit, "#part-1-plot", "--series-1")[0] == 0
    assert browser.shown(visit, "#part-1-plot > div:last-child", "--series-1")[0] == 0
    browser.double_click(visit, x, y)
    assert browser.shown(visit, "#part-1-plot", "--series-1")[0] == pixels


def test_figures_are_drawn(tmp_path: Path, browser: Chromium) -> None:
    """The stages' forward and backward; step time, MFU and exposed share in three panels."""
    visit = opened(browser, tmp_path, "prediction")
    assert all(browser.shown(visit, "#part-3-plot", colour)[0] > 100 for colour in ("--compute", "--overlapped"))
    colours = enumerate(("--overlapped", "--compute", "--transfer"), start=1)
    assert all(browser.shown(visit, f"#part-4-plot > :nth-child({n})", colour)[0] > 50 for n, colour in colours)


def test_the_pointer_shows_a_slot_and_a_point(tmp_path: Path, browser: Chromium) -> None:
    visit = opened(browser, tmp_path, "prediction")
    said = "document.querySelector('.tip:not([hidden])').innerText"
    browser.move(visit, *browser.shown(visit, "#part-3-plot", "--compute")[1:])
    assert browser.evaluate(visit, said) == "forward\nmicro-batch 0, part 0: 0.9 ms from 0"
    browser.evaluate(visit, "document.querySelectorAll('.tip').forEach(tip => { tip.hidden = true; })")
    browser.move(visit, *browser.shown(visit, "#part-4-plot", "--overlapped")[1:])
    assert browser.evaluate(visit, said) == "step, ms\n2: 10.0"


def test_bars_are_as_long_as_their_times(tmp_path: Path, browser: Chromium) -> None:
    """1600 µs of 1667, each with its error."""
    visit = opened(browser, tmp_path, "tuning")
    lengths = browser.evaluate(
        visit,
        "[...document.getElementById('part-5').closest('section').querySelectorAll('.bar')].map((bar) => "
        "[...bar.children].reduce((sum, part) => sum + part.getBoundingClientRect().width, 0) / "
        "bar.getBoundingClientRect().width)",
    )
    assert lengths == pytest.approx([1603 / 1671, 1.0, 1645 / 1671], abs=0.005)
