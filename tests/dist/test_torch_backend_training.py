"""Backend `counterpoint` under what users of torch write: DTensor, HSDP, pipelines, DDP, compiled functions.

Sums of two ranks have one order: losses, gradients and parameters are those of gloo, bit by bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist import torch_backend_training_programs as programs
from tests.support.ranks import Ranks, run_once


def test_tensor_and_sequence_parallel(four_ranks: Ranks) -> None:
    """DTensor's gathers and reduce_scatters are taken, too, though they arrive as coalesced calls."""
    for ours, gloo, taken in four_ranks.run(programs.sequence_parallel):
        assert ours == gloo
        assert min(taken["all_gather"], taken["reduce_scatter"]) >= 12, taken


@pytest.mark.parametrize(
    ("axes", "operations"),
    [(["replicate"], ["all_reduce"]), (["replicate", "shard"], ["all_gather", "all_reduce", "reduce_scatter"])],
)
def test_hybrid_sharding(four_ranks: Ranks, axes: list[str], operations: list[str]) -> None:
    for ours, gloo, taken in four_ranks.run(programs.hybrid_sharded, axes):
        assert ours == gloo
        assert sorted(taken) == operations
        assert min(taken.values()) >= 3


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_pipelines_with_several_stages_on_a_rank(two_ranks: Ranks, schedule: str) -> None:
    for ours, gloo in two_ranks.run(programs.pipeline, schedule):
        assert ours == gloo


@pytest.mark.parametrize("how", ["static graph", "unused parameters", "uneven inputs", "compiled"])
def test_data_parallel_in_every_way(two_ranks: Ranks, how: str) -> None:
    for ours, gloo, taken in two_ranks.run(programs.data_parallel, how):
        assert ours == gloo
        assert taken["all_reduce"] >= 3, taken


def test_functional_collectives_in_a_full_graph(two_ranks: Ranks) -> None:
    """Once eager, once compiled: every call of both is taken."""
    expected = {"all_gather": 2, "all_reduce": 2, "reduce_scatter": 2}
    assert two_ranks.run(programs.full_graph) == [(True, expected)] * 2


def test_a_group_of_some_ranks(three_ranks: Ranks) -> None:
    """The others have a placeholder of torch, which has no report."""
    first, outside, last = three_ranks.run(programs.part_of_the_ranks)
    assert first == last == (4.0, 2.0, [0, 2], {"all_reduce": 1, "broadcast": 1})
    assert "this rank is not in the group" in outside


@pytest.mark.parametrize(
    "spelling", ["counterpoint", "cpu:counterpoint", "cuda:counterpoint,cpu:gloo", "cpu:gloo,cuda:counterpoint"]
)
def test_the_default_group_by_every_spelling(tmp_path: Path, spelling: str) -> None:
    found = run_once(2, programs.begun_as, spelling, str(tmp_path / "store"))
    for total, values, taken, is_world, of_half in found:
        assert (total, values, taken["all_reduce"], is_world, of_half) == (3.0, [0, 1], 1, True, 0)
