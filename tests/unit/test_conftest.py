"""No test hides: each is walked, and each skip can be made a failure."""

from pathlib import Path

import pytest


def test_every_skip_can_be_made_a_failure() -> None:
    """Tests are skipped by the marks of conftest.py, which have an option each, and never by pytest's own ways."""
    root = Path(__file__).parents[1]
    ways = ("importorskip", "skipif", "mark.skip")
    sources = {path: path.read_text() for path in root.rglob("*.py") if path != Path(__file__)}
    assert [str(path) for path, text in sources.items() if any(way in text for way in ways)] == []


def test_every_folder_of_tests_is_walked(request: pytest.FixtureRequest) -> None:
    """pytest leaves folders called `dist`, `build` and some others out unless told not to: no test sleeps there."""
    root = Path(__file__).parents[1]
    folders = {folder for path in root.rglob("test_*.py") for folder in path.relative_to(root).parts[:-1]}
    left_out = [str(pattern) for pattern in request.config.getini("norecursedirs")]
    assert [folder for folder in folders for pattern in left_out if Path(folder).match(pattern)] == []
