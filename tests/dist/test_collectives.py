"""Collectives between real processes: random ones with delays at random steps, beside gloo, and their memory."""

from typing import Any

import pytest
import torch

from tests.dist import collective_programs as programs
from tests.support.ranks import Ranks, run_once


@pytest.mark.parametrize("seed", [0, 1])
def test_random_collectives_on_two_ranks(two_ranks: Ranks, seed: int) -> None:
    """Every bit is right: any operation, dtype, size, alignment, channel and memory, in place or not, ranks delayed."""
    assert two_ranks.run(programs.random_collectives, seed, 1000, 1 << 20) == [1000] * 2


@pytest.mark.parametrize("seed", [2, 3])
def test_random_collectives_on_three_ranks(three_ranks: Ranks, seed: int) -> None:
    assert three_ranks.run(programs.random_collectives, seed, 600, 1 << 18) == [600] * 3


@pytest.mark.parametrize(("world_size", "count"), [(1, 200), (4, 200), *((5, 100), (6, 80), (7, 60), (8, 60))])
def test_random_collectives_on_more_and_fewer_ranks(world_size: int, count: int) -> None:
    assert run_once(world_size, programs.random_collectives, 4, count, 1 << 18) == [count] * world_size


def test_large_blocks_are_cut_into_no_more_chunks_than_there_are_flags(two_ranks: Ranks) -> None:
    assert two_ranks.run(programs.random_collectives, 6, 20, 1 << 23, 16) == [20] * 2


@pytest.mark.parametrize("operation", ["all_gather", "all_to_all", "broadcast", "scatter", "gather"])
def test_data_moves_as_with_gloo(three_ranks: Ranks, operation: str) -> None:
    assert three_ranks.run(programs.against_gloo, operation) == [True] * 3


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_sums_are_no_worse_than_those_of_gloo(three_ranks: Ranks, operation: str, dtype: torch.dtype) -> None:
    """Their error against float64 is at most twice that of torch's own sum; half of it where accumulators are wider."""
    for ours, theirs in three_ranks.run(programs.errors_of_a_sum, operation, dtype):
        assert ours <= (theirs if dtype.itemsize == 2 else 2 * theirs)


@programs.DEVICES
def test_channels_run_at_the_same_time(two_ranks: Ranks, device: Any) -> None:
    assert two_ranks.run(programs.channels_do_not_wait, device) == [(True, True)] * 2


def test_communicators_run_at_the_same_time(three_ranks: Ranks) -> None:
    assert three_ranks.run(programs.groups_at_once) == [[6.0, 6.0, 4.0], [6.0, 6.0], [6.0, 6.0, 4.0]]


def test_buffers_are_used_again(two_ranks: Ranks) -> None:
    for early, late in two_ranks.run(programs.steps_of_training, 1000):
        assert late == early


def test_buffers_have_the_same_place_on_all_ranks(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(programs.same_place)
    assert first == second


def test_the_own_block_can_be_left_to_the_reader(three_ranks: Ranks) -> None:
    """Everything else of an all_to_all comes, and its place stays as it was; without symmetric memory it cannot be."""
    for rank, (output, told) in enumerate(three_ranks.run(programs.own_block_left)):
        assert output == [-1.0 if peer == rank else 10.0 * peer + rank for peer in range(3)]
        assert "has to be from empty()" in told


def test_outputs_released_early_are_right(three_ranks: Ranks) -> None:
    """Held for different times, used once or twice, on two channels, with delays: and no more blocks than are alive."""
    for wrong, blocks in three_ranks.run(programs.early_steps, 300):
        assert (wrong, blocks <= 10) == (0, True)


def test_what_cannot_be_released_early_is_refused(two_ranks: Ranks) -> None:
    """Calls of one to all, all to one, and sums, before they begin; blocks that differ are told."""
    told = two_ranks.run(programs.early_refused)
    assert all("into a tensor of empty(early_release=True)" in text for ours in told for text in ours[:2]), told
    assert "empty(early_release=True)" in told[0][2], told
    assert any("into early-release block" in ours[3] and ours[3].startswith("Misconfigured") for ours in told), told


def test_nothing_is_left_behind(two_ranks: Ranks) -> None:
    assert two_ranks.run(programs.left_behind) == [(0, 0)] * 2
