"""How many SMs a GEMM should leave to the sums of a zero-SM reduce_scatter or all_reduce beside it.

Copies need no SM; the sum of what they brought does. Beside a persistent GEMM it waits for the end of the kernel, and
the second half of an all_reduce waits with it. A few SMs less for the GEMM let it go on at once, at the price of the
waves that those SMs would have taken. The rule plays each candidate and takes the least time:

    GEMM        T_g(n) = T_g * sum of K * ceil(tiles / n) / sum of K * ceil(tiles / S), + 6 % while the other side runs
    chunk 1     7/8 of the shard, there at 7/8 of the time of the copies; then the rest
    sum         (world + 1) * shard bytes of memory: 105 GB/s for each free SM, 3.8 TB/s when the GEMM has ended; with
                no SM left free, between two GEMMs or after the last
    all_reduce  the second half of its time after that

Measured on 4 x H200 (2026-11-21): the rates of `Machine` from the sums alone and beside GEMMs of 116 to 128 SMs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from counterpoint.errors import Misconfigured
from counterpoint.machine.occupancy import HOPPER_TILE, tiles_of, waves

__all__ = ["REDUCTIONS", "GemmSms", "Machine", "Product", "choose_gemm_sms", "together_us"]

REDUCTIONS = ("all_reduce", "reduce_scatter")
Product = tuple[int, int, int]
"""M, N and K of a matrix product."""
FREE = (0, 4, 8, 12, 16)  # SMs that candidates leave; cuBLAS' blocks come in pairs, and a GPC has 16 or 18
FIRST = 7 / 8  # of the shard is one chunk, as `collectives/tuning.py` cuts large ones


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Rates of H200: GB/s, bytes read and written counted."""

    sm_gb_per_s: float = 105.0
    memory_gb_per_s: float = 3800.0
    contention: float = 0.06  # what the GEMM loses of its speed while copies run
    tile: tuple[int, int] = HOPPER_TILE


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmSms:
    """What was found: SMs for the GEMM, None for all, and the predicted time of the pair by SMs of the GEMM, µs."""

    gemm_sms: int | None
    together_us: dict[int, float]


def choose_gemm_sms(
    gemms: Sequence[Product],
    collective: str,
    *,
    size_bytes: int,
    compute_us: float,
    comm_us: float,
    world_size: int,
    num_sms: int,
    machine: Machine | None = None,
) -> GemmSms:
    """The number of SMs with the least predicted time; of equals the most.

    Args:
        gemms: that run one after the other; none: nothing can be limited.
        collective: all_reduce or reduce_scatter.
        size_bytes: of the full array.
        compute_us: the GEMMs alone, on all SMs.
        comm_us: the collective alone, by zero_sm.
        world_size: ranks.
        num_sms: of the GPU.
        machine: None: H200.

    Raises:
        Misconfigured: another collective, or sizes and times that are not positive.
    """
    if collective not in REDUCTIONS:
        raise Misconfigured(f"{collective} adds up nothing; allowed are {', '.join(REDUCTIONS)}")
    if min(size_bytes, compute_us, comm_us, world_size - 1) <= 0:
        raise Misconfigured(
            f"{size_bytes} bytes, {compute_us} and {comm_us} µs, {world_size} ranks: give positive sizes and times, "
            "and two ranks or more"
        )
    candidates = [num_sms - free for free in FREE if free < num_sms] if gemms else [num_sms]
    found = {
        sms: together_us(
            gemms, collective, sms, size_bytes=size_bytes, compute_us=compute_us, comm_us=comm_us,
            world_size=world_size, num_sms=num_sms, machine=machine or Machine(),
        )
        for sms in candidates
    }  # fmt: skip
    best = min(found, key=found.__getitem__)
    return GemmSms(gemm_sms=None if best == num_sms else best, together_us=found)


def together_us(
    gemms: Sequence[Product],
    collective: str,
    gemm_sms: int,
    *,
    size_bytes: int,
    compute_us: float,
    comm_us: float,
    world_size: int,
    num_sms: int,
    machine: Machine,
) -> float:
    """When both sides have ended, launched together, the GEMMs on `gemm_sms`; arguments as above."""
    ends = _ends(gemms, gemm_sms, compute_us, num_sms, machine.tile) or [compute_us]
    slower = 1 + machine.contention * min(comm_us, ends[-1]) / ends[-1]
    ends = [end * slower for end in ends]
    moved = (world_size + 1) * size_bytes / world_size
    brought = comm_us if collective == "reduce_scatter" else comm_us / 2
    after = comm_us - brought  # of the all_gather that follows
    first = _summed(FIRST * brought, 0.0, FIRST * moved, ends, num_sms - gemm_sms, machine)
    last = _summed(brought, first, (1 - FIRST) * moved, ends, num_sms - gemm_sms, machine)
    comm_end = max(first + FIRST * after, last) + (1 - FIRST) * after
    between = gemm_sms == num_sms and last < ends[-1]  # the sums ran in between, and the GEMMs waited for them
    return max(ends[-1] + (moved / machine.memory_gb_per_s / 1000 if between else 0.0), comm_end)


def _ends(
    gemms: Sequence[Product], gemm_sms: int, compute_us: float, num_sms: int, tile: tuple[int, int]
) -> list[float]:
    """When each GEMM ends, alone: its time follows its waves."""
    tiles = [(tiles_of(m, n, tile), k) for m, n, k in gemms]
    whole = sum(k * waves(count, num_sms=num_sms, blocks_per_sm=1) for count, k in tiles)
    return list(
        accumulate(compute_us * k * waves(count, num_sms=gemm_sms, blocks_per_sm=1) / whole for count, k in tiles)
    )


def _summed(
    there_us: float, after_us: float, moved: float, ends: Sequence[float], free_sms: int, machine: Machine
) -> float:
    """When a sum of `moved` bytes of memory traffic is done: of what is there then, and after another sum."""
    fast, slow = machine.memory_gb_per_s * 1000, free_sms * machine.sm_gb_per_s * 1000  # bytes per µs
    if not free_sms:
        begins = next((end for end in ends if end >= there_us), there_us)
        return max(begins, after_us) + moved / fast
    begins = max(there_us, after_us)
    beside = min(moved, max(0.0, ends[-1] - begins) * slow)
    return begins + beside / slow + (moved - beside) / fast
