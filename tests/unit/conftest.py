"""Unit tests start no process: one that does belongs to tests/process."""

from __future__ import annotations

import multiprocessing.process
import os
import subprocess
from collections.abc import Iterator
from typing import NoReturn

import pytest


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
