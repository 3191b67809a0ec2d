"""Unit tests start no process: one that does belongs to tests/process."""

from __future__ import annotations

import multiprocessing.process
import os
import subprocess
from typing import NoReturn

import pytest


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that starts a process, by whatever door."""

    def refuse(*arguments: object, **options: object) -> NoReturn:
        pytest.fail("a unit test starts no process: put it into tests/process")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
    monkeypatch.setattr(os, "fork", refuse)
