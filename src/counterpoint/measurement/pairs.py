"""Measure a pair of a computation and a collective: by every mechanism, alone, one after the other, in every order."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.machine.gpus import peak_tflops
from counterpoint.machine.profile import profile_of
from counterpoint.measurement.collective import elements_of, memory_bytes
from counterpoint.measurement.gpu_usage import Observed, device_state, observe
from counterpoint.measurement.mechanisms import Mechanism, find_mechanism
from counterpoint.measurement.open_mechanisms import Opened, memory_of, offered, open_all, open_mechanism
from counterpoint.measurement.rows import Experiment, SamplesOf, comm_time, compute_time, play_rounds, row, time_of
from counterpoint.measurement.session import Session
from counterpoint.measurement.trial import Case, Trial
from counterpoint.measurement.workloads import Workload, find_workload, prepare
from counterpoint.pair.choice import choose_gemm_sms
from counterpoint.pair.sm_split import SmLayout
from counterpoint.pair.together import REDUCTIONS, Pair
from counterpoint.records.measurement import Order, Plan, Row, Scenario

Curve = Sequence[tuple[int, float]]  # (bytes, µs), ascending in bytes

_CURVE_BYTES = {"cuda": (1 << 20, 16 << 20, 128 << 20, 1 << 30), "cpu": (1 << 18, 4 << 20, 32 << 20)}
_CALIBRATING_ROUNDS = 5


@dataclass(kw_only=True)
class Calibration:
    """Caches what is measured once for many scenarios.

    These are the µs of each workload, those of each collective by size, and what ran under each mechanism, since a
    profiler takes a second or two to start. Scenarios of other dtypes need another one.
    """

    workloads: dict[str, float] = field(default_factory=dict)
    collectives: dict[tuple[str, str], Curve] = field(default_factory=dict)
    observed: dict[tuple[str, str, str], Observed] = field(default_factory=dict)  # workload, collective, settings


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """Holds a scenario with the operands of its workload allocated."""

    scenario: Scenario
    workload: Workload
    compute: Callable[[], None]
    mechanisms: Sequence[Mechanism]


def pair(
    session: Session, scenario: Scenario, plan: Plan, calibration: Calibration, unavailable: dict[str, str]
) -> Iterator[Experiment]:
    """Yield the experiment of a scenario, with all mechanisms in all orders; none where no mechanism is offered."""
    workload = find_workload(scenario.workload)
    asked = [find_mechanism(name, session.device.type) for name in scenario.mechanisms]
    mechanisms = offered(session, asked, scenario.collective, unavailable)
    if not mechanisms:
        return
    session.require_memory(workload.memory_bytes(session.compute_dtype.itemsize), scenario.workload)
    compute = prepare(workload, session.device, session.compute_dtype, seed=plan.seed + session.rank)
    both = _Pair(scenario=scenario, workload=workload, compute=compute, mechanisms=mechanisms)
    numel = _numel(session, both, calibration)
    size = numel * session.dtype.itemsize
    needed = memory_bytes(scenario.collective, size, session.world_size)
    memories = [memory_of(mechanism) for mechanism in mechanisms]
    copies = len({"plain", *memories} - {"windows"}) + memories.count("windows")  # plain ones to compare with, always
    session.require_memory(copies * needed, f"{scenario.collective} of {size / 1e9:.2f} GB")
    stock = session.lanes(compute, lambda: None)
    fitted = _fitted(session, both, size, calibration)
    with open_all(session, fitted, scenario.collective, numel, stock, unavailable) as (opened, plain):

        def rows(samples: SamplesOf[tuple[str, str]]) -> list[Row]:
            device = device_state(session)
            observed = _observed(session, both, opened, plain, calibration)
            names = [each.mechanism.name for each in opened]
            alone = {name: time_of(samples[name, "comm_alone"], comm_time).us for name in names}
            best = min(alone, key=alone.__getitem__)
            return [
                row(
                    scenario,
                    mechanism=name,
                    order=order,
                    size_bytes=size,
                    flops=workload.flops,
                    peak_tflops=peak_tflops(session.gpu_name) if session.compute_dtype.itemsize == 2 else None,
                    samples=samples,
                    best=(best, alone[best]),
                    observed=seen,
                    device=device,
                )
                for name, seen in zip(names, observed, strict=True)
                for order in scenario.orders
            ]

        yield Experiment(trials=_trials(session, opened, scenario.orders), rows=rows)


def _observed(
    session: Session, pair: _Pair, opened: Sequence[Opened], plain: Opened, calibration: Calibration
) -> list[Observed]:
    """Return what ran under each mechanism, observed once for each workload and collective, at the first size."""
    keys = [(pair.workload.name, pair.scenario.collective, each.mechanism.settings) for each in opened]
    if not all(key in calibration.observed for key in keys):
        calibration.observed |= zip(keys, observe(session, opened, plain), strict=True)
    return [calibration.observed[key] for key in keys]


def _fitted(session: Session, pair: _Pair, size: int, calibration: Calibration) -> Sequence[Mechanism]:
    """Return the mechanisms with `gemm_sms=fit` replaced by a number for this pair, the same on all ranks."""
    if not any(mechanism.fits_sms for mechanism in pair.mechanisms):
        return pair.mechanisms
    collective = pair.scenario.collective
    sms: int | None = None
    if collective in REDUCTIONS:
        profile = profile_of(torch.cuda.get_device_name(session.device))
        num_sms = torch.cuda.get_device_properties(session.device).multi_processor_count
        both = Pair(
            products=pair.workload.products,
            compute_us=_workload_us(session, pair, calibration),
            collective=collective,
            size_bytes=size,
            comm_us=time_at(_curve(session, collective, "zero_sm", calibration), size),
            mechanism="zero_sm",
            num_ctas=0,
            world_size=session.world_size,
            layout=SmLayout.even(num_sms, profile.chip),
        )
        sms = choose_gemm_sms(both, profile).gemm_sms
    return [mechanism.with_gemm_sms(sms) for mechanism in pair.mechanisms]


def _trials(
    session: Session, opened: Sequence[Opened], orders: Sequence[Order]
) -> dict[tuple[str, str], Callable[[], Trial]]:
    """Return the trials of one round by mechanism and case; the plain computation is (`""`, `compute_alone`).

    For each mechanism these are the collective alone, the computation alone under its controls, both one after the
    other, and both in each order.
    """
    cases: tuple[Case, ...] = ("compute_alone", "comm_alone", "serial", *orders)
    trials = {("", "compute_alone"): lambda: session.stage.run(opened[0].alone, "compute_alone")}
    trials |= {(each.mechanism.name, case): each.trial(session, case) for each in opened for case in cases}
    return trials


def _numel(session: Session, pair: _Pair, calibration: Calibration) -> int:
    """Return the elements of the full array: as asked, or such that the fastest plain mechanism takes ratio · T_g."""
    scenario = pair.scenario
    size = scenario.size_bytes
    if size is None:
        if scenario.ratio is None:
            raise Misconfigured(f"{scenario.name}: give size_bytes or ratio")
        compute_us = _workload_us(session, pair, calibration)
        bases = list(dict.fromkeys(mechanism.base for mechanism in pair.mechanisms))
        curves = [curve for base in bases if (curve := _curve(session, scenario.collective, base, calibration))]
        if not curves:
            raise Unsupported(f"{scenario.collective} by {', '.join(bases)} could not be started at any size")
        size = size_for_time(curves, scenario.ratio * compute_us)
    return elements_of(size, session.dtype.itemsize, session.world_size)


def _workload_us(session: Session, pair: _Pair, calibration: Calibration) -> float:
    name = pair.workload.name
    if name not in calibration.workloads:
        lanes = session.lanes(pair.compute, lambda: None)
        samples = play_rounds(
            session,
            {name: lambda: session.stage.run(lanes, "compute_alone")},
            rounds=_CALIBRATING_ROUNDS + 3,
            dropped=3,
            seed=0,
        )
        calibration.workloads[name] = time_of(samples[name], compute_time).us
    return calibration.workloads[name]


def _curve(session: Session, collective: str, base: str, calibration: Calibration) -> Curve:
    """Return points (bytes, µs) of one mechanism alone; none if it cannot run this collective here."""
    key = (collective, base)
    if key not in calibration.collectives:
        points: list[tuple[int, float]] = []
        mechanism = find_mechanism(base, session.device.type)
        for size in _CURVE_BYTES[session.device.type]:
            numel = elements_of(size, session.dtype.itemsize, session.world_size)
            try:
                points.append((numel * session.dtype.itemsize, _comm_alone_us(session, mechanism, collective, numel)))
            except Unsupported:
                break
        calibration.collectives[key] = points
    return calibration.collectives[key]


def time_at(curve: Curve, size_bytes: float) -> float:
    """Return the time in µs at a size, by log-log interpolation.

    Outside of the measured sizes the nearest segment is extended; above, the time is proportional to the size.
    """
    sizes = [size for size, _ in curve]
    if size_bytes >= sizes[-1]:
        return curve[-1][1] * size_bytes / sizes[-1]
    at = min(max(bisect.bisect(sizes, size_bytes), 1), len(sizes) - 1)
    (x0, y0), (x1, y1) = curve[at - 1], curve[at]
    slope = math.log(y1 / y0) / math.log(x1 / x0)
    return y0 * math.exp(slope * math.log(size_bytes / x0))


def size_for_time(curves: Sequence[Curve], time_us: float, *, smallest: int = 1 << 14, largest: int = 1 << 36) -> int:
    """Return the bytes, between the bounds, for which the fastest of `curves` takes `time_us`; by bisection."""
    low, high = math.log(smallest), math.log(largest)
    for _ in range(60):
        middle = (low + high) / 2
        if min(time_at(curve, math.exp(middle)) for curve in curves) < time_us:
            low = middle
        else:
            high = middle
    return round(math.exp(high))


def _comm_alone_us(session: Session, mechanism: Mechanism, collective: str, numel: int) -> float:
    """Return the time of one collective alone in µs: the median of a few rounds, of the slowest rank."""
    stock = session.lanes(lambda: None, lambda: None)
    with open_mechanism(session, mechanism, collective, numel, stock, {}) as opened:
        run = opened.trial(session, "comm_alone")
        samples = play_rounds(session, {collective: run}, rounds=_CALIBRATING_ROUNDS + 2, dropped=2, seed=0)
    return time_of(samples[collective], comm_time).us
