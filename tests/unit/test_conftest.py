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
OUTCOMES = [  # "errors": it failed before it began
    (MANY_GPUS, (), False, "skipped"),
    (MANY_GPUS, ("--require-gpus=4096",), False, "errors"),
    (MANY_GPUS, ("--require-gpus=8",), False, "skipped"),
    (NEEDS_NOTHING_HERE, (), False, "skipped"),
    (NEEDS_NOTHING_HERE, ("--require=triton,root",), False, "skipped"),
    (NEEDS_NOTHING_HERE, ("--require=triton,browser",), False, "errors"),
    (SKIPS_ITSELF, ("--require=browser",), True, "failed"),
]


def ran(pytester: pytest.Pytester, source: str, *options: str) -> pytest.RunResult:
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nmarkers =\n    gpu(n): n GPUs\n    needs(name): something\n")
    pytester.makepyfile(source)
    return pytester.runpytest("-p", "no:hypothesispytest", *options)  # it would import hypothesis anew in each run


@pytest.mark.parametrize(("source", "options", "has_browser", "outcome"), OUTCOMES)
def test_a_skip_is_a_failure_where_the_test_was_required(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, source: str, options: tuple[str, ...],
    has_browser: bool, outcome: str,
) -> None:  # fmt: skip
    """By --require-gpus=N up to N GPUs, and by --require for what it names, for whatever reason a test is skipped."""
    if has_browser:
        (pytester.path / "chromium").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(pytester.path))
    assert ran(pytester, source, *options).parseoutcomes() == {outcome: 1}


def test_the_first_case_of_each_file_is_run_by_make_test(pytester: pytest.Pytester) -> None:
    """In a lane whose tests start processes; in no other."""
    text = "import pytest\n\n@pytest.mark.parametrize('n', range(3))\ndef test_it(n): pass\n\ndef test_other(): pass\n"
    for lane in ("process", "unit"):
        folder = pytester.mkdir(lane)
        for name in ("one", "two"):
            (folder / f"test_{lane}_{name}.py").write_text(text)
    assert ran(pytester, "", "-m", "smoke").parseoutcomes() == {"passed": 2, "deselected": 14}


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
