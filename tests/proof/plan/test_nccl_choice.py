"""The predicted time of a collective over sizes that lie close together."""

from itertools import pairwise

import pytest

from counterpoint.plan.job.cluster import Cluster, find_gpu
from counterpoint.plan.network.estimate import estimate
from counterpoint.plan.network.group import Group
from counterpoint.plan.network.network import OPERATIONS, levels, network_of

HOST = network_of(Cluster(gpu=find_gpu("H200"), levels=levels("nvlink-h100", 8)))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_time_never_falls_where_protocols_change(operation: str) -> None:
    """Over 2 to 8 H200, from 1 KiB to 1 GiB in steps of 3 %."""
    for ranks in range(2, 9):
        times = [estimate(operation, 2 ** (step / 20), Group(ranks=ranks), HOST).us for step in range(200, 601)]
        assert all(few <= many * (1 + 1e-12) for few, many in pairwise(times))
