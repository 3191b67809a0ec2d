"""Runs the kernels for rows of experts in Triton's interpreter, beside operations of torch.

Started by path with the cases as JSON on standard input; writes for each `right`, or what was not. The interpreter
cuts float32 off where a GPU rounds it to bfloat16, so that what is rounded there is float16 here, and float32.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import json
import sys
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from counterpoint.parallel.expert import layers, slabs
from counterpoint.parallel.expert import permute as module
from counterpoint.parallel.expert.layers import swiglu
from counterpoint.parallel.expert.permute import Assignment, assign, combine, narrowed, permute, weight_grads
from counterpoint.parallel.expert.token_mechanism import ExpertLayout
from tests.support.routing import routing


@dataclass
class Case:
    run: str
    kind: str = "random"
    tokens: int = 14
    top_k: int = 3
    experts: int = 5
    ranks: int = 2
    pad: int = 1
    capacity: int | None = None
    hidden: int = 40
    dtype: str = "float32"
    weighted: bool = False
    ids: str = "int64"
    rank: int = 0  # whose choices are packed, from place `first` on, into `room` for each rank
    first: int = 5
    room: int = 9

    def __post_init__(self) -> None:
        self.dice = torch.Generator().manual_seed(self.tokens)
        chosen = routing(self.kind, self.tokens, self.top_k, self.experts * self.ranks)
        beside = torch.full_like(chosen, self.experts)  # that nobody reads, as rows of a table have more columns
        self.chosen = torch.cat([chosen, beside], dim=1).to(getattr(torch, self.ids))[:, : self.top_k]
        self.x = self.random(self.tokens, self.hidden)
        self.weights = torch.rand(self.tokens, self.top_k, generator=self.dice) if self.weighted else None

    def random(self, *shape: int) -> Tensor:
        values: Tensor = torch.randn(*shape, generator=self.dice).to(getattr(torch, self.dtype))
        return values

    def assigned(self) -> Assignment:
        room = self.tokens * self.top_k + self.experts * (self.pad - 1)
        capacity = -(-room // self.pad) * self.pad if self.capacity is None else self.capacity
        return assign(
            self.chosen, first_expert=self.experts, num_experts=self.experts, capacity=capacity, pad_multiple=self.pad
        )


def by_kernels(use: bool = True) -> Any:
    """Take kernels wherever the tensors are, with small blocks, so that small tensors have several."""
    sizes: dict[str, Any] = {
        "CHOICES": 32,
        "SCANNED": 4,
        "BLOCK_BYTES": 256,
        "DOTS": 256,
        "ZERO_ROWS": 8,
        "ZERO_COLUMNS": 64,
    }
    return patch.multiple(module, on_gpu=lambda tensor: use, **sizes)


def differing(pairs: dict[str, tuple[Tensor, Tensor]]) -> str:
    for what, (got, wanted) in pairs.items():
        if got.dtype != wanted.dtype or not torch.equal(got, wanted):
            return f"{what}: {got} instead of {wanted}"
    return "right"


def assigns(case: Case) -> str:
    wanted = case.assigned()
    with by_kernels():
        got = case.assigned()
    names = ("offsets", "slots", "sources", "missing")
    return differing({name: (getattr(got, name), getattr(wanted, name)) for name in names})


def moves(case: Case) -> str:
    """Rows and sums bit by bit; what is not written stays NaN in both; dots up to their order."""
    found = case.assigned()
    results = []
    for kernels in (False, True):
        rows = torch.full((found.capacity, case.hidden), float("nan"), dtype=case.x.dtype)
        half = case.tokens // 2
        with by_kernels(kernels):
            whole = permute(case.x, found, weights=case.weights)
            for part in (slice(half, case.tokens), slice(half)):
                weights = None if case.weights is None else case.weights[part]
                some = found.of_tokens(part.start or 0, part.stop)
                permute(case.x[part], some, weights=weights, out=rows, zero_tail=False)
            sums = combine(whole, found, weights=case.weights)
            wide = combine(whole, found, weights=case.weights, out=torch.empty(case.x.shape))
            dots = weight_grads(whole, case.x, found)
        results.append({"whole": whole, "rows": rows.nan_to_num(nan=7.0), "sums": sums, "wide": wide, "dots": dots})
    wanted, got = results
    torch.testing.assert_close(got.pop("dots"), wanted.pop("dots"))
    return differing({name: (got[name], wanted[name]) for name in got})


def widens(case: Case) -> str:
    """Float8 tokens with a scale each, into rows of float32; and copied as they are."""
    found = case.assigned()
    scales = case.x.abs().amax(1, keepdim=True).float() / 448
    narrow = (case.x / scales).to(torch.float8_e4m3fn)
    wanted = permute(narrow.float() * scales, found)
    with by_kernels():
        got = permute(narrow, found, weights=scales.expand(-1, case.top_k), out=torch.empty_like(wanted))
        same = permute(narrow, found)
    return differing({"rows": (got, wanted), "copies": (same.float(), permute(narrow.float(), found))})


def spares(case: Case) -> str:
    """NaN in rows without a choice, and in weights of choices without a row, are not read."""
    found, weights = case.assigned(), torch.rand(case.tokens, case.top_k, generator=case.dice)
    rows = permute(case.x, found)
    poisoned = torch.where((found.sources < 0)[:, None], float("nan"), rows)
    spoiled = torch.where(found.slots < 0, float("nan"), weights)
    with by_kernels():
        sums = combine(poisoned, found, weights=spoiled)
        copies = permute(case.x, found, weights=spoiled)
        dots = weight_grads(poisoned, case.x, found)
    wanted = combine(rows, found, weights=weights), permute(case.x, found, weights=weights)
    return "dots" if dots.isnan().any() else differing({"sums": (sums, wanted[0]), "copies": (copies, wanted[1])})


def activates(case: Case) -> str:
    """Values and derivatives of the rows that are used; NaN past them stays where it is."""
    used = case.tokens * 2 // 3
    offsets = torch.tensor([used // 2, used], dtype=torch.int32)
    results = []
    for kernels in (False, True):
        gate_up = torch.cat([case.x, case.x.roll(1, 0)], 1)
        gate_up[used:] = float("nan")
        sizes: dict[str, Any] = {"ROWS": 4, "COLUMNS": 16, "PROGRAMS": 1}
        with patch.multiple(layers, on_gpu=lambda tensor, k=kernels: k, _num_sms=lambda device: 3, **sizes):
            out = swiglu(gate_up.requires_grad_(), offsets)
            out.backward(case.x)
        assert gate_up.grad is not None
        results += [(out.detach()[:used], gate_up.grad[:used])]
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted)
    return "right"


def narrows(case: Case) -> str:
    """Bit by bit, also of a token of zeros; to float16, as the interpreter forgets carries when it rounds to float8."""
    case.x[:1] = 0
    values, scales = narrowed(case.x, torch.float16)
    sizes: dict[str, Any] = {"ELEMENTS": 128}
    with patch.multiple(module, on_gpu=lambda tensor: True, **sizes):
        got_values, got_scales = narrowed(case.x, torch.float16)
    return differing({"values": (got_values, values), "scales": (got_scales, scales)})


def packs(case: Case) -> str:
    """Rows by rank, for slabs; where tokens are weighted, they have a scale each."""
    weights = torch.rand(case.tokens, case.top_k, generator=case.dice)
    scales = torch.rand(case.tokens, 1, generator=case.dice) if case.weighted else None
    layout = ExpertLayout(
        rank=case.rank, world_size=case.ranks, experts=case.experts * case.ranks, top_k=case.top_k,
        max_tokens=max(1, case.tokens), hidden=8,
    )  # fmt: skip
    results = []
    for kernels in (False, True):
        with patch.multiple(slabs, on_gpu=lambda tensor, k=kernels: k, CHOICES=16):
            made = slabs.pack(case.chosen.contiguous(), weights, scales, layout, first=case.first, room=case.room)
        results.append({name: value for name, value in vars(made).items() if isinstance(value, Tensor)})
    wanted, got = results
    return differing({name: (got[name], wanted[name]) for name in wanted})


if __name__ == "__main__":
    every = (assigns, moves, widens, spares, activates, narrows, packs)
    runs = {each.__name__: each for each in every}
    json.dump([runs[case["run"]](Case(**case)) for case in json.load(sys.stdin)], sys.stdout)
