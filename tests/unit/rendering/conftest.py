"""Fixtures of the report's tests: diagnoses and a browser."""

import pytest

from counterpoint.records.diagnosis import Diagnosis, TimelineLane
from tests.support import example_diagnosis as example


@pytest.fixture(name="training")
def training_fixture() -> Diagnosis:
    return example.training()


@pytest.fixture(name="lanes")
def lanes_fixture() -> list[TimelineLane]:
    return example.lanes()


@pytest.fixture(name="empty")
def empty_fixture() -> Diagnosis:
    return example.empty()


@pytest.fixture(name="hostile")
def hostile_fixture() -> tuple[Diagnosis, list[TimelineLane]]:
    return example.hostile()
