"""Connect the ranks of a measurement: devices, process groups, runner of trials, and exchange of values."""

from __future__ import annotations

import datetime
import gc
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.host.group import check_agreement, gather_values, raise_together
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.controls.control import Control, Lanes
from counterpoint.errors import Misconfigured, Unsupported, printable
from counterpoint.measurement.trial import CpuStage, CudaStage
from counterpoint.measurement.workloads import MEASURABLE, measured_dtype

T = TypeVar("T")


class NotEnoughMemory(Unsupported):
    """Is raised on all ranks together when an action needs more memory than is free on one of them."""


class Session:
    """Represents this rank in a measurement: joins torchrun's process group, which `close` leaves.

    On `cuda` it uses NCCL and the GPU of number LOCAL_RANK (Unsupported if there is none); on `cpu`, gloo and one
    thread. A collective waits `timeout_s` for other ranks. What is measured communicates `dtype` and computes in
    `compute_dtype`, which `use_dtypes` sets.
    """

    def __init__(self, device_type: str, *, timeout_s: float = 100.0) -> None:
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if device_type == "cuda":
            self.device = _gpu(self.local_rank)
            dist.init_process_group("cpu:gloo,cuda:nccl", timeout=self._timeout, device_id=self.device)
        else:
            torch.set_num_threads(1)
            self.device = torch.device("cpu")
            dist.init_process_group("gloo", timeout=self._timeout)
        self.use_dtypes()
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        assert dist.group.WORLD is not None  # it was just made
        self.world: dist.ProcessGroup = dist.group.WORLD
        self._hosts = dist.new_group(backend="gloo", timeout=self._timeout)  # for messages, never on a GPU
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self._streams = [torch.cuda.Stream(self.device) for _ in range(2)] if self.is_cuda else []
        self.stage: CudaStage | CpuStage = CudaStage(self.device, self.world) if self.is_cuda else CpuStage(self._hosts)

    def use_dtypes(self, dtype: str | None = None, compute_dtype: str | None = None) -> tuple[str, str]:
        """Measure in these dtypes (torch's names) from now on; None: the device's default dtype.

        Returns:
            The dtypes of what is communicated and of the computation.

        Raises:
            Misconfigured: matrix products and sums are not measured in such a dtype.
        """
        for asked in filter(None, (dtype, compute_dtype)):
            if asked not in MEASURABLE:
                raise Misconfigured(f"dtype {printable(asked)!r}; choose from: {', '.join(MEASURABLE)}")
        names = measured_dtype(dtype, self.device.type), measured_dtype(compute_dtype, self.device.type)
        self.dtype: torch.dtype = getattr(torch, names[0])
        self.compute_dtype: torch.dtype = getattr(torch, names[1])
        return names

    @property
    def is_cuda(self) -> bool:
        """Return whether the measurement runs on GPUs."""
        return self.device.type == "cuda"

    @property
    def gpu_uuid(self) -> str:
        """Return the UUID of this rank's GPU, as NVML writes it."""
        return f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"

    @property
    def gpu_name(self) -> str | None:
        """Return the name of this rank's GPU; None on a CPU."""
        return torch.cuda.get_device_name(self.device) if self.is_cuda else None

    def synchronize(self) -> None:
        """Wait until this rank's GPU has done all queued work; do nothing on a CPU."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of ranks."""
        return gather_values(self._hosts, value)

    def check_agreement(self, what: str, value: object) -> None:
        """Raise Misconfigured on every rank if `value` differs between ranks."""
        check_agreement(self._hosts, {what: value})

    def raise_together(self, action: Callable[[], T]) -> T:
        """Return the result of `action`; if it raises on one rank, the others raise PeerFailed instead of waiting."""
        return raise_together(self._hosts, action)

    def require_memory(self, needed: int, what: str) -> None:
        """Raise NotEnoughMemory on all ranks if any rank lacks `needed` free bytes; all ranks call it together."""
        free = min(self.gather(self.free_bytes()))
        if needed > 0.95 * free:
            raise NotEnoughMemory(
                f"{what} needs {needed / 1e9:.1f} GB on each rank and {free / 1e9:.1f} GB are free; "
                "choose a smaller size"
            )

    def free_bytes(self) -> int:
        """Return the bytes of memory that this rank can still allocate."""
        if self.is_cuda:
            cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            return int(torch.cuda.mem_get_info(self.device)[0]) + cached
        with open("/proc/meminfo") as file:  # noqa: PTH123
            kilobytes = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
        return kilobytes * 1024 // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def give_memory_back(self) -> None:
        """Give PyTorch's unused cached memory back to the device."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()

    def group(self, controls: Sequence[Control]) -> dist.ProcessGroup:
        """Return a process group of all ranks with NCCL options set by `controls`; equal options share one group."""
        if not self.is_cuda:
            return self.world
        options = dist.ProcessGroupNCCL.Options()
        before = _described(options)
        configuring = []
        for control in controls:
            control.configure(options)
            if _described(options) != before:
                configuring.append(control.name)
                before = _described(options)
        key = tuple(configuring)
        if key not in self._groups:
            self._groups[key] = dist.new_group(backend="nccl", pg_options=options, timeout=self._timeout)
            dist.all_reduce(torch.ones(1, device=self.device), group=self._groups[key])  # makes the communicator
            torch.cuda.synchronize(self.device)
        return self._groups[key]

    def lanes(self, compute: Callable[[], None], comm: Callable[[], None]) -> Lanes:
        """Return `Lanes` that run `compute` and `comm` on two streams of default priority; a CPU has no streams."""
        if not self.is_cuda:
            return Lanes(compute_stream=None, comm_stream=None, compute=compute, comm=comm)
        return Lanes(compute_stream=self._streams[0], comm_stream=self._streams[1], compute=compute, comm=comm)

    @cached_property
    def communicator(self) -> Communicator:
        """Return the communicator of all ranks, for the mechanism `zero_sm`; all ranks read this property together."""
        return Communicator(
            self.world, device=self.device, options=CommunicatorOptions(timeout_s=self._timeout.total_seconds())
        )

    def close(self) -> None:
        """Leave the process groups."""
        if "communicator" in self.__dict__:
            self.communicator.close()
        dist.destroy_process_group()


def _gpu(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        raise Unsupported(f"torch {torch.__version__} sees no GPU here; use --device cpu to try the whole path")
    if local_rank >= torch.cuda.device_count():
        raise Unsupported(f"local rank {local_rank} has no GPU: this host shows {torch.cuda.device_count()}")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _described(options: Any) -> str:
    """Return all readable fields of NCCL options as text, to detect changes by controls."""
    config = options.config
    fields = {name: getattr(config, name) for name in sorted(dir(config)) if not name.startswith("_")}
    return repr((options.is_high_priority_stream, {k: v for k, v in fields.items() if not callable(v)}))
