"""How the time of matmuls is measured, on a GPU that tells what was launched on it."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from counterpoint.parallel.tensor import plans


class Clock:
    """A GPU on which launch number i takes 10 (i + 1) µs, twice as long in the first round."""

    def __init__(self) -> None:
        self.us, self.round, self.order = 0.0, 0, list[int]()

    def launch(self, index: int) -> None:
        self.order.append(index)
        self.us += 10.0 * (index + 1) * (2 if self.round == 1 else 1)

    def sleep(self, cycles: int) -> None:
        self.round += 1


class Moment:
    """An event of that GPU."""

    clock: Clock

    def __init__(self, enable_timing: bool) -> None:
        self.us = -1.0

    def record(self) -> None:
        self.us = self.clock.us

    def elapsed_time(self, end: Moment) -> float:
        return (end.us - self.us) / 1000


def test_launches_are_timed_in_changing_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets its own time, whenever it ran; the first round does not count."""
    clock = Moment.clock = Clock()
    monkeypatch.setattr(torch.cuda, "Event", Moment)
    monkeypatch.setattr(torch.cuda, "_sleep", clock.sleep)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    launches = [partial(clock.launch, index) for index in range(8)]
    assert plans._median_us(launches, torch.device("cpu")) == pytest.approx([10.0 * (index + 1) for index in range(8)])
    rounds = [tuple(clock.order[start : start + 8]) for start in range(0, len(clock.order), 8)]
    assert [sorted(one) for one in rounds] == [list(range(8))] * len(rounds)
    assert len(set(rounds)) == len(rounds) > 3


def test_the_host_is_timed_by_launches() -> None:
    """On any device: more than nothing, and less than a blocking call."""
    assert 0.0 < plans._launch_us(torch.device("cpu")) < 10_000.0
