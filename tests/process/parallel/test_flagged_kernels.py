"""Matmuls that poll give the values of float64, in Triton's interpreter, and are compiled well for Hopper.

Interpreter and compiler run in one process each for all cases.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.triton_script import ran

HERE = Path(__file__).parent
UNEVEN: dict[str, Any] = {"rank": 1, "rows": [20, 33, 0, 17], "batch": 2, "chunk_rows": 25}
EVEN: dict[str, Any] = {"rank": 2, "rows": [16, 16, 16, 16]}

INTERPRETED: list[dict[str, Any]] = [
    *({"run": run, "rows": [19] * world, "rank": world // 2} for run in ("gather", "scatter") for world in range(1, 9)),
    *({"run": run, **UNEVEN, **what}
      for run in ("gather", "scatter")
      for what in ({}, {"rank": 0, "k": 20}, {"rank": 2, "transposed": False}, {"rank": 3, "n": 37, "k": 41},
                   {"bias": True, "out": "float16"}, {"programs": 1}, {"programs": 500})),
    *({"run": run, **EVEN, "transposed": False, "bias": True} for run in ("gather", "scatter")),
    {"run": "scatter", **UNEVEN, "average": True, "bias": True},
    *({"run": "late", **UNEVEN, "rank": seed % 4, "seed": seed} for seed in range(6)),
    *({"run": "order", **UNEVEN, "rank": rank, "programs": 1} for rank in range(4)),
    {"run": "order", "rank": 5, "rows": [16] * 8, "programs": 1},
    *({"run": run, "rank": 1, "rows": [32, 32, 16], "chunk_rows": 16, "n": 40, "k": 16, "programs": 1, "max_spins": 3}
      for run in ("lost", "lost_partials", "polls")),
    {"run": "together", "rows": [20, 33, 0, 17], "batch": 2, "chunk_rows": 25},
    {"run": "together", "rows": [16] * 3, "bias": True, "n": 40},
    *({"run": "ascending", "rows": [16] * 8, "rank": rank} for rank in (0, 2, 7)),
]  # fmt: skip

BF16: dict[str, Any] = {"dtype": "bfloat16", "transposed": True, "tma": True, "stages": 3}
COMPILED: list[dict[str, Any]] = [
    BF16 | {"kernel": "all_gather_matmul"},
    BF16 | {"kernel": "all_gather_matmul", "transposed": False, "stages": 4},
    BF16 | {"kernel": "all_gather_matmul", "tma": False},
    BF16 | {"kernel": "matmul_reduce_scatter"},
    BF16 | {"kernel": "matmul_reduce_scatter", "transposed": False, "stages": 4},
]
HOPPER_SHARED_BYTES = 227 * 1024

pytestmark = pytest.mark.needs("triton")


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> dict[int, str]:
    return ran(HERE / "flagged_interpreted.py", INTERPRETED, request)


@pytest.mark.parametrize("index", range(len(INTERPRETED)), ids=[str(case) for case in INTERPRETED])
def test_values_words_and_order(interpreted: dict[int, str], index: int) -> None:
    assert interpreted[index] == "right"


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[int, dict[str, Any]]:
    return ran(HERE / "flagged_compiled.py", COMPILED, request)


@pytest.mark.parametrize("index", range(len(COMPILED)), ids=[str(case) for case in COMPILED])
def test_compiled_for_hopper(compiled: dict[int, dict[str, Any]], index: int) -> None:
    """Tensor cores, TMA where asked for, 16-byte stores, no register spilled, it fits an SM, for any layout."""
    case, code = COMPILED[index], compiled[index]
    assert code["shared"] <= HOPPER_SHARED_BYTES
    assert "wgmma" in code["order"]
    assert ("tma" in code["order"]) is case["tma"]
    assert code["kernels"] == 1, "other rows, ranks, batches and chunks have to do without compiling again"
    assert set(code["stores"]) == {"st.global.v4.b32"}
    assert code["spilled_bytes"] == 0 or not case["tma"]


@pytest.mark.parametrize("index", [0, 1])
def test_nothing_is_loaded_before_its_word_was_seen(compiled: dict[int, dict[str, Any]], index: int) -> None:
    """all_gather: poll with acquire at system scope, barrier, proxy fence, and only then the loads by TMA."""
    order = compiled[index]["order"]
    last_poll = max(place for place, what in enumerate(order) if what == "poll")
    after = order[last_poll + 1 :]
    assert "tma" not in order[:last_poll]
    assert "barrier" in after[: after.index("proxy_fence")]
    assert after.index("proxy_fence") < after.index("tma")


@pytest.mark.parametrize("index", [3, 4])
def test_tiles_are_counted_after_all_threads_have_stored(compiled: dict[int, dict[str, Any]], index: int) -> None:
    """reduce_scatter: the stores of a tile, a barrier, then one addition with release at system scope."""
    order = compiled[index]["order"]
    count = order.index("count")
    assert order[count - 2 : count] == ["store", "barrier"]
