"""Give compute and a collective each a stream on separate SMs, by green contexts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Literal

from counterpoint.controls.control import Control, Lanes, call_driver
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.records.measurement import Evidence, Observation


def plan_split(compute_sms: int, *, total: int, grain: int) -> Literal["compute", "comm"]:
    """Return whose SMs the driver must split off so that compute gets `compute_sms` and the collective the rest.

    The driver splits off groups of multiples of `grain` SMs (8 from compute capability 9.0); what remains may be odd.

    Raises:
        Misconfigured: neither side is a multiple of `grain`, or one would be too small; the text names what can be had.
    """
    comm_sms = total - compute_sms
    if compute_sms >= grain and comm_sms >= grain:
        if comm_sms % grain == 0:
            return "comm"
        if compute_sms % grain == 0:
            return "compute"
    can = [n for n in range(grain, total - grain + 1) if n % grain == 0 or (total - n) % grain == 0]
    near = sorted(sorted(can, key=lambda n: abs(n - compute_sms))[:4])
    raise Misconfigured(
        f"green={compute_sms} cannot be had: this GPU has {total} SMs and splits them by {grain}; "
        f"nearest: {', '.join(map(str, near)) or 'none'}"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """Holds two streams on disjoint sets of SMs."""

    compute_stream: Any  # torch.cuda.ExternalStream
    comm_stream: Any


@dataclass(frozen=True, kw_only=True)
class GreenContexts(Control):
    """Runs compute on `compute_sms` SMs and the collective on all other SMs.

        part = GreenContexts(compute_sms=108).partition(device)
        with torch.cuda.stream(part.compute_stream): y = x @ w  # and the collective on part.comm_stream

    NCCL must be called with `async_op=False`: then it launches on the current stream, otherwise on its own, which is
    in no green context. GEMMs and NCCL still launch grids for the whole device: CTAs beyond their SMs wait until the
    first CTAs end.

    `compute_sms` or the rest must be a multiple of 8 (Hopper; 2 on older GPUs).
    """

    setting: ClassVar[str] = "green={compute_sms}"
    driver_calls: ClassVar[tuple[str, ...]] = (
        "cuDevSmResourceSplitByCount",
        "cuGreenCtxCreate",
        "cuGreenCtxStreamCreate",
        "cuGreenCtxGetDevResource",
    )
    remedy: ClassVar[str] = (
        "launch both sides on the lanes' streams, NCCL with async_op=False (otherwise it takes a stream of its own)"
    )

    compute_sms: int

    def __post_init__(self) -> None:
        if self.compute_sms < 1:
            raise Misconfigured(f"green={self.compute_sms} is not a number of SMs; give 1 or more")

    def available(self) -> str | None:
        """Return why this GPU cannot give compute `compute_sms` SMs of its own; None if it can."""
        if (reason := super().available()) is not None:
            return reason
        import torch

        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        try:
            plan_split(self.compute_sms, total=properties.multi_processor_count, grain=_grain(properties.major))
        except Misconfigured as error:
            return str(error)
        return None

    def partition(self, device: Any, *, compute_priority: int = 0, comm_priority: int = 0) -> Partition:
        """Return two streams on disjoint SMs of `device`, cached by arguments and never destroyed.

        They are never destroyed: torch's allocators record events on every stream that used a tensor or pinned memory,
        when that memory is freed, however late; on a destroyed green context this ends the process. `Misconfigured` is
        raised if this GPU cannot split its SMs so, `Unsupported` if the driver refused, or gave other numbers than
        asked for.
        """
        import torch

        index = torch.device(device).index
        return _partition(
            torch.cuda.current_device() if index is None else index, self.compute_sms, compute_priority, comm_priority
        )

    @contextmanager
    def apply(self, lanes: Lanes) -> Iterator[Lanes]:
        """Yield the lanes with both streams replaced by the partition's streams."""
        part = self.partition(
            lanes.compute_stream.device,
            compute_priority=lanes.compute_stream.priority,
            comm_priority=lanes.comm_stream.priority,
        )
        yield replace(lanes, compute_stream=part.compute_stream, comm_stream=part.comm_stream)

    def verify(self, seen: Observation) -> Evidence:
        """Compare the SMs on which a probe ran in each stream with the SMs asked for."""
        compute, comm = set(seen.compute_sms or ()), set(seen.comm_sms or ())
        ran = (*seen.compute, *seen.comm)  # a priority is known of what ran on the lanes' streams, and of nothing else
        outside = sum(one.kind == "kernel" and one.priority is None for one in ran)
        return self.evidence(
            asked=f"a probe on {self.compute_sms} SMs in the compute stream, on others in the collective's, and no "
            "kernel in other streams",
            seen=f"{len(compute)} SMs for compute, {len(comm)} for the collective, {len(compute & comm)} shared, "
            f"{outside} kernels in other streams"
            if compute and comm
            else "no probe ran",
            took_effect=len(compute) == self.compute_sms and bool(comm) and not compute & comm and not outside,
        )


def _grain(major: int) -> int:
    """Return the number of SMs of which a split must be a multiple (CUDA driver API, cuDevSmResourceSplitByCount)."""
    return 8 if major >= 9 else 2


@cache
def _partition(device: int, compute_sms: int, compute_priority: int, comm_priority: int) -> Partition:
    import torch

    properties = torch.cuda.get_device_properties(device)
    total = properties.multi_processor_count
    side = plan_split(compute_sms, total=total, grain=_grain(properties.major))
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)  # makes the primary context, too
        group, rest = _cut(device, compute_sms if side == "compute" else total - compute_sms)
        compute, comm = (group, rest) if side == "compute" else (rest, group)
        found = compute.sm.smCount, comm.sm.smCount
        if found != (compute_sms, total - compute_sms):
            raise Unsupported(
                f"green={compute_sms}: asked for {compute_sms} + {total - compute_sms} SMs, the driver gives "
                f"{found[0]} + {found[1]}; ask for these numbers"
            )
        return Partition(
            compute_stream=_green_stream(device, compute, compute_priority),
            comm_stream=_green_stream(device, comm, comm_priority),
        )


def _cut(device: int, num_sms: int) -> tuple[Any, Any]:
    """Return the device's SMs in two driver resources: a group of `num_sms`, and all others."""
    from cuda.bindings import driver

    all_sms = call_driver("cuDeviceGetDevResource", device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
    groups, _, rest = call_driver("cuDevSmResourceSplitByCount", 1, all_sms, 0, num_sms)
    return groups[0], rest


def _green_stream(device: int, resource: Any, priority: int) -> Any:
    """Return a stream in a new green context of the SMs `resource`; raise if the driver gives another number of SMs."""
    import torch
    from cuda.bindings import driver

    description = call_driver("cuDevResourceGenerateDesc", [resource], 1)
    context = call_driver(
        "cuGreenCtxCreate", description, device, driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    )
    given = call_driver(
        "cuGreenCtxGetDevResource", context, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    ).sm.smCount
    if given != resource.sm.smCount:
        raise Unsupported(f"a green context of {resource.sm.smCount} SMs got {given}; the driver cannot split so")
    stream = call_driver(
        "cuGreenCtxStreamCreate", context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value, priority
    )
    return torch.cuda.ExternalStream(int(stream), device=torch.device("cuda", device))
