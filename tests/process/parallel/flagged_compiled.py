"""Compiles the matmuls that poll for Hopper without a GPU, and says what their code does in which order.

Started by path with the cases as JSON on standard input; writes shared memory, spilled bytes, the kinds of stores, and
the instructions that tests look for, in the order of the text.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from counterpoint.parallel.tensor import flagged_kernels
from counterpoint.parallel.tensor.flagged import MatmulTiles

WORDS = ("words", "error", "stored")
COUNTS = ("patience", "row_tiles", "rank", "world_size", "slot_rows")
TENSORS = ("c", "partial", "staged", "out")
ABSENT = ("bias", "own_scale", "gathered_scale", "a_scale", "b_scale")
WIDTHS = ("N", "K")  # and strides: multiples of 16, as those of models
SEEN = {
    "poll": r"(?:ld|atom)\.global\.(?:sys\.acquire|acquire\.sys|sys\.global\.acquire)",
    "count": r"atom\.global\.(?:sys\.release|release\.sys)\.add",
    "barrier": r"bar\.sync",
    "proxy fence": r"fence\.proxy\.async;",
    "tma": r"cp\.async\.bulk\.tensor",
    "wgmma": r"wgmma\.mma_async",
    "store": r"st\.global",
}


def signature(kernel: Any, tiles: MatmulTiles, *, transposed: bool, tma: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """The types of the arguments of bfloat16 tensors whose rows are multiples of 16, and the values of constants."""
    blocks = dict.fromkeys(("a", "own", "gathered"), (tiles.rows, tiles.depth))
    blocks["b"] = (tiles.columns, tiles.depth) if transposed else (tiles.depth, tiles.columns)
    constants = {
        "BLOCK_M": tiles.rows, "BLOCK_N": tiles.columns, "BLOCK_K": tiles.depth, "GROUP": tiles.group,
        "TRANSPOSED": transposed, "TMA": tma, "COMPILED": True, "AVERAGE": False,
        "a_scale_stride": 0, "b_scale_stride": 0, **dict.fromkeys(ABSENT),
    }  # fmt: skip
    types = {"table": "*i32", **dict.fromkeys(WORDS, "i64"), **dict.fromkeys(TENSORS, "*bf16")}
    types |= {name: f"tensordesc<bf16[{rows},{width}]>" if tma else "*bf16" for name, (rows, width) in blocks.items()}
    found = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    return found, {name: value for name, value in constants.items() if name in kernel.arg_names}


def spilled_bytes(binary: bytes) -> int:
    """The stack that ptxas gave each thread."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(binary)
        said = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return sum(int(size) for size in re.findall(r"STACK:(\d+)", said))


def compiled(case: dict[str, Any]) -> dict[str, Any]:
    """What the code of a kernel is like."""
    kernel, tiles = getattr(flagged_kernels, case["kernel"]), MatmulTiles(stages=case["stages"])
    types, constants = signature(kernel, tiles, transposed=case["transposed"], tma=case["tma"])
    multiples = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(types.items())
        if kind.startswith("*") or name in WIDTHS or (name.endswith("_stride") and kind != "constexpr")
    }
    source = ASTSource(kernel, types, constexprs=constants, attrs=multiples)
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    text = code.asm["ptx"]
    pattern = "|".join(f"(?P<{name.replace(' ', '_')}>{expression})" for name, expression in SEEN.items())
    return {
        "shared": code.metadata.shared,
        "spilled_bytes": spilled_bytes(code.asm["cubin"]),
        "stores": sorted(set(re.findall(r"st\.global[\w.]*", text))),
        "order": [str(match.lastgroup).replace("_", " ") for match in re.finditer(pattern, text)],
    }


if __name__ == "__main__":
    json.dump([compiled(case) for case in json.load(sys.stdin)], sys.stdout)
