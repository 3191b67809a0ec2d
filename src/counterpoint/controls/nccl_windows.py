"""NCCL windows: buffers of one process group registered as symmetric memory, which NCCL's newer paths ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from counterpoint.controls.control import Control
from counterpoint.controls.kinds import copies, nccl_kernels, symmetric_kernels
from counterpoint.controls.requirements import no_nccl
from counterpoint.errors import Misconfigured
from counterpoint.records.evidence import Evidence, Launched, Seen

__all__ = ["NcclWindows"]


@dataclass(frozen=True, kw_only=True)
class NcclWindows(Control):
    """Allocates buffers that NCCL knows as symmetric windows, for copy engines or its symmetric kernels.

        windows = NcclWindows()
        buffer = windows.empty(numel, dtype=torch.bfloat16, device=device, group=group)  # all ranks, same order

    Every buffer has a memory pool of its own, registered once it is allocated: torch no longer registers what grows in
    a pool later, since that could hang. Does nothing unless **all** buffers of a collective are windows, nor for sums
    of float64 or other than SUM and AVG, nor across NVLink domains. For large sizes NCCL's symmetric kernels were
    slower than its plain ones (1 GiB all_gather, 8 x H200: 266 against 342 GB/s, 2026-11-20).

    Memory stays registered until `release`, or as long as this control lives: keep it longer than its buffers.
    """

    remedy: ClassVar[str] = "take both buffers from `empty`, for the group that runs the collective"

    _pools: list[tuple[Any, Any]] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def name(self) -> str:
        return "windows"

    def available(self) -> str | None:
        reason = no_nccl()
        if reason is None:
            import torch

            if not hasattr(torch.distributed.ProcessGroupNCCL, "register_mem_pool"):
                return f"PyTorch {torch.__version__} cannot register memory pools with NCCL"
        return reason

    def empty(self, numel: int, *, dtype: Any, device: Any, group: Any) -> Any:
        """An uninitialised buffer of `numel` elements, registered with `group`. All ranks call it in the same order.

        Args:
            numel: elements.
            dtype: torch.dtype of the elements.
            device: this rank's torch.device.
            group: an NCCL process group.

        Raises:
            Misconfigured: `group` has no NCCL backend on `device`.
        """
        import torch
        import torch.distributed as dist

        backend = group._get_backend(torch.device(device))
        if not hasattr(backend, "register_mem_pool"):
            raise Misconfigured(f"windows need an NCCL process group, this one is {dist.get_backend(group)}")
        dist.barrier(group=group, device_ids=[torch.device(device).index])  # makes the communicator, if it is new
        pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.device(device), torch.cuda.use_mem_pool(pool):
            buffer = torch.empty(numel, dtype=dtype, device=device)
        backend.register_mem_pool(pool, symm=True)
        self._pools.append((backend, pool))
        return buffer

    def release(self) -> None:
        """Deregisters every buffer. All ranks call it, after the last collective and before the group is destroyed."""
        import torch

        torch.cuda.synchronize()
        while self._pools:
            backend, pool = self._pools.pop()
            backend.deregister_mem_pool(pool)

    def verify(self, seen: Seen) -> Evidence:
        now, before = _path(seen.comm), _path(seen.comm_without)
        return Evidence(
            control=self.name,
            asked="NCCL's symmetric kernels, or copies instead of kernels",
            seen=f"{now}, without it {before}",
            took_effect=now in ("symmetric kernels", "copies") and now != before,
        )


def _path(comm: tuple[Launched, ...]) -> str:
    """The way NCCL went."""
    kernels = nccl_kernels(comm)
    if kernels:
        return "symmetric kernels" if len(symmetric_kernels(comm)) == len(kernels) else "plain kernels"
    return "copies" if copies(comm) else "nothing"
