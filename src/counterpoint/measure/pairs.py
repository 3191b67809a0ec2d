"""One scenario: the same pair by every mechanism, in every order, in the same interleaved rounds."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.machine.gpus import peak_tflops
from counterpoint.machine.sums import REDUCTIONS, choose_gemm_sms
from counterpoint.measure.comm import elements_of, memory_bytes
from counterpoint.measure.device_state import combine, read_device
from counterpoint.measure.mechanisms import Opened, OpenedAll, memory_of, offered, open_all, open_mechanism
from counterpoint.measure.names import Mechanism, find_mechanism
from counterpoint.measure.rounds import play_rounds
from counterpoint.measure.rows import Watched, comm_time, compute_time, row, time_of
from counterpoint.measure.session import Session
from counterpoint.measure.sizes import Curve, size_for_time, time_at
from counterpoint.measure.stage import Case, Trial
from counterpoint.measure.watch import watch
from counterpoint.measure.workloads import Matmul, Workload, find_workload, prepare
from counterpoint.records.measurement import Outcome, Plan, Scenario

__all__ = ["Calibration", "measure_scenario"]

_CURVE_BYTES = {"cuda": (1 << 20, 16 << 20, 128 << 20, 1 << 30), "cpu": (1 << 18, 4 << 20, 32 << 20)}
_CALIBRATING_ROUNDS = 5


@dataclass(kw_only=True)
class Calibration:
    """What is found once for many scenarios: the time of a workload and of a collective by size, in µs, and what ran
    of each mechanism (a profiler takes a second or two to start)."""

    workloads: dict[str, float] = field(default_factory=dict)
    collectives: dict[tuple[str, str], Curve] = field(default_factory=dict)
    watched: dict[tuple[str, str, str], Watched] = field(default_factory=dict)  # workload, collective, settings


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """A scenario with its operands allocated."""

    scenario: Scenario
    workload: Workload
    compute: Callable[[], None]
    mechanisms: tuple[Mechanism, ...]


def measure_scenario(session: Session, scenario: Scenario, plan: Plan, calibration: Calibration) -> Outcome:
    """All rows of a scenario; none where no mechanism offers the collective. All ranks call it with the same arguments.

    Raises:
        Misconfigured: unknown names; sizes beyond this machine's memory.
        WrongResult: a mechanism gave wrong data.
        Unsupported: no mechanism that offers the collective can be started.
    """
    workload = find_workload(scenario.workload)
    asked = [find_mechanism(name, session.device.type) for name in scenario.mechanisms]
    mechanisms, unavailable = offered(session, asked, scenario.collective)
    if not mechanisms:
        return Outcome(scenario=scenario.name, unavailable=unavailable)
    session.require_memory(workload.memory_bytes(session.dtype.itemsize), scenario.workload)
    compute = prepare(workload, session.device, session.dtype, seed=plan.seed + session.rank)
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
        watched = _watched(session, pair, opened, calibration)
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
            peak_tflops=peak_tflops(torch.cuda.get_device_name(session.device)) if session.is_cuda else None,
            samples=samples,
            best=(best, alone[best]),
            watched=seen,
            device=device,
        )
        for name, seen in zip(names, watched, strict=True)
        for order in scenario.orders
    )
    return Outcome(scenario=scenario.name, rows=rows, unavailable=opened.unavailable)


def _watched(session: Session, pair: _Pair, opened: OpenedAll, calibration: Calibration) -> list[Watched]:
    """What ran, seen at the first size of each pair of operations."""
    keys = [(pair.workload.name, pair.scenario.collective, each.mechanism.settings) for each in opened.each]
    if not all(key in calibration.watched for key in keys):
        calibration.watched |= zip(keys, watch(session, opened.each, opened.plain), strict=True)
    return [calibration.watched[key] for key in keys]


def _fitted(session: Session, pair: _Pair, size: int, calibration: Calibration) -> tuple[Mechanism, ...]:
    """The mechanisms, `gemm_sms=fit` made a number for this pair; all ranks find the same one."""
    if not any(mechanism.fits_sms for mechanism in pair.mechanisms):
        return pair.mechanisms
    collective = pair.scenario.collective
    sms: int | None = None
    if collective in REDUCTIONS:
        sms = choose_gemm_sms(
            [(one.m, one.n, one.k) for one in pair.workload.operations if isinstance(one, Matmul)],
            collective,
            size_bytes=size,
            compute_us=_workload_us(session, pair, calibration),
            comm_us=time_at(_curve(session, collective, "zero_sm", calibration), size),
            world_size=session.world_size,
            num_sms=torch.cuda.get_device_properties(session.device).multi_processor_count,
        ).gemm_sms
    return tuple(mechanism.with_gemm_sms(sms) for mechanism in pair.mechanisms)


def _trials(
    session: Session, opened: Sequence[Opened], orders: Sequence[str]
) -> dict[tuple[str, str], Callable[[], Trial]]:
    """What one round holds: the plain computation; by each mechanism the collective alone, the computation alone under
    its controls, both one after the other, and both in each order."""
    plain = Case(what="compute_alone")
    trials = {("", "compute_alone"): lambda: session.stage.run(opened[0].alone, plain)}
    for each in opened:
        for what in ("compute_alone", "comm_alone", "serial", *orders):
            trials[each.mechanism.name, what] = each.trial(session, what)
    return trials


def _numel(session: Session, pair: _Pair, calibration: Calibration) -> int:
    """Elements of the full array: as asked, or so that the fastest plain mechanism takes `ratio` times the workload."""
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
            {name: lambda: session.stage.run(lanes, Case(what="compute_alone"))},
            rounds=_CALIBRATING_ROUNDS + 3,
            dropped=3,
            seed=0,
        )
        calibration.workloads[name] = time_of(samples[name], compute_time).us
    return calibration.workloads[name]


def _curve(session: Session, collective: str, base: str, calibration: Calibration) -> Curve:
    """(bytes, µs) of one mechanism alone; empty if it cannot run this collective here."""
    key = (collective, base)
    if key not in calibration.collectives:
        points: list[tuple[int, float]] = []
        mechanism = find_mechanism(base, session.device.type)
        for size in _CURVE_BYTES[session.device.type]:
            numel = elements_of(size, session.dtype.itemsize, session.world_size)
            try:
                points.append((numel * session.dtype.itemsize, comm_alone_us(session, mechanism, collective, numel)))
            except Unsupported:
                break
        calibration.collectives[key] = points
    return calibration.collectives[key]


def comm_alone_us(session: Session, mechanism: Mechanism, collective: str, numel: int) -> float:
    """Time of one collective alone, in µs: the median of a few rounds, of the slowest rank."""
    stock = session.lanes(lambda: None, lambda: None)
    with open_mechanism(session, mechanism, collective, numel, stock, {}) as opened:
        run = opened.trial(session, "comm_alone")
        samples = play_rounds(session, {collective: run}, rounds=_CALIBRATING_ROUNDS + 2, dropped=2, seed=0)
    return time_of(samples[collective], comm_time).us
