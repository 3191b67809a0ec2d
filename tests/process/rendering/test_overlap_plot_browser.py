"""The page of `counterpoint measure --html` in a real browser: silent, offline, drawn."""

from pathlib import Path

import pytest

from counterpoint.rendering.measurement_html import write_overlap_plot
from tests.support import example_measurement as measured
from tests.support.chromium import Chromium


def page(tmp_path: Path, case: str) -> Path:
    path = tmp_path / f"{case}.html"
    write_overlap_plot(path, getattr(measured, case)())
    return path


@pytest.mark.needs("browser")
def test_the_plot_is_drawn(tmp_path: Path, browser: Chromium) -> None:
    visit = browser.open(page(tmp_path, "usual"))
    assert browser.evaluate(visit, "document.querySelectorAll('#part-1-plot canvas').length") == 2
    assert all(browser.shown(visit, "#part-1-plot", f"--series-{number}")[0] > 5 for number in (1, 2))


@pytest.mark.needs("browser")
def test_the_pointer_shows_the_row(tmp_path: Path, browser: Chromium) -> None:
    visit = browser.open(page(tmp_path, "usual"))
    _, x, y = browser.shown(visit, "#part-1-plot", "--series-2")
    browser.move(visit, x, y)
    tip = browser.evaluate(visit, "document.querySelector('.tip:not([hidden])').innerText")
    assert tip.splitlines()[0] == "nccl+max_ctas=8"
    assert tip.endswith("MARKED: max_ctas=8 had no effect: 24 CTAs ran")


@pytest.mark.needs("browser")
def test_a_hostile_name_under_the_pointer_is_text(tmp_path: Path, browser: Chromium) -> None:
    visit = browser.open(page(tmp_path, "hostile"))
    _, x, y = browser.shown(visit, "#part-1-plot", "--series-1")
    browser.move(visit, x, y)
    assert browser.evaluate(visit, "document.querySelector('.tip:not([hidden]) b').textContent").startswith("</script>")
    assert browser.evaluate(visit, "document.querySelectorAll('.tip:not([hidden]) *').length") == 2


@pytest.mark.needs("browser")
def test_the_legend_hides_and_shows_a_mechanism(tmp_path: Path, browser: Chromium) -> None:
    visit = browser.open(page(tmp_path, "usual"))
    click = "document.querySelector('.key').click()"
    browser.evaluate(visit, click)
    assert browser.evaluate(visit, "document.querySelector('.key').getAttribute('aria-pressed')") == "false"
    assert browser.shown(visit, "#part-1-plot", "--series-1")[0] == 0
    browser.evaluate(visit, click)
    assert browser.shown(visit, "#part-1-plot", "--series-1")[0] > 5


@pytest.mark.needs("browser")
def test_dragging_zooms_all_panels_and_a_double_click_ends_it(tmp_path: Path, browser: Chromium) -> None:
    """What lies outside of the drag is no longer drawn."""
    visit = browser.open(page(tmp_path, "usual"))
    pixels, x, y = browser.shown(visit, "#part-1-plot", "--series-1")
    browser.drag(visit, (x + 40, y), (x + 140, y))
    assert browser.shown(visit, "#part-1-plot", "--series-1")[0] == 0
    assert browser.shown(visit, "#part-1-plot > div:last-child", "--series-1")[0] == 0
    browser.double_click(visit, x, y)
    assert browser.shown(visit, "#part-1-plot", "--series-1")[0] == pixels
