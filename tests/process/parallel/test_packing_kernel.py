"""The kernel that packs rows by rank gives the bits of torch in Triton's interpreter, which runs once for all cases."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.routing import ROUTINGS
from tests.support.triton_script import ran

CASES: list[dict[str, Any]] = [
    *({"kind": kind, "rank": rank, "ranks": ranks} for kind in ROUTINGS for rank, ranks in ((0, 2), (2, 3))),
    {"kind": "random", "rank": 1, "ranks": 4, "scaled": True, "first": 1, "room": 69},
    {"kind": "random", "rank": 0, "ranks": 1, "local": 4, "scaled": True, "first": 69, "room": 69},
    {"kind": "distinct", "rank": 7, "ranks": 8, "local": 1, "top_k": 8, "tokens": 40},
    {"kind": "random", "rank": 1, "ranks": 2, "tokens": 0},
]  # fmt: skip

pytestmark = pytest.mark.needs("triton")


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> dict[int, str]:
    return ran(Path(__file__).parent / "packing_interpreted.py", CASES, request)


@pytest.mark.parametrize("index", range(len(CASES)), ids=[str(case) for case in CASES])
def test_the_bits_of_torch(interpreted: dict[int, str], index: int) -> None:
    assert interpreted[index] == "right"
