"""Give the streams of compute and a collective priorities, so that one goes first when both wait for SMs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from counterpoint.controls.control import Control, Lanes
from counterpoint.controls.observe import written
from counterpoint.errors import Misconfigured
from counterpoint.records.measurement import Evidence, Observation


@dataclass(frozen=True, kw_only=True)
class StreamPriority(Control):
    """Gives the collective's stream a priority, which decides whether collective or compute gets free SMs first.

        with StreamPriority(level="high").apply(lanes) as lanes:
            ...  # lanes.comm_stream goes first

    `high`: the highest that torch offers; `low`: the collective stays at 0, which is CUDA's lowest, and the compute
    stream gets the highest; `default`: 0; a number: exactly that, 0 or below. Does nothing once the blocks of the other
    side are resident (they are never pre-empted), and nothing for copies. A collective with `async_op=True` runs on
    NCCL's own stream: `configure` raises that stream, too.
    """

    setting: ClassVar[str] = "priority={level}"
    remedy: ClassVar[str] = (
        "launch the collective on the lanes' stream (async_op=False) and with a priority that the GPU has; copies "
        "have none"
    )

    level: Literal["high", "default", "low"] | int = "high"

    def __post_init__(self) -> None:
        if not (self.level in ("high", "default", "low") or (isinstance(self.level, int) and self.level <= 0)):
            raise Misconfigured(
                f"priority={self.level} is not a stream priority; choose high, default, low, or a number from 0 (the "
                "lowest) down to what torch.cuda.Stream.priority_range() gives"
            )

    def configure(self, options: Any) -> None:
        """Set in the process group's options whether NCCL's own stream has high priority."""
        options.is_high_priority_stream = self.level == "high" or (isinstance(self.level, int) and self.level < 0)

    @contextmanager
    def apply(self, lanes: Lanes) -> Iterator[Lanes]:
        """Yield the lanes with a new stream for the collective, and at level `low` also with one for compute."""
        import torch

        device = lanes.comm_stream.device
        _, highest = lanes.comm_stream.priority_range()
        if self.level == "low":
            yield replace(
                lanes,
                comm_stream=torch.cuda.Stream(device, priority=0),
                compute_stream=torch.cuda.Stream(device, priority=highest),
            )
        else:
            wanted = {"high": highest, "default": 0}.get(str(self.level), self.level)
            yield replace(lanes, comm_stream=torch.cuda.Stream(device, priority=wanted))

    def verify(self, seen: Observation) -> Evidence:
        """Check the priorities of the streams on which kernels ran against the setting."""
        kernels = [one for one in seen.comm if one.kind == "kernel"]  # what copies and memsets do, no priority changes
        comm = sorted({one.priority for one in kernels if one.priority is not None})
        compute = sorted({one.priority for one in seen.compute if one.priority is not None})
        asked = {
            "high": "the collective on a stream of negative priority, below that of compute",
            "default": "the collective on a stream of priority 0",
            "low": "compute on a stream of lower number than the collective's",
        }.get(str(self.level), f"the collective on a stream of priority {self.level}")
        known = bool(comm) and all(one.priority is not None for one in kernels)
        if self.level == "high":
            took_effect = known and comm[-1] < min([0, *compute])
        elif self.level == "low":
            took_effect = known and bool(compute) and compute[-1] < comm[0]
        else:
            took_effect = known and comm == [0 if self.level == "default" else self.level]
        return self.evidence(
            asked=asked,
            seen=f"priority {written(comm, nothing='unknown') if kernels else 'of no kernel'} of the collective, "
            f"{written(compute, nothing='unknown')} of compute",
            took_effect=took_effect,
        )
