"""Measure a part of a plan, of any kind, in one loop: prepare, play the rounds, make rows."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

from counterpoint.measurement.alone import collective_alone, compute_alone, cost, is_cost
from counterpoint.measurement.collective import collectives
from counterpoint.measurement.dependent import is_dependent, is_exchange
from counterpoint.measurement.expert import exchange
from counterpoint.measurement.pairs import Calibration, pair
from counterpoint.measurement.rows import Experiment, play_rounds
from counterpoint.measurement.session import Session
from counterpoint.measurement.tensor import dependent_matmul
from counterpoint.records.measurement import Block, BlockRow, Outcome, Plan, Row, Scenario


def measure_part(session: Session, part: Scenario | Block, plan: Plan, calibration: Calibration) -> Outcome:
    """Return all rows of a part, or why it has none. All ranks call it with the same arguments.

    Args:
        session: this rank.
        part: what to measure.
        plan: rounds and seed.
        calibration: what scenarios share; scenarios of other dtypes need another one.

    Raises:
        Misconfigured: there is no such workload, collective or mechanism, or ranks cannot share it.
        NotEnoughMemory: it needs more memory than is free on a rank.
        Unsupported: no mechanism can run here.
        WrongResult: a collective delivers wrong data.
    """
    unavailable: dict[str, str] = {}
    rows: list[Row | BlockRow] = []
    with closing(_experiments(session, part, plan, calibration, unavailable)) as experiments:
        for experiment in experiments:
            samples = play_rounds(
                session, experiment.trials, rounds=plan.rounds, dropped=plan.dropped_rounds, seed=plan.seed
            )
            rows += experiment.rows(samples)
            del experiment, samples  # the operands of one are given back before the next is prepared
    session.give_memory_back()
    return Outcome(
        scenario=part.name,
        rows=tuple(row for row in rows if isinstance(row, Row)),
        blocks=tuple(row for row in rows if isinstance(row, BlockRow)),
        unavailable=unavailable,
    )


def _experiments(
    session: Session, part: Scenario | Block, plan: Plan, calibration: Calibration, unavailable: dict[str, str]
) -> Generator[Experiment, None, None]:
    """Yield the experiments of a part, by its kind; reasons why mechanisms cannot run go to `unavailable`."""
    if isinstance(part, Scenario):
        yield from pair(session, part, plan, calibration, unavailable)
        return
    if is_dependent(part.what):
        kind = dependent_matmul
    elif is_exchange(part.what):
        kind = exchange
    elif is_cost(part.what):
        kind = cost
    else:
        kind = collective_alone if part.what in collectives() else compute_alone
    yield from kind(session, part, plan, unavailable)
