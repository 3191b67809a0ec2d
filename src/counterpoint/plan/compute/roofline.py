"""Compute the time of one operation on one GPU by the roofline model, with the fraction of each peak that is reached.

matmul   us = max(math, memory) + launch,   math: waves of tiles (`machine/matmul.py`)
flash    us = flops / (peak · flash · keys / (keys + flash_length)) + launch
streaming  us = bytes / (bandwidth · memory) + kernels · launch

host     us = kernels · host, the time of the CPU to launch them; it runs ahead of the GPU where that is longer

The fractions of peaks that are reached are the group `efficiency` of the GPU's profile (`machine/profile.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from counterpoint.errors import Misconfigured, printable
from counterpoint.machine.gpus import find_gpu
from counterpoint.machine.matmul import matmul_math_us
from counterpoint.machine.profile import Efficiency
from counterpoint.plan.compute.operations import FlashAttentionOp, MemoryBoundOp, Operation
from counterpoint.plan.job.cluster import ClusterGpu
from counterpoint.records import Record

GROUPED = 0.7  # part of a dense product's rate that grouped products of experts reach: chosen with public sources
LOWEST = 0.3  # fraction of the highest clock or power: roughly the least that drivers allow
MIN_DYNAMIC = 0.01  # least dynamic power, as a fraction of the power limit without static power


class GpuRates(Record, frozen=True, kw_only=True):
    """Holds one GPU's rates in one precision; peaks are the data sheet's, scaled to the GPU's clock in training."""

    gpu: str  # its name
    peak: float  # FLOP per µs; in an fp8 job the bf16 peak, for operations that are not in fp8
    fp8_peak: float = 0.0  # FLOP per µs in fp8; 0: the job has none
    sms: int  # streaming multiprocessors
    memory: float  # bytes per µs, of the data sheet
    efficiency: Efficiency  # the fraction of peak and memory bandwidth that is reached

    @classmethod
    def of(
        cls, gpu: ClusterGpu, precision: str = "bf16", efficiency: Efficiency | None = None, *, burst: bool = False
    ) -> GpuRates:
        """Return the rates that a GPU reaches in the precision of its linear layers, at its clock and power limit.

        `efficiency` has the fractions of peaks that are reached (None: as in the GPU's profile). With `burst` the
        rates are those of single kernels at the highest clock, instead of a training under the power limit.

        Raises:
            Misconfigured: the GPU does not compute in this precision, or cannot have this clock or power.
        """
        if precision not in gpu.tflops:
            listed = ", ".join(gpu.tflops)
            raise Misconfigured(
                f"training.precision = {precision!r}: {gpu.name} computes in {listed}; give one of them"
            )
        known = efficiency or gpu.profile.efficiency
        clock = 1.0 if burst else clock_kept(gpu, known)
        return cls(
            gpu=gpu.name,
            peak=gpu.tflops["bf16" if precision == "fp8" else precision] * clock * 1e6,
            fp8_peak=gpu.tflops["fp8"] * clock * 1e6 if precision == "fp8" else 0.0,
            sms=gpu.sms,
            memory=gpu.memory_gb_per_s * 1e3,
            efficiency=known,
        )

    @property
    def bandwidth(self) -> float:
        """Return the bytes per µs that streaming kernels reach."""
        return self.memory * self.efficiency.memory


def clock_kept(gpu: ClusterGpu, known: Efficiency) -> float:
    """Return a GPU's clock during training / its clock in short bursts, at which data sheets state peak rates.

    Power is static + dynamic; dynamic power grows with the cube of the clock (clock · voltage², voltage proportional
    to clock). So under a lower power limit the clock falls with the cube root of the dynamic power that is left. A
    locked clock is kept where the limit allows it.
    """
    limit, sheet = 1.0, find_gpu(gpu.name)
    if gpu.power_watts is not None:
        limit = gpu.power_watts / _of_sheet(sheet.watts if sheet else None, gpu, "power_watts", gpu.power_watts)
    left = (limit - known.static) / (1.0 - known.static)
    kept = known.clock * max(left, MIN_DYNAMIC) ** (1 / 3)
    if gpu.clock_ghz is not None:
        locked = gpu.clock_ghz / _of_sheet(sheet.clock_ghz if sheet else None, gpu, "clock_ghz", gpu.clock_ghz)
        kept = min(kept, locked)
    return float(kept)


def _of_sheet(highest: float | None, gpu: ClusterGpu, field: str, given: float) -> float:
    """Return the data sheet's `highest` clock or power; raise Misconfigured if unknown, or `given` is out of range."""
    if highest is None:
        raise Misconfigured(
            f"gpu.{field} = {given}: what {printable(gpu.name)} has without it is not known; leave it out"
        )
    if not LOWEST * highest <= given <= highest:
        raise Misconfigured(f"gpu.{field} = {given}: give {LOWEST * highest:g} to {highest:g} for {gpu.name}")
    return highest


class Cost(Record, frozen=True, kw_only=True):
    """Holds the time of one operation alone; `us` = max(math_us, memory_us) + launch_us."""

    us: float
    math_us: float
    memory_us: float
    launch_us: float


@lru_cache(maxsize=1 << 16)
def cost(operation: Operation, rates: GpuRates) -> Cost:
    """Return the time of one operation alone, split into math, memory and launch time."""
    math_us, bandwidth, launch_us = 0.0, rates.bandwidth, rates.efficiency.launch_us
    if isinstance(operation, MemoryBoundOp):
        bandwidth *= rates.efficiency.strided if operation.strided else 1.0
        launch_us *= operation.kernels
    elif isinstance(operation, FlashAttentionOp):
        math_us = _flash_us(operation, rates)
    else:
        # tensor cores take more elements of k at once in fp8: the rest of a tile takes as long as in bf16
        depth, reached = (rates.peak / rates.fp8_peak, rates.efficiency.fp8) if operation.fp8 else (1.0, 1.0)
        reached *= GROUPED if operation.grouped else 1.0
        math_us = matmul_math_us(
            operation.m, operation.n, operation.k * depth, batch=operation.batch, peak=rates.peak * reached,
            sms=rates.sms, bandwidth=rates.bandwidth, known=rates.efficiency,
        )  # fmt: skip
    memory_us = operation.num_bytes / bandwidth
    us = max(math_us, memory_us) + launch_us
    return Cost(us=us, math_us=math_us, memory_us=memory_us, launch_us=launch_us)


def total_us(operations: Iterable[Operation], rates: GpuRates) -> float:
    """Return the µs of operations that run one after the other."""
    return sum(cost(operation, rates).us for operation in operations)


def host_us(operations: Iterable[Operation], rates: GpuRates) -> float:
    """Return the µs that the host takes to launch the kernels of these operations."""
    return rates.efficiency.host_us * sum(operation.kernels for operation in operations)


def _flash_us(operation: FlashAttentionOp, rates: GpuRates) -> float:
    known = rates.efficiency
    reached = known.flash_backward if operation.backward else known.flash_forward
    reached *= {1: known.flash1, 2: known.flash2, 3: 1.0}[operation.version]
    peak = rates.fp8_peak * known.fp8 if operation.fp8 else rates.peak
    return operation.flops / (peak * reached * operation.keys / (operation.keys + known.flash_length))
