"""Memory of single calls: what was given back serves the next call, on every rank the same."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from counterpoint.parallel import call_memory
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


def test_shared_memory_is_new_each_time(communicator: Any) -> None:
    """Peers are told when it is free."""
    memory = CallMemory(communicator)
    for _ in range(2):
        memory.shared("gathered", 64, dtype=torch.uint8)
    assert communicator.made == [True, True]


@pytest.mark.parametrize(("last", "waited_for"), [(0, "the default stream"), (7, "stream 7")])
def test_another_stream_waits_for_the_last_user(
    communicator: Any, monkeypatch: pytest.MonkeyPatch, last: int, waited_for: str
) -> None:
    """Also for the default stream, whose handle is 0; torch makes a new stream of an external one with that handle."""
    communicator.device, handles, waited = torch.device("cuda", 0), [last, last, last, 5], list[str]()
    monkeypatch.setattr(call_memory, "raw_stream", lambda: lambda index: handles.pop(0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(wait_stream=waited.append))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "the default stream")
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: f"stream {handle}")
    memory = CallMemory(communicator)
    memory.give_back(memory.empty(64, dtype=torch.uint8))
    memory.give_back(memory.empty(64, dtype=torch.uint8))
    assert waited == []
    memory.empty(64, dtype=torch.uint8)
    assert waited == [waited_for]
