"""Compute the time of one operation on one GPU by the roofline model, with the part of each peak that is reached.

matmul   us = max(math, memory) + launch
         math = waves · tile,   waves = ceil(batch · ceil(m / tile_m) · ceil(n / tile_n) / SMs)
         tile = 2 · tile_m · tile_n · (k + depth) · max(1 + edge · e, load · e) / (peak · matmul / SMs)
         e = 1 / tile_m + 1 / tile_n, what is loaded over what is computed
         depth: filling and draining the pipeline of a tile, in elements of k; edge: loading operands costs more the
         smaller the tile is; load: tiles that are smaller still wait for their operands
         of the tile sizes the fastest is taken, as cuBLAS does; where waves are few, also with k cut (split-k): each
         part writes its sums in float32, and one more kernel adds them up
flash    us = flops / (peak · flash · keys / (keys + flash_length)) + launch
streaming  us = bytes / (bandwidth · memory) + kernels · launch

The parts reached are the group `efficiency` of the GPU's profile (`machine/profile.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from counterpoint.errors import Misconfigured
from counterpoint.machine.profile import Efficiency, shipped_profile
from counterpoint.plan.compute.layers import FlashAttentionOp, MatmulOp, MemoryBoundOp, Operation
from counterpoint.plan.job.cluster import ClusterGpu
from counterpoint.records import Record

SPLITS = (1, 2, 4, 8)
SUM_BYTES = 8  # of an element in float32, written and read again


class GpuRates(Record, frozen=True, kw_only=True):
    """Holds the rates of one GPU in one precision."""

    gpu: str  # its name
    peak: float  # FLOP per µs, of the data sheet
    sms: int  # streaming multiprocessors
    memory: float  # bytes per µs, of the data sheet
    efficiency: Efficiency  # the part of both that is reached

    @classmethod
    def of(cls, gpu: ClusterGpu, precision: str = "bf16", efficiency: Efficiency | None = None) -> GpuRates:
        """Return the rates of a GPU, or raise Misconfigured if it does not compute in this precision."""
        if precision not in gpu.tflops:
            known = ", ".join(gpu.tflops)
            raise Misconfigured(f"training.precision = {precision!r}: {gpu.name} computes in {known}; give one of them")
        return cls(
            gpu=gpu.name,
            peak=gpu.tflops[precision] * 1e6,
            sms=gpu.sms,
            memory=gpu.memory_gb_per_s * 1e3,
            efficiency=efficiency or shipped_profile(gpu.name).efficiency,
        )

    @property
    def bandwidth(self) -> float:
        """Return the bytes per µs that streaming kernels reach."""
        return self.memory * self.efficiency.memory


class Cost(Record, frozen=True, kw_only=True):
    """Holds the time of one operation alone; `us` = max(math_us, memory_us) + launch_us."""

    us: float
    math_us: float
    memory_us: float
    launch_us: float


@lru_cache(maxsize=1 << 16)
def cost(operation: Operation, rates: GpuRates) -> Cost:
    """Return the time of one operation alone, with the terms that it is made of."""
    math_us, bandwidth, launch_us = 0.0, rates.bandwidth, rates.efficiency.launch_us
    if isinstance(operation, MemoryBoundOp):
        bandwidth *= rates.efficiency.strided if operation.strided else 1.0
        launch_us *= operation.kernels
    elif isinstance(operation, FlashAttentionOp):
        math_us = _flash_us(operation, rates)
    else:
        math_us = _matmul_us(operation, rates)
    memory_us = operation.num_bytes / bandwidth
    us = max(math_us, memory_us) + launch_us
    return Cost(us=us, math_us=math_us, memory_us=memory_us, launch_us=launch_us)


def total_us(operations: Iterable[Operation], rates: GpuRates) -> float:
    """Return the time of operations one after the other."""
    return sum(cost(operation, rates).us for operation in operations)


def _flash_us(operation: FlashAttentionOp, rates: GpuRates) -> float:
    known = rates.efficiency
    reached = known.flash_backward if operation.backward else known.flash_forward
    return operation.flops / (rates.peak * reached * operation.keys / (operation.keys + known.flash_length))


def _matmul_us(operation: MatmulOp, rates: GpuRates) -> float:
    """Return the µs of arithmetic of a matrix product with the fastest tile size."""
    known, sms = rates.efficiency, rates.sms
    per_sm = rates.peak * known.matmul / sms
    sums_us = SUM_BYTES * operation.batch * operation.m * operation.n / rates.bandwidth
    best = float("inf")
    for high, wide in known.tiles:
        tiles = operation.batch * -(-operation.m // high) * -(-operation.n // wide)
        loaded = 1.0 / high + 1.0 / wide
        depth_us = 2.0 * high * wide * max(1.0 + known.edge * loaded, known.load * loaded) / per_sm
        for split in SPLITS if tiles < 2 * sms else SPLITS[:1]:
            waves = -(-tiles * split // sms)
            us = waves * (operation.k / split + known.depth) * depth_us
            best = min(best, us + (split * sums_us + known.launch_us if split > 1 else 0.0))
    return best
