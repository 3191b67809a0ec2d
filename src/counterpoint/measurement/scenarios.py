"""Measure a part of a plan: a pair by every mechanism and in every order, or a building block alone.

All trials of one pair, or of one size of a building block, run in the same interleaved rounds.
"""

from __future__ import annotations

import bisect
import gc
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import msgspec
import torch

from counterpoint.controls.control import applied
from counterpoint.controls.parse import parse_mechanism
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.machine.bus_bandwidth import bus_gb_per_s
from counterpoint.machine.gpus import peak_tflops
from counterpoint.machine.profile import profile_of
from counterpoint.measurement.collective import collectives, elements_of, memory_bytes
from counterpoint.measurement.costs import is_cost, measure_cost
from counterpoint.measurement.dependent import is_dependent, is_exchange
from counterpoint.measurement.expert import measure_exchange
from counterpoint.measurement.gpu_usage import Observed, combine, observe, observe_compute, read_device
from counterpoint.measurement.mechanisms import Mechanism, find_mechanism
from counterpoint.measurement.open_mechanisms import Opened, OpenedAll, memory_of, offered, open_all, open_mechanism
from counterpoint.measurement.rows import comm_time, compute_time, play_rounds, row, time_of, why_late
from counterpoint.measurement.session import Session
from counterpoint.measurement.tensor import measure_dependent
from counterpoint.measurement.trial import Case, Trial
from counterpoint.measurement.workloads import Workload, find_workload, prepare
from counterpoint.pair.choice import choose_gemm_sms
from counterpoint.pair.sm_split import SmLayout
from counterpoint.pair.together import REDUCTIONS, Pair
from counterpoint.records.measurement import Block, BlockRow, Order, Outcome, Plan, Scenario

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
    """Holds a scenario with its operands allocated."""

    scenario: Scenario
    workload: Workload
    compute: Callable[[], None]
    mechanisms: tuple[Mechanism, ...]


def measure_scenario(session: Session, scenario: Scenario, plan: Plan, calibration: Calibration) -> Outcome:
    """Return all rows of a scenario, or none where no mechanism offers the collective.

    All ranks call it with the same arguments.
    """
    workload = find_workload(scenario.workload)
    asked = [find_mechanism(name, session.device.type) for name in scenario.mechanisms]
    mechanisms, unavailable = offered(session, asked, scenario.collective)
    if not mechanisms:
        return Outcome(scenario=scenario.name, unavailable=unavailable)
    session.require_memory(workload.memory_bytes(session.compute_dtype.itemsize), scenario.workload)
    compute = prepare(workload, session.device, session.compute_dtype, seed=plan.seed + session.rank)
    pair = _Pair(scenario=scenario, workload=workload, compute=compute, mechanisms=mechanisms)
    found = _measure(session, pair, plan, _numel(session, pair, calibration), calibration)
    del pair, compute
    gc.collect()
    if session.is_cuda:
        torch.cuda.empty_cache()
    return msgspec.structs.replace(found, unavailable=unavailable | found.unavailable)


def _measure(session: Session, pair: _Pair, plan: Plan, numel: int, calibration: Calibration) -> Outcome:
    scenario = pair.scenario
    size = numel * session.dtype.itemsize
    needed = memory_bytes(scenario.collective, size, session.world_size)
    memories = [memory_of(mechanism) for mechanism in pair.mechanisms]
    copies = len({"plain", *memories} - {"windows"}) + memories.count("windows")  # plain ones to compare with, always
    session.require_memory(copies * needed, f"{scenario.collective} of {size / 1e9:.2f} GB")
    stock = session.lanes(pair.compute, lambda: None)
    mechanisms = _fitted(session, pair, size, calibration)
    with open_all(session, mechanisms, scenario.collective, numel, stock) as opened:
        trials = _trials(session, opened.each, scenario.orders)
        samples = play_rounds(session, trials, rounds=plan.rounds, dropped=plan.dropped_rounds, seed=plan.seed)
        device = combine(session.gather(read_device(session.gpu_uuid) if session.is_cuda else None))
        observed = _observed(session, pair, opened, calibration)
    names = [each.mechanism.name for each in opened.each]
    alone = {name: time_of(samples[name, "comm_alone"], comm_time).us for name in names}
    best = min(alone, key=alone.__getitem__)
    rows = tuple(
        row(
            scenario,
            mechanism=name,
            order=order,
            size_bytes=size,
            flops=pair.workload.flops,
            peak_tflops=peak_tflops(session.gpu_name) if session.compute_dtype.itemsize == 2 else None,
            samples=samples,
            best=(best, alone[best]),
            observed=seen,
            device=device,
        )
        for name, seen in zip(names, observed, strict=True)
        for order in scenario.orders
    )
    return Outcome(scenario=scenario.name, rows=rows, unavailable=opened.unavailable)


def _observed(session: Session, pair: _Pair, opened: OpenedAll, calibration: Calibration) -> list[Observed]:
    """Return what ran under each mechanism, observed once for each workload and collective, at the first size."""
    keys = [(pair.workload.name, pair.scenario.collective, each.mechanism.settings) for each in opened.each]
    if not all(key in calibration.observed for key in keys):
        calibration.observed |= zip(keys, observe(session, opened.each, opened.plain), strict=True)
    return [calibration.observed[key] for key in keys]


def _fitted(session: Session, pair: _Pair, size: int, calibration: Calibration) -> tuple[Mechanism, ...]:
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
    return tuple(mechanism.with_gemm_sms(sms) for mechanism in pair.mechanisms)


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


def measure_block(session: Session, block: Block, plan: Plan) -> Outcome:
    """Return all rows of a building block. All ranks call it with the same arguments."""
    if is_dependent(block.what):
        return measure_dependent(session, block, plan)
    if is_exchange(block.what):
        return measure_exchange(session, block, plan)
    if is_cost(block.what):
        return measure_cost(session, block, plan)
    if block.what not in collectives():
        return _compute_block(session, block, plan)
    rows: list[BlockRow] = []
    asked = [find_mechanism(name, session.device.type) for name in block.mechanisms]
    mechanisms, unavailable = offered(session, asked, block.what)
    for size in block.sizes_bytes if mechanisms else ():
        found, missing = _comm_block(session, block, mechanisms, size, plan)
        rows.extend(found)
        unavailable.update(missing)
    return Outcome(scenario=block.name, blocks=tuple(rows), unavailable=unavailable)


def _comm_block(
    session: Session, block: Block, mechanisms: Sequence[Mechanism], size: int, plan: Plan
) -> tuple[list[BlockRow], dict[str, str]]:
    """Return the rows of one size by all mechanisms, and why others could not be opened."""
    numel = elements_of(size, session.dtype.itemsize, session.world_size)
    stock = session.lanes(lambda: None, lambda: None)
    copies = 1 + sum(mechanism.windows is not None for mechanism in mechanisms)
    session.require_memory(copies * memory_bytes(block.what, size, session.world_size), f"{block.what} of {size} bytes")
    with open_all(session, mechanisms, block.what, numel, stock) as opened:
        trials = {each.mechanism.name: each.trial(session, "comm_alone") for each in opened.each}
        samples = play_rounds(session, trials, rounds=plan.rounds, dropped=plan.dropped_rounds, seed=plan.seed)
        observed = observe(session, opened.each, opened.plain)
    size = numel * session.dtype.itemsize
    times = [time_of(samples[name], comm_time) for name in trials]
    rows = [
        BlockRow(
            what=block.what,
            mechanism=name,
            size_bytes=size,
            num_ctas=None if seen.usage is None else seen.usage.comm_ctas,
            time=time,
            gb_per_s=bus_gb_per_s(block.what, size, session.world_size, time.us),
            marked=seen.marked or why_late(samples[name]),
        )
        for name, time, seen in zip(trials, times, observed, strict=True)
    ]
    return rows, opened.unavailable


def _compute_block(session: Session, block: Block, plan: Plan) -> Outcome:
    """Return the rows of a computation under each setting."""
    workload = find_workload(block.what)
    session.require_memory(workload.memory_bytes(session.compute_dtype.itemsize), block.what)
    found = [(name, () if name == "stock" else parse_mechanism(f"nccl+{name}")[1]) for name in block.mechanisms]
    asked = [Mechanism(name=name, controls=controls) for name, controls in found]
    mechanisms, unavailable = offered(session, asked, block.what)
    compute = prepare(workload, session.device, session.compute_dtype, seed=plan.seed + session.rank)
    stock = session.lanes(compute, lambda: None)
    with ExitStack() as stack:
        settings = [stack.enter_context(applied(mechanism.controls, stock)) for mechanism in mechanisms]
        trials: dict[str, Callable[[], Trial]] = {
            mechanism.name: partial(session.stage.run, lanes, "compute_alone")
            for mechanism, lanes in zip(mechanisms, settings, strict=True)
        }
        samples = play_rounds(session, trials, rounds=plan.rounds, dropped=plan.dropped_rounds, seed=plan.seed)
        controls = [mechanism.controls for mechanism in mechanisms]
        observed = observe_compute(session, list(zip(settings, controls, strict=True)), stock)
    times = [time_of(samples[name], compute_time) for name in trials]
    rows = tuple(
        BlockRow(
            what=block.what,
            mechanism=name,
            num_sms=None if seen.usage is None else seen.usage.compute_sms,
            time=time,
            tflops=workload.flops / time.us / 1e6,
            marked=seen.marked or why_late(samples[name]),
        )
        for name, time, seen in zip(trials, times, observed, strict=True)
    )
    return Outcome(scenario=block.name, blocks=rows, unavailable=unavailable)
