"""What extra shared memory does to one kernel, or why it can do nothing: pure, before anything is launched."""

from __future__ import annotations

from dataclasses import dataclass

from counterpoint.errors import Misconfigured
from counterpoint.machine.occupancy import Footprint, SmLimits, blocks_per_sm, smem_for_blocks_per_sm

__all__ = ["Kernel", "Shape", "Wanted", "shape"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """A kernel as it is about to be launched."""

    name: str
    threads: int
    regs_per_thread: int
    static_smem_bytes: int = 0
    dynamic_smem_bytes: int = 0
    clustered: bool = False
    cooperative: bool = False

    @property
    def footprint(self) -> Footprint:
        """What one block takes of an SM."""
        return Footprint(
            threads=self.threads,
            regs_per_thread=self.regs_per_thread,
            smem_bytes=self.static_smem_bytes + self.dynamic_smem_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Either so many blocks per SM, or so many bytes of shared memory per block, static + dynamic.

    Raises:
        Misconfigured: not exactly one of the two, or one below 1.
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
    """What is launched instead. `refused` says why it is what it was."""

    kernel: Kernel
    blocks_before: int
    blocks_after: int
    dynamic_smem_bytes: int
    refused: str | None = None


def shape(kernel: Kernel, wanted: Wanted, *, sm: SmLimits) -> Shape:
    """`kernel` with as much dynamic shared memory as `wanted` asks for. Never raises: what cannot be is `refused`."""
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


def _total(kernel: Kernel, wanted: Wanted, before: int, sm: SmLimits) -> int:
    """Static + dynamic bytes to launch with; Misconfigured, with the reason, if the kernel has to stay as it is."""
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
