"""What every rank of a measurement runs: `torchrun -m counterpoint.measure.worker PLAN.json`.

A rank that fails leaves a `Failure` in the plan's folder of errors and exits with 1.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path

import msgspec

from counterpoint.errors import Unsupported
from counterpoint.measure.orphans import die_with_parent
from counterpoint.records.measurement import Failure, Plan

__all__ = ["main"]


def main() -> None:
    """Entry point of one rank; torch is imported once nothing can leave it an orphan."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # whoever interrupts a rank ends it, and the launcher says by what
    plan = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Plan)
    at: list[str | None] = [None]
    try:
        try:
            from counterpoint.measure.work import work
        except ModuleNotFoundError as error:
            raise Unsupported(f"{error.name} is not installed: pip install 'counterpoint[torch]'") from None
        work(plan, at)
    except Exception as error:
        traceback.print_exc()  # into this rank's log
        _leave(plan, error, at[0])
        os._exit(1)  # a communicator that lost a peer would hold up a normal exit


def _leave(plan: Plan, error: Exception, scenario: str | None) -> None:
    """Writes why this rank ends: whole or not at all."""
    rank = int(os.environ.get("RANK", "0"))
    failure = Failure(rank=rank, kind=type(error).__name__, text=str(error), scenario=scenario)
    path = Path(plan.errors) / f"rank{rank}.json"
    path.with_suffix(".part").write_bytes(msgspec.json.encode(failure))
    path.with_suffix(".part").replace(path)


if __name__ == "__main__":
    main()
