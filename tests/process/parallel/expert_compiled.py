"""Calls the kernels for rows of experts without a GPU: compiled for one, not run; says what their code is like.

Started by path with the cases as JSON on standard input; writes for each, by kernel, the kinds of loads and stores,
spilled bytes, the instructions of memory in the order of the text, and how many kernels other numbers of tokens need.
"""

import json
import re
import sys
from collections import defaultdict
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from counterpoint.parallel.expert import layers
from counterpoint.parallel.expert import permute as module
from counterpoint.parallel.expert.layers import swiglu
from counterpoint.parallel.expert.permute import assign, combine, narrowed, permute, weight_grads
from tests.process.parallel.offline_compiler import OfflineDriver, spilled_bytes

TOKENS = (16384, 16384, 5120)  # all multiples of 16, as Triton has kernels of their own for others
ACCESS = r"(?:ld|st)\.global[\w.]*"
found: dict[str, list[Any]] = defaultdict(list)
really = JITFunction.run


def compiled_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
    kernel = really(self, *arguments, grid=grid, warmup=True, **constants)
    found[self.fn.__name__].append(kernel)


def calls(case: dict[str, Any], tokens: int) -> None:
    top_k, hidden, capacity = case["top_k"], case["hidden"], tokens * case["top_k"]
    x = torch.empty(tokens, hidden, dtype=getattr(torch, case["dtype"]))
    weights = torch.empty(tokens, top_k) if case["weighted"] else None
    ids = torch.empty(tokens, top_k, dtype=torch.int64)
    known = assign(ids, first_expert=0, num_experts=case["experts"], capacity=capacity, pad_multiple=case["pad"])
    rows = permute(x, known, weights=weights, zero_tail=False)
    combine(rows, known, weights=weights)
    weight_grads(rows, x, known)
    gate_up = torch.empty(capacity, 2 * case["ffn"], dtype=x.dtype, requires_grad=True)
    out = swiglu(gate_up, known.offsets)
    out.backward(out.detach())
    narrowed(x, getattr(torch, case["wire"]))


def described(case: dict[str, Any]) -> dict[str, Any]:
    driver.set_active(OfflineDriver(case["capability"]))
    found.clear()
    for tokens in TOKENS:
        calls(case, tokens)
    described = {}
    for name, kernels in found.items():
        text = kernels[0].asm["ptx"]
        described[name] = {
            "kernels": len({id(kernel) for kernel in kernels}),
            "spilled_bytes": spilled_bytes(kernels[0].asm["cubin"]),
            "order": [each[0] for each in re.finditer(ACCESS, text)],
        }
    return described


if __name__ == "__main__":
    everywhere: dict[str, Any] = {"on_gpu": lambda tensor: True}
    with (
        patch.object(JITFunction, "run", compiled_only),
        patch.multiple(module, **everywhere),
        patch.multiple(layers, **everywhere, _num_sms=lambda device: 132),
    ):
        json.dump([described(case) for case in json.load(sys.stdin)], sys.stdout)
