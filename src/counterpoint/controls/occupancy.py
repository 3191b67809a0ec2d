"""Put fewer blocks of compute kernels on each SM, by asking for shared memory that they do not use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

from counterpoint.controls.control import Control, Lanes, first_reason
from counterpoint.controls.launch_hooks import KernelLaunch, LaunchHook, no_cupti, no_triton, shaped_triton
from counterpoint.controls.occupancy_shape import Shaper, UnshapedKernel, Wanted, device_limits, shape
from counterpoint.errors import Misconfigured
from counterpoint.machine.occupancy import SmLimits
from counterpoint.records.measurement import Evidence, Launched, Observation


@dataclass(frozen=True, kw_only=True)
class OccupancyShaping(Control):
    """Asks for extra dynamic shared memory at launch, so that fewer blocks of a kernel fit on an SM.

        with OccupancyShaping(blocks_per_sm=3).launches() as shaper:
            matmul[grid](a, b, c, ...)          # a Triton kernel
        shaper.shapes                           # what became of each kernel, and why some stayed as they were

    No kernel or library is modified. Reached are Triton kernels; with `interpose` every kernel that the driver
    launches, cuBLAS and PyTorch included, at about 7 µs each and not beside a profiler (launch_hooks.py). Kernels
    launched through cuda-bindings or cuda.core can ask `shaper.dynamic_smem` or `shaper.launch_config` themselves.

    What it is good for was measured on H200 (docs/results/occupancy.md): a collective that comes second gets in by
    *priority*, with or without shaping; shaping decides how long that takes, and what the GEMM itself gains or loses.
    Source: "Resource-aware Computation-Communication Overlap", arXiv 2606.09200.

    Args:
        blocks_per_sm: at most so many blocks of a kernel on an SM, or
        smem_bytes: so much shared memory per block, static + dynamic. Exactly one of the two.
        kernels: regular expression; only kernels whose names it is found in.
        interpose: every launch of the process, not only Triton's.
        sm: limits of an SM to judge by; None: those of the current device.

    Raises:
        Misconfigured: not exactly one of the two, one below 1, or not a regular expression.
    """

    driver_calls: ClassVar[tuple[str, ...]] = (
        "cuFuncGetAttribute",
        "cuFuncSetAttribute",
        "cuFuncGetName",
        "cuKernelGetFunction",
        "cuDeviceGetAttribute",
    )
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
        Wanted(blocks_per_sm=self.blocks_per_sm, smem_bytes=self.smem_bytes)
        try:
            re.compile(self.kernels)
        except re.error as error:
            raise Misconfigured(
                f"kernels={self.kernels!r} is not a regular expression: {error}; escape what is meant literally"
            ) from error

    @property
    def wanted(self) -> Wanted:
        """Return the shape that every kernel should have."""
        return Wanted(blocks_per_sm=self.blocks_per_sm, smem_bytes=self.smem_bytes)

    @property
    def name(self) -> str:
        """Return the setting, such as `blocks_per_sm=3`."""
        asked = f"smem={self.smem_bytes}" if self.blocks_per_sm is None else f"blocks_per_sm={self.blocks_per_sm}"
        return asked + (",interposed" if self.interpose else "")

    def available(self) -> str | None:
        """Return why launches cannot be changed, or None."""
        return first_reason(super().available(), no_cupti() if self.interpose else no_triton())

    @contextmanager
    def launches(self) -> Iterator[Shaper]:
        """Shape the kernels that are launched inside.

        Yields:
            The shaper, which says what became of each kernel.

        Raises:
            Unsupported: no Triton, or with `interpose` no CUPTI or a profiler that has it.
        """
        shaper = Shaper(self.wanted, kernels=self.kernels)
        with LaunchHook(lambda launch: _hooked(shaper, launch)) if self.interpose else shaped_triton(shaper):
            yield shaper

    @contextmanager
    def apply(self, lanes: Lanes) -> Iterator[Lanes]:
        """Shape what the compute side launches."""
        with self.launches() as shaper:
            shaper.active = False  # the communication side stays as it is

            def shaped() -> None:
                with shaper.only_here():
                    lanes.compute()

            yield replace(lanes, compute=shaped)

    def verify(self, seen: Observation) -> Evidence:
        """Compare the blocks per SM of one kernel: of those that `kernels` names, the longest without the control."""
        sm = self.sm or device_limits()
        before = self._longest(seen.compute_without)
        after = self._longest(tuple(one for one in seen.compute if before is not None and one.name == before.name))
        if before is None or after is None:
            missing = "without the control" if before is None else "with it"
            return self._result(f"no kernel {self.kernels!r} that the profiler knows the size of {missing}", False)
        would = shape(_kernel(before), self.wanted, sm=sm)
        has, had = (shape(_kernel(one), self.wanted, sm=sm).blocks_before for one in (after, before))
        text = f"{had} blocks per SM before, {has} after ({before.smem_bytes} and {after.smem_bytes} bytes a block)"
        if would.refused is not None:
            return self._result(f"{text}: {before.name} cannot be shaped: {would.refused}", False)
        grown = after.smem_bytes == would.kernel.static_smem_bytes + would.dynamic_smem_bytes
        return self._result(f"{text}: {before.name}", grown and has == would.blocks_after)

    def _result(self, text: str, took_effect: bool) -> Evidence:
        asked = (
            f"{self.blocks_per_sm} blocks per SM"
            if self.smem_bytes is None
            else f"{self.smem_bytes} bytes of shared memory per block"
        )
        return self.evidence(asked=asked, seen=text, took_effect=took_effect)

    def _longest(self, launched: tuple[Launched, ...]) -> Launched | None:
        kernels = [one for one in launched if one.block and one.smem_bytes is not None and one.regs_per_thread]
        named = [one for one in kernels if re.search(self.kernels, one.name)]
        return max(named, key=lambda one: one.duration_us, default=None)


def _kernel(seen: Launched) -> UnshapedKernel:
    """Return a kernel that ran as an `UnshapedKernel`; the profiler does not split its shared memory."""
    assert seen.block is not None, "chosen for having one"
    return UnshapedKernel(
        name=seen.name,
        threads=prod(seen.block),
        regs_per_thread=seen.regs_per_thread or 0,
        dynamic_smem_bytes=seen.smem_bytes or 0,
        clustered=seen.cluster is not None and prod(seen.cluster) > 1,
    )


def _hooked(shaper: Shaper, launch: KernelLaunch) -> int | None:
    """Return the dynamic shared memory for one launch, as the shaper says; None to leave it as it is."""
    if not shaper.active:
        return None
    return shaper.dynamic_smem(
        launch.handle,
        threads=prod(launch.block),
        dynamic_smem_bytes=launch.dynamic_smem_bytes,
        clustered=prod(launch.cluster) > 1,
        cooperative=launch.cooperative,
    )
