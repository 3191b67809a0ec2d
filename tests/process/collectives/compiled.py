"""Compiles the Triton kernel for Hopper without a GPU and says which loads, stores and conversions it has.

Started by path with (dtype, sources, skew in bytes) as JSON on standard input; writes how often each is there.
"""

import json
import re
import sys
from collections import Counter

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from counterpoint.collectives.cuda.lower import ReduceLaunch
from counterpoint.collectives.cuda.sum_kernel import combine
from counterpoint.collectives.cuda.sum_launch import launch_of, with_types
from counterpoint.collectives.program.reductions import Reduction


def instructions(dtype: str, sources: int, skew: int) -> dict[str, int]:
    """How often each global load, store and rounding conversion stands in the code of a sum."""
    addresses = (1 << 40) + skew, *((1 << 41) + slot * (1 << 20) for slot in range(sources - 1))
    launch = launch_of(ReduceLaunch(addresses, 1 << 42, 1 << 20, 1), Reduction(op="sum", dtype=dtype), device_sms=132)
    constants = with_types(launch.constants)
    names = combine.arg_names[: len(launch.arguments)]
    signature = dict.fromkeys(names, "i64") | dict.fromkeys(constants, "constexpr")
    source = ASTSource(combine, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": launch.num_warps})
    found = re.findall(r"\b((?:ld|st)\.global|cvt\.rn)[\w.:]*?((?:\.v\d)?\.b(?:f16)?\w+)", compiled.asm["ptx"])
    return Counter(head + tail for head, tail in found)


if __name__ == "__main__":
    json.dump([instructions(*case) for case in json.load(sys.stdin)], sys.stdout)
