"""Limit the SMs of GEMMs: cuBLAS launches its persistent kernels for fewer SMs, so that other SMs stay free."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

from counterpoint.controls.control import Control, Lanes, why_unsupported
from counterpoint.controls.observe import matmul_kernels, written
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.records.measurement import Evidence, Observation


@dataclass(frozen=True, kw_only=True)
class GemmSmLimit(Control):
    """Limits the GEMMs that this thread launches to `num_sms` SMs.

        with GemmSmLimit(num_sms=108).limit():
            loss = model(batch); loss.backward()

    Sets two limits, as GEMMs obey one or the other: `cublasSetSmCountTarget` on the thread's cuBLAS handle
    (torch.mm, F.linear without bias), and torch's SM carve-out (cuBLASLt: addmm and F.linear with bias, _scaled_mm).
    Handles are per thread: inside `limit`, backward runs in the calling thread, too. Not reached: GEMMs that other
    threads launch, kernels whose grid is their number of tiles (not persistent), captured graphs, other libraries.

    `num_sms` is at least 1. 8192³ bf16 on an H200 with 132/124/108: 777/758/711 TFLOP/s.
    """

    setting: ClassVar[str] = "gemm_sms={num_sms}"
    remedy: ClassVar[str] = (
        "launch GEMMs of torch inside the limit, in the calling thread; one whose grid is its number of tiles (not "
        "persistent) cannot be limited: leave the control out"
    )

    num_sms: int

    def __post_init__(self) -> None:
        if self.num_sms < 1:
            raise Misconfigured(f"gemm_sms={self.num_sms} is not a number of SMs; give 1 or more")

    def available(self) -> str | None:
        """Return why GEMMs cannot be limited to `num_sms` SMs; None if they can."""
        if (reason := super().available()) is not None:
            return reason
        import torch

        total = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        if self.num_sms >= total:
            return f"gemm_sms={self.num_sms} limits nothing: this GPU has {total} SMs"
        return why_unsupported(_cublas)

    @contextmanager
    def limit(self) -> Iterator[None]:
        """Limit all GEMMs that this thread launches on the current device, until the block ends.

        `Unsupported` is raised if cuBLAS or its function for the limit is missing.
        """
        import torch

        with ExitStack() as undo:
            undo.enter_context(_handle_target(torch.cuda.current_blas_handle(), self.num_sms))
            undo.enter_context(_carveout(self.num_sms))
            undo.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield

    @contextmanager
    def apply(self, lanes: Lanes) -> Iterator[Lanes]:
        """Yield the lanes with the compute side's GEMMs limited to `num_sms` SMs."""

        def limited() -> None:
            with self.limit():
                lanes.compute()

        yield replace(lanes, compute=limited)

    def verify(self, seen: Observation) -> Evidence:
        """Compare the GEMMs' grids under the limit with their grids without it."""
        now, before, grids = _grids(seen)
        stuck = bool(now) and now == before and max(now) > self.num_sms
        return self.evidence(
            asked=f"GEMM grids of at most {self.num_sms} blocks, of more without it",
            seen=grids + (" (not persistent, or launched where the limit does not reach)" if stuck else ""),
            took_effect=bool(now) and bool(before) and max(now) <= self.num_sms < max(before),
        )


@dataclass(frozen=True, kw_only=True)
class GemmSmFit(Control):
    """Is a placeholder for the GEMM SM limit that a rule finds per pair: `found` returns it; limits nothing itself."""

    setting: ClassVar[str] = "gemm_sms=fit"
    remedy: ClassVar[str] = "give a number of SMs, as in gemm_sms=124"

    def found(self, num_sms: int | None) -> Control:
        """Return a `GemmSmLimit` of `num_sms`, which a rule found for a pair; if it is None, return this control."""
        return self if num_sms is None else GemmSmLimit(num_sms=num_sms)

    def verify(self, seen: Observation) -> Evidence:
        """Check that the GEMMs have equal grids with and without the control."""
        now, before, grids = _grids(seen)
        return self.evidence(asked="all SMs: the rule found no limit that pays", seen=grids, took_effect=now == before)


def _grids(seen: Observation) -> tuple[list[int], list[int], str]:
    """Return each GEMM's number of blocks with the control, without it, and a text that states both."""
    now, before = ([one.num_blocks for one in matmul_kernels(side)] for side in (seen.compute, seen.compute_without))
    text = f"GEMM grids of {written(sorted(set(now)))} blocks, without it {written(sorted(set(before)))}"
    return now, before, text


@contextmanager
def _handle_target(handle: int, num_sms: int) -> Iterator[None]:
    """Set the SM limit of one cuBLAS handle, and restore the old limit at the end."""
    cublas = _cublas()
    old = ctypes.c_int(0)
    _check(cublas.cublasGetSmCountTarget(ctypes.c_void_p(handle), ctypes.byref(old)), "cublasGetSmCountTarget")
    _check(cublas.cublasSetSmCountTarget(ctypes.c_void_p(handle), num_sms), "cublasSetSmCountTarget")
    try:
        yield
    finally:
        cublas.cublasSetSmCountTarget(ctypes.c_void_p(handle), old)


@contextmanager
def _carveout(num_sms: int) -> Iterator[None]:
    """Set torch's private SM carve-out, the only limit for cuBLASLt, and restore the old carve-out at the end."""
    import torch

    old = torch._C._get_sm_carveout_experimental()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    torch._C._set_sm_carveout_experimental(max(0, total - num_sms))
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(old)


@cache
def _cublas() -> Any:
    """Return the cuBLAS library that torch has loaded; raise `Unsupported` if it cannot limit SMs."""
    import torch

    name = f"libcublas.so.{str(torch.version.cuda).partition('.')[0]}"
    try:
        library = ctypes.CDLL(name)  # by its soname: the copy in the process, not another one
    except OSError as error:
        raise Unsupported(
            f"cannot reach {name}, which torch {torch.__version__} should have loaded: {error}"
        ) from error
    if not hasattr(library, "cublasSetSmCountTarget"):
        raise Unsupported(f"{name} has no cublasSetSmCountTarget; it needs CUDA 11.5 or newer")
    return library


def _check(status: int, call: str) -> None:
    if status != 0:
        raise Unsupported(f"{call} failed with cuBLAS status {status}; this cuBLAS cannot limit SMs")
