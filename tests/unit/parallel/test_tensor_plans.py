"""How and when the time of matmuls is measured, on a GPU that tells what was launched on it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from counterpoint.machine.profile import default_profile
from counterpoint.pair.arrivals import ShardedRows
from counterpoint.pair.matmul_choice import MatmulPlan
from counterpoint.parallel.options import TensorChoice, TensorOptions
from counterpoint.parallel.tensor import plans
from counterpoint.parallel.tensor.plans import MatmulShape, Plans


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

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Moment) -> float:
        return (end.us - self.us) / 1000


def test_launches_are_timed_in_changing_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets its own time, whenever it ran; the first round does not count."""
    clock = Moment.clock = Clock()
    monkeypatch.setattr(torch.cuda, "Event", Moment)
    monkeypatch.setattr(torch.cuda, "_sleep", clock.sleep)
    launches = [partial(clock.launch, index) for index in range(8)]
    assert plans._median_us(launches) == pytest.approx([10.0 * (index + 1) for index in range(8)])
    rounds = [tuple(clock.order[start : start + 8]) for start in range(0, len(clock.order), 8)]
    assert [sorted(one) for one in rounds] == [list(range(8))] * len(rounds)
    assert len(set(rounds)) == len(rounds) > 3


def test_the_host_is_timed_by_launches() -> None:
    """On any device: more than nothing, and less than a blocking call."""
    assert 0.0 < plans._launch_us(torch.device("cpu")) < 10_000.0


class Measured:
    """Plans of a rank of two on a GPU whose matmuls take 1 µs for 10 rows; `asked` says which were timed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mechanism: TensorChoice = "auto") -> None:
        self.asked: list[tuple[int, int]] = []
        self.plans = Plans(None, default_profile(), TensorOptions(mechanism=mechanism))
        monkeypatch.setattr(plans, "gather_values", lambda _, value: [value, value])
        monkeypatch.setattr(plans, "_launch_us", lambda _: 1.0)
        monkeypatch.setattr(plans, "_measured", self.measured)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def measured(self, rows: int, columns: int, k: int, *_: Any) -> tuple[tuple[int, float], ...]:
        self.asked.append((columns, k))
        return tuple((count, count / 10) for count in range(128, rows + 1, 128))

    def plan(self, rows: int, columns: int = 4096) -> MatmulPlan:
        shape = MatmulShape(
            operation="all_gather_matmul", layout=ShardedRows(rows=(rows // 2, rows // 2)), k=2048, columns=(columns,),
            dtype="bfloat16", num_bytes=rows * 2048 * 2,
        )  # fmt: skip
        return self.plans.get(shape, torch.device("cuda"))[0]

    def plan_in_backward(self, rows: int) -> MatmulPlan:
        found: list[MatmulPlan] = []
        x = torch.zeros(1, requires_grad=True)
        x.register_hook(lambda _: found.append(self.plan(rows)))
        x.sum().backward()
        return found[0]


def test_one_measurement_serves_all_numbers_of_rows_of_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a weight and dtype; also more rows than twice those that were measured."""
    gpu = Measured(monkeypatch)
    alone = [gpu.plan(rows).alone_us for rows in (1000, 96, 2050, 40_000)]
    assert gpu.asked == [(4096, 2048)]
    assert alone == pytest.approx([100.0, 12.8, 205.0, 4000.0])
    gpu = Measured(monkeypatch)
    gpu.plan(1000)
    gpu.plan(1000, columns=512)
    assert gpu.asked == [(4096, 2048), (512, 2048)]


def test_nothing_is_measured_in_a_backward_but_in_the_next_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does not know is estimated."""
    gpu = Measured(monkeypatch)
    assert (gpu.plan_in_backward(1000).estimated, gpu.asked) == (True, [])
    # once; then the backward knows it
    gpu = Measured(monkeypatch)
    gpu.plan_in_backward(1000)
    assert [gpu.plans.catch_up(), gpu.plans.catch_up()] == [True, False]
    assert (gpu.plan_in_backward(2000).estimated, gpu.asked) == (False, [(4096, 2048)])


def test_a_backward_does_not_catch_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has matmuls of other layers under way."""
    gpu, found = Measured(monkeypatch), list[bool]()
    gpu.plan_in_backward(1000)
    x = torch.zeros(1, requires_grad=True)
    x.register_hook(lambda _: found.append(gpu.plans.catch_up()))
    x.sum().backward()
    assert (found, gpu.asked) == ([False], [])


def test_measurements_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest one goes, on all ranks alike."""
    monkeypatch.setattr(plans, "_MAX_CURVES", 2)
    gpu = Measured(monkeypatch)
    for columns in (512, 1024, 2048, 512):
        gpu.plan(1000, columns)
    assert [columns for columns, _ in gpu.asked] == [512, 1024, 2048, 512]
