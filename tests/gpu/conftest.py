"""What the ranks of a worker found: they run all scenarios once, and each test asserts one claim about it."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu_ranks import Seen, scenario_results


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What the worker of a file found, which stands beside it; `RUN` says with which arguments and limits it runs."""
    test: Path = request.path
    worker = test.with_name(f"{test.stem.removeprefix('test_')}_worker.py")
    run: dict[str, Any] = dict(request.module.RUN)
    return scenario_results(worker, tmp_path_factory.mktemp(worker.stem), *run.pop("arguments", ()), **run)
