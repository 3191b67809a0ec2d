"""Overrides of torchtitan between processes: results and derivatives are those of one process with all of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist import torchtitan_programs as programs
from tests.support.ranks import Ranks

STOCK = "AllToAllTokenDispatcher"


@pytest.mark.parametrize("mechanism", ["torch", "gather", "slabs", "auto"])
def test_tokens_reach_their_experts(two_ranks: Ranks, mechanism: str) -> None:
    """Two layers share a dispatcher, which the first dispatch makes for the rank with most tokens."""
    for early, made, paths in two_ranks.run(programs.routed, [5, 12], {"mechanism": mechanism}, STOCK, False):
        assert (early, made) == (0, 1)
        assert mechanism in ("auto", *paths)


@pytest.mark.parametrize("mechanism", ["torch", "gather", "slabs"])
def test_scores_before_experts(two_ranks: Ranks, mechanism: str) -> None:
    """They travel beside the tokens, which takes a second dispatcher."""
    for _, made, _ in two_ranks.run(programs.routed, [9, 4], {"mechanism": mechanism}, STOCK, True):
        assert made == 2


def test_buffers_are_made_when_meshes_are_wired(two_ranks: Ranks) -> None:
    """Where the override says how large a token is, and how many there are."""
    options: dict[str, Any] = {"mechanism": "gather", "hidden": programs.HIDDEN, "max_tokens": 16}
    for early, made, _ in two_ranks.run(programs.routed, [7, 7], options, STOCK, False):
        assert (early, made) == (1, 1)


def test_dispatchers_end_with_their_group(two_ranks: Ranks) -> None:
    """Their threads and memory are given back when torch destroys it."""
    assert two_ranks.run(programs.ended) == [(True, False)] * 2


@pytest.mark.parametrize("scores_first", [False, True])
def test_rows_are_padded_for_quantized_experts(two_ranks: Ranks, scores_first: bool) -> None:
    """The numbers of rows that are returned have the padding in them."""
    two_ranks.run(programs.routed, [6, 10], {"mechanism": "gather"}, "TorchAOTokenDispatcher", scores_first)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
def test_linear_layers(two_ranks: Ranks, sequence: bool, bias: bool) -> None:
    """With and without sequence parallelism, and two projections in one weight."""
    two_ranks.run(programs.linears, sequence, bias)
