"""Run one trial: release computation and collective together on every rank, and time both on one clock.

The host's launch time is not part of it. On a GPU everything is queued behind a spin kernel, the ranks are aligned by
a tiny all_reduce, and CUDA events take the times; a trial whose launches came too late is marked. On a CPU each side
has a thread, and a barrier aligns the ranks. The second side of an ordered trial starts `HEAD_START_US` later, by a
delay that needs no SM: a copy to pinned host memory (a sleeping kernel would hold the SM that a persistent GEMM needs).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from counterpoint.controls.control import Lanes
from counterpoint.records.measurement import Order

HEAD_START_US = 100.0
_HOST_US = 500.0  # assumed host time to queue a trial, until it is measured
_SPIN_MARGIN_US = 300.0
_MOST_SPIN_US = 20_000.0
_CYCLES_PER_US = 2000  # at the highest clock; at a lower one the spin is longer
_CPU_HEAD_START_US = 2000.0  # long enough that a sleeping thread wakes up in time

Side = Literal["compute", "comm"]
Case = Literal["compute_alone", "comm_alone", "serial"] | Order
"""What a trial runs: one side alone, one after the other (`serial`), or both in an order."""

ONE_BY_ONE: dict[Case, tuple[Side, ...]] = {
    "compute_alone": ("compute",),
    "comm_alone": ("comm",),
    "serial": ("compute", "comm"),
}
DELAYED: dict[Case, Side] = {"comm_first": "compute", "compute_first": "comm"}


def sides_of(case: Case, *, host_waits: bool = False) -> tuple[Side, ...]:
    """Return "compute" and "comm" in the order in which the host queues them: "comm" first, as in prefetching.

    The delay alone decides which side the device reaches first. If `host_waits` for the device within the collective,
    the computation is queued before it.
    """
    return ONE_BY_ONE.get(case, ("compute", "comm") if host_waits else ("comm", "compute"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Holds one trial's times in µs after the release; NaN: did not run; `late`: the host queued too slowly."""

    compute_start: float = float("nan")
    compute_end: float = float("nan")
    comm_start: float = float("nan")
    comm_end: float = float("nan")
    late: bool = False


class CudaStage:
    """Runs trials on this rank's GPU; the NCCL `group` of all ranks only aligns them in time."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup) -> None:
        self.device, self.group = device, group
        self._host_us = _HOST_US
        self._flag = torch.ones(1, device=device)
        self._main = torch.cuda.Stream(device)
        self._delay = _CopyDelay(HEAD_START_US, device, group)

    def run(self, lanes: Lanes, case: Case, *, host_waits: bool = False) -> Trial:
        """Return the times of one trial, run until the device is idle; all ranks call it with the same case.

        `host_waits` says that the host waits for the device within `lanes.comm`. What the host queues after that is
        late by design: the times include it, and the trial does not count as late.
        """
        streams = {"compute": lanes.compute_stream, "comm": lanes.comm_stream}
        launches = {"compute": lanes.compute, "comm": lanes.comm}
        ready, *times = (torch.cuda.Event(enable_timing=True) for _ in range(5))
        events = {"compute": times[:2], "comm": times[2:]}
        self._main.wait_stream(torch.cuda.current_stream(self.device))  # on which in-place data is restored
        with torch.cuda.stream(self._main):
            torch.cuda._sleep(int(spin_us(self._host_us) * _CYCLES_PER_US))
            queued = time.perf_counter()
            dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self.group)
            ready.record()
        before, sides = ready, sides_of(case, host_waits=host_waits)
        late, host_us = False, 0.0
        for side in sides:
            if host_waits and side == "comm":
                late, host_us = ready.query(), (time.perf_counter() - queued) * 1e6
            with torch.cuda.stream(streams[side]):
                streams[side].wait_event(before)
                if side == DELAYED.get(case):
                    self._delay()
                events[side][0].record()
                launches[side]()
                events[side][1].record()
            if case == "serial":
                before = events[side][1]
        if not host_waits or "comm" not in sides:
            late, host_us = ready.query(), (time.perf_counter() - queued) * 1e6
        self._host_us = max(host_us, 0.9 * self._host_us)  # a hiccup is soon forgotten
        torch.cuda.synchronize(self.device)
        since = {f"{side}_{edge}": ready.elapsed_time(event) * 1e3
                 for side in sides
                 for edge, event in zip(("start", "end"), events[side], strict=True)}  # fmt: skip
        return Trial(late=late, **since)


def spin_us(host_us: float) -> float:
    """Return the µs to delay the device while the host queues a trial, which took the host `host_us` before."""
    return min(1.5 * host_us + _SPIN_MARGIN_US, _MOST_SPIN_US)


class _CopyDelay:
    """Delays a stream for about `microseconds` by a copy to pinned host memory, calibrated while all ranks copy."""

    def __init__(self, microseconds: float, device: torch.device, group: dist.ProcessGroup) -> None:
        most, copies = 8 << 20, 40
        source = torch.empty(most, dtype=torch.uint8, device=device)
        target = torch.empty(most, dtype=torch.uint8, pin_memory=True)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.all_reduce(torch.ones(1, device=device), group=group)  # all copy at once: they share the path to the host
        for index in range(2 * copies):  # the first half warms up
            if index == copies:
                begin.record()
            target.copy_(source, non_blocking=True)
        end.record()
        torch.cuda.synchronize(device)
        length = min(most, int(most * microseconds / (begin.elapsed_time(end) * 1e3 / copies)))
        self._source, self._target = source[:length], target[:length]

    def __call__(self) -> None:
        self._target.copy_(self._source, non_blocking=True)


class CpuStage:
    """Runs trials on this rank's CPU, `compute` and `comm` in a thread each; the gloo `group` aligns the ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def run(self, lanes: Lanes, case: Case, *, host_waits: bool = False) -> Trial:
        """Run one trial like `CudaStage.run`, with computation and collective in a thread each, so neither is late."""
        launches = {"compute": lanes.compute, "comm": lanes.comm}
        times: dict[str, float] = {}
        failures: list[BaseException] = []
        go = threading.Event()
        released = [0.0]

        def play(sides: tuple[Side, ...]) -> None:
            try:
                go.wait()
                for side in sides:
                    if side == DELAYED.get(case):
                        time.sleep(_CPU_HEAD_START_US / 1e6)
                    times[f"{side}_start"] = (time.perf_counter() - released[0]) * 1e6
                    launches[side]()
                    times[f"{side}_end"] = (time.perf_counter() - released[0]) * 1e6
            except BaseException as error:
                failures.append(error)

        parts = [sides_of(case)] if case == "serial" else [(side,) for side in sides_of(case)]
        threads = [threading.Thread(target=play, args=(sides,), daemon=True) for sides in parts]
        for thread in threads:
            thread.start()
        dist.barrier(group=self.group)
        released[0] = time.perf_counter()
        go.set()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return Trial(late=False, **times)
