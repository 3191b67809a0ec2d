"""A made-up GPU that plays pairs block by block: what the budget rule is tested against where the truth is known.

It shares no code with the rule. SMs are a heap of the times at which they are free; a GEMM takes tile after tile with
one block per SM, which keeps it to the GEMM's end; a collective takes one SM per CTA, all at once or not at all. There
is no contention, and clusters are not looked at; noise is multiplied on afterwards.
"""

from __future__ import annotations

import heapq
import math
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from counterpoint.pair.together import overlap, pair_class
from counterpoint.records.measurement import BlockRow, Order, Row, Timing

__all__ = ["SyntheticMachine"]

HEAD_US = 100.0
LATENCY_US = 15.0
TILE_TFLOPS = 6.0  # of one SM
CTA_GB_PER_S = 24.0
LINK_GB_PER_S = 460.0  # what all CTAs reach at most
DEFAULT_CTAS = 24


@dataclass(kw_only=True)
class SyntheticMachine:
    """`noise` is the relative standard deviation of every time it tells."""

    num_sms: int = 132
    noise: float = 0.0
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def gemm_us(self, shape: tuple[int, int, int], num_sms: int) -> float:
        """Alone, without noise."""
        tiles, tile_us = self._tiles(shape)
        return math.ceil(tiles / num_sms) * tile_us

    def comm_us(self, size_bytes: int, num_ctas: int | None) -> float:
        """Alone, without noise; all collectives are alike."""
        rate = min((num_ctas or DEFAULT_CTAS) * CTA_GB_PER_S, LINK_GB_PER_S)
        return LATENCY_US + size_bytes / rate / 1e3

    def together_us(
        self, shape: tuple[int, int, int], size_bytes: int, num_ctas: int | None, gemm_sms: int | None, order: Order
    ) -> float:
        """T without noise. Launched together, the GEMM is there first."""
        tiles, tile_us = self._tiles(shape)
        ctas, comm_us = num_ctas or DEFAULT_CTAS, self.comm_us(size_bytes, num_ctas)
        blocks = min(gemm_sms or self.num_sms, tiles)
        gemm_at = HEAD_US if order == "comm_first" else 0.0
        if order == "comm_first":
            at_once = min(blocks, self.num_sms - ctas)
            free = [gemm_at] * at_once + [max(comm_us, gemm_at)] * (blocks - at_once)
            return max(comm_us, *_ends(tiles, tile_us, free))
        end = max(_ends(tiles, tile_us, [gemm_at] * blocks))
        comm_at = HEAD_US if order == "compute_first" else 0.0
        if blocks + ctas > self.num_sms:
            comm_at = max(comm_at, end)
        return max(end, comm_at + comm_us)

    def blocks(
        self,
        shapes: Iterable[tuple[int, int, int]],
        sms: Sequence[int],
        sizes: Sequence[int],
        limits: Sequence[str],
    ) -> list[BlockRow]:
        """The building blocks as a suite would measure them; `limits` are mechanisms that leave the GEMM alone."""
        gemms = [
            BlockRow(what=name(shape), mechanism=f"gemm_sms={n}", num_sms=n, time=self.told(self.gemm_us(shape, n)))
            for shape in shapes
            for n in sms
        ]
        comms = [
            BlockRow(
                what=collective, mechanism=limit, size_bytes=size, num_ctas=ctas or DEFAULT_CTAS,
                time=self.told(self.comm_us(size, ctas)),
            )
            for collective in ("all_gather", "reduce_scatter", "all_reduce")
            for size in sizes
            for limit in limits
            for ctas in [limit_of(limit, "max_ctas")]
        ]  # fmt: skip
        return [*gemms, *comms]

    def row(
        self, shape: tuple[int, int, int], collective: str, size_bytes: int, ratio: float | None, mechanism: str,
        order: Order,
    ) -> Row:  # fmt: skip
        """One measured pair."""
        num_ctas, gemm_sms = limit_of(mechanism, "max_ctas"), limit_of(mechanism, "gemm_sms")
        compute, comm = self.told(self.gemm_us(shape, self.num_sms)), self.told(self.comm_us(size_bytes, num_ctas))
        both = self.told(self.together_us(shape, size_bytes, num_ctas, gemm_sms, order))
        head_us = 0.0 if order == "together" else HEAD_US
        ratios = overlap(compute_us=compute.us, comm_us=comm.us, both_us=both.us, order=order, head_us=head_us)
        return Row(
            scenario=f"{name(shape)} {collective} {ratio or size_bytes}",
            workload=name(shape),
            collective=collective,
            size_bytes=size_bytes,
            ratio=ratio,
            mechanism=mechanism,
            order=order,
            compute_alone=compute,
            compute_controlled=self.told(self.gemm_us(shape, gemm_sms or self.num_sms)),
            comm_alone=comm,
            best_comm_alone_us=comm.us,
            best_mechanism="nccl",
            serial=self.told(compute.us + comm.us),
            together=both,
            compute_together=both,
            comm_together=both,
            head_start_us=head_us,
            hidden=ratios.hidden,
            ideal_fraction=ratios.ideal_fraction,
            compute_kept=compute.us / both.us,
            comm_kept=comm.us / both.us,
            pair_class=pair_class(compute.us, comm.us),
        )

    def told(self, time_us: float) -> Timing:
        """A time as it is measured: with noise."""
        us = time_us * math.exp(self.random.gauss(0.0, self.noise))
        return Timing(us=us, p10_us=us, p90_us=us, rank=0, per_rank_us=(us,))

    def _tiles(self, shape: tuple[int, int, int]) -> tuple[int, float]:
        m, n, k = shape
        return math.ceil(m / 128) * math.ceil(n / 256), 2 * 128 * 256 * k / TILE_TFLOPS / 1e6


def _ends(tiles: int, tile_us: float, free_at: list[float]) -> list[float]:
    """When each block is done, if each takes the next of `tiles` as it is free, from these times on."""
    heapq.heapify(free_at)
    for _ in range(tiles):
        heapq.heapreplace(free_at, free_at[0] + tile_us)
    return free_at


def name(shape: tuple[int, int, int]) -> str:
    """Of the workload."""
    return f"gemm {shape[0]}x{shape[1]}x{shape[2]}"


def limit_of(mechanism: str, key: str) -> int | None:
    """What a mechanism sets `key` to: 16 for `max_ctas` in `nccl+max_ctas=16`."""
    found = re.search(rf"\+{key}=(\d+)", mechanism)
    return int(found[1]) if found else None
