"""Memory of single calls: what was given back serves the next call, on every rank the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from counterpoint.parallel.call_memory import CallMemory


class Counting:
    """A communicator that only makes memory."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.made: list[bool] = []  # whether with an early release

    def empty(self, *shape: int, dtype: torch.dtype, early_release: bool = False) -> Tensor:
        self.made.append(early_release)
        return torch.empty(shape, dtype=dtype)


@pytest.fixture
def communicator() -> Any:
    return Counting()


def test_what_was_given_back_is_handed_out_again(communicator: Any) -> None:
    """In another shape and dtype, too; not as long as it is lent."""
    memory = CallMemory(communicator)
    first, second = (memory.empty(4, 8, dtype=torch.float32) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()
    memory.give_back(second)
    again = memory.empty(50, dtype=torch.bfloat16)
    assert (again.data_ptr(), again.shape, again.dtype) == (second.data_ptr(), (50,), torch.bfloat16)
    assert communicator.made == [False, False]


def test_the_least_that_fits_is_taken(communicator: Any) -> None:
    """And nothing of more than twice the size: a table does not take the place of tokens."""
    memory = CallMemory(communicator)
    sizes = [memory.empty(count, dtype=torch.uint8) for count in (1000, 150, 120)]
    for one in sizes:
        memory.give_back(one)
    assert memory.empty(100, dtype=torch.uint8).data_ptr() == sizes[2].data_ptr()
    assert memory.empty(100, dtype=torch.uint8).data_ptr() == sizes[1].data_ptr()
    memory.empty(100, dtype=torch.uint8)
    assert len(communicator.made) == 4


def test_memory_that_is_not_kept_is_new_each_time(communicator: Any) -> None:
    """Peers are told when it is free."""
    memory = CallMemory(communicator, keeps=False)
    for _ in range(2):
        memory.give_back(memory.empty(64, dtype=torch.uint8))
    memory.shared("gathered", 64, dtype=torch.uint8)
    assert communicator.made == [True, True, True]
