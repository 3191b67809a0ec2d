"""Compute how many blocks of a kernel fit on one SM, and how many waves a grid takes.

    waves = ceil(blocks / ((SMs - communication CTAs) * blocks per SM))

One communication CTA takes one SM: NCCL's blocks (544 threads, ~100 registers, ~100 KB of shared memory) leave no room
for a block of a GEMM next to them. Source: CUDA programming guide, "compute capabilities"; H200, 2026-11-20.
"""

from __future__ import annotations

from dataclasses import dataclass

from counterpoint.errors import Misconfigured

_REGISTERS_ALLOCATED_BY = 256  # per warp
_WARPS_ALLOCATED_BY = 4  # one for each of an SM's four register files


@dataclass(frozen=True, kw_only=True, slots=True)
class SmLimits:
    """Holds the limits of one SM, and how many SMs the GPU has."""

    num_sms: int
    regs: int  # 32-bit registers
    smem: int  # bytes of shared memory
    threads: int  # most resident at once, like `blocks`
    blocks: int = 32
    smem_reserved: int = 1024  # bytes per block, by the system; 0 before compute capability 8

    @property
    def most_smem_per_block(self) -> int:
        """Return how many bytes of shared memory a block may opt in to: all of an SM, less the system's reserve."""
        return self.smem - self.smem_reserved


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Holds the threads, registers and shared memory that one block of a kernel takes."""

    threads: int
    regs_per_thread: int
    smem_bytes: int  # static + dynamic

    def most_on(self, sm: SmLimits) -> int:
        """Return how many blocks of this kernel fit on one SM at once, at least 1."""
        return blocks_per_sm(
            threads=self.threads, regs_per_thread=self.regs_per_thread, smem_bytes=self.smem_bytes, sm=sm
        )


def blocks_per_sm(*, threads: int, regs_per_thread: int, smem_bytes: int, sm: SmLimits) -> int:
    """Return how many blocks of a kernel fit on one SM at once, at least 1, since the kernel did run.

    With `regs_per_thread` 0, unknown, registers do not limit; `smem_bytes` are static + dynamic, of a block.
    """
    warps = -(-max(threads, 1) // 32)
    limits = [sm.blocks, sm.threads // (warps * 32)]
    if regs_per_thread > 0:
        limits.append(sm.regs // _regs_per_warp(regs_per_thread) // _WARPS_ALLOCATED_BY * _WARPS_ALLOCATED_BY // warps)
    if smem_bytes > 0:
        limits.append(sm.smem // (smem_bytes + sm.smem_reserved))
    return max(1, min(limits))


def smem_for_blocks_per_sm(wanted: int, *, kernel: Footprint, sm: SmLimits) -> int:
    """Return the least shared memory per block (static + dynamic bytes) with which exactly `wanted` fit on an SM.

    A block takes its shared memory and what the system reserves, in units of 128 bytes (256 before Ampere):
    `smem / (wanted + 1) < block <= smem / wanted`.

    Raises:
        Misconfigured: fewer fit already (shared memory can only lower the number), or no size gives exactly `wanted`.
    """
    fit = kernel.most_on(sm)
    if not 1 <= wanted <= fit:
        raise Misconfigured(f"{wanted} blocks per SM cannot be had: {fit} fit, and more shared memory makes it fewer")
    if wanted == fit:
        return kernel.smem_bytes
    unit = 128 if sm.smem_reserved else 256
    block = (sm.smem // (wanted + 1) // unit + 1) * unit
    if sm.smem // block != wanted:
        raise Misconfigured(f"no amount of shared memory leaves exactly {wanted} blocks per SM; ask for fewer")
    return block - sm.smem_reserved


def blocks_beside(kernel: Footprint, guest: Footprint, *, sm: SmLimits) -> int:
    """Return how many blocks of `kernel` fit on an SM that already holds one block of `guest`; may be 0.

    Registers are in four files, one for every fourth warp of a block: what counts is the fullest file, not the sum.
    NCCL's block of 544 threads × 96 registers puts 5 of its 17 warps into one file and leaves 32 registers a thread
    for one more warp there, so no GEMM fits beside it whatever the shared memory. Seen so on H200, 2026-11-21.
    """
    mine, theirs = (-(-max(one.threads, 1) // 32) for one in (kernel, guest))
    limits = [
        sm.blocks - 1,
        (sm.threads - theirs * 32) // (mine * 32),
        (sm.smem - guest.smem_bytes - sm.smem_reserved) // max(kernel.smem_bytes + sm.smem_reserved, 1),
    ]
    file = sm.regs // _WARPS_ALLOCATED_BY
    for index in range(min(mine, _WARPS_ALLOCATED_BY)):
        taken = len(range(index, theirs, _WARPS_ALLOCATED_BY)) * _regs_per_warp(guest.regs_per_thread)
        wanted = len(range(index, mine, _WARPS_ALLOCATED_BY)) * _regs_per_warp(kernel.regs_per_thread)
        limits.append((file - taken) // max(wanted, 1))
    return max(0, min(limits))


def _regs_per_warp(regs_per_thread: int) -> int:
    return -(-regs_per_thread * 32 // _REGISTERS_ALLOCATED_BY) * _REGISTERS_ALLOCATED_BY


def tiles_of(m: int, n: int, tile: tuple[int, int]) -> int:
    """Return into how many tiles a product of `m` rows and `n` columns is cut; one block computes each tile."""
    return -(-m // tile[0]) * -(-n // tile[1])


def waves(blocks: int, *, num_sms: int, blocks_per_sm: int) -> int:
    """Return the number of waves in which `blocks` thread blocks run on `num_sms` SMs."""
    return -(-blocks // (max(num_sms, 1) * blocks_per_sm))


def most_ctas_without_extra_wave(blocks: int, *, num_sms: int, blocks_per_sm: int) -> int:
    """Return how many SMs communication can take at most before `blocks` need one more wave."""
    alone = waves(blocks, num_sms=num_sms, blocks_per_sm=blocks_per_sm)
    return num_sms - -(-blocks // (alone * blocks_per_sm))
