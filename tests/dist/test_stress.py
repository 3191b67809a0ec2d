"""FSDP2, tensor and expert parallelism, and the backend on the same 8 ranks: values are those of stock."""

import pytest

from tests.dist import stress_programs
from tests.support.ranks import Ranks

STEPS = 12


@pytest.mark.parametrize("seed", range(2, 8))
def test_training_by_all_at_once_is_that_of_stock(eight_ranks: Ranks, seed: int) -> None:
    """Losses, gradients and parameters, within twice stock's own error; calls of the backend exactly."""
    found = eight_ranks.run(stress_programs.stressed, seed, STEPS)
    assert max(rank.error for rank in found) <= 2 * max(rank.stock for rank in found)
    for rank in found:
        tokens, matmuls, calls = rank.paths
        assert tokens in ({"gather"}, {"slabs"})
        assert matmuls & {"cuts", "serial"}
        assert "zero_sm" in calls
        assert rank.copied == []
