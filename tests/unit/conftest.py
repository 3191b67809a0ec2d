"""Unit tests start no process: one that does belongs to tests/process."""

import multiprocessing.process
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from typing import NoReturn

import pytest

with suppress(ImportError):
    import cuda.bindings.driver  # noqa: F401  # its first import asks ldconfig, a process, where libraries are


@pytest.fixture(autouse=True, scope="module")
def no_process() -> Iterator[None]:
    """Fail a test that starts a process, by whatever door."""

    def refuse(*arguments: object, **options: object) -> NoReturn:
        pytest.fail("a unit test starts no process: put it into tests/process")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", refuse)
        patch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
        patch.setattr(os, "fork", refuse)
        yield
