"""Fixtures of the report's tests: diagnoses and a browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import example
import pytest
from chromium import Chromium

from counterpoint.records import Diagnosis, Lane


@pytest.fixture(name="training")
def training_fixture() -> Diagnosis:
    return example.training()


@pytest.fixture(name="lanes")
def lanes_fixture() -> list[Lane]:
    return example.lanes()


@pytest.fixture(name="empty")
def empty_fixture() -> Diagnosis:
    return example.empty()


@pytest.fixture(name="hostile")
def hostile_fixture() -> tuple[Diagnosis, list[Lane]]:
    return example.hostile()


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """One headless Chromium for all tests; the `browser` mark decides whether they may be skipped."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("needs Debian's chromium on the PATH")
    chromium = Chromium(program, tmp_path_factory.mktemp("chromium"))
    try:
        yield chromium
    finally:
        chromium.close()
