"""Compute the time of one operation on one GPU by the roofline model, with the part of each peak that is reached.

matmul   us = max(math, memory) + launch,   math: waves of tiles (`machine/matmul.py`)
flash    us = flops / (peak · flash · keys / (keys + flash_length)) + launch
streaming  us = bytes / (bandwidth · memory) + kernels · launch

host     us = kernels · host, the time of the CPU to launch them; it runs ahead of the GPU where that is longer

The parts reached are the group `efficiency` of the GPU's profile (`machine/profile.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from counterpoint.errors import Misconfigured
from counterpoint.machine.matmul import matmul_math_us
from counterpoint.machine.profile import Efficiency, shipped_profile
from counterpoint.plan.compute.layers import FlashAttentionOp, MemoryBoundOp, Operation
from counterpoint.plan.job.cluster import ClusterGpu
from counterpoint.records import Record


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
        math_us = matmul_math_us(
            operation.m, operation.n, operation.k,
            batch=operation.batch, peak=rates.peak, sms=rates.sms, bandwidth=rates.bandwidth, known=rates.efficiency,
        )  # fmt: skip
    memory_us = operation.num_bytes / bandwidth
    us = max(math_us, memory_us) + launch_us
    return Cost(us=us, math_us=math_us, memory_us=memory_us, launch_us=launch_us)


def total_us(operations: Iterable[Operation], rates: GpuRates) -> float:
    """Return the time of operations one after the other."""
    return sum(cost(operation, rates).us for operation in operations)


def host_us(operations: Iterable[Operation], rates: GpuRates) -> float:
    """Return the time that the host takes to launch the kernels of operations."""
    return rates.efficiency.host_us * sum(operation.kernels for operation in operations)


def _flash_us(operation: FlashAttentionOp, rates: GpuRates) -> float:
    known = rates.efficiency
    reached = known.flash_backward if operation.backward else known.flash_forward
    return operation.flops / (rates.peak * reached * operation.keys / (operation.keys + known.flash_length))
