"""No test passes by not running: what a skip means is decided here, once.

`gpu(n)` and `needs(name)` tests are skipped with a reason where the machine lacks what they need. `--require-gpus=N`
and `--require=name,name` say that it has it: then such a skip, for whatever reason, is a failure.
"""

import ctypes
import os
import shutil
from collections.abc import Callable, Generator
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec

import pytest
from hypothesis import settings

settings.register_profile("quick", max_examples=10, deadline=None)  # of `make unit`; `make prove` does it thoroughly
settings.register_profile("thorough", max_examples=100, deadline=None)  # machines may be busy: no time is asserted


def installed(module: str) -> bool:
    """Return whether a module can be imported, without importing more than its parent."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def newest_torch() -> bool:
    """Return whether torch is as new as what the tests are written for; older ones lack a part that a few tests use."""
    major, minor = version("torch").split(".")[:2]
    return (int(major), int(minor)) >= (2, 13)


NEEDS: dict[str, tuple[Callable[[], bool], str]] = {
    "browser": (lambda: shutil.which("chromium") is not None, "Debian's chromium on the PATH"),
    "cuda-bindings": (lambda: installed("cuda.bindings"), "cuda-bindings"),
    "cuda-core": (lambda: installed("cuda.core"), "cuda-core"),
    "root": (lambda: os.geteuid() == 0, "to run as root"),
    "torch-2.13": (newest_torch, "torch 2.13 or newer"),
    "transformers": (
        lambda: installed("transformers") and installed("accelerate"),
        "the packages transformers and accelerate",
    ),
    "triton": (lambda: installed("triton"), "Triton"),
    "zstandard": (lambda: installed("zstandard"), "the package zstandard"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("counterpoint")
    group.addoption("--require-gpus", type=int, default=0, metavar="N", help="fail if a gpu(n <= N) test is skipped")
    group.addoption(
        "--ranks-per-gpu", type=int, default=1, metavar="N",
        help="N ranks share a GPU, which counts as N; tests that need links between GPUs, or times, are skipped",
    )  # fmt: skip
    group.addoption(
        "--require", default="", metavar="NAMES", help=f"fail if a test is skipped that needs one of {', '.join(NEEDS)}"
    )


RANKS_PER_GPU = "COUNTERPOINT_TEST_RANKS_PER_GPU"


@cache
def gpu_count() -> int:
    """Return how many GPUs CUDA would show to a process, by its driver (torch would cost seconds); 0 without one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def gpus_needed(item: pytest.Item) -> int:
    """Return the n of `gpu(n)`; 0 for a test without the mark."""
    mark = item.get_closest_marker("gpu")
    return 0 if mark is None else int(mark.args[0])


def names_needed(item: pytest.Item) -> set[str]:
    """Return what the `needs` marks of a test name."""
    return {name for mark in item.iter_markers("needs") for name in mark.args}


def names_required(config: pytest.Config) -> set[str]:
    """Return what the caller says is here."""
    return set(filter(None, config.getoption("--require").split(",")))


def pytest_configure(config: pytest.Config) -> None:
    """Refuse options that would be without effect, and tell worker processes how many ranks share a GPU."""
    refuse_unknown("--require", names_required(config))
    ranks = config.getoption("--ranks-per-gpu")
    if not 1 <= ranks <= 8:
        raise pytest.UsageError(f"--ranks-per-gpu={ranks}: give 1 to 8")
    os.environ[RANKS_PER_GPU] = str(ranks)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the first case of each file of `tests/process` and `tests/dist` as `smoke`.

    Refuse a `gpu` mark that does not say how many, and a `needs` mark that nobody can answer.
    """
    for first in {item.path: item for item in reversed(items)}.values():
        if not {"process", "dist"}.isdisjoint(first.nodeid.partition("::")[0].split("/")):
            first.add_marker("smoke")
    for item in items:
        mark = item.get_closest_marker("gpu")
        if mark is not None and (len(mark.args) != 1 or not isinstance(mark.args[0], int) or mark.args[0] < 1):
            raise pytest.UsageError(f"{item.nodeid}: write the mark as gpu(n) with n >= 1, not gpu{mark.args}")
        alone = item.get_closest_marker("own_gpus")
        if alone is not None and not (len(alone.args) == 1 and isinstance(alone.args[0], str)):
            raise pytest.UsageError(f"{item.nodeid}: write the mark as own_gpus(why), not own_gpus{alone.args}")
        refuse_unknown(item.nodeid, names_needed(item))


def refuse_unknown(where: str, names: set[str]) -> None:
    if names - NEEDS.keys():
        raise pytest.UsageError(f"{where}: {', '.join(sorted(names - NEEDS.keys()))}; known are {', '.join(NEEDS)}")


def why_not_rehearsed(item: pytest.Item) -> str:
    """Return why a test says nothing where ranks share a GPU, and they do; empty if it can run."""
    mark = item.get_closest_marker("own_gpus")
    return str(mark.args[0]) if mark is not None and item.config.getoption("--ranks-per-gpu") > 1 else ""


def required(item: pytest.Item) -> str | None:
    """Return the option by which the caller said that this test can run here; None if none was given."""
    if 0 < gpus_needed(item) <= item.config.getoption("--require-gpus") and not why_not_rehearsed(item):
        return f"--require-gpus={item.config.getoption('--require-gpus')}"
    named = names_needed(item)
    return f"--require={','.join(sorted(named))}" if named and named <= names_required(item.config) else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed, ranks = gpus_needed(item), item.config.getoption("--ranks-per-gpu")
    if needed and gpu_count() * (1 if needed == 1 else ranks) < needed:
        pytest.skip(f"needs {needed} GPUs, this machine has {gpu_count()}, each for {ranks} ranks")
    if why := why_not_rehearsed(item):
        pytest.skip(f"not on shared GPUs: {why}")
    for name in sorted(names_needed(item)):
        is_here, text = NEEDS[name]
        if not is_here():
            pytest.skip(f"needs {text}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip of a required test into a failure."""
    report = yield
    option = required(item)
    if report.skipped and not hasattr(report, "wasxfail") and option is not None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} did not run although {option} was given: {reason}"
    return report
