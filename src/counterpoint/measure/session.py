"""One rank of a running measurement: its device, process groups, stage, and how it agrees with the other ranks."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from counterpoint.collectives.communicator import Communicator
from counterpoint.controls.control import Control, Lanes
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.measure.stage import CpuStage, CudaStage, Stage

__all__ = ["PeerFailed", "Session"]

T = TypeVar("T")


class PeerFailed(Unsupported):
    """Another rank raised; that rank says why, and `failures.died` believes it before this one."""


class Session:
    """Joins the process group that the environment (torchrun) describes; `close` leaves it.

    Args:
        device_type: `cuda` (NCCL, this rank's GPU by LOCAL_RANK) or `cpu` (gloo, one thread).
        timeout_s: how long a collective waits for other ranks.

    Raises:
        Unsupported: no such GPU, or no CUDA in this torch.
    """

    def __init__(self, device_type: str, *, timeout_s: float = 100.0) -> None:
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if device_type == "cuda":
            self.device = _gpu(self.local_rank)
            self.dtype = torch.bfloat16
            dist.init_process_group("cpu:gloo,cuda:nccl", timeout=self._timeout, device_id=self.device)
        else:
            torch.set_num_threads(1)
            self.device, self.dtype = torch.device("cpu"), torch.float32
            dist.init_process_group("gloo", timeout=self._timeout)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        assert dist.group.WORLD is not None  # it was just made
        self.world: dist.ProcessGroup = dist.group.WORLD
        self._hosts = dist.new_group(backend="gloo", timeout=self._timeout)  # for words, never on a GPU
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self._streams = [torch.cuda.Stream(self.device) for _ in range(2)] if self.is_cuda else []
        self.stage = self._stage()

    def _stage(self) -> Stage:
        if self.device.type == "cuda":
            return CudaStage(self.device, self.world)
        return CpuStage(self._hosts)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def gpu_uuid(self) -> str:
        """Of this rank's GPU, as NVML knows it."""
        return f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._hosts)
        return values

    def agree(self, what: str, value: object) -> None:
        """Raises Misconfigured on every rank if `value` is not the same on all of them."""
        values = self.gather(value)
        other = next((rank for rank, seen in enumerate(values) if seen != values[0]), None)
        if other is not None:
            raise Misconfigured(
                f"the ranks do not match: {what} is {values[0]!r} on rank 0 and {values[other]!r} on rank {other}; "
                "start all of them with the same command on the same kind of machine"
            )

    def together(self, action: Callable[[], T]) -> T:
        """Runs `action` on this rank; if it raises on any rank, every rank raises, so that nobody waits for ever.

        Raises:
            PeerFailed: it raised on another rank only.
        """
        error: Exception | None = None
        try:
            result = action()
        except Exception as raised:
            error = raised
        told = self.gather(None if error is None else f"{error}")
        if error is not None:
            raise error
        failed = next(
            (f"rank {rank} could not go on: {text}" for rank, text in enumerate(told) if text is not None), None
        )
        if failed is not None:
            raise PeerFailed(failed)
        return result

    def require_memory(self, needed: int, what: str) -> None:
        """All ranks call it before they allocate `needed` bytes for `what`.

        Raises:
            Misconfigured: more than is free on this rank.
            PeerFailed: than is free on another.
        """

        def check() -> None:
            free = self.free_bytes()
            if needed > 0.95 * free:
                raise Misconfigured(
                    f"{what} needs {needed / 1e9:.1f} GB on each rank and {free / 1e9:.1f} GB are free; "
                    "choose a smaller size"
                )

        self.together(check)

    def free_bytes(self) -> int:
        """Memory that this rank may still take."""
        if self.is_cuda:
            cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            return int(torch.cuda.mem_get_info(self.device)[0]) + cached
        with open("/proc/meminfo") as file:  # noqa: PTH123
            kilobytes = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
        return kilobytes * 1024 // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def group(self, controls: Sequence[Control]) -> dist.ProcessGroup:
        """A process group of all ranks made with the options that `controls` set; made once for each set of them."""
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
        """Two streams of default priority (none on a CPU)."""
        if not self.is_cuda:
            return Lanes(compute_stream=None, comm_stream=None, compute=compute, comm=comm)
        return Lanes(compute_stream=self._streams[0], comm_stream=self._streams[1], compute=compute, comm=comm)

    @cached_property
    def communicator(self) -> Communicator:
        """Of all ranks, for the mechanism `zero_sm`; all ranks ask for it together."""
        return Communicator(self.world, device=self.device, timeout_s=self._timeout.total_seconds())

    def close(self) -> None:
        """Leaves the process groups."""
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
    """All readable fields of the options, to tell whether a control changed one."""
    config = options.config
    fields = {name: getattr(config, name) for name in sorted(dir(config)) if not name.startswith("_")}
    return repr((options.is_high_priority_stream, {k: v for k, v in fields.items() if not callable(v)}))
