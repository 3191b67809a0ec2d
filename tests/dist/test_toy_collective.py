"""A collective that is one row of `OPERATIONS` and one program runs between processes, and the others run by name."""

from __future__ import annotations

import pytest

from tests.dist import toy_programs
from tests.support.ranks import Ranks


@pytest.mark.parametrize("in_symmetric_memory", [True, False], ids=["empty", "plain"])
def test_a_toy_collective_runs_on_cpu_processes(three_ranks: Ranks, in_symmetric_memory: bool) -> None:
    """Every rank has what the one before it gave, twice in a row, in symmetric and in plain memory."""
    found = three_ranks.run(toy_programs.shifted, in_symmetric_memory)
    assert found == [[2.0, 12.0], [0.0, 10.0], [1.0, 11.0]]


def test_a_toy_collective_is_measured(three_ranks: Ranks) -> None:
    """Its result is right, and both mechanisms have a time and a bus bandwidth."""
    outcome = three_ranks.run(toy_programs.measured)[0]
    assert [(row.mechanism, row.time.us > 0, row.gb_per_s > 0) for row in outcome.blocks] == [
        ("gloo", True, True),
        ("zero_sm", True, True),
    ]


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"])
def test_a_collective_by_its_name_is_the_same_as_its_method(three_ranks: Ranks, name: str) -> None:
    """Bit for bit."""
    assert three_ranks.run(toy_programs.by_name, name) == [True] * 3
