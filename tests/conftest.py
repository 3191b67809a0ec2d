"""No test passes by not running: what a skip means is decided here, once.

`gpu(n)` and `browser` tests are skipped with a reason where the machine lacks what they need. `--require-gpus=N` and
`--require-browser` say that it has it: then such a skip, for whatever reason, is a failure.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Generator, Iterator
from functools import cache
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ranks import Ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("counterpoint")
    group.addoption("--require-gpus", type=int, default=0, metavar="N", help="fail if a gpu(n <= N) test is skipped")
    group.addoption("--require-browser", action="store_true", help="fail if a browser test is skipped")


@cache
def gpu_count() -> int:
    """GPUs that CUDA would show to a process, asked of the driver (torch would cost seconds); 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def gpus_needed(item: pytest.Item) -> int:
    """The n of `gpu(n)`; 0 for a test without the mark."""
    mark = item.get_closest_marker("gpu")
    return 0 if mark is None else int(mark.args[0])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a `gpu` mark that does not say how many."""
    for item in items:
        mark = item.get_closest_marker("gpu")
        if mark is not None and (len(mark.args) != 1 or not isinstance(mark.args[0], int) or mark.args[0] < 1):
            raise pytest.UsageError(f"{item.nodeid}: write the mark as gpu(n) with n >= 1, not gpu{mark.args}")


def required(item: pytest.Item) -> str | None:
    """The option by which the caller said that this test can run here; None if none was given."""
    if 0 < gpus_needed(item) <= item.config.getoption("--require-gpus"):
        return f"--require-gpus={item.config.getoption('--require-gpus')}"
    if item.get_closest_marker("browser") and item.config.getoption("--require-browser"):
        return "--require-browser"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = gpus_needed(item)
    if needed and gpu_count() < needed:
        pytest.skip(f"needs {needed} GPUs, this machine has {gpu_count()}")
    if item.get_closest_marker("browser") and shutil.which("chromium") is None:
        pytest.skip("needs Debian's chromium on the PATH")


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


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two gloo ranks, started once for the whole run."""
    yield from _ranks(2)


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[Ranks]:
    """An odd number: rotations and shards have no symmetry to hide behind."""
    yield from _ranks(3)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Two axes of two."""
    yield from _ranks(4)


def _ranks(world_size: int) -> Iterator[Ranks]:
    from ranks import Ranks

    ranks = Ranks(world_size)
    yield ranks
    ranks.close()
