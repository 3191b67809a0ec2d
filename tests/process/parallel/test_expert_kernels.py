"""Kernels for rows of experts give the bits of torch in Triton's interpreter, and are compiled well for many GPUs.

Interpreter and compiler run in one process each for all cases.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.routing import ROUTINGS
from tests.support.triton_script import ran

HERE = Path(__file__).parent

PACKS: dict[str, Any] = {"run": "packs", "ids": "int32", "experts": 2, "tokens": 23}
INTERPRETED: list[dict[str, Any]] = [
    *({"run": "assigns", "kind": kind, "pad": pad, "capacity": capacity}
      for kind in ROUTINGS for pad in (1, 16) for capacity in (None, 0, 16)),
    {"run": "assigns", "tokens": 0},
    {"run": "assigns", "tokens": 0, "pad": 16, "capacity": 32},
    {"run": "assigns", "tokens": 1, "top_k": 1, "experts": 1, "ranks": 1},
    {"run": "assigns", "tokens": 32, "top_k": 8, "experts": 64, "kind": "distinct", "ids": "int32"},
    {"run": "assigns", "tokens": 100, "top_k": 8, "experts": 3, "kind": "zipf", "pad": 3, "capacity": 600},
    {"run": "assigns", "tokens": 70, "top_k": 2, "experts": 33, "kind": "distinct", "capacity": 5000},
    *({"run": "moves", "kind": kind, "weighted": weighted, "pad": pad}
      for kind in ROUTINGS for weighted, pad in ((False, 16), (True, 1))),
    *({"run": "moves", "dtype": dtype, "weighted": weighted, "pad": 16, "top_k": top_k, "hidden": hidden}
      for dtype in ("float32", "float16", "float64") for weighted in (False, True)
      for top_k, hidden in ((1, 1), (6, 150))),
    {"run": "moves", "dtype": "bfloat16", "kind": "distinct", "top_k": 1, "ranks": 1, "hidden": 130},
    {"run": "moves", "tokens": 0, "pad": 16, "capacity": 32},
    {"run": "moves", "weighted": True, "pad": 4, "capacity": 12},
    *({"run": "widens", "hidden": hidden} for hidden in (40, 250)),
    {"run": "spares", "pad": 16, "capacity": 32},
    *({"run": "activates", "dtype": dtype, "hidden": hidden}
      for dtype in ("float32", "float16", "float64") for hidden in (1, 40)),
    {"run": "activates", "tokens": 0},
    {"run": "activates", "tokens": 1},
    *({"run": "narrows", "dtype": dtype, "hidden": hidden}
      for dtype in ("float32", "bfloat16") for hidden in (1, 40, 300)),
    {"run": "narrows", "tokens": 0},
    *(PACKS | {"kind": kind, "rank": rank, "ranks": ranks} for kind in ROUTINGS for rank, ranks in ((0, 2), (2, 3))),
    PACKS | {"kind": "random", "rank": 1, "ranks": 4, "weighted": True, "first": 1, "room": 69},
    PACKS | {"kind": "random", "rank": 0, "ranks": 1, "experts": 4, "weighted": True, "first": 69, "room": 69},
    PACKS | {"kind": "distinct", "rank": 7, "ranks": 8, "experts": 1, "top_k": 8, "tokens": 40},
    PACKS | {"kind": "random", "rank": 1, "ranks": 2, "tokens": 0},
]  # fmt: skip

QWEN3: dict[str, Any] = {"hidden": 2048, "ffn": 768, "top_k": 8, "experts": 64, "weighted": True, "pad": 1}
QWEN3 |= {"dtype": "bfloat16", "capability": 90, "wire": "float8_e4m3fn"}
COMPILED: list[dict[str, Any]] = [
    QWEN3,
    QWEN3 | {"weighted": False, "pad": 16},
    QWEN3 | {"hidden": 4096, "ffn": 14336, "top_k": 2, "experts": 4},
    QWEN3 | {"hidden": 7168, "experts": 256},
    QWEN3 | {"dtype": "float32"},
    QWEN3 | {"capability": 80, "wire": "float8_e5m2"},
    *(QWEN3 | {"capability": capability} for capability in (89, 100, 120)),
]

pytestmark = pytest.mark.needs("triton")


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> dict[int, str]:
    return ran(HERE / "expert_interpreted.py", INTERPRETED, request)


@pytest.mark.parametrize("index", range(len(INTERPRETED)), ids=[str(case) for case in INTERPRETED])
def test_the_bits_of_torch(interpreted: dict[int, str], index: int) -> None:
    assert interpreted[index] == "right"


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[int, dict[str, Any]]:
    return ran(HERE / "expert_compiled.py", COMPILED, request)


@pytest.mark.parametrize("index", range(len(COMPILED)), ids=[str(case) for case in COMPILED])
def test_compiled_well(compiled: dict[int, dict[str, Any]], index: int) -> None:
    """No register is spilled, rows move 16 bytes at a time, and other numbers of tokens need no other kernel."""
    code = compiled[index]
    names = {"count", "scan", "place", "permute", "combine", "weight_grads", "swiglu", "swiglu_backward", "narrow"}
    assert code.keys() == names
    assert {name: what["spilled_bytes"] for name, what in code.items()} == dict.fromkeys(code, 0)
    assert {name: what["kernels"] for name, what in code.items()} == dict.fromkeys(code, 1)
    for name in ("permute", "combine", "swiglu", "swiglu_backward"):
        assert {what for what in code[name]["order"] if what.startswith("st")} == {"st.global.v4.b32"}
    for name in ("permute", "combine", "weight_grads", "swiglu", "swiglu_backward"):
        assert {what for what in code[name]["order"] if what.startswith("ld")} == {"ld.global.b32", "ld.global.v4.b32"}


@pytest.mark.parametrize("index", range(len(COMPILED)), ids=[str(case) for case in COMPILED])
def test_a_token_is_read_once(compiled: dict[int, dict[str, Any]], index: int) -> None:
    """And its slots, all before the first copy is stored."""
    order = compiled[index]["permute"]["order"]
    copies = order[: order.index("st.global.v4.b32")]
    factors = 2 if COMPILED[index]["weighted"] else 1
    assert copies.count("ld.global.b32") == factors * COMPILED[index]["top_k"]
    assert 1 <= copies.count("ld.global.v4.b32") <= 2
    assert order.count("ld.global.v4.b32") == copies.count("ld.global.v4.b32")
