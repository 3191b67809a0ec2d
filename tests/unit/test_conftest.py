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
NEEDS_NOTHING_HERE = """
import pytest

@pytest.mark.needs("browser")
def test_in_browser():
    pass
"""
SKIPS_ITSELF = NEEDS_NOTHING_HERE.replace("pass", 'pytest.skip("not today")')


def ran(pytester: pytest.Pytester, source: str, *options: str) -> pytest.RunResult:
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nmarkers =\n    gpu(n): n GPUs\n    needs(name): something\n")
    pytester.makepyfile(source)
    return pytester.runpytest("-p", "no:hypothesispytest", *options)  # it would import hypothesis anew in each run


@pytest.fixture
def _chromium(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something called chromium on the PATH."""
    program = pytester.path / "chromium"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(pytester.path))


@pytest.fixture
def _no_chromium(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(pytester.path))


def test_too_few_gpus_is_a_skip(pytester: pytest.Pytester) -> None:
    """Without an option, a test that needs more GPUs than there are is skipped."""
    assert ran(pytester, MANY_GPUS).parseoutcomes() == {"skipped": 1}


def test_required_gpus_make_the_skip_a_failure(pytester: pytest.Pytester) -> None:
    """--require-gpus=N fails a skipped gpu(N) test (before it began: pytest says error)."""
    assert ran(pytester, MANY_GPUS, "--require-gpus=4096").parseoutcomes() == {"errors": 1}


def test_fewer_required_gpus_leave_the_skip(pytester: pytest.Pytester) -> None:
    """--require-gpus=N says nothing about tests that need more than N."""
    assert ran(pytester, MANY_GPUS, "--require-gpus=8").parseoutcomes() == {"skipped": 1}


@pytest.mark.usefixtures("_no_chromium")
@pytest.mark.parametrize(
    ("options", "outcome"),
    [((), "skipped"), (("--require=triton,root",), "skipped"), (("--require=triton,browser",), "errors")],
    ids=["nothing", "others", "it"],
)
def test_what_is_missing_and_required_is_a_failure(
    pytester: pytest.Pytester, options: tuple[str, ...], outcome: str
) -> None:
    """Without chromium a browser test is skipped, unless --require names it (before it began: pytest says error)."""
    assert ran(pytester, NEEDS_NOTHING_HERE, *options).parseoutcomes() == {outcome: 1}


@pytest.mark.usefixtures("_chromium")
def test_a_skip_from_within_a_required_test_is_a_failure(pytester: pytest.Pytester) -> None:
    """--require also fails a test that skips itself for a reason of its own."""
    assert ran(pytester, SKIPS_ITSELF, "--require=browser").parseoutcomes() == {"failed": 1}


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        (MANY_GPUS.replace("(4096)", ""), (), "write the mark as gpu(n) with n >= 1"),
        (NEEDS_NOTHING_HERE.replace("browser", "luck"), (), "luck; known are browser"),
        (NEEDS_NOTHING_HERE, ("--require=browser,luck",), "--require: luck; known are browser"),
    ],
)
def test_a_mark_or_option_without_effect_is_refused(
    pytester: pytest.Pytester, source: str, options: tuple[str, ...], said: str
) -> None:
    """A mark without a number, and names that nobody knows, end the run as usage errors."""
    result = ran(pytester, source, *options)
    assert (result.ret, said in str(result.stderr)) == (pytest.ExitCode.USAGE_ERROR, True)


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
