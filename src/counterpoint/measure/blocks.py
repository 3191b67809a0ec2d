"""Building blocks alone: a collective by size and mechanism, or a computation by setting of a control."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from counterpoint.controls.control import Lanes
from counterpoint.controls.parse import parse_mechanism
from counterpoint.measure.comm import COLLECTIVES, elements_of, memory_bytes
from counterpoint.measure.mechanisms import offered, open_all
from counterpoint.measure.metrics import bus_gb_per_s
from counterpoint.measure.names import Mechanism, find_mechanism
from counterpoint.measure.rounds import Samples, play_rounds, why_late
from counterpoint.measure.rows import Watched, comm_time, compute_time, time_of
from counterpoint.measure.session import Session
from counterpoint.measure.stage import Case, Trial
from counterpoint.measure.watch import watch, watch_compute
from counterpoint.measure.workloads import find_workload, prepare
from counterpoint.records.measurement import Block, BlockRow, Outcome, Plan

__all__ = ["measure_block"]


def measure_block(session: Session, block: Block, plan: Plan) -> Outcome:
    """All rows of a block. All ranks call it with the same arguments.

    Raises:
        Misconfigured: unknown names; sizes beyond this machine's memory.
        WrongResult: a collective gave wrong data.
        Unsupported: no mechanism that offers the collective can be started.
    """
    if block.what not in COLLECTIVES:
        return _workload(session, block, plan)
    rows: list[BlockRow] = []
    asked = [find_mechanism(name, session.device.type) for name in block.mechanisms]
    mechanisms, unavailable = offered(session, asked, block.what)
    for size in block.sizes_bytes if mechanisms else ():
        found, missing = _collective(session, block, mechanisms, size, plan)
        rows.extend(found)
        unavailable.update(missing)
    return Outcome(scenario=block.name, blocks=tuple(rows), unavailable=unavailable)


def _collective(
    session: Session, block: Block, mechanisms: Sequence[Mechanism], size: int, plan: Plan
) -> tuple[list[BlockRow], dict[str, str]]:
    """One size by all mechanisms, in the same rounds."""
    numel = elements_of(size, session.dtype.itemsize, session.world_size)
    stock = session.lanes(lambda: None, lambda: None)
    copies = 1 + sum(mechanism.windows is not None for mechanism in mechanisms)
    session.require_memory(copies * memory_bytes(block.what, size, session.world_size), f"{block.what} of {size} bytes")
    with open_all(session, mechanisms, block.what, numel, stock) as opened:
        trials = {each.mechanism.name: each.trial(session, "comm_alone") for each in opened.each}
        samples = play_rounds(session, trials, rounds=plan.rounds, dropped=plan.dropped_rounds, seed=plan.seed)
        watched = watch(session, opened.each, opened.plain)
    rows = [
        _row(session, block.what, name, numel * session.dtype.itemsize, samples[name], seen)
        for name, seen in zip(trials, watched, strict=True)
    ]
    return rows, opened.unavailable


def _row(session: Session, what: str, mechanism: str, size_bytes: int, samples: Samples, seen: Watched) -> BlockRow:
    time = time_of(samples, comm_time)
    return BlockRow(
        what=what,
        mechanism=mechanism,
        size_bytes=size_bytes,
        num_ctas=None if seen.usage is None else seen.usage.comm_ctas,
        time=time,
        gb_per_s=bus_gb_per_s(what, size_bytes, time.us, session.world_size),
        marked=seen.marked or why_late(samples),
    )


def _workload(session: Session, block: Block, plan: Plan) -> Outcome:
    """A computation under each setting, in the same rounds."""
    workload = find_workload(block.what)
    session.require_memory(workload.memory_bytes(session.dtype.itemsize), block.what)
    found = [(name, () if name == "stock" else parse_mechanism(f"nccl+{name}")[1]) for name in block.mechanisms]
    asked = [Mechanism(name=name, controls=controls) for name, controls in found]
    mechanisms, unavailable = offered(session, asked, block.what)
    compute = prepare(workload, session.device, session.dtype, seed=plan.seed + session.rank)
    stock = session.lanes(compute, lambda: None)
    with ExitStack() as stack:
        settings: list[Lanes] = []
        for mechanism in mechanisms:
            lanes = stock
            for control in mechanism.controls:
                lanes = stack.enter_context(control.apply(lanes))
            settings.append(lanes)
        alone = Case(what="compute_alone")
        trials: dict[str, Callable[[], Trial]] = {
            mechanism.name: partial(session.stage.run, lanes, alone)
            for mechanism, lanes in zip(mechanisms, settings, strict=True)
        }
        samples = play_rounds(session, trials, rounds=plan.rounds, dropped=plan.dropped_rounds, seed=plan.seed)
        controls = [mechanism.controls for mechanism in mechanisms]
        watched = watch_compute(session, list(zip(settings, controls, strict=True)), stock)
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
        for name, time, seen in zip(trials, times, watched, strict=True)
    )
    return Outcome(scenario=block.name, blocks=rows, unavailable=unavailable)
