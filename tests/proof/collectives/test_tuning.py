"""The best tunings of a sweep of sizes."""

from itertools import pairwise

import pytest

from counterpoint.collectives.program.calls import Call
from counterpoint.collectives.program.clock import simulate
from counterpoint.collectives.program.operations import all_reduce, plan_all, reduce_scatter
from counterpoint.collectives.program.steps import Tuning
from counterpoint.collectives.program.tuning import best_tuning
from counterpoint.machine.bus_bandwidth import bus_gb_per_s
from counterpoint.machine.profile import Rates, default_profile

H200 = default_profile().rates


MIB = 1 << 20


SIZES = tuple(1 << power for power in (20, 22, 24, 26, 28, 30))  # of the full array


def us(call: Call, tuning: Tuning, rates: Rates = H200) -> float:
    return simulate(plan_all(call, tuning), rates).us


def reduction(operation: str, world_size: int, num_bytes: int) -> Call:
    if operation == "all_reduce":
        return all_reduce(world_size, num_bytes)
    return reduce_scatter(world_size, num_bytes // world_size)


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("operation", ["reduce_scatter", "all_reduce"])
def test_best_reductions_grow_no_slower_with_size(operation: str, world_size: int) -> None:
    """Bus bandwidth never falls from one size to the next."""
    calls = [(size, reduction(operation, world_size, size)) for size in SIZES]
    found = [bus_gb_per_s(operation, size, world_size, us(call, best_tuning(call))) for size, call in calls]
    assert all(small < large for small, large in pairwise(found))
