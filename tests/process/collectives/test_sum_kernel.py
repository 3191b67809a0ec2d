"""The kernel that adds up gives the bits of plain torch, in Triton's interpreter, and is compiled well for Hopper.

Interpreter and compiler run in one process each for all cases.
"""

from pathlib import Path
from typing import Any

import pytest

from counterpoint.collectives.program.reductions import DTYPES
from tests.support.triton_script import ran

HERE = Path(__file__).parent


FLOATS = ["bfloat16", "float16", "float32", "float64"]


INTERPRETED: list[dict[str, Any]] = [
    *({"op": "sum", "dtype": dtype, "numel": 5003, "world_size": 3, "own": 1} for dtype in DTYPES),
    *({"op": op, "dtype": "bfloat16", "numel": 777, "world_size": 4, "own": 3} for op in ("avg", "max", "min")),
    *({"op": op, "dtype": "int32", "numel": 777, "world_size": 4, "own": 0} for op in ("max", "min")),
    *({"op": "premul_sum", "factor": 0.1, "dtype": dtype, "numel": 99, "world_size": 2, "own": 1} for dtype in FLOATS),
    *({"op": "sum", "dtype": "float32", "numel": numel, "world_size": 2, "own": 0} for numel in (1, 7, 4096, 12288)),
    *({"op": "sum", "dtype": "float16", "numel": 3000, "world_size": 3, "own": own} for own in range(3)),
    {"op": "sum", "dtype": "bfloat16", "numel": 4099, "world_size": 8, "own": 5, "skew": 2, "target_skew": 6},
    {"op": "sum", "dtype": "float32", "numel": 30000, "world_size": 3, "own": 2, "in_place": True},
    {"op": "sum", "dtype": "float32", "numel": 30001, "world_size": 3, "own": 2, "num_sms": 2},
    {"op": "sum", "dtype": "float32", "numel": 30001, "world_size": 3, "own": 2, "programs": 7},
    *({"op": op, "dtype": dtype, "result": "float32", "numel": 5003, "world_size": 3, "own": 1, "target_skew": skew}
      for op in ("sum", "avg", "premul_sum") for dtype in ("bfloat16", "float16") for skew in (0, 4)),
    {"op": "avg", "dtype": "float32", "numel": 100, "world_size": 1, "own": 0},
    *({"op": "sum", "dtype": "float32", "numel": 70, "world_size": 5, "own": at, "backwards": True} for at in range(5)),
]  # fmt: skip


pytestmark = pytest.mark.needs("triton")
COMPILED = [["bfloat16", 8, 0], ["float32", 8, 0], ["bfloat16", 8, 2]]


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> dict[int, str]:
    return ran(HERE / "interpreted.py", INTERPRETED, request)


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[int, dict[str, int]]:
    return ran(HERE / "compiled.py", COMPILED, request)


@pytest.mark.parametrize("index", range(len(INTERPRETED)), ids=[str(case) for case in INTERPRETED])
def test_the_kernel_gives_the_bits_of_plain_torch(interpreted: dict[int, str], index: int) -> None:
    """Any op, dtype, length, alignment, place of the own source and number of programs; and nothing else is written."""
    assert interpreted[index] == "equal"


def test_loads_and_stores_are_16_bytes_wide(compiled: dict[int, dict[str, int]]) -> None:
    """Aligned: two wide loads per source and two wide stores; narrow ones for the tail alone (16 and 8 elements)."""
    bf16, fp32, _ = compiled.values()
    assert (bf16["ld.global.v4.b32"], bf16["st.global.v4.b32"], bf16["ld.global.b16"]) == (16, 2, 8 * 16)
    assert (fp32["ld.global.v4.b32"], fp32["st.global.v4.b32"], fp32["ld.global.b32"]) == (16, 2, 8 * 8)


def test_only_what_is_not_aligned_is_narrow(compiled: dict[int, dict[str, int]]) -> None:
    """An own source that starts 2 bytes late costs the other seven nothing."""
    assert compiled[2]["ld.global.v4.b32"] == 14


def test_compiled_sums_round_to_nearest(compiled: dict[int, dict[str, int]]) -> None:
    """bfloat16 is rounded once per element, to nearest: as many conversions as there are pairs of elements."""
    assert compiled[0]["cvt.rn.bf16x2"] == 8
