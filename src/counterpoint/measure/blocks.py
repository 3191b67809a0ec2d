"""Building blocks alone: a collective by size and mechanism, or a computation by setting of a control."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from counterpoint.controls.control import Control, Lanes
from counterpoint.controls.parse import parse_mechanism
from counterpoint.errors import Unsupported
from counterpoint.measure.comm import COLLECTIVES, elements_of
from counterpoint.measure.mechanisms import open_all
from counterpoint.measure.metrics import bus_gb_per_s
from counterpoint.measure.names import find_mechanism
from counterpoint.measure.rounds import play_rounds
from counterpoint.measure.rows import Watched, comm_time, compute_time, time_of
from counterpoint.measure.session import Session
from counterpoint.measure.stage import Case, Trial
from counterpoint.measure.watch import watch, watch_compute
from counterpoint.measure.workloads import find_workload, prepare
from counterpoint.records.measurement import Block, BlockRow, Outcome, Plan, Timing

__all__ = ["measure_block"]


def measure_block(session: Session, block: Block, plan: Plan) -> Outcome:
    """All rows of a block. All ranks call it with the same arguments.

    Raises:
        Misconfigured: unknown names.
        WrongResult: a collective gave wrong data.
    """
    if block.what not in COLLECTIVES:
        return _workload(session, block, plan)
    rows: list[BlockRow] = []
    unavailable: dict[str, str] = {}
    for size in block.sizes_bytes:
        found, missing = _collective(session, block, size, plan)
        rows.extend(found)
        unavailable.update(missing)
    return Outcome(scenario=block.name, blocks=tuple(rows), unavailable=unavailable)


def _collective(session: Session, block: Block, size: int, plan: Plan) -> tuple[list[BlockRow], dict[str, str]]:
    """One size by all mechanisms, in the same rounds."""
    numel = elements_of(size, session.dtype.itemsize, session.world_size)
    stock = session.lanes(lambda: None, lambda: None)
    mechanisms = [find_mechanism(name, session.device.type) for name in block.mechanisms]
    with open_all(session, mechanisms, block.what, numel, stock) as opened:
        trials: dict[str, Callable[[], Trial]] = {
            each.mechanism.name: partial(session.stage.run, each.alone, Case(what="comm_alone")) for each in opened.each
        }
        samples = play_rounds(session, trials, rounds=plan.rounds, dropped=plan.dropped_rounds, seed=plan.seed)
        watched = watch(session, opened.each, opened.plain)
    rows = [
        _row(session, block.what, name, numel * session.dtype.itemsize, time_of(samples[name], comm_time), seen)
        for name, seen in zip(trials, watched, strict=True)
    ]
    return rows, opened.unavailable


def _row(session: Session, what: str, mechanism: str, size_bytes: int, time: Timing, seen: Watched) -> BlockRow:
    return BlockRow(
        what=what,
        mechanism=mechanism,
        size_bytes=size_bytes,
        num_ctas=None if seen.usage is None else seen.usage.comm_ctas,
        time=time,
        gb_per_s=bus_gb_per_s(what, size_bytes, time.us, session.world_size),
        marked=seen.marked,
    )


def _workload(session: Session, block: Block, plan: Plan) -> Outcome:
    """A computation under each setting, in the same rounds."""
    workload = find_workload(block.what)
    compute = prepare(workload, session.device, session.dtype, seed=plan.seed + session.rank)
    stock = session.lanes(compute, lambda: None)
    with ExitStack() as stack:
        settings: dict[str, tuple[Lanes, tuple[Control, ...]]] = {}
        for name in block.mechanisms:
            lanes, controls = stock, _controls(block, name)
            for control in controls:
                lanes = stack.enter_context(control.apply(lanes))
            settings[name] = lanes, controls
        trials: dict[str, Callable[[], Trial]] = {
            name: partial(session.stage.run, lanes, Case(what="compute_alone")) for name, (lanes, _) in settings.items()
        }
        samples = play_rounds(session, trials, rounds=plan.rounds, dropped=plan.dropped_rounds, seed=plan.seed)
        watched = watch_compute(session, list(settings.values()), stock)
    times = [time_of(samples[name], compute_time) for name in settings]
    rows = tuple(
        BlockRow(
            what=block.what,
            mechanism=name,
            num_sms=None if seen.usage is None else seen.usage.compute_sms,
            time=time,
            tflops=workload.flops / time.us / 1e6,
            marked=seen.marked,
        )
        for name, time, seen in zip(settings, times, watched, strict=True)
    )
    return Outcome(scenario=block.name, blocks=rows)


def _controls(block: Block, name: str) -> tuple[Control, ...]:
    """Of one setting of a computation; `stock` has none."""
    controls = () if name == "stock" else parse_mechanism(f"nccl+{name}")[1]
    for control in controls:
        reason = control.available()
        if reason is not None:
            raise Unsupported(f"{block.name}: {name} cannot work here: {reason}")
    return controls
