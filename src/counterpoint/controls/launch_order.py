"""Make the collective take its SMs before the GEMM starts, without setting CUDA_DEVICE_MAX_CONNECTIONS."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from counterpoint.controls.control import Control, Lanes, call_driver
from counterpoint.controls.observe import nccl_kernels
from counterpoint.errors import Misconfigured
from counterpoint.records.measurement import Evidence, Launched, Observation

_TIMED = 32  # round trips that are timed together, to find the time of one
_FEWEST = 2  # round trips at least, so that every waiting stream gets its turn in between


@dataclass(frozen=True, kw_only=True)
class CommFirst(Control):
    """Delays compute until the collective is next on its own stream, then `lead_us` more, so that it takes SMs first.

        lead = CommFirst().lead(comm_stream, compute_stream)
        mark = lead.mark(); dist.all_gather_into_tensor(full, shard)  # on the collective's stream
        lead.hold(mark); y = x @ w                                    # on the compute stream

    The compute stream waits for an event right before the collective, then hands over to a third stream and back,
    each time with a memset of 4 bytes, which makes it a real wait. None of this needs an SM. It is the waiting
    that helps: a stream that goes on, even with 64 memsets, can keep the GPU's front end from the collective's launch.
    The host must queue the collective **before** the compute, as programs that prefetch do; a compute queued first goes
    ahead at once (waiting for what is not queued could hang). Costs: the lead, some 20 µs of the host, and all the
        time for which work before the collective holds up its stream. Measured: docs/results/pairs.md.
    """

    setting: ClassVar[str] = "order=comm_resident"
    driver_calls: ClassVar[tuple[str, ...]] = ("cuMemsetD32Async",)
    remedy: ClassVar[str] = "let the host queue the collective before the compute, on another stream"

    lead_us: float = 8.0  # µs between the collective's turn and compute's, 0 to 1000

    def __post_init__(self) -> None:
        if not 0 <= self.lead_us <= 1000:
            raise Misconfigured(f"a lead of {self.lead_us} µs makes no sense; give 0 to 1000")

    def lead(self, comm_stream: Any, compute_stream: Any) -> Lead:
        """Measure round trips between these streams, synchronize the device, and return a `Lead` of `lead_us`."""
        import torch

        device = compute_stream.device
        streams = (torch.cuda.Stream(device) for _ in range(3))  # torch hands its streams out again and again
        relay = next(stream for stream in streams if stream not in (comm_stream, compute_stream))
        lead = Lead(round_trips=_TIMED, relay=relay, target=torch.zeros(1, dtype=torch.int32, device=device))
        torch.cuda.synchronize(device)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(device), torch.cuda.stream(compute_stream):
            lead.delay()
            torch.cuda._sleep(2_000_000)  # all are queued before the first one runs
            begin.record()
            lead.delay()
            end.record()
            end.synchronize()
        each_us = begin.elapsed_time(end) * 1e3 / _TIMED
        return replace(lead, round_trips=max(_FEWEST, math.ceil(self.lead_us / each_us)))

    @contextmanager
    def apply(self, lanes: Lanes) -> Iterator[Lanes]:
        """Yield the lanes with an event (mark) before each collective, and with compute delayed past the event."""
        import torch

        lead = self.lead(lanes.comm_stream, lanes.compute_stream)
        newest: list[Any] = []  # at most one mark: the last one on a stream comes after all before it

        def comm() -> None:
            if not torch.cuda.is_current_stream_capturing():  # the eager compute could not wait for a captured mark
                newest[:] = [lead.mark()]
            lanes.comm()

        def compute() -> None:
            if newest:
                lead.hold(newest.pop())
            lanes.compute()

        yield replace(lanes, comm=comm, compute=compute)

    def verify(self, seen: Observation) -> Evidence:
        """Compare the µs by which the collective starts before compute, with the control and without it."""
        now, before = _lead_us(seen.comm, seen.compute), _lead_us(seen.comm_without, seen.compute_without)
        return self.evidence(
            asked=f"the collective starts {self.lead_us:g} µs or more before compute, and sooner than without it",
            seen=f"it starts {now:.1f} µs before, without it {before:.1f} µs",
            took_effect=now >= self.lead_us and now > before,
        )


@dataclass(frozen=True, kw_only=True)
class Lead:
    """Delays a stream by `round_trips` handovers to another stream and back, none of which needs an SM."""

    round_trips: int
    relay: Any  # torch.cuda.Stream, neither compute's nor the collective's
    target: Any  # torch.Tensor of one int32, for the memsets: without work in between the driver drops the waits

    def mark(self) -> Any:
        """Return an event recorded at this point of the current stream; call this right before a collective."""
        import torch

        mark = torch.cuda.Event()
        mark.record()
        return mark

    def hold(self, mark: Any) -> None:
        """Make the current stream wait for `mark`, and then for the round trips to the other stream."""
        import torch

        torch.cuda.current_stream(self.relay.device).wait_event(mark)
        self.delay()

    def delay(self) -> None:
        """Queue the round trips on the current stream, which delays that stream's later work."""
        import torch

        stream = torch.cuda.current_stream(self.relay.device)
        for _ in range(self.round_trips):
            for giver, taker in ((stream, self.relay), (self.relay, stream)):
                call_driver("cuMemsetD32Async", self.target.data_ptr(), 0, 1, giver.cuda_stream)
                taker.wait_stream(giver)


def _lead_us(comm: tuple[Launched, ...], compute: tuple[Launched, ...]) -> float:
    """Return how many µs before the first compute kernel the collective starts; NaN if one of them did not run."""
    starts = [one.start_us for one in nccl_kernels(comm) or comm if one.kind != "memset"]
    kernels = [one.start_us for one in compute if one.kind == "kernel"]
    return min(kernels) - min(starts) if starts and kernels else math.nan
