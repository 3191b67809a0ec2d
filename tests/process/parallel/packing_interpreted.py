"""Runs the kernel that packs rows by rank in Triton's interpreter, beside operations of torch.

Started by path with the cases as JSON on standard input; writes for each `right`, or what was not.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import json
import sys
from dataclasses import fields
from typing import Any
from unittest.mock import patch

import torch

from counterpoint.parallel.expert import slabs as module
from counterpoint.parallel.expert.slabs import pack
from counterpoint.parallel.expert.token_mechanism import ExpertLayout
from tests.support.routing import routing


def packed(
    *,
    kind: str,
    rank: int,
    ranks: int,
    local: int = 2,
    tokens: int = 23,
    top_k: int = 3,
    first: int = 5,
    room: int = 9,
    scaled: bool = False,
) -> str:
    dice = torch.Generator().manual_seed(tokens)
    ids = routing(kind, tokens, top_k, local * ranks).int()
    weights = torch.rand(ids.shape, generator=dice)
    scales = torch.rand(tokens, 1, generator=dice) if scaled else None
    layout = ExpertLayout(
        rank=rank, world_size=ranks, experts=local * ranks, top_k=top_k, max_tokens=max(1, tokens), hidden=8
    )

    def made() -> Any:
        return pack(ids, weights, scales, layout, first=first, room=room)

    wanted = made()
    with patch.multiple(module, on_gpu=lambda tensor: True, CHOICES=16):
        got = made()
    for field in fields(wanted):
        one, other = getattr(got, field.name), getattr(wanted, field.name)
        if isinstance(one, torch.Tensor) and (one.dtype != other.dtype or not torch.equal(one, other)):
            return f"{field.name}: {one} instead of {other}"
    return "right"


if __name__ == "__main__":
    json.dump([packed(**case) for case in json.load(sys.stdin)], sys.stdout)
