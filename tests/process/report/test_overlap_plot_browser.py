"""The page of `counterpoint measure --html` in a real browser: silent, offline, drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterpoint.report.measurement_html import write_overlap_plot
from tests.support import example_measurement as measured
from tests.support.chromium import Chromium


def page(tmp_path: Path, case: str) -> Path:
    path = tmp_path / f"{case}.html"
    write_overlap_plot(path, getattr(measured, case)())
    return path


@pytest.mark.needs("browser")
@pytest.mark.parametrize("case", ["usual", "hostile", "blocks"])
def test_the_page_is_silent_and_offline(tmp_path: Path, browser: Chromium, case: str) -> None:
    """No complaint in the console, no request, no script run from a name."""
    visit = browser.open(page(tmp_path, case))
    assert (visit.complaints, visit.requests) == ([], [])


@pytest.mark.needs("browser")
def test_the_plot_is_drawn(tmp_path: Path, browser: Chromium) -> None:
    """Points of four rows are on the screen."""
    visit = browser.open(page(tmp_path, "usual"))
    assert browser.evaluate(visit, "document.querySelectorAll('#plot .points path').length") == 4
