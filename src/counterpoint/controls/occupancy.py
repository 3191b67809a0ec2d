"""Put fewer blocks of compute kernels on each SM, by asking for shared memory that the kernels do not use.

`OccupancyShaping` is the control, `shape` its rule, and `Shaper` applies the rule to each kernel at launch: kernels
launched through cuda-bindings or cuda.core ask it themselves, the hooks of launch_hooks.py ask it for all others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar

from counterpoint.controls.control import Control, Lanes, call_driver, first_reason
from counterpoint.controls.launch_hooks import no_cupti, no_triton, shaped_launches, shaped_triton
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.machine.occupancy import Footprint, SmLimits, smem_for_blocks_per_sm
from counterpoint.records.measurement import Evidence, Launched, Observation


@dataclass(frozen=True, kw_only=True)
class OccupancyShaping(Control):
    """Asks for extra dynamic shared memory at launch, so that fewer blocks of a kernel fit on an SM.

        with OccupancyShaping(blocks_per_sm=3).launches() as shaper:
            matmul[grid](a, b, c, ...)          # a Triton kernel
        shaper.shapes                           # what became of each kernel, and why some stayed as they were

    No kernel or library is modified. Reached are Triton kernels; with `interpose` every kernel that the driver
    launches, cuBLAS and PyTorch included, at about 7 µs each and not beside a profiler (launch_hooks.py). Kernels
    launched through cuda-bindings or cuda.core ask `shaper.dynamic_smem` or `shaper.launch_config` themselves.

    What it is good for was measured on H200 (docs/results/pairs.md): a collective that comes second gets in by
    *priority*, with or without shaping; shaping decides how long that takes, and what the GEMM itself gains or loses.
    Source: "Resource-aware Computation-Communication Overlap", arXiv 2606.09200.

    Args:
        blocks_per_sm: at most so many blocks of a kernel on an SM, or
        smem_bytes: so much shared memory per block, static + dynamic. Exactly one of the two.
        kernels: regular expression; only kernels whose names it is found in.
        interpose: every launch of the process, not only Triton's.
        sm: limits of an SM to judge by; None: the current device's.

    Raises:
        Misconfigured: not exactly one of the two, one below 1, or not a regular expression.
    """

    driver_calls: ClassVar[tuple[str, ...]] = (
        "cuFuncGetAttribute", "cuFuncSetAttribute", "cuFuncGetName", "cuKernelGetFunction", "cuDeviceGetAttribute",
    )  # fmt: skip
    remedy: ClassVar[str] = (
        "ask for fewer blocks than fit by themselves, of a kernel that Triton launches (others: interpose=True); one "
        "block per SM already: a smaller grid, gemm_sms=N"
    )

    blocks_per_sm: int | None = None
    smem_bytes: int | None = None
    kernels: str = ""
    interpose: bool = False
    sm: SmLimits | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.blocks_per_sm, self.smem_bytes) if value is not None]
        if len(given) != 1 or given[0] < 1:
            raise Misconfigured(
                f"blocks_per_sm={self.blocks_per_sm} and smem={self.smem_bytes} came; give exactly one, 1 or more"
            )
        try:
            re.compile(self.kernels)
        except re.error as error:
            raise Misconfigured(
                f"kernels={self.kernels!r} is not a regular expression: {error}; escape what is meant literally"
            ) from error

    @property
    def name(self) -> str:
        """Return the setting as it is written in a mechanism's name, such as `blocks_per_sm=3`."""
        asked = f"smem={self.smem_bytes}" if self.blocks_per_sm is None else f"blocks_per_sm={self.blocks_per_sm}"
        return asked + (",interposed" if self.interpose else "")

    def available(self) -> str | None:
        """Return why launches cannot be changed in this process; None if they can."""
        return first_reason(super().available(), no_cupti() if self.interpose else no_triton())

    @contextmanager
    def launches(self) -> Iterator[Shaper]:
        """Set the shared memory of the kernels that are launched in the `with` block.

        `Unsupported` is raised without Triton, or with `interpose` without CUPTI or beside a profiler that has it.

        Yields:
            The shaper, which says what became of each kernel.
        """
        shaper = Shaper(self)
        with shaped_launches(shaper) if self.interpose else shaped_triton(shaper):
            yield shaper

    @contextmanager
    def apply(self, lanes: Lanes) -> Iterator[Lanes]:
        """Yield lanes whose compute side launches its kernels with the extra shared memory."""
        with self.launches() as shaper:
            shaper.active = False  # the communication side stays as it is

            def shaped() -> None:
                shaper.active = True
                try:
                    lanes.compute()
                finally:
                    shaper.active = False

            yield replace(lanes, compute=shaped)

    def verify(self, seen: Observation) -> Evidence:
        """Compare the blocks per SM, with and without the control, of the longest kernel that matches `kernels`."""
        sm = self.sm or device_limits()
        before = self._longest(seen.compute_without)
        after = self._longest(tuple(one for one in seen.compute if before is not None and one.name == before.name))
        if before is None or after is None:
            missing = "without the control" if before is None else "with it"
            return self._result(f"no kernel {self.kernels!r} that the profiler knows the size of {missing}", False)
        would = shape(_kernel(before), self, sm=sm)
        has, had = _kernel(after).footprint.most_on(sm), would.blocks_before
        text = f"{had} blocks per SM before, {has} after ({before.smem_bytes} and {after.smem_bytes} bytes a block)"
        if would.refused is not None:
            return self._result(f"{text}: {before.name} cannot be shaped: {would.refused}", False)
        grown = after.smem_bytes == would.kernel.static_smem_bytes + would.dynamic_smem_bytes
        return self._result(f"{text}: {before.name}", grown and has == would.blocks_after)

    def _result(self, text: str, took_effect: bool) -> Evidence:
        asked = f"{self.smem_bytes} bytes of shared memory per block"
        if self.smem_bytes is None:
            asked = f"{self.blocks_per_sm} blocks per SM"
        return self.evidence(asked=asked, seen=text, took_effect=took_effect)

    def _longest(self, launched: tuple[Launched, ...]) -> Launched | None:
        kernels = [one for one in launched if one.block and one.smem_bytes is not None and one.regs_per_thread]
        named = [one for one in kernels if re.search(self.kernels, one.name)]
        return max(named, key=lambda one: one.duration_us, default=None)


def _kernel(seen: Launched) -> UnshapedKernel:
    """Return a profiled kernel as an `UnshapedKernel`, with all its shared memory counted as dynamic."""
    assert seen.block is not None, "chosen for having one"
    return UnshapedKernel(
        name=seen.name,
        threads=prod(seen.block),
        regs_per_thread=seen.regs_per_thread or 0,
        dynamic_smem_bytes=seen.smem_bytes or 0,
        clustered=seen.cluster is not None and prod(seen.cluster) > 1,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class UnshapedKernel:
    """Describes a kernel that is about to be launched, and the resources that it asks for."""

    name: str
    threads: int
    regs_per_thread: int
    static_smem_bytes: int = 0
    dynamic_smem_bytes: int = 0
    clustered: bool = False
    cooperative: bool = False

    @property
    def footprint(self) -> Footprint:
        """Return the resources of an SM that one block of the kernel takes."""
        return Footprint(
            threads=self.threads,
            regs_per_thread=self.regs_per_thread,
            smem_bytes=self.static_smem_bytes + self.dynamic_smem_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Describes how a kernel is launched after shaping; `refused` says why it was not shaped."""

    kernel: UnshapedKernel
    blocks_before: int
    blocks_after: int
    dynamic_smem_bytes: int
    refused: str | None = None


def shape(kernel: UnshapedKernel, wanted: OccupancyShaping, *, sm: SmLimits) -> Shape:
    """Return how to launch `kernel` with the dynamic shared memory that `wanted` asks for, or why not (`refused`)."""
    block, refused = kernel.footprint, None
    before = block.most_on(sm)
    try:
        block = replace(block, smem_bytes=_total(kernel, wanted, before, sm))
    except Misconfigured as error:
        refused = str(error)
    return Shape(
        kernel=kernel,
        blocks_before=before,
        blocks_after=block.most_on(sm),
        dynamic_smem_bytes=block.smem_bytes - kernel.static_smem_bytes,
        refused=refused,
    )


def _total(kernel: UnshapedKernel, wanted: OccupancyShaping, before: int, sm: SmLimits) -> int:
    """Return the bytes of static + dynamic shared memory to launch with; raise if the kernel cannot be shaped."""
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
    assert wanted.smem_bytes is not None, "OccupancyShaping holds exactly one of the two"
    if wanted.smem_bytes > sm.most_smem_per_block:
        raise Misconfigured(f"smem={wanted.smem_bytes} is more than a block may have: {sm.most_smem_per_block} bytes")
    if wanted.smem_bytes <= kernel.footprint.smem_bytes:
        raise Misconfigured(f"it asks for {kernel.footprint.smem_bytes} bytes itself; give more")
    return wanted.smem_bytes


class Shaper:
    """Decides once per kernel how to launch it; threads may share a shaper, as a decision is always the same."""

    def __init__(self, wanted: OccupancyShaping) -> None:
        self.active = True  # read by the hooks: off while the communication side is queued
        self._wanted, self._pattern = wanted, re.compile(wanted.kernels)
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

        The permission stays: it changes nothing by itself, and captured graphs need it. `handle` is a `CUfunction` or
        `CUkernel`, `threads` are of a block, `dynamic_smem_bytes` what the kernel asks for by itself. `Unsupported`:
        the driver refused.
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
        """Return a copy of cuda.core's `LaunchConfig` with the shared memory that `kernel` has to be launched with."""
        smem = self.dynamic_smem(
            int(kernel.handle if hasattr(kernel, "handle") else kernel._handle),
            threads=prod(config.block),
            dynamic_smem_bytes=config.shmem_size,
            clustered=bool(config.cluster),
            cooperative=bool(getattr(config, "is_cooperative", False)),
        )
        fields = ("grid", "cluster", "block", "is_cooperative", "programmatic_stream_serialization")
        kept = {name: getattr(config, name) for name in fields if getattr(config, name, None)}
        return type(config)(**kept, shmem_size=smem)

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
    """Return the limits of one SM of a device (None: the current context's device), as the driver states them."""
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
    """Return the `CUfunction` of a handle, which is a `CUfunction` (from Triton) or a `CUkernel` (from cuBLAS)."""
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
