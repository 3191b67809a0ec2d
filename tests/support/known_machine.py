"""A machine of known figures: what the suite `machine` would measure on it, by the models that profiles are for.

Collectives by zero_sm take what the clock says, NCCL latency + bytes / bandwidth, GEMMs what the model of waves says.
Pairs by NCCL take what the model that divides SMs says; others keep, while both run, the parts of their speeds that the
profile has. Every time is multiplied by noise.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from counterpoint.collectives.program.operations import even_call
from counterpoint.collectives.program.tuning import best_tuning, with_link_turns
from counterpoint.machine.bus_bandwidth import bus_factor, bus_gb_per_s
from counterpoint.machine.gpus import find_gpu
from counterpoint.machine.profile import Profile, default_profile
from counterpoint.measurement.suites import GEMM, LASTING, STREAM, SUM, capped, few_sms, parts_of
from counterpoint.measurement.workloads import find_workload
from counterpoint.pair.choice import predict
from counterpoint.pair.curves import Curves, curves_from
from counterpoint.pair.sm_split import SmLayout, SmSplit
from counterpoint.pair.together import REDUCTIONS, overlap, pair_class, steps_of
from counterpoint.records.measurement import Block, BlockRow, Environment, Measurement, Order, Row, Scenario, Timing
from counterpoint.tuning.fit import pair_of
from counterpoint.tuning.fit.collectives import TimedCall
from counterpoint.tuning.fit.collectives import predicted_us as clock_us
from counterpoint.tuning.fit.matmuls import predicted_us as gemm_us
from counterpoint.tuning.fit.matmuls import summed_us

RANKS = 4
HEAD_US = 100.0
SPEED_BY_CTAS = {4: 0.3, 8: 0.55, 16: 0.95, 24: 1.0}
WHERE = Environment(
    device="cuda", gpu="NVIDIA H200", world_size=RANKS, driver="580.1", torch="2.11.0", nccl="2.28.9",
    counterpoint="0.1.0", commit="abc", command=("counterpoint", "tune", "--machine"),
    date="2026-11-23T03:00:00+00:00", variables={},
)  # fmt: skip


@dataclass(kw_only=True)
class KnownMachine:
    """`noise` is the relative standard deviation of every time; the ranks tuned their calls by the default profile."""

    profile: Profile
    noise: float = 0.0
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def measurement(self) -> Measurement:
        blocks = tuple(self._blocks())
        return Measurement(
            suite="machine", environment=WHERE, rounds=7, dropped_rounds=2, blocks=blocks, rows=tuple(self._rows())
        )

    def alone_us(self, collective: str, size_bytes: int, mechanism: str) -> float:
        if mechanism.startswith("zero_sm"):
            call = even_call(collective, RANKS, size_bytes)
            tuning = best_tuning(call, default_profile().rates)
            tuning = with_link_turns(tuning) if call.reduces else tuning
            return clock_us(TimedCall(call=call, tuning=tuning, us=1.0), self.profile.rates)
        rates = self.profile.nccl_rates
        split = SmSplit.of(mechanism)
        speed = SPEED_BY_CTAS[(split and split.max_ctas) or 24]
        gb_per_s = speed * rates.bus_gb_per_s[collective]  # type: ignore[index]
        return rates.latency_us + bus_factor(collective, RANKS) * size_bytes / gb_per_s / 1e3

    def compute_us(self, workload: str, num_sms: int = 132) -> float:
        products, tile = find_workload(workload).products, self.profile.chip.matmul_tile
        part = sum(steps_of(products, num_sms, tile)) / sum(steps_of(products, 132, tile))
        sheet = find_gpu("H200")
        assert sheet is not None
        return gemm_us(workload, sheet, self.profile.efficiency) * part

    def _told(self, us: float) -> Timing:
        us *= math.exp(self.random.gauss(0.0, self.noise))
        return Timing(us=us, p10_us=us * 0.99, p90_us=us * 1.01, rank=0, per_rank_us=(us,) * RANKS)

    def _blocks(self) -> Iterator[BlockRow]:
        efficiency, sums = self.profile.efficiency, self.profile.sums
        bandwidth = 4800.0 * efficiency.memory * 1e3
        known = {
            "launch kernel": efficiency.host_us,
            "launch collective": efficiency.host_collective_us,
            STREAM: find_workload(STREAM).memory_bytes(2) / bandwidth,
            LASTING: self.compute_us(GEMM) / efficiency.clock,
            SUM: (RANKS + 1) / RANKS * (1 << 30) / sums.memory_gb_per_s / 1e3,
        }
        for block in parts_of("machine", device="cuda", world_size=RANKS):
            if not isinstance(block, Block):
                continue
            for mechanism in block.mechanisms:
                for size in block.sizes_bytes:
                    time = self._told(self.alone_us(block.what, size, mechanism))
                    split = SmSplit.of(mechanism)
                    yield BlockRow(
                        what=block.what, mechanism=mechanism, size_bytes=size, time=time,
                        num_ctas=0 if split is None else split.max_ctas or 24,
                        gb_per_s=bus_gb_per_s(block.what, size, RANKS, time.us),
                    )  # fmt: skip
                if not block.sizes_bytes:
                    limit = int(mechanism.partition("=")[2] or 132)
                    us = known.get(block.what) or self.compute_us(block.what, limit)
                    rate = sums.memory_gb_per_s if block.what == SUM else None
                    yield BlockRow(what=block.what, mechanism=mechanism, time=self._told(us), gb_per_s=rate)

    @cached_property
    def _curves(self) -> Curves:
        quiet = KnownMachine(profile=self.profile)
        rows = tuple(quiet._blocks())
        products = {row.what: find_workload(row.what).products for row in rows if row.what.startswith("gemm ")}
        return curves_from(rows, products, layout=SmLayout.even(132))

    def _rows(self) -> Iterator[Row]:
        for scenario in parts_of("machine", device="cuda"):
            if not isinstance(scenario, Scenario):
                continue
            size = self._size(scenario)
            for mechanism in scenario.mechanisms:
                for order in scenario.orders:
                    yield self._row(scenario, size, mechanism, order)

    def _size(self, scenario: Scenario) -> int:
        wanted = (scenario.ratio or 1.0) * self.compute_us(scenario.workload)
        sizes = [1 << 20, 1 << 32]
        for _ in range(40):
            middle = round(math.sqrt(sizes[0] * sizes[1])) // 512 * 512
            sizes[self.alone_us(scenario.collective, middle, "nccl") > wanted] = middle
        return sizes[0]

    def _row(self, scenario: Scenario, size: int, mechanism: str, order: Order) -> Row:
        compute, comm = self.compute_us(scenario.workload), self.alone_us(scenario.collective, size, mechanism)
        kept = self.profile.mechanisms["nccl_capped" if mechanism == capped() else mechanism.partition("+")[0]]
        g, c, both = play(compute, comm, kept.compute_kept, kept.comm_kept, order)
        head_us = 0.0 if order == "together" else HEAD_US
        ratios = overlap(compute_us=compute, comm_us=comm, both_us=both, order=order, head_us=head_us)
        fields: dict[str, Any] = {
            "scenario": scenario.name, "workload": scenario.workload, "collective": scenario.collective,
            "size_bytes": size, "ratio": scenario.ratio, "mechanism": mechanism, "order": order,
            "compute_alone": self._told(compute), "compute_controlled": self._told(compute),
            "comm_alone": self._told(comm), "best_comm_alone_us": comm, "best_mechanism": mechanism,
            "serial": self._told(compute + comm), "together": self._told(both), "compute_together": self._told(g),
            "comm_together": self._told(c), "head_start_us": head_us, "hidden": ratios.hidden,
            "ideal_fraction": ratios.ideal_fraction, "compute_kept": compute / g, "comm_kept": comm / c,
            "pair_class": pair_class(compute, comm),
        }  # fmt: skip
        row = Row(**fields)
        if mechanism in few_sms() and scenario.collective in REDUCTIONS:
            pair = pair_of(row, RANKS, SmLayout.even(132))
            return Row(**fields | {"together": self._told(summed_us(pair, row, self.profile))})
        split = SmSplit.of(mechanism)
        if split is None or not self._curves.cover(scenario.workload, scenario.collective, size, split):
            return row
        told = predict(
            self._curves, scenario.workload, scenario.collective, size, split,
            orders=(order,), contention=self.profile.contention,
        ).objective_us  # fmt: skip
        return Row(**fields | {"together": self._told(told)})


def play(compute: float, comm: float, kept_g: float, kept_c: float, order: Order) -> tuple[float, float, float]:
    """Return how long each side took from its own start, and both, if they keep these parts of their speeds."""
    compute_at = HEAD_US if order == "comm_first" else 0.0
    comm_at = HEAD_US if order == "compute_first" else 0.0
    now = max(compute_at, comm_at)
    g, c = compute - min(compute, now - compute_at), comm - min(comm, now - comm_at)
    if not g or not c:
        ends = compute_at + compute, comm_at + comm
    elif g / kept_g <= c / kept_c:
        ends = now + g / kept_g, now + g / kept_g + c - g / kept_g * kept_c
    else:
        ends = now + c / kept_c + g - c / kept_c * kept_g, now + c / kept_c
    return ends[0] - compute_at, ends[1] - comm_at, max(ends)
