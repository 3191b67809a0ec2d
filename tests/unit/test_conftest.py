"""A skip must not hide: the marks and options of tests/conftest.py, tried on tests made up here."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = (Path(__file__).parents[1] / "conftest.py").read_text()
MANY_GPUS = """
import pytest

@pytest.mark.gpu(4096)
def test_on_gpus():
    pass
"""
SKIPS_ITSELF = """
import pytest

@pytest.mark.browser
def test_in_browser():
    pytest.skip("not today")
"""


def outcomes(pytester: pytest.Pytester, source: str, *options: str) -> dict[str, int]:
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nmarkers =\n    gpu(n): n GPUs\n    browser: chromium\n")
    pytester.makepyfile(source)
    return pytester.runpytest(*options).parseoutcomes()


@pytest.fixture
def _chromium(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something called chromium on the PATH."""
    program = pytester.path / "chromium"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(pytester.path))


def test_too_few_gpus_is_a_skip(pytester: pytest.Pytester) -> None:
    """Without an option, a test that needs more GPUs than there are is skipped."""
    assert outcomes(pytester, MANY_GPUS) == {"skipped": 1}


def test_required_gpus_make_the_skip_a_failure(pytester: pytest.Pytester) -> None:
    """--require-gpus=N fails a skipped gpu(N) test (before it began: pytest says error)."""
    assert outcomes(pytester, MANY_GPUS, "--require-gpus=4096") == {"errors": 1}


def test_fewer_required_gpus_leave_the_skip(pytester: pytest.Pytester) -> None:
    """--require-gpus=N says nothing about tests that need more than N."""
    assert outcomes(pytester, MANY_GPUS, "--require-gpus=8") == {"skipped": 1}


def test_a_missing_browser_is_a_skip(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without chromium on the PATH, a browser test is skipped."""
    monkeypatch.setenv("PATH", str(pytester.path))
    assert outcomes(pytester, SKIPS_ITSELF.replace('pytest.skip("not today")', "pass")) == {"skipped": 1}


def test_a_required_missing_browser_is_a_failure(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """--require-browser fails it instead (before it began: pytest says error)."""
    monkeypatch.setenv("PATH", str(pytester.path))
    assert outcomes(pytester, SKIPS_ITSELF, "--require-browser") == {"errors": 1}


@pytest.mark.usefixtures("_chromium")
def test_a_skip_from_within_a_required_test_is_a_failure(pytester: pytest.Pytester) -> None:
    """--require-browser also fails a test that skips itself for a reason of its own."""
    assert outcomes(pytester, SKIPS_ITSELF, "--require-browser") == {"failed": 1}


def test_a_mark_without_a_number_is_refused(pytester: pytest.Pytester) -> None:
    """`@pytest.mark.gpu` alone ends the run as a usage error, it is not a test for any number of GPUs."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(MANY_GPUS.replace("(4096)", ""))
    assert pytester.runpytest().ret == pytest.ExitCode.USAGE_ERROR


def test_every_folder_of_tests_is_walked(request: pytest.FixtureRequest) -> None:
    """pytest leaves folders called `dist`, `build` and some others out unless told not to: no test sleeps there."""
    root = Path(__file__).parents[1]
    folders = {folder for path in root.rglob("test_*.py") for folder in path.relative_to(root).parts[:-1]}
    left_out = [str(pattern) for pattern in request.config.getini("norecursedirs")]
    assert [folder for folder in folders for pattern in left_out if Path(folder).match(pattern)] == []
