"""Plan the matmuls of a process group, once for each shape, from measurements on its GPUs, equally on all ranks.

A matmul is measured once for each `[k, n]` and dtype, at several numbers of rows, in the first forward call that has
it: the curve then serves all numbers of rows. Nothing is measured in a backward: a matmul that a backward needs and
that was not measured is estimated, and measured in the next forward call.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from statistics import median
from typing import Any, TypeVar

import torch

from counterpoint.collectives.host.group import gather_values
from counterpoint.errors import Unsupported
from counterpoint.machine.profile import Profile
from counterpoint.pair.arrivals import ShardedMatmul, ShardedRows, TensorOperation
from counterpoint.pair.curves import DTYPES, RowCurve, estimated_curve
from counterpoint.pair.matmul_choice import MatmulMechanism, MatmulPlan, RowAxis, choose_matmul, cut, with_best_chunks
from counterpoint.parallel.follow_tuning import FollowedTuning
from counterpoint.parallel.options import TensorChoice, TensorOptions
from counterpoint.parallel.tensor.overlapped import Steps
from counterpoint.tuned.choices import matmul_workload

T = TypeVar("T")
_POINTS, _REPEATS = 64, 5  # of a measured curve; with half of the points, cuts miss where waves begin
_TILE = 128  # points are at multiples of this many rows
_MAX_CURVES = 1024  # number of curves that one group keeps
_HOST_LAUNCHES: dict[MatmulMechanism, int] = {"torch": 10, "serial": 20, "cuts": 20}
"""Holds the host's time for a call, as a multiple of the launch of a matmul (benchmarks/tensor_host.py measured it)."""


@dataclass(frozen=True, kw_only=True)
class MatmulShape:
    """Describes the calls that share a plan: operation, layout and sizes, equal on all ranks."""

    operation: TensorOperation
    layout: ShardedRows  # without its chunks, which the plan chooses
    k: int
    columns: tuple[int, ...]  # columns of each weight
    dtype: str  # torch's name of the operands' dtype
    num_bytes: int  # bytes of the whole array that is communicated


def asked_mechanism(
    shape: MatmulShape, options: TensorOptions, tuning: FollowedTuning | None
) -> tuple[TensorChoice, str]:
    """Return the mechanism that the options, or else a tuning, ask for (`auto`: the fastest by prediction), and why."""
    asked = options.mechanism
    if asked != "auto" or tuning is None:
        return asked, f"asked for {asked}"
    found = tuning.find(
        shape.operation,
        ranks=shape.layout.world_size,
        num_bytes=shape.num_bytes,
        dtype=shape.dtype,
        compute=matmul_workload(shape.layout.total, sum(shape.columns), shape.k),
    )
    if found is None:
        return "auto", ""
    mechanism: Any = "torch" if found.stays else found.mechanism
    return mechanism, found.why


class Plans:
    """Plans the calls of one group; all ranks ask for the same shapes in the same order."""

    def __init__(
        self, group: Any, profile: Profile, options: TensorOptions, tuning: FollowedTuning | None = None
    ) -> None:
        self._group, self._profile, self._options, self._tuning = group, profile, options, tuning
        self._measured: dict[Hashable, Any] = {}  # curves and factors, by kind and shape of matmul
        self.estimated: dict[MatmulShape, torch.device] = {}  # shapes planned in a backward, without measurements
        self._host_us: dict[MatmulMechanism, float] | None = None

    def get(self, shape: MatmulShape, device: torch.device) -> tuple[MatmulPlan, Steps]:
        """Return this rank's plan of a call, and the plan's pieces as `Steps`.

        Raises:
            Unsupported: nothing is known of such matmuls, or they cannot be measured in a graph capture.
        """
        if shape.dtype not in DTYPES:
            raise Unsupported(f"no plan for matmuls of {shape.dtype}")
        layout = shape.layout
        curves = tuple(self._curve(shape, columns, device) for columns in shape.columns)
        task = with_best_chunks(
            ShardedMatmul(operation=shape.operation, curves=curves, shard_rows=layout.rows, batch=layout.batch),
            self._profile,
        )
        asked, why = asked_mechanism(shape, self._options, self._tuning)
        plan = self._chosen(task, shape.layout.rank, asked, why)
        return plan, Steps.of(plan.pieces, replace(layout, chunk_rows=task.chunk_rows))

    def catch_up(self) -> bool:
        """Measure the matmuls that a backward pass estimated, if none runs now; return whether plans may change."""
        if not self.estimated or not _may_measure():
            return False
        shapes, self.estimated = self.estimated, {}
        for shape, device in shapes.items():
            self.get(shape, device)
        return True

    def _chosen(self, task: ShardedMatmul, rank: int, taken: TensorChoice, why: str) -> MatmulPlan:
        plan = choose_matmul(task, rank, self._profile, host_us=self._host_us)
        if taken == "auto":
            return plan
        if taken == plan.mechanism:
            return plan if self._tuning is None else replace(plan, why=why)
        if taken == "cuts":
            pieces = cut(task, rank, self._profile).pieces
        else:
            axis = RowAxis(task, rank, self._profile)
            pieces = axis.pieces(axis.serial_bounds)
        return replace(plan, mechanism=taken, pieces=pieces, why=why)

    def _curve(self, shape: MatmulShape, columns: int, device: torch.device) -> RowCurve:
        rows = shape.layout.total

        def slowest() -> tuple[tuple[int, float], ...]:
            if self._host_us is None:
                launch_us = max(gather_values(self._group, _launch_us(device)))
                self._host_us = {name: count * launch_us for name, count in _HOST_LAUNCHES.items()}
            most = max(_POINTS * _TILE, -(-rows // _TILE) * _TILE)
            ranks = gather_values(self._group, _measured(most, columns, shape.k, shape.dtype, device))
            return tuple((row[0][0], max(us for _, us in row)) for row in zip(*ranks, strict=True))

        points = None
        if device.type == "cuda" and self._options.measure and not shape.dtype.startswith("float8"):
            points = self._once((columns, shape.k, shape.dtype), slowest, shape, device)
        if points is None:
            return estimated_curve(columns, shape.k, shape.dtype, rows, self._profile)
        most, most_us = points[-1]
        beyond = ((rows, most_us * rows / most),) if rows > most else ()
        return RowCurve(n=columns, k=shape.k, dtype=shape.dtype, points=points + beyond)

    def _once(self, key: Hashable, measure: Callable[[], T], shape: MatmulShape, device: torch.device) -> T | None:
        """Return a measurement, made now or earlier; None in a backward pass, after which `catch_up` measures.

        Raises:
            Unsupported: a graph is captured, in which nothing can be measured.
        """
        if key not in self._measured:
            if torch.cuda.is_current_stream_capturing():
                raise Unsupported("a matmul that is new in a graph capture: make the same call once before")
            if not _may_measure():
                self.estimated[shape] = device
                return None
            if len(self._measured) == _MAX_CURVES:
                del self._measured[next(iter(self._measured))]
            self._measured[key] = measure()
        found: T = self._measured[key]
        return found


def _may_measure() -> bool:
    """Return whether matmuls may be measured now: not in a backward or graph capture, on all ranks alike."""
    in_backward = torch._C._current_graph_task_id() != -1
    return not in_backward and not torch.cuda.is_current_stream_capturing()


@lru_cache(maxsize=256)
def _measured(rows: int, columns: int, k: int, dtype: str, device: torch.device) -> tuple[tuple[int, float], ...]:
    """Return the median µs of a matmul at several numbers of rows, up to `rows`, on the current stream."""
    step = -(-rows // _POINTS // _TILE) * _TILE
    counts = [*range(step, rows, step), rows]
    with torch.cuda.device(device):
        a = torch.randn(rows, k, device=device, dtype=getattr(torch, dtype))
        b = torch.randn(columns, k, device=device, dtype=getattr(torch, dtype)).t()
        out = torch.empty(rows, columns, device=device, dtype=getattr(torch, dtype))
        launches = [partial(torch.mm, a[:count], b, out=out[:count]) for count in counts]
        return tuple(zip(counts, _median_us(launches), strict=True))


def _launch_us(device: torch.device) -> float:
    """Return the median µs that this thread needs to launch a matmul, by a matmul so small that the GPU keeps up."""
    a, times = torch.zeros(16, 16, device=device, dtype=torch.bfloat16), []
    out = torch.empty_like(a)
    for _ in range(100):
        began = time.perf_counter()
        torch.mm(a, a, out=out)
        times.append(1e6 * (time.perf_counter() - began))
    return median(times)


def _median_us(launches: Sequence[Callable[[], object]]) -> list[float]:
    """Return the median µs of each launch; launches run one after the other, in changing order."""
    times: list[list[float]] = [[] for _ in launches]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(launches) + 1)]
    for repeat in range(_REPEATS + 1):
        order = random.Random(repeat).sample(range(len(launches)), len(launches))
        torch.cuda._sleep(4_000_000)  # gives the host a lead before the first launch begins
        events[0].record()
        for index, event in zip(order, events[1:], strict=True):
            launches[index]()
            event.record()
        events[-1].synchronize()  # the whole device may include another stream that waits for a peer
        if repeat:
            for index, (first, last) in zip(order, pairwise(events), strict=True):
                times[index].append(1000.0 * first.elapsed_time(last))
    return [median(each) for each in times]
