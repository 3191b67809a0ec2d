"""Predict how long a compute-collective pair takes by each mechanism, from a machine's profile. No torch.

The times of each side alone come from the profile, the slowdown beside each other from the models of `pair/`:

    GEMMs alone             waves of tiles (`estimated_curve`); on fewer SMs only `WAVES_COST` of the additional
                            waves' time, since at the power limit fewer SMs have higher clocks
    NCCL alone              latency + bytes / bus bandwidth; with c CTAs it has the fraction
                            c / `full_speed_ctas` · 0.9 of that bandwidth, at most 1
    copy engines alone      the collective's program on the clock of `collectives/program`
    NCCL beside GEMMs       `choice.predict`, by launch order
    copies beside others    `together_us`

A prediction only decides what is measured: docs/design/tune.md says how often it is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean

from counterpoint.collectives.program.clock import simulate
from counterpoint.collectives.program.operations import even_call, measured_by, plan_all
from counterpoint.collectives.program.tuning import best_tuning
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.machine.bus_bandwidth import bus_factor
from counterpoint.machine.gpus import find_gpu
from counterpoint.machine.profile import Profile, Rates
from counterpoint.measurement.workloads import (
    ComputeOperation,
    Workload,
    find_dependent,
    find_exchange,
    find_workload,
    is_dependent,
)
from counterpoint.pair.arrivals import ShardedMatmul
from counterpoint.pair.choice import FREE_SMS, candidates_for, predict
from counterpoint.pair.curves import DTYPES, CommCurve, CommPoint, Curves, GemmCurve, comm_key, estimated_curve
from counterpoint.pair.expert_choice import ExpertExchange, choose_expert
from counterpoint.pair.matmul_choice import choose_matmul
from counterpoint.pair.sm_split import SmLayout, SmSplit
from counterpoint.pair.together import REDUCTIONS, Pair, steps_of, together_us
from counterpoint.records.tuning import StepPair
from counterpoint.tuning.pairs import depends, orders_of

NCCL_CTAS = 24  # that NCCL takes by itself on NVLink, of any size above some MiB (results/pairs-4xh200.json)
CLUSTERS = (2,)  # of CTAs, to try besides NCCL's own of 4: these find room beside a GEMM that leaves SMs
ABOUT_FULL = 0.9  # of NCCL's bandwidth by `full_speed_ctas`, "with which it about fills the links": 311 of 343 GB/s
WAVES_COST = 0.6  # median over 24 settings of 100 to 128 SMs in results/blocks-4xh200.json, and over those of 2 GPUs


def predicted_times(pair: StepPair, profile: Profile) -> dict[str, float]:
    """Return the predicted µs of a pair by each mechanism, the default first, as means over launch orders.

    Raises:
        Unsupported: the profile is of a GPU whose data sheet is not known.
        Misconfigured: the profile has no figure of the operation.
    """
    if is_dependent(pair.operation):
        return _dependent(pair, profile)
    if depends(pair):
        return _exchange(pair, profile)
    return dict(Predictor.of(pair, profile).times())


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """Predicts the µs of an independent pair by each mechanism, from the times of computation and collective alone."""

    pair: StepPair
    profile: Profile
    workload: Workload
    layout: SmLayout
    compute_us: float
    nccl_us: float
    copies_us: float | None  # by copy engines; None: no program can do it

    @classmethod
    def of(cls, pair: StepPair, profile: Profile) -> Predictor:
        """Return the predictor of a pair; raise `Unsupported` if the profile's GPU is unknown."""
        sheet = find_gpu(profile.gpu)
        if sheet is None:
            raise Unsupported(f"the data sheet of {profile.gpu} is not known")
        workload = find_workload(pair.compute)
        return cls(
            pair=pair,
            profile=profile,
            workload=workload,
            layout=SmLayout.even(sheet.sm.num_sms, profile.chip),
            compute_us=sum(_operation_us(one, pair.computed_in, profile) for one in workload.operations),
            nccl_us=_nccl_us(pair, profile),
            copies_us=_copies_us(pair.operation, pair.ranks, pair.bytes_per_rank * pair.ranks, profile.rates),
        )

    def times(self) -> Iterator[tuple[str, float]]:
        """Yield each mechanism with its predicted µs."""
        stock_us = self._together("nccl", self.nccl_us, NCCL_CTAS)
        yield "nccl", stock_us
        yield "nccl+priority=high", stock_us  # the profile has no figure that distinguishes them
        if self.workload.products:
            yield from self._divided()
        if self.copies_us is None:
            return
        if self.pair.operation in measured_by("nccl_copies"):
            yield "nccl_zero_cta", self._together("nccl_zero_cta", self.copies_us, 0)
        yield "zero_sm", self._together("zero_sm", self.copies_us, 0)
        if self.pair.operation in REDUCTIONS and self.workload.products:
            for sms in (self.layout.num_sms - free for free in FREE_SMS if free):
                yield f"zero_sm+gemm_sms={sms}", self._together("zero_sm", self.copies_us, 0, gemm_sms=sms)

    def _together(self, mechanism: str, comm_us: float, num_ctas: int, *, gemm_sms: int | None = None) -> float:
        both = Pair(
            products=self.workload.products,
            compute_us=self._compute_us(gemm_sms) / self._more_waves(gemm_sms),  # which the model multiplies by them
            collective=self.pair.operation,
            size_bytes=self.pair.bytes_per_rank * self.pair.ranks,
            comm_us=comm_us,
            mechanism=mechanism,
            num_ctas=num_ctas,
            world_size=self.pair.ranks,
            layout=self.layout,
        )
        return fmean(
            together_us(replace(both, order=order), self.profile, gemm_sms=gemm_sms) for order in orders_of(self.pair)
        )

    def _divided(self) -> Iterator[tuple[str, float]]:
        """Yield NCCL mechanisms that limit SMs and CTAs, with µs predicted from estimated curves."""
        curves = self._curves()
        for split in candidates_for(self.layout, NCCL_CTAS, clusters=CLUSTERS):
            if split == SmSplit():
                continue
            found = predict(
                curves, self.pair.compute, self.pair.operation, self._size, split,
                orders=orders_of(self.pair), contention=self.profile.contention,
            )  # fmt: skip
            yield split.mechanism, found.objective_us

    def _more_waves(self, gemm_sms: int | None) -> float:
        """Return the ratio of GEMM waves on `gemm_sms` SMs to waves on all SMs; 1 for other computation."""
        products, tile = self.workload.products, self.profile.chip.matmul_tile
        if gemm_sms is None or not products:
            return 1.0
        return sum(steps_of(products, gemm_sms, tile)) / sum(steps_of(products, self.layout.num_sms, tile))

    def _compute_us(self, gemm_sms: int | None) -> float:
        """Return the µs of the computation alone with GEMMs on `gemm_sms` SMs; None: on all."""
        return self.compute_us * (1.0 + WAVES_COST * (self._more_waves(gemm_sms) - 1.0))

    @property
    def _size(self) -> int:
        return self.pair.bytes_per_rank * self.pair.ranks

    def _curves(self) -> Curves:
        """Return time curves of GEMMs, with more waves on fewer SMs, and NCCL, with less bandwidth on fewer CTAs."""
        splits = candidates_for(self.layout, NCCL_CTAS, clusters=CLUSTERS)
        limits = sorted({split.gemm_sms or self.layout.num_sms for split in splits})
        points = tuple((sms, self._compute_us(sms)) for sms in limits)
        gemm = GemmCurve(
            workload=self.pair.compute,
            products=self.workload.products,
            points=points,
            tile=self.profile.chip.matmul_tile,
        )
        comms = {comm_key(self.pair.operation, split): self._comm_curve(split.max_ctas) for split in splits}
        return Curves(layout=self.layout, gemms={self.pair.compute: gemm}, comms=comms)

    def _comm_curve(self, max_ctas: int | None) -> CommCurve:
        ctas, size = max_ctas or NCCL_CTAS, self._size
        rates = self.profile.nccl_rates
        part = min(1.0, ABOUT_FULL * ctas / self.profile.nccl.full_speed_ctas)
        bandwidth_us = (self.nccl_us - rates.latency_us) / part
        sizes = (max(1, size // 2), size, 2 * size)
        return CommCurve(
            points=tuple(
                CommPoint(size_bytes=each, time_us=rates.latency_us + bandwidth_us * each / size, num_ctas=ctas)
                for each in sizes
            )
        )


def _operation_us(one: ComputeOperation, dtype: str, profile: Profile) -> float:
    """Return the µs of an operation alone, by the GPU's data sheet and the fraction of its peak that is reached."""
    sheet, known, (precision, item_bytes) = find_gpu(profile.gpu), profile.efficiency, DTYPES[dtype]
    if sheet is None or precision not in sheet.tflops:
        raise Unsupported(f"the data sheet of {profile.gpu} has no peak of {dtype}")
    if one.kind == "matmul":
        m, n, k = one.sizes
        return estimated_curve(n, k, dtype, m, profile, step=m).us(m)
    if one.kind == "attention":
        return one.flops / (sheet.tflops[precision] * known.flash_forward) / 1e6 + known.launch_us
    return item_bytes * one.numel / profile.sums.memory_gb_per_s / 1000 + known.launch_us


def _nccl_us(pair: StepPair, profile: Profile) -> float:
    rates = profile.nccl_rates
    if pair.operation not in rates.bus_gb_per_s:
        raise Misconfigured(f"the profile has no nccl_rates of {pair.operation}")
    crossing = pair.bytes_per_rank * pair.ranks * bus_factor(pair.operation, pair.ranks)
    return rates.latency_us + crossing / rates.bus_gb_per_s[pair.operation] / 1000


@lru_cache(maxsize=1024)  # 0.3 s for reductions of 8 ranks, and many pairs of a step have the same
def _copies_us(operation: str, ranks: int, num_bytes: int, rates: Rates) -> float | None:
    if operation not in measured_by("programs"):
        return None
    call = even_call(operation, ranks, num_bytes)
    return simulate(plan_all(call, best_tuning(call, rates)), rates).us


def _dependent(pair: StepPair, profile: Profile) -> dict[str, float]:
    call = find_dependent(f"{pair.operation} {pair.compute.removeprefix('gemm ')}")
    curve = estimated_curve(call.n, call.k, pair.dtype, call.m, profile)
    task = ShardedMatmul(operation=call.operation, curves=(curve,), shard_rows=(call.m // pair.ranks,) * pair.ranks)
    return {str(name): us for name, us in choose_matmul(task, 0, profile).predicted_us.items()}


def _exchange(pair: StepPair, profile: Profile) -> dict[str, float]:
    exchange = find_exchange(f"{pair.operation} {pair.compute}")
    layer = exchange.sizes
    task = ExpertExchange(
        ranks=pair.ranks, top_k=layer.top_k, experts=layer.experts, tokens=exchange.tokens, hidden=layer.hidden,
        element_bytes=DTYPES[pair.dtype][1],
    )  # fmt: skip
    return {str(name): us for name, us in choose_expert(task, profile).predicted_us.items()}
