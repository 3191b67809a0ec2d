"""Runs the Triton kernel in its interpreter, on memory of this process: one of its own, as it is a mode of Triton.

Started by path with the cases as JSON on standard input; writes for each whether it gave the bits of `reference`.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import json
import sys
from dataclasses import replace
from typing import Any

import torch

from counterpoint.collectives.cpu.call import reference
from counterpoint.collectives.cuda.lower import ReduceLaunch
from counterpoint.collectives.cuda.sum_kernel import combine
from counterpoint.collectives.cuda.sum_launch import launch_of, with_types
from counterpoint.collectives.program.reductions import Reduction

GUARD = 64  # bytes on both sides of every array that must stay as they are


def array(numel: int, reduction: Reduction, skew: int, seed: int, name: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """`numel` random elements `skew` bytes after a multiple of 64, and all the memory around them."""
    generator = torch.Generator().manual_seed(seed)
    dtype: torch.dtype = getattr(torch, name or reduction.dtype)
    around = torch.randint(0, 100, (numel * dtype.itemsize + 2 * GUARD + 64,), generator=generator).to(torch.uint8)
    start = -around.data_ptr() % 64 + GUARD + skew
    values = around[start : start + numel * dtype.itemsize].view(dtype)
    values.copy_((torch.randn(numel, generator=generator) * 40).to(values.dtype))
    return values, around


def combined(rows: list[torch.Tensor], reduction: Reduction) -> torch.Tensor:
    """`reference`, but bfloat16 cut and not rounded: so does the interpreter, unlike compiled code."""
    if reduction.result_dtype != "bfloat16":
        same: torch.Tensor = reference(rows, reduction)
        return same
    wide: torch.Tensor = reference([row.float() for row in rows], replace(reduction, dtype="float32"))
    return (wide.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def run(case: dict[str, Any]) -> str:
    reduction = Reduction(
        op=case["op"], dtype=case["dtype"], factor=case.get("factor", 1.0), num_sms=case.get("num_sms"),
        result=case.get("result", ""),
    )  # fmt: skip
    numel, world, own, skew = case["numel"], case["world_size"], case["own"], case.get("skew", 0)
    slot = -(-numel * reduction.item_bytes // 16) * 16
    mine, _ = array(numel, reduction, skew, 1)
    staging, _ = array(slot * max(1, world - 1) // reduction.item_bytes, reduction, 0, 2)
    target, around = array(numel, reduction, case.get("target_skew", 0), 3, reduction.result_dtype)
    if case.get("in_place"):
        target = mine
    slots = [staging.data_ptr() + slot * index for index in range(world - 1)]
    rows = [staging.view(-1)[slot * i // reduction.item_bytes :][:numel] for i in range(world - 1)]
    sources, wanted = (
        [*slots[:own], mine.data_ptr(), *slots[own:]],
        combined([*rows[:own], mine, *rows[own:]], reduction),
    )
    call = ReduceLaunch(tuple(sources), target.data_ptr(), numel * reduction.item_bytes, 1)
    launch = launch_of(call, reduction, device_sms=132)
    before = around.clone()
    combine[(case.get("programs", launch.num_programs),)](*launch.arguments, **with_types(launch.constants))
    if not torch.equal(target.view(torch.uint8), wanted.view(torch.uint8)):
        different = (target.view(torch.uint8) != wanted.view(torch.uint8)).nonzero()
        return f"{len(different)} bytes differ, the first at {int(different[0])}: {target[:4]} instead of {wanted[:4]}"
    changed = int((before != around).sum())
    inside = 0 if case.get("in_place") else target.nbytes
    return "equal" if changed <= inside and (before[:GUARD] == around[:GUARD]).all() else "wrote outside"


if __name__ == "__main__":
    json.dump([run(case) for case in json.load(sys.stdin)], sys.stdout)
