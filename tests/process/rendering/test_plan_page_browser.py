"""The page of `counterpoint plan --html` in a real browser: silent, offline, drawn."""

from pathlib import Path

import pytest

from counterpoint.rendering.plan_html import write_plan_page
from tests.support import example_prediction as predicted
from tests.support.chromium import Chromium


def page(tmp_path: Path, case: str) -> Path:
    path = tmp_path / f"{case}.html"
    write_plan_page(path, getattr(predicted, case)())
    return path


@pytest.mark.needs("browser")
def test_figures_are_drawn(tmp_path: Path, browser: Chromium) -> None:
    """The stages' forward and backward; step time, MFU and exposed share in three panels."""
    visit = browser.open(page(tmp_path, "usual"))
    assert all(browser.shown(visit, "#part-3-plot", colour)[0] > 100 for colour in ("--compute", "--overlapped"))
    colours = enumerate(("--overlapped", "--compute", "--transfer"), start=1)
    assert all(browser.shown(visit, f"#part-4-plot > :nth-child({n})", colour)[0] > 50 for n, colour in colours)


@pytest.mark.needs("browser")
def test_the_pointer_shows_a_slot_and_a_point(tmp_path: Path, browser: Chromium) -> None:
    visit = browser.open(page(tmp_path, "usual"))
    said = "document.querySelector('.tip:not([hidden])').innerText"
    browser.move(visit, *browser.shown(visit, "#part-3-plot", "--compute")[1:])
    assert browser.evaluate(visit, said) == "forward\nmicro-batch 0, part 0: 0.9 ms from 0"
    browser.evaluate(visit, "document.querySelectorAll('.tip').forEach(tip => { tip.hidden = true; })")
    browser.move(visit, *browser.shown(visit, "#part-4-plot", "--overlapped")[1:])
    assert browser.evaluate(visit, said) == "step, ms\n2: 10.0"
