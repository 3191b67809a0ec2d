"""Every page in a real browser: silent, offline, and no wider than a phone."""

from pathlib import Path

import pytest

from tests.support.chromium import Chromium
from tests.support.pages import PAGES


@pytest.mark.needs("browser")
@pytest.mark.parametrize("name", list(PAGES))
def test_a_page_is_silent_offline_and_fits_a_phone(tmp_path: Path, browser: Chromium, name: str) -> None:
    """No complaint in the console, no request, no script run from a name; no scrolling sideways at 390 pixels."""
    PAGES[name](tmp_path / "page.html")
    visit = browser.open(tmp_path / "page.html", width=390, height=844)
    assert (visit.complaints, visit.requests) == ([], [])
    assert browser.evaluate(visit, "document.documentElement.scrollWidth") == 390
