"""Graphs of torch.compile give with fused matmuls what they gave before, and nothing of torch's collectives is left."""

from __future__ import annotations

import pytest
import torch

from tests.dist import tensor_compiled_programs as programs
from tests.support.ranks import Ranks
from tests.support.tensor_graphs import CASES


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.runs])
def test_small_graphs_give_the_same(two_ranks: Ranks, name: str) -> None:
    """Bit by bit, as their numbers are whole."""
    for pairs in two_ranks.run(programs.both_results, name):
        assert pairs
        for before, after in pairs:
            assert before.dtype == after.dtype
            assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("bias", "sequence", "batch", "pieces"),
    [(True, True, 2, False), (False, True, 1, True), (True, False, 2, False)],
    ids=["sequence parallel", "a batch of one, in pieces", "replicated"],
)
def test_a_compiled_block_gives_the_same_without_torchs_collectives(
    two_ranks: Ranks, bias: bool, sequence: bool, batch: int, pieces: bool
) -> None:
    """Forward and backward, by inductor; the gathers of q, k and v are one, so are the sums of their gradients."""
    for expected, results, report, counts, paths in two_ranks.run(programs.trained, bias, sequence, batch, pieces):
        assert paths <= ({"cuts", "serial"} if pieces else {"torch"})
        rtol, atol = (1e-5, 1e-6) if pieces else (1e-12, 1e-14)
        assert len(expected) == len(results) > 9
        for one, other in zip(expected, results, strict=True):
            torch.testing.assert_close(other, one, rtol=rtol, atol=atol)
        forward, backward = (dict(one) for one in counts)
        if sequence:
            gather, scatter = "counterpoint::all_gather_matmul", "counterpoint::matmul_reduce_scatter"
            assert backward == {gather: 2, scatter: 2}
            if bias:
                gather, scatter = "counterpoint::all_gather_linear", "counterpoint::linear_reduce_scatter"
            assert forward == {gather: 2, scatter: 2}
            matmuls = [3, 1, 2, 1, 1, 2, 1, 3]
        else:
            assert forward == {"counterpoint::linear_all_reduce": 2}
            assert backward == {"counterpoint::matmul_all_reduce": 2}
            matmuls = [1, 1, 2, 3]
        assert [int(row.runs.split()[0]) for row in report.require().modules] == matmuls
        assert {row.name.split()[0] for row in report.modules} == {"forward", "backward"}


def test_a_graph_from_inductors_cache_is_as_it_was_fused(two_ranks: Ranks) -> None:
    """Another choice of groups is not taken from the cache."""
    for (first, second, third), (expected, *results) in two_ranks.run(programs.compiled_thrice):
        assert [row.runs for row in first.require().modules] == ["3 matmuls"]
        kinds = [row.name.split()[0] for row in first.modules]
        assert kinds in (["inference"], ["forward"])  # torch 2.11 does not tell them apart
        assert (first.cached_graphs, second.cached_graphs, third.cached_graphs) == (0, 1, 0)
        assert second.require().modules == ()
        assert [row.torch_why for row in third.modules] == ["its group is not one of those to fuse"]
        for result in results:
            assert torch.equal(result, expected)
