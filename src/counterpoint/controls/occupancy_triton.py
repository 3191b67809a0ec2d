"""The way in for Triton: its launcher hands the driver what `packed_metadata` says, so it is told more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from counterpoint.controls.occupancy_shaper import Shaper
from counterpoint.errors import Unsupported

__all__ = ["no_triton", "shaped_triton"]


def no_triton() -> str | None:
    """Why Triton's launcher cannot be told; None if it can."""
    try:
        _launcher()
    except Unsupported as error:
        return str(error)
    return None


@contextmanager
def shaped_triton(shaper: Shaper) -> Iterator[None]:
    """Every Triton kernel launched inside, by any thread while `shaper.active`, is launched as the shaper says.

    Not reached: kernels that Inductor launches through torch's own static launcher, and captured graphs.

    Raises:
        Unsupported: no Triton for NVIDIA GPUs, or one with another launcher than 3.6 and 3.7 have.
    """
    launcher = _launcher()
    stock: Callable[..., Any] = launcher.__call__

    def launch(
        self: Any, grid_x: int, grid_y: int, grid_z: int, stream: int, function: int, packed: Any, *rest: Any
    ) -> Any:
        if shaper.active:
            warps, ctas, smem = _unpacked(packed)
            cooperative = bool(getattr(self, "launch_cooperative_grid", False))
            smem = shaper.dynamic_smem(
                function, threads=32 * warps, dynamic_smem_bytes=smem, clustered=ctas > 1, cooperative=cooperative
            )
            packed = (warps, ctas, smem)
        return stock(self, grid_x, grid_y, grid_z, stream, function, packed, *rest)

    launcher.__call__ = launch
    try:
        yield
    finally:
        launcher.__call__ = stock


def _unpacked(packed: Any) -> tuple[int, int, int]:
    """Warps, blocks per cluster, and bytes of dynamic shared memory."""
    if not (isinstance(packed, tuple) and len(packed) == 3):
        raise Unsupported(f"Triton's launcher got {packed!r} and not (warps, CTAs, shared memory); use interpose=True")
    return packed


def _launcher() -> Any:
    try:
        from triton.backends.nvidia.driver import CudaLauncher
    except ImportError as error:
        raise Unsupported(f"Triton for NVIDIA GPUs is not installed, or not 3.6 or newer: {error}") from error
    return CudaLauncher
