"""The page of `counterpoint plan --html` in a real browser: silent, offline, drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterpoint.report.plan_html import write_plan_page
from tests.support import example_prediction as predicted
from tests.support.chromium import Chromium


def page(tmp_path: Path, case: str) -> Path:
    path = tmp_path / f"{case}.html"
    write_plan_page(path, getattr(predicted, case)())
    return path


@pytest.mark.needs("browser")
@pytest.mark.parametrize("case", ["bare", "usual", "hostile"])
def test_the_page_is_silent_and_offline(tmp_path: Path, browser: Chromium, case: str) -> None:
    """No complaint in the console, no request, no script run from a name."""
    visit = browser.open(page(tmp_path, case))
    assert (visit.complaints, visit.requests) == ([], [])


@pytest.mark.needs("browser")
def test_figures_are_drawn(tmp_path: Path, browser: Chromium) -> None:
    """Six slots of the timeline, two points on each of three curves."""
    visit = browser.open(page(tmp_path, "usual"))
    assert browser.evaluate(visit, "document.querySelectorAll('#timeline-plot .point').length") == 6
    assert browser.evaluate(visit, "document.querySelectorAll('#curve-0 .points path').length") == 6
