"""The page of `counterpoint tune --html` in a real browser: silent, offline, readable on a phone."""

from pathlib import Path

import pytest

from counterpoint.records.tuning import Tuned
from counterpoint.rendering.tuning_tables import write_tuning_page
from tests.support.chromium import Chromium
from tests.support.example_tuned import example_tuned


def page(folder: Path, tuned: Tuned) -> Path:
    path = folder / "tuning.html"
    write_tuning_page(path, tuned)
    return path


@pytest.mark.needs("browser")
def test_bars_are_as_long_as_their_times(tmp_path: Path, browser: Chromium) -> None:
    """1600 µs of 1667, each with its error."""
    visit = browser.open(page(tmp_path, example_tuned()))
    lengths = browser.evaluate(
        visit,
        "[...document.getElementById('part-5').closest('section').querySelectorAll('.bar')].map((bar) => "
        "[...bar.children].reduce((sum, part) => sum + part.getBoundingClientRect().width, 0) / "
        "bar.getBoundingClientRect().width)",
    )
    assert lengths == pytest.approx([1603 / 1671, 1.0, 1645 / 1671], abs=0.005)
