"""A browser for the tests of the pages."""

from collections.abc import Iterator

import pytest

from tests.support.chromium import Chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    chromium = Chromium("chromium", tmp_path_factory.mktemp("chromium"))
    try:
        yield chromium
    finally:
        chromium.close()
