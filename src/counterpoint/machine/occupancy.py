"""How many blocks of a kernel live on one SM, and how many waves a grid takes.

    waves = ceil(blocks / ((SMs - communication CTAs) * blocks per SM))

One communication CTA takes one SM: NCCL's blocks (544 threads, ~100 registers, ~100 KB of shared memory) leave no room
for a block of a GEMM beside them. Source: CUDA programming guide, "compute capabilities"; measured on H200, 2026-11-20.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SmLimits", "blocks_per_sm", "most_ctas_without_extra_wave", "waves"]

_REGISTERS_ALLOCATED_BY = 256  # per warp
_WARPS_ALLOCATED_BY = 4  # one for each of an SM's four register files


@dataclass(frozen=True, kw_only=True, slots=True)
class SmLimits:
    """What one SM holds."""

    num_sms: int
    regs: int
    smem: int
    threads: int
    blocks: int = 32
    smem_reserved: int = 1024  # per block, by the system; 0 before compute capability 8


def blocks_per_sm(*, threads: int, regs_per_thread: int, smem_bytes: int, sm: SmLimits) -> int:
    """Blocks of a kernel that fit on one SM at once, at least 1 (it did run).

    Args:
        threads: per block.
        regs_per_thread: as the profiler reports; 0 if unknown (then registers do not limit).
        smem_bytes: static + dynamic shared memory per block.
        sm: the device.
    """
    warps = -(-max(threads, 1) // 32)
    limits = [sm.blocks, sm.threads // (warps * 32)]
    if regs_per_thread > 0:
        per_warp = -(-regs_per_thread * 32 // _REGISTERS_ALLOCATED_BY) * _REGISTERS_ALLOCATED_BY
        limits.append(sm.regs // per_warp // _WARPS_ALLOCATED_BY * _WARPS_ALLOCATED_BY // warps)
    if smem_bytes > 0:
        limits.append(sm.smem // (smem_bytes + sm.smem_reserved))
    return max(1, min(limits))


def waves(blocks: int, *, num_sms: int, blocks_per_sm: int) -> int:
    """Rounds in which `blocks` run on `num_sms` SMs."""
    return -(-blocks // (max(num_sms, 1) * blocks_per_sm))


def most_ctas_without_extra_wave(blocks: int, *, num_sms: int, blocks_per_sm: int) -> int:
    """The most SMs that communication can take before `blocks` need one more wave."""
    alone = waves(blocks, num_sms=num_sms, blocks_per_sm=blocks_per_sm)
    return num_sms - -(-blocks // (alone * blocks_per_sm))
