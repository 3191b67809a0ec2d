"""Run the process of one rank of a measurement: `torchrun -m counterpoint.measurement.worker PLAN.json`.

A rank measures the parts of its plan one after the other; rank 0 appends a line for each to the plan's results. A rank
that fails leaves a `RankFailure` in the plan's folder of errors and exits with 1.
"""

from __future__ import annotations

import datetime
import math
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

import counterpoint
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.measurement.api import STARTUP_S, VARIABLES
from counterpoint.measurement.workloads import is_dependent, is_exchange
from counterpoint.processes import die_with_parent, leaving_word
from counterpoint.records.measurement import LEGS, Block, BlockRow, Environment, Outcome, Plan, Row, Scenario
from counterpoint.rehearsed import NO_TIMES, is_rehearsal

if TYPE_CHECKING:
    from counterpoint.measurement.pairs import Calibration
    from counterpoint.measurement.rounds import Experiment
    from counterpoint.measurement.session import Session


def main() -> None:
    """Run one rank; first make sure that this process dies with its parent, then import torch."""
    die_with_parent()
    if is_rehearsal():
        sys.exit(f"{NO_TIMES}: measure and tune outside of counterpoint rehearse")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupted rank ends, and the launcher says by which signal
    plan = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Plan)
    worker = Worker(plan)
    with leaving_word(Path(plan.errors), int(os.environ.get("RANK", "0")), lambda: worker.scenario):
        worker.run()


class Worker:
    """Runs a plan on this rank; `scenario` is the name of the scenario or block being measured."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.scenario: str | None = None

    def run(self) -> None:
        """Join the other ranks, check that all agree on plan, torch and GPU model, measure, and leave."""
        try:
            import torch

            from counterpoint.measurement.session import Session
        except ModuleNotFoundError as error:
            raise Unsupported(f"{error.name} is not installed: pip install 'counterpoint[torch]'") from None
        plan = self.plan
        session = Session(plan.device, timeout_s=plan.timeout_s)
        session.check_agreement("the plan", msgspec.json.encode(plan).decode())
        if plan.world_size != session.world_size:
            raise Misconfigured(f"the plan is for {plan.world_size} ranks and {session.world_size} were started")
        session.check_agreement("torch", str(torch.__version__))
        session.check_agreement("the GPU", session.gpu_name)
        self._measure(session)
        session.close()

    def _measure(self, session: Session) -> None:
        """Measure all scenarios and blocks of the plan, and append each outcome to the results file."""
        from counterpoint.measurement.pairs import Calibration
        from counterpoint.measurement.rounds import TURN
        from counterpoint.measurement.session import NotEnoughMemory

        results = Path(self.plan.results)
        calibrations: defaultdict[tuple[str, str], Calibration] = defaultdict(Calibration)
        environment = _environment(session) if session.rank == 0 else None
        took_s: list[float] = []
        for place, part in enumerate(self.plan.parts):
            began, until_s = time.monotonic(), self.plan.until_s or math.inf
            least_s = fmean(took_s or [0.0]) * min(1.0, TURN / self.plan.rounds)
            if took_s and session.gather(began + least_s > until_s)[0]:
                break
            plan = self.plan
            if plan.until_s is not None:  # and a part ends long before the parent gives up
                share_s = _share(until_s, len(plan.parts) - place)
                plan = replace(plan, until_s=min(share_s, began + plan.timeout_s / 2 - STARTUP_S))
            self.scenario = part.name
            dtypes = session.use_dtypes(part.dtype, None if isinstance(part, Block) else part.compute_dtype)
            try:
                outcome = measure_part(session, part, plan, calibrations[dtypes])
            except NotEnoughMemory as error:
                outcome = Outcome(scenario=part.name, unavailable=dict.fromkeys(part.mechanisms, str(error)))
            rows = (replace(row, dtype=dtypes[0], compute_dtype=dtypes[1]) for row in outcome.rows)
            blocks = (replace(row, dtype=dtypes[0]) for row in outcome.blocks)
            outcome = replace(outcome, rows=tuple(rows), blocks=tuple(blocks), environment=environment)
            if session.rank == 0:
                with results.open("ab") as file:
                    file.write(msgspec.json.encode(outcome) + b"\n")
                environment = None
            took_s.append(time.monotonic() - began)


def _share(until_s: float, left: int) -> float:
    """Divide the time until `until_s` into `left` equal shares; return when the first share ends."""
    now = time.monotonic()
    return now + (until_s - now) / max(left, 1)


def _environment(session: Session) -> Environment:
    import torch

    from counterpoint.measurement.gpu_usage import driver_version

    return Environment(
        device=session.device.type,
        gpu=session.gpu_name,
        world_size=session.world_size,
        driver=driver_version() if session.is_cuda else None,
        torch=str(torch.__version__),
        nccl=".".join(str(part) for part in torch.cuda.nccl.version()) if session.is_cuda else None,
        counterpoint=counterpoint.__version__,
        commit=_commit(),
        command=tuple(sys.argv),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        variables={name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
    )


def _commit() -> str | None:
    """Return COUNTERPOINT_COMMIT if set, else the commit of this file's checkout, with `-dirty` if it has changes."""
    if given := os.environ.get("COUNTERPOINT_COMMIT"):
        return given
    describe = ("git", "-C", Path(__file__).parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        done = subprocess.run(describe, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # no git here
        return None
    return done.stdout.strip() or None


def measure_part(session: Session, part: Scenario | Block, plan: Plan, calibration: Calibration) -> Outcome:
    """Return all rows of one scenario or block, or why it has none. All ranks call it with the same arguments.

    `calibration` is what scenarios of the same dtypes share. NotEnoughMemory and WrongResult are raised on all ranks,
    as are Misconfigured (no such workload, collective or mechanism) and Unsupported (no mechanism can run here).
    """
    from counterpoint.measurement.rounds import play_rounds

    unavailable: dict[str, str] = {}
    rows: list[Row | BlockRow] = []
    expected = len(LEGS) if isinstance(part, Block) and is_exchange(part.what) else 1
    with closing(_experiments(session, part, plan, calibration, unavailable)) as experiments:
        for place, experiment in enumerate(experiments):
            samples = play_rounds(
                session, experiment.trials, rounds=plan.rounds, dropped=plan.dropped_rounds, seed=plan.seed,
                until_s=_share(plan.until_s or math.inf, expected - place),
            )  # fmt: skip
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
    """Yield the experiments of one scenario or block; put why mechanisms cannot run into `unavailable`."""
    from counterpoint.measurement.alone import collective_alone, compute_alone, cost, is_cost
    from counterpoint.measurement.collective import collectives
    from counterpoint.measurement.expert import exchange
    from counterpoint.measurement.pairs import pair
    from counterpoint.measurement.tensor import dependent_matmul

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


if __name__ == "__main__":
    main()
