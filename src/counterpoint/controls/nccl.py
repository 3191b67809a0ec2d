"""Set NCCL's options for one process group: CTAs, cluster size, CTA policy, and buffers in symmetric windows.

options = dist.ProcessGroupNCCL.Options()
NcclCtas(max_ctas=8).configure(options)
group = dist.new_group(pg_options=options)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from counterpoint.controls.control import Control, nccl_config, no_nccl
from counterpoint.controls.observe import blocks, copies, nccl_kernels, symmetric_kernels, written
from counterpoint.errors import Misconfigured
from counterpoint.records.measurement import Evidence, Launched, Observation

_MOST_CTAS = 64  # NCCL's MAXCHANNELS
_MOST_PER_CLUSTER = 8  # portable cluster size
Policy = Literal["default", "efficiency", "zero"]
_NUMBER: dict[str, int] = {"default": 0, "efficiency": 1, "zero": 2}  # NCCL_CTA_POLICY_*


@dataclass(frozen=True, kw_only=True)
class NcclCtas(Control):
    """Limits the CTAs that NCCL uses for every collective of one process group.

    Does nothing where NCCL would stay within the limits anyway, and for kernels of other limits: all-to-all and
    send/recv round up to a power of two, NCCL's symmetric kernels choose for themselves. Bandwidth falls with the CTAs.

    Both limits are 1 to 64; NCCL may still use fewer than `min_ctas` for small sizes.
    """

    nccl_options: ClassVar[tuple[str, ...]] = ("max_ctas", "min_ctas")
    remedy: ClassVar[str] = (
        "give limits that NCCL breaks by itself (powers of two for all-to-all), and a process group made with these "
        "options"
    )

    max_ctas: int | None = None
    min_ctas: int | None = None

    def __post_init__(self) -> None:
        given = [number for number in (self.min_ctas, self.max_ctas) if number is not None]
        if not given or not all(1 <= number <= _MOST_CTAS for number in given) or given != sorted(given):
            raise Misconfigured(
                f"max_ctas={self.max_ctas}, min_ctas={self.min_ctas}: give one or both, from 1 to {_MOST_CTAS}, "
                "min_ctas not above max_ctas"
            )

    @property
    def name(self) -> str:
        """Return the setting as it is written in a mechanism's name, such as `max_ctas=8`."""
        parts = {"max_ctas": self.max_ctas, "min_ctas": self.min_ctas}
        return "+".join(f"{key}={value}" for key, value in parts.items() if value is not None)

    def configure(self, options: Any) -> None:
        """Set the limits of CTAs in the process group's options."""
        config = nccl_config(options)
        config.max_ctas = self.max_ctas or _MOST_CTAS  # NCCL 2.28 refuses a minimum without a maximum
        if self.min_ctas is not None:
            config.min_ctas = self.min_ctas

    def verify(self, seen: Observation) -> Evidence:
        """Check the CTAs of NCCL's kernels, with the control and without it, against the limits."""
        now, before = blocks(nccl_kernels(seen.comm)), blocks(nccl_kernels(seen.comm_without))
        low, high = self.min_ctas or 1, self.max_ctas or _MOST_CTAS

        def within(counts: list[int]) -> bool:
            return low <= counts[0] and counts[-1] <= high

        return self.evidence(
            asked=f"{low} to {high} CTAs, fewer or more without it",
            seen=f"{written(now, nothing='no NCCL kernel')} CTAs, without it {written(before)}",
            took_effect=bool(now) and bool(before) and within(now) and not within(before),
        )


@dataclass(frozen=True, kw_only=True)
class NcclCluster(Control):
    """Sets the cluster size of NCCL's kernels of one process group.

    `cga_cluster` is 0 to 8; 0 launches without clusters. Does nothing for a grid that the size does not divide (NCCL
    drops the clusters) and where it is NCCL's default (4 on Hopper).
    """

    setting: ClassVar[str] = "cga_cluster={cga_cluster}"
    nccl_options: ClassVar[tuple[str, ...]] = ("cga_cluster_size",)
    remedy: ClassVar[str] = (
        "give a size that divides the CTAs and is not NCCL's default, and a process group made with these options"
    )

    by_cluster: ClassVar[bool] = True

    cga_cluster: int

    def __post_init__(self) -> None:
        if not 0 <= self.cga_cluster <= _MOST_PER_CLUSTER:
            raise Misconfigured(
                f"cga_cluster={self.cga_cluster} is not a cluster size; choose 0 (none) to {_MOST_PER_CLUSTER}"
            )

    def available(self) -> str | None:
        """Return why the cluster size cannot be set; None if it can."""
        import torch

        if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9:
            return "thread block clusters need compute capability 9.0"
        return super().available()

    def configure(self, options: Any) -> None:
        """Set the cluster size in the process group's options."""
        nccl_config(options).cga_cluster_size = self.cga_cluster

    def verify(self, seen: Observation) -> Evidence:
        """Compare the cluster sizes of NCCL's kernels with the control and without it."""
        now, before = _sizes(nccl_kernels(seen.comm)), _sizes(nccl_kernels(seen.comm_without))
        return self.evidence(
            asked=f"clusters of {max(self.cga_cluster, 1)} CTAs, other than without it",
            seen=f"clusters of {written(now)} CTAs, without it {written(before)}",
            took_effect=now == [max(self.cga_cluster, 1)] and None not in before and before not in ([], now),
        )


def _sizes(kernels: tuple[Launched, ...]) -> list[int | None]:
    """Return the sizes (CTAs) of the kernels' clusters, each size once; None stands for a size that was not seen."""
    sizes = {None if one.cluster is None else one.cluster[0] * one.cluster[1] * one.cluster[2] for one in kernels}
    return sorted(sizes, key=lambda size: -1 if size is None else size)


@dataclass(frozen=True, kw_only=True)
class NcclCtaPolicy(Control):
    """Sets the CTA policy of one process group: whether NCCL prefers speed, fewer CTAs, or copy engines.

    `zero` uses copy engines for all_gather, all_to_all, gather and scatter of one node, and silently falls back
    to kernels unless **both** buffers are registered as windows (`NcclWindows`) and the stream is not the default
    one; sums always need kernels. `efficiency` does nothing where NVLink multicast (NVLS) is off. Needs NCCL 2.28.
    """

    setting: ClassVar[str] = "cta_policy={policy}"
    nccl_options: ClassVar[tuple[str, ...]] = ("cta_policy",)
    remedy: ClassVar[str] = (
        "zero: a process group made with these options, both buffers from NcclWindows.empty, not the default stream, "
        "no sums; efficiency needs NVLink multicast"
    )

    policy: Policy

    def __post_init__(self) -> None:
        if self.policy not in get_args(Policy):
            raise Misconfigured(f"cta_policy={self.policy} is unknown; choose from: {', '.join(get_args(Policy))}")

    def configure(self, options: Any) -> None:
        """Set the CTA policy in the process group's options."""
        nccl_config(options).cta_policy = _NUMBER[self.policy]

    def verify(self, seen: Observation) -> Evidence:
        """Check whether NCCL ran the kernels or copies that the policy should lead to."""
        kernels, moved = nccl_kernels(seen.comm), copies(seen.comm)
        now, before = blocks(kernels), blocks(nccl_kernels(seen.comm_without))
        took_effect, asked = {
            "zero": (not kernels and bool(moved) and bool(before), "copies and no NCCL kernel, without it a kernel"),
            "efficiency": (bool(now and before) and now[-1] < before[-1], "fewer CTAs than without it"),
            "default": (bool(kernels), "NCCL's kernels"),
        }[self.policy]
        return self.evidence(
            asked=asked,
            seen=f"NCCL kernels of {written(now, nothing='0')} CTAs and {len(moved)} copies, "
            f"without it kernels of {written(before, nothing='0')} CTAs",
            took_effect=took_effect,
        )


@dataclass(frozen=True, kw_only=True)
class NcclWindows(Control):
    """Allocates buffers registered with NCCL as symmetric windows, for NCCL's copy engines or symmetric kernels.

        windows = NcclWindows()
        buffer = windows.empty(numel, dtype=torch.bfloat16, device=device, group=group)  # all ranks, same order

    Every buffer has a memory pool of its own, registered once it is allocated: torch no longer registers what grows in
    a pool later, since that could hang. Does nothing unless **all** buffers of a collective are windows, nor for sums
    of float64 or other than SUM and AVG, nor across NVLink domains. For large sizes NCCL's symmetric kernels were
    slower than its plain ones (1 GiB all_gather, 8 x H200: 266 against 342 GB/s, 2026-11-20).

    Memory stays registered until `release`, or as long as this control lives: keep it longer than its buffers.
    """

    setting: ClassVar[str] = "windows"
    remedy: ClassVar[str] = "take both buffers from `empty`, for the group that runs the collective"

    _pools: list[tuple[Any, Any]] = field(default_factory=list, init=False, repr=False, compare=False)

    def available(self) -> str | None:
        """Return why no memory can be registered with NCCL; None if it can."""
        reason = no_nccl()
        if reason is None:
            import torch

            if not hasattr(torch.distributed.ProcessGroupNCCL, "register_mem_pool"):
                return f"PyTorch {torch.__version__} cannot register memory pools with NCCL"
        return reason

    def empty(self, numel: int, *, dtype: Any, device: Any, group: Any) -> Any:
        """Return a buffer registered with an NCCL `group`, in one order on all ranks; Misconfigured: no NCCL."""
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
        """Deregister every buffer; all ranks call it after the last collective and before the group is destroyed."""
        import torch

        torch.cuda.synchronize()
        while self._pools:
            backend, pool = self._pools.pop()
            backend.deregister_mem_pool(pool)

    def verify(self, seen: Observation) -> Evidence:
        """Check that NCCL ran symmetric kernels or copies."""
        now, before = _path(seen.comm), _path(seen.comm_without)
        return self.evidence(
            asked="NCCL's symmetric kernels, or copies instead of kernels",
            seen=f"{now}, without it {before}",
            took_effect=now in ("symmetric kernels", "copies") and now != before,
        )


def _path(comm: tuple[Launched, ...]) -> str:
    """Return in words the path that NCCL took: symmetric kernels, plain kernels, copies or nothing."""
    kernels = nccl_kernels(comm)
    if kernels:
        return "symmetric kernels" if len(symmetric_kernels(comm)) == len(kernels) else "plain kernels"
    return "copies" if copies(comm) else "nothing"
