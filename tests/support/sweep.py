"""Sweeps over several values, of which `make test` runs a few and `make prove` the others."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def sweep(*axes: Iterable[Any], every: int) -> list[Any]:
    """Return the combinations of the axes as parameters of a test, all but every n-th of them marked `long`.

    Where `every` has no factor in common with the lengths of the axes, each of their values stays in `make test`.
    """
    return [
        pytest.param(*values, marks=[pytest.mark.long] if number % every else [])
        for number, values in enumerate(product(*axes))
    ]
