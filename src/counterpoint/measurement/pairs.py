"""Measure a pair of a computation and a collective by every mechanism: alone, in sequence, together in each order."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.machine.gpus import peak_tflops
from counterpoint.machine.profile import profile_of
from counterpoint.measurement.collective import elements_of, memory_bytes
from counterpoint.measurement.gpu_usage import Observed, device_state, observe
from counterpoint.measurement.mechanisms import Mechanism, find_mechanism
from counterpoint.measurement.open_mechanisms import Opened, memory_of, offered, open_all, open_mechanism
from counterpoint.measurement.rounds import Experiment, SamplesOf, comm_time, compute_time, play_rounds, row, time_of
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
    """Caches measurements that scenarios with the same dtypes share.

    These are the µs of each workload, the µs of each collective by size, and what ran under each mechanism, since a
    profiler takes a second or two to start.
    """

    workloads: dict[str, float] = field(default_factory=dict)
    collectives: dict[tuple[str, str], Curve] = field(default_factory=dict)
    observed: dict[tuple[str, str, str], Observed] = field(default_factory=dict)  # workload, collective, settings

    def workload_us(self, session: Session, name: str, compute: Callable[[], None]) -> float:
        """Return the µs of a workload alone; measure it at first use."""
        if name not in self.workloads:
            lanes = session.lanes(compute, lambda: None)
            trials = {name: lambda: session.stage.run(lanes, "compute_alone")}
            samples = play_rounds(session, trials, rounds=_CALIBRATING_ROUNDS + 3, dropped=3, seed=0)
            self.workloads[name] = time_of(samples[name], compute_time).us
        return self.workloads[name]

    def curve(self, session: Session, collective: str, base: str) -> Curve:
        """Return points (bytes, µs) of a collective alone by one base mechanism; empty if the mechanism cannot run."""
        key = (collective, base)
        if key not in self.collectives:
            points: list[tuple[int, float]] = []
            mechanism = find_mechanism(base, session.device.type)
            for size in _CURVE_BYTES[session.device.type]:
                numel = elements_of(size, session.dtype.itemsize, session.world_size)
                try:
                    us = _comm_alone_us(session, mechanism, collective, numel)
                except Unsupported:
                    break
                points.append((numel * session.dtype.itemsize, us))
            self.collectives[key] = points
        return self.collectives[key]

    def observe(self, session: Session, scenario: Scenario, opened: Sequence[Opened], plain: Opened) -> list[Observed]:
        """Return observations of each mechanism, made once per workload and collective, at the first message size."""
        keys = [(scenario.workload, scenario.collective, each.mechanism.settings) for each in opened]
        if not all(key in self.observed for key in keys):
            self.observed |= zip(keys, observe(session, opened, plain), strict=True)
        return [self.observed[key] for key in keys]


def pair(
    session: Session, scenario: Scenario, plan: Plan, calibration: Calibration, unavailable: dict[str, str]
) -> Iterator[Experiment]:
    """Yield the experiment of a scenario: all mechanisms in all launch orders; nothing if no mechanism can run."""
    workload = find_workload(scenario.workload)
    asked = [find_mechanism(name, session.device.type) for name in scenario.mechanisms]
    mechanisms = offered(session, asked, scenario.collective, unavailable)
    if not mechanisms:
        return
    session.require_memory(workload.memory_bytes(session.compute_dtype.itemsize), scenario.workload)
    compute = prepare(workload, session.device, session.compute_dtype, seed=plan.seed + session.rank)
    compute_us = partial(calibration.workload_us, session, scenario.workload, compute)
    numel = elements_of(
        _size_bytes(session, scenario, mechanisms, compute_us, calibration), session.dtype.itemsize, session.world_size
    )
    size = numel * session.dtype.itemsize
    needed = memory_bytes(scenario.collective, size, session.world_size)
    memories = [memory_of(mechanism) for mechanism in mechanisms]
    copies = len({"plain", *memories} - {"windows"}) + memories.count("windows")  # plain ones to compare with, always
    session.require_memory(copies * needed, f"{scenario.collective} of {size / 1e9:.2f} GB")
    stock = session.lanes(compute, lambda: None)
    if any(mechanism.fits_sms for mechanism in mechanisms):
        sms = _fitted_sms(session, scenario.collective, workload, size, compute_us, calibration)
        mechanisms = [mechanism.with_gemm_sms(sms) for mechanism in mechanisms]
    with open_all(session, mechanisms, scenario.collective, numel, stock, unavailable) as (opened, plain):

        def rows(samples: SamplesOf[tuple[str, str]]) -> list[Row]:
            device = device_state(session)
            observed = calibration.observe(session, scenario, opened, plain)
            names = [each.mechanism.name for each in opened]
            alone = {name: time_of(samples[name, "comm_alone"], comm_time).us for name in names}
            best = min(alone, key=alone.__getitem__)
            return [
                row(
                    scenario, mechanism=name, order=order, size_bytes=size, flops=workload.flops,
                    peak_tflops=peak_tflops(session.gpu_name) if session.compute_dtype.itemsize == 2 else None,
                    samples=samples, best=(best, alone[best]), observed=seen, device=device,
                )
                for name, seen in zip(names, observed, strict=True)
                for order in scenario.orders
            ]  # fmt: skip

        yield Experiment(trials=_trials(session, opened, scenario.orders), rows=rows)


def _trials(
    session: Session, opened: Sequence[Opened], orders: Sequence[Order]
) -> dict[tuple[str, str], Callable[[], Trial]]:
    """Return the trials of one round by (mechanism, case); the computation without controls is (`""`, `compute_alone`).

    For each mechanism these are the collective alone, the computation alone under its controls, both one after the
    other, and both in each order.
    """
    cases: tuple[Case, ...] = ("compute_alone", "comm_alone", "serial", *orders)
    trials = {("", "compute_alone"): lambda: session.stage.run(opened[0].alone, "compute_alone")}
    trials |= {(each.mechanism.name, case): each.trial(session, case) for each in opened for case in cases}
    return trials


def _size_bytes(
    session: Session,
    scenario: Scenario,
    mechanisms: Sequence[Mechanism],
    compute_us: Callable[[], float],
    calibration: Calibration,
) -> int:
    """Return the message size: as asked, or so that the fastest base mechanism takes `ratio` times the compute time."""
    if scenario.size_bytes is not None:
        return scenario.size_bytes
    if scenario.ratio is None:
        raise Misconfigured(f"{scenario.name}: give size_bytes or ratio")
    wanted_us = scenario.ratio * compute_us()
    bases = list(dict.fromkeys(mechanism.base for mechanism in mechanisms))
    curves = [curve for base in bases if (curve := calibration.curve(session, scenario.collective, base))]
    if not curves:
        raise Unsupported(f"{scenario.collective} by {', '.join(bases)} could not be started at any size")
    return size_for_time(curves, wanted_us)


def _fitted_sms(
    session: Session,
    collective: str,
    workload: Workload,
    size: int,
    compute_us: Callable[[], float],
    calibration: Calibration,
) -> int | None:
    """Return how many SMs `choose_gemm_sms` leaves to this pair's GEMM, equal on all ranks; None: all SMs."""
    if collective not in REDUCTIONS:
        return None
    profile = profile_of(torch.cuda.get_device_name(session.device))
    num_sms = torch.cuda.get_device_properties(session.device).multi_processor_count
    both = Pair(
        products=workload.products,
        compute_us=compute_us(),
        collective=collective,
        size_bytes=size,
        comm_us=time_at(calibration.curve(session, collective, "zero_sm"), size),
        mechanism="zero_sm",
        num_ctas=0,
        world_size=session.world_size,
        layout=SmLayout.even(num_sms, profile.chip),
    )
    return choose_gemm_sms(both, profile).gemm_sms


def time_at(curve: Curve, size_bytes: float) -> float:
    """Return the µs of a collective of `size_bytes`, interpolated log-log on its curve (points of bytes and µs).

    Below the measured sizes the first segment is extended; above them, time is proportional to size.
    """
    sizes = [size for size, _ in curve]
    if size_bytes >= sizes[-1]:
        return curve[-1][1] * size_bytes / sizes[-1]
    at = min(max(bisect.bisect(sizes, size_bytes), 1), len(sizes) - 1)
    (x0, y0), (x1, y1) = curve[at - 1], curve[at]
    slope = math.log(y1 / y0) / math.log(x1 / x0)
    return y0 * math.exp(slope * math.log(size_bytes / x0))


def size_for_time(curves: Sequence[Curve], time_us: float) -> int:
    """Return, by bisection from 16 KiB to 64 GiB, the bytes for which the fastest of `curves` takes `time_us`."""
    low, high = math.log(1 << 14), math.log(1 << 36)
    for _ in range(60):
        middle = (low + high) / 2
        if min(time_at(curve, math.exp(middle)) for curve in curves) < time_us:
            low = middle
        else:
            high = middle
    return round(math.exp(high))


def _comm_alone_us(session: Session, mechanism: Mechanism, collective: str, numel: int) -> float:
    """Return the µs of one collective alone: the median of a few rounds, on the slowest rank."""
    stock = session.lanes(lambda: None, lambda: None)
    with open_mechanism(session, mechanism, collective, numel, stock, {}) as opened:
        run = opened.trial(session, "comm_alone")
        samples = play_rounds(session, {collective: run}, rounds=_CALIBRATING_ROUNDS + 2, dropped=2, seed=0)
    return time_of(samples[collective], comm_time).us
