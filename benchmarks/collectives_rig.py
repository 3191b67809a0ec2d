"""One rank's zero-SM collectives without a communicator: buffers, flags, programs; for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from counterpoint.collectives.cuda.driver import BindReduction, Bound, Executor, Graph
from counterpoint.collectives.cuda.lower import Addresses, DriverCall, lower
from counterpoint.collectives.cuda.peer_access import CudaCard, why_not
from counterpoint.collectives.cuda.regions import CudaMemory
from counterpoint.collectives.cuda.sum_launch import bind
from counterpoint.collectives.memory import Location
from counterpoint.collectives.program.calls import Call
from counterpoint.collectives.program.operations import plan
from counterpoint.collectives.program.reductions import Reduction
from counterpoint.collectives.program.steps import Tuning
from counterpoint.errors import Unsupported
from counterpoint.rehearsed import is_rehearsal

__all__ = ["Rig"]

FLAG_BYTES = 1 << 16  # beside output, and as much beside staging
MAX_SKEW = 256  # bytes by which an output may be shifted in its region


class Rig:
    """Symmetric output and staging of a fixed size, and what is needed to run programs on them.

    Args:
        group: NCCL process group; all ranks on one host.
        device: index of this rank's GPU.
        output_bytes: the most that an output may have.
        staging_bytes: the most that the slices of the other ranks may have.

    Raises:
        Unsupported: the group cannot share memory.
    """

    def __init__(self, group: Any, device: int, *, output_bytes: int, staging_bytes: int) -> None:
        self.rank, self.world_size, self.device = group.rank(), group.size(), device
        cards: list[Any] = [None] * self.world_size
        dist.all_gather_object(cards, CudaCard.of(device), group=group)
        reason = why_not(cards, share_gpu=is_rehearsal())
        if reason is not None:
            raise Unsupported(reason)
        self.memory = CudaMemory(group, device)
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.output_bytes = output_bytes
        self.output = self.memory.create(output_bytes + MAX_SKEW)
        self.staging = self.memory.create(staging_bytes)
        self.flags = self.memory.create(2 * FLAG_BYTES)
        words = self.bytes_of(self.flags, FLAG_BYTES, 4 * self.world_size).view(torch.int32)
        words.fill_(1)  # at rest, staging is free
        torch.cuda.synchronize()
        dist.barrier(group=group, device_ids=[device])
        self.executor = Executor()

    def bytes_of(self, region: int, offset: int, num_bytes: int) -> torch.Tensor:
        """Own bytes of a region, as a tensor."""
        found: torch.Tensor = self.memory.tensor(Location(region, offset), num_bytes, lambda: None)
        return found

    def out(self, num_bytes: int, *, skew: int = 0) -> torch.Tensor:
        """The output, `skew` bytes into its region."""
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", self.device))
        return self.bytes_of(self.output, skew, num_bytes)

    def lowered(
        self, call: Call, tuning: Tuning, *, input: torch.Tensor | None = None, skew: int = 0
    ) -> tuple[DriverCall, ...]:
        """This rank's driver calls for `call`, its output `skew` bytes into the region."""
        return lower(plan(call, self.rank, tuning), self.addresses(input, skew))

    def addresses(self, input: torch.Tensor | None = None, skew: int = 0) -> Addresses:
        """Where everything lies, the output `skew` bytes into its region."""

        def everywhere(region: int, offset: int = 0) -> tuple[int, ...]:
            at = Location(region, offset)
            return tuple(self.memory.address(rank, at, 1) for rank in range(self.world_size))

        return Addresses(
            input=0 if input is None else input.data_ptr(),
            output=everywhere(self.output, skew),
            staging=everywhere(self.staging),
            output_flags=everywhere(self.flags),
            staging_flags=everywhere(self.flags, FLAG_BYTES),
        )

    def bound(self, calls: tuple[DriverCall, ...], stream: int, reduction: Reduction | None = None) -> Bound:
        """`calls`, ready to be issued on `stream`."""
        return self.executor.bind(calls, stream, reduction=self.how(reduction))

    def graph(self, calls: tuple[DriverCall, ...], reduction: Reduction | None = None) -> Graph:
        """`calls` as a graph."""
        return self.executor.graph(calls, reduction=self.how(reduction))

    def how(self, reduction: Reduction | None) -> BindReduction | None:
        """What binds sums to streams of this device; None if nothing is to be reduced."""
        if reduction is None:
            return None
        return lambda call, stream: bind(call, reduction, stream=stream, device_sms=self.sms)

    def launcher(
        self, calls: tuple[DriverCall, ...], *, graph: bool, reduction: Reduction | None
    ) -> Callable[[], None]:
        """What issues `calls` on the stream that is current now."""
        stream = torch.cuda.current_stream().cuda_stream
        if not graph:
            return self.bound(calls, stream, reduction)
        return partial(self.graph(calls, reduction).launch, self.executor.driver.CUstream(stream))
