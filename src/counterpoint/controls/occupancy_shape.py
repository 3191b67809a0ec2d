"""Compute how much extra shared memory a kernel needs, and let the driver launch it with that much.

Kernels launched through cuda-bindings or cuda.core ask `Shaper.dynamic_smem` for the bytes to launch with, or
`Shaper.launch_config` for the whole configuration; the hooks of launch_hooks.py ask for all others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from counterpoint.controls.control import call_driver
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.machine.occupancy import Footprint, SmLimits, blocks_per_sm, smem_for_blocks_per_sm


@dataclass(frozen=True, kw_only=True, slots=True)
class UnshapedKernel:
    """Describes a kernel that is about to be launched."""

    name: str
    threads: int
    regs_per_thread: int
    static_smem_bytes: int = 0
    dynamic_smem_bytes: int = 0
    clustered: bool = False
    cooperative: bool = False

    @property
    def footprint(self) -> Footprint:
        """Return the resources that one block takes of an SM."""
        return Footprint(
            threads=self.threads,
            regs_per_thread=self.regs_per_thread,
            smem_bytes=self.static_smem_bytes + self.dynamic_smem_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Asks for a number of blocks per SM, or for bytes of shared memory per block (static + dynamic).

    `Misconfigured` is raised unless exactly one of the two is given, and is at least 1.
    """

    blocks_per_sm: int | None = None
    smem_bytes: int | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.blocks_per_sm, self.smem_bytes) if value is not None]
        if len(given) != 1 or given[0] < 1:
            raise Misconfigured(
                f"blocks_per_sm={self.blocks_per_sm} and smem={self.smem_bytes} came; give exactly one, 1 or more"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Describes how a kernel is launched instead; `refused` says why nothing changes."""

    kernel: UnshapedKernel
    blocks_before: int
    blocks_after: int
    dynamic_smem_bytes: int
    refused: str | None = None


def shape(kernel: UnshapedKernel, wanted: Wanted, *, sm: SmLimits) -> Shape:
    """Return `kernel` with as much dynamic shared memory as `wanted` asks for, or `refused` with the reason."""
    before = _fit(kernel.footprint, sm)
    try:
        total = _total(kernel, wanted, before, sm)
    except Misconfigured as error:
        unchanged = kernel.dynamic_smem_bytes
        return Shape(
            kernel=kernel, blocks_before=before, blocks_after=before, dynamic_smem_bytes=unchanged, refused=str(error)
        )
    taller = Footprint(threads=kernel.threads, regs_per_thread=kernel.regs_per_thread, smem_bytes=total)
    return Shape(
        kernel=kernel,
        blocks_before=before,
        blocks_after=_fit(taller, sm),
        dynamic_smem_bytes=total - kernel.static_smem_bytes,
    )


def _total(kernel: UnshapedKernel, wanted: Wanted, before: int, sm: SmLimits) -> int:
    """Return static + dynamic bytes to launch with; raise Misconfigured if the kernel has to stay as it is."""
    if kernel.clustered:
        raise Misconfigured("it is launched in clusters, and its blocks are placed by the cluster")
    if kernel.cooperative:
        raise Misconfigured("it is a cooperative launch: all its blocks must be resident, or it does not start")
    if before == 1:
        raise Misconfigured("it has one block per SM already; a smaller grid frees SMs: gemm_sms=N for cuBLAS")
    if wanted.blocks_per_sm is not None:
        if wanted.blocks_per_sm >= before:
            raise Misconfigured(f"only {before} blocks fit on an SM as it is; ask for fewer")
        return smem_for_blocks_per_sm(wanted.blocks_per_sm, kernel=kernel.footprint, sm=sm)
    assert wanted.smem_bytes is not None, "Wanted holds exactly one of the two"
    if wanted.smem_bytes > sm.most_smem_per_block:
        raise Misconfigured(f"smem={wanted.smem_bytes} is more than a block may have: {sm.most_smem_per_block} bytes")
    if wanted.smem_bytes <= kernel.footprint.smem_bytes:
        raise Misconfigured(f"it asks for {kernel.footprint.smem_bytes} bytes itself; give more")
    return wanted.smem_bytes


def _fit(block: Footprint, sm: SmLimits) -> int:
    return blocks_per_sm(
        threads=block.threads, regs_per_thread=block.regs_per_thread, smem_bytes=block.smem_bytes, sm=sm
    )


class Shaper:
    """Decides once per kernel how to launch it. Threads may share a shaper: a decision taken twice is the same.

    Kernels stay as they are if the regular expression `kernels` is not found in their names.
    """

    def __init__(self, wanted: Wanted, *, kernels: str = "") -> None:
        self.active = True  # read by the hooks: off while the communication side is queued
        self._wanted, self._pattern = wanted, re.compile(kernels)
        self._shapes: dict[tuple[int, int, int, bool, bool], Shape | None] = {}
        self._limits: dict[int, SmLimits] = {}  # by device

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Return every kernel that was launched, shaped or refused, in the order of its first launch."""
        return tuple(found for found in self._shapes.values() if found is not None)

    def dynamic_smem(
        self,
        handle: int,
        *,
        threads: int,
        dynamic_smem_bytes: int = 0,
        clustered: bool = False,
        cooperative: bool = False,
    ) -> int:
        """Return the bytes of dynamic shared memory to launch a kernel with, and permit the kernel to have them.

        That permission stays: it changes nothing by itself, and captured graphs need it.

        Args:
            handle: `CUfunction` or `CUkernel`, as an integer.
            threads: per block.
            dynamic_smem_bytes: what it needs by itself.
            clustered: launched with a cluster dimension.
            cooperative: launched cooperatively.

        Raises:
            Unsupported: the driver refused.
        """
        key = (handle, threads, dynamic_smem_bytes, clustered, cooperative)
        if key not in self._shapes:
            function = _function(handle)
            kernel = UnshapedKernel(
                name=call_driver("cuFuncGetName", function).decode(),
                threads=threads,
                regs_per_thread=_attribute(function, "NUM_REGS"),
                static_smem_bytes=_attribute(function, "SHARED_SIZE_BYTES"),
                dynamic_smem_bytes=dynamic_smem_bytes,
                clustered=clustered or _attribute(function, "REQUIRED_CLUSTER_WIDTH") > 0,
                cooperative=cooperative,
            )
            self._shapes[key] = self._decide(kernel, function)
        found = self._shapes[key]
        return dynamic_smem_bytes if found is None else found.dynamic_smem_bytes

    def launch_config(self, config: Any, kernel: Any) -> Any:
        """Return a copy of cuda.core's `LaunchConfig` with the shared memory to launch `kernel` with."""
        threads = config.block[0] * config.block[1] * config.block[2]
        smem = self.dynamic_smem(
            int(kernel.handle if hasattr(kernel, "handle") else kernel._handle),
            threads=threads,
            dynamic_smem_bytes=config.shmem_size,
            clustered=bool(config.cluster),
            cooperative=bool(getattr(config, "is_cooperative", False)),
        )
        fields = ("grid", "cluster", "block", "is_cooperative", "programmatic_stream_serialization")
        kept = {name: getattr(config, name) for name in fields if getattr(config, name, None)}
        return type(config)(**kept, shmem_size=smem)

    @contextmanager
    def only_here(self) -> Iterator[None]:
        """Shape what is launched inside, and nothing that is launched after it."""
        self.active = True
        try:
            yield
        finally:
            self.active = False

    def _decide(self, kernel: UnshapedKernel, function: Any) -> Shape | None:
        if not self._pattern.search(kernel.name):
            return None
        device = int(call_driver("cuCtxGetDevice"))
        if device not in self._limits:
            self._limits[device] = device_limits(device)
        found = shape(kernel, self._wanted, sm=self._limits[device])
        if found.dynamic_smem_bytes > _attribute(function, "MAX_DYNAMIC_SHARED_SIZE_BYTES"):
            from cuda.bindings import driver

            most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call_driver("cuFuncSetAttribute", function, most, found.dynamic_smem_bytes)
        return found


def device_limits(device: int | None = None) -> SmLimits:
    """Return what an SM of the device (None: of the current context) holds, as the driver says; raise if it cannot."""
    from cuda.bindings import driver

    which = call_driver("cuCtxGetDevice") if device is None else call_driver("cuDeviceGet", device)

    def ask(name: str) -> int:
        attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call_driver("cuDeviceGetAttribute", attribute, which))

    return SmLimits(
        num_sms=ask("MULTIPROCESSOR_COUNT"),
        regs=ask("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        smem=ask("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        threads=ask("MAX_THREADS_PER_MULTIPROCESSOR"),
        blocks=ask("MAX_BLOCKS_PER_MULTIPROCESSOR"),
        smem_reserved=ask("RESERVED_SHARED_MEMORY_PER_BLOCK"),
    )


def _function(handle: int) -> Any:
    """Return the function of a handle: cuBLAS and the CUDA runtime launch `CUkernel`s, Triton `CUfunction`s."""
    from cuda.bindings import driver

    function = driver.CUfunction(handle)
    try:
        _attribute(function, "NUM_REGS")
    except Unsupported:
        return call_driver("cuKernelGetFunction", driver.CUkernel(handle))
    return function


def _attribute(function: Any, name: str) -> int:
    from cuda.bindings import driver

    return int(
        call_driver("cuFuncGetAttribute", getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}"), function)
    )
