"""What one operation takes on one GPU: the roofline, with what is reached of each roof (`efficiency.py`).

matmul   us = max(math, memory) + launch
         math = waves · tile,   waves = ceil(batch · ceil(m / tile_m) · ceil(n / tile_n) / SMs)
         tile = 2 · tile_m · tile_n · (k + depth) · max(1 + edge · e, load · e) / (peak · matmul / SMs)
         e = 1 / tile_m + 1 / tile_n, what is loaded over what is computed
         depth: filling and draining the pipeline of a tile, in elements of k; edge: loading operands costs more the
         smaller the tile is; load: tiles that are smaller still wait for their operands
         of the tile sizes the fastest is taken, as cuBLAS does; where waves are few, also with k cut (split-k): each
         part writes its sums in float32, and a kernel more adds them up
flash    us = flops / (peak · flash · keys / (keys + flash_length)) + launch
traffic  us = bytes / (bandwidth · memory) + kernels · launch
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Literal

from counterpoint.errors import Misconfigured
from counterpoint.plan.cluster import Gpu
from counterpoint.plan.efficiency import Efficiency, efficiency_of
from counterpoint.plan.layers import Flash, Matmul, Operation, Traffic
from counterpoint.records.base import Record

__all__ = ["Cost", "Machine", "cost", "total_us"]

SPLITS = (1, 2, 4, 8)
SUM_BYTES = 8  # of an element in float32, written and read again


class Machine(Record, frozen=True, kw_only=True):
    """One GPU in one precision, and what is reached of it.

    Args:
        gpu: its name.
        peak: FLOP per µs, of the data sheet.
        sms: streaming multiprocessors.
        memory: bytes per µs, of the data sheet.
        efficiency: what is reached of both.
    """

    gpu: str
    peak: float
    sms: int
    memory: float
    efficiency: Efficiency

    @classmethod
    def of(cls, gpu: Gpu, precision: str = "bf16", efficiency: Efficiency | None = None) -> Machine:
        """Raises Misconfigured if the GPU does not compute in this precision."""
        if precision not in gpu.tflops:
            known = ", ".join(gpu.tflops)
            raise Misconfigured(f"training.precision = {precision!r}: {gpu.name} computes in {known}; give one of them")
        return cls(
            gpu=gpu.name,
            peak=gpu.tflops[precision] * 1e6,
            sms=gpu.sms,
            memory=gpu.memory_gb_per_s * 1e3,
            efficiency=efficiency or efficiency_of(gpu.name),
        )

    @property
    def bandwidth(self) -> float:
        """Bytes per µs that streaming kernels reach."""
        return self.memory * self.efficiency.memory


class Cost(Record, frozen=True, kw_only=True):
    """Of one operation; `us` = max(math_us, memory_us) + launch_us.

    Args:
        bound: by which of the two.
        of_peak: FLOP/s over the data sheet's.
        tile: of a matmul, in rows and columns.
        waves: rounds in which its tiles run.
    """

    name: str
    us: float
    math_us: float
    memory_us: float
    launch_us: float
    bound: Literal["math", "memory"]
    of_peak: float
    tile: tuple[int, int] | None = None
    waves: int | None = None


@lru_cache(maxsize=1 << 16)
def cost(operation: Operation, machine: Machine) -> Cost:
    """The time of one operation alone, µs, with the terms that it is made of."""
    launch = machine.efficiency.launch_us
    if isinstance(operation, Traffic):
        rate = machine.bandwidth * (machine.efficiency.strided if operation.strided else 1.0)
        return _cost(operation.name, 0.0, 0.0, operation.num_bytes / rate, operation.kernels * launch, machine)
    memory_us = operation.num_bytes / machine.bandwidth
    if isinstance(operation, Flash):
        return _cost(operation.name, operation.flops, _flash_us(operation, machine), memory_us, launch, machine)
    math_us, tile, waves = _matmul_us(operation, machine)
    return _cost(operation.name, operation.flops, math_us, memory_us, launch, machine, tile, waves)


def total_us(operations: Iterable[Operation], machine: Machine) -> float:
    """One after the other."""
    return sum(cost(operation, machine).us for operation in operations)


def _cost(
    name: str, flops: float, math_us: float, memory_us: float, launch_us: float, machine: Machine,
    tile: tuple[int, int] | None = None, waves: int | None = None,
) -> Cost:  # fmt: skip
    us = max(math_us, memory_us) + launch_us
    return Cost(
        name=name,
        us=us,
        math_us=math_us,
        memory_us=memory_us,
        launch_us=launch_us,
        bound="math" if math_us >= memory_us else "memory",
        of_peak=flops / us / machine.peak if us else 0.0,
        tile=tile,
        waves=waves,
    )


def _flash_us(operation: Flash, machine: Machine) -> float:
    known = machine.efficiency
    reached = known.flash_backward if operation.backward else known.flash_forward
    return operation.flops / (machine.peak * reached * operation.keys / (operation.keys + known.flash_length))


def _matmul_us(operation: Matmul, machine: Machine) -> tuple[float, tuple[int, int], int]:
    """Math time, tile and waves of the fastest tile size."""
    known, sms = machine.efficiency, machine.sms
    per_sm = machine.peak * known.matmul / sms
    sums_us = SUM_BYTES * operation.batch * operation.m * operation.n / machine.bandwidth
    best = (float("inf"), known.tiles[0], 0)
    for tile in known.tiles:
        high, wide = tile
        tiles = operation.batch * -(-operation.m // high) * -(-operation.n // wide)
        loaded = 1.0 / high + 1.0 / wide
        depth_us = 2.0 * high * wide * max(1.0 + known.edge * loaded, known.load * loaded) / per_sm
        for split in SPLITS if tiles < 2 * sms else SPLITS[:1]:
            waves = -(-tiles * split // sms)
            us = waves * (operation.k / split + known.depth) * depth_us
            us += split * sums_us + known.launch_us if split > 1 else 0.0
            if us < best[0]:
                best = (us, tile, waves)
    return best
