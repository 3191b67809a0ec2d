"""What a group of tensor parallelism raises and keeps, without peers."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from counterpoint.errors import PeerTimeout
from counterpoint.pair.arrivals import ShardedRows
from counterpoint.parallel.tensor.group import TensorGroup
from counterpoint.parallel.tensor.overlapped import Weight


@pytest.fixture
def group() -> Iterator[TensorGroup]:
    """One rank that believes to be one of three, a matmul of which has polled for the second chunk of rank 2."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    made = TensorGroup(dist.group.WORLD)
    made.world_size = 3
    made._error = torch.tensor(1 + ShardedRows(rows=(4, 4, 4), chunk_rows=2).word(peer=2, chunk=1))
    yield made
    dist.destroy_process_group()


def test_rows_that_never_came_are_named_by_check(group: TensorGroup) -> None:
    """A matmul that has polled in vain goes on with wrong rows."""
    with pytest.raises(PeerTimeout, match="rank 2 has not sent chunk 1 of its rows"):
        group.check()


def test_rows_that_never_came_are_named_by_the_next_call(group: TensorGroup) -> None:
    """Who never calls `check` is told, too."""
    with pytest.raises(PeerTimeout, match="rank 2 has not sent chunk 1 of its rows") as raised:
        group.matmul_all_reduce(torch.zeros(3, 8), Weight(matrix=torch.zeros(8, 8)), "sum")
    assert raised.value.ranks == (2,)
