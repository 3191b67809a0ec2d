"""Start one process per rank on this machine to measure a plan, and report in one error why ranks ended.

The ranks get torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), so that `torchrun
--nproc-per-node 8 -m counterpoint.measurement.worker plan.json` starts the same program.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from counterpoint.errors import CounterpointError, Misconfigured
from counterpoint.processes import (
    DEFAULTS,
    PARENT_VARIABLE,
    SETTLE_S,
    Processes,
    Progress,
    Remains,
    abort,
    died,
    exit_code,
    hung,
    read_failure,
    reserved_port,
    started,
    tail,
    wait_for_all,
    watch,
)
from counterpoint.records.measurement import Outcome, Plan

WORKER = "counterpoint.measurement.worker"
STARTUP_S = 60.0  # torch's import, CUDA's and NCCL's start, on top of the timeout
VARIABLES = ("NCCL_", "CUDA_", "TORCH_", "NVSHMEM_", "PYTORCH_", "OMP_")  # prefixes of variables that change results


def launch(
    plan: Plan,
    *,
    folder: Path,
    timeout_s: float,
    startup_s: float = STARTUP_S,
    progress: Progress | None = None,
    module: str = WORKER,
) -> None:
    """Run all scenarios of `plan`, whose results file exists and is empty; return when all ranks have ended well.

    Call it from a thread that lives until it returns: the kernel kills the ranks when that thread ends.

    Args:
        plan: what to measure; its `errors` folder is made if it is missing.
        folder: gets plan.json and rank<N>.log with all that the ranks print.
        timeout_s: longest time without a finished scenario.
        startup_s: added to it before the first one.
        progress: called as (scenarios done, in all, what runs now).
        module: what `python -m` starts; it takes the path of plan.json.

    Raises:
        Misconfigured: a rank raised it; the text is the rank's. `Unsupported` likewise.
        PeerTimeout: ranks died, raised something else or stopped making progress; names them and their logs.
    """
    plan_file = folder / "plan.json"
    plan_file.write_bytes(msgspec.json.encode(plan))
    Path(plan.errors).mkdir(exist_ok=True)
    command = [sys.executable, "-P", "-X", "faulthandler", "-m", module, str(plan_file)]
    logs = [folder / f"rank{rank}.log" for rank in range(plan.world_size)]
    with (
        reserved_port() as port,
        started(command, logs, [_environment(rank, plan.world_size, port) for rank in range(plan.world_size)]) as ranks,
    ):
        watch(
            ranks,
            progress=_Results(plan, progress or (lambda done, total, what: None)).size,
            timeout_s=timeout_s,
            startup_s=startup_s,
            died=lambda: died(_remains(ranks, plan, folder), during=_during(plan), logs=str(folder)),
            hung=lambda: _hung(ranks, plan, folder, timeout_s),
        )


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    threads = max(1, len(os.sched_getaffinity(0)) // world_size)
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        PARENT_VARIABLE: os.getpid(),
    }
    return {"OMP_NUM_THREADS": str(threads), **DEFAULTS, **os.environ, **{key: str(it) for key, it in place.items()}}


def read_outcomes(path: Path) -> tuple[Outcome, ...]:
    """Return the outcomes in complete lines, in the order measured; raise Misconfigured if the file is gone."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise Misconfigured(f"{path} was taken away while it was needed; start again") from None
    return tuple(msgspec.json.decode(line, type=Outcome) for line in text[: text.rfind(b"\n") + 1].splitlines())


class _Results:
    """Watches the results file of a plan grow, and reports the finished parts."""

    def __init__(self, plan: Plan, tell: Progress) -> None:
        self._plan, self._tell = plan, tell
        self._size: int | None = -1

    def size(self) -> int | None:
        """Return the file's size; None if it was deleted, which `read_outcomes` then reports."""
        results = Path(self._plan.results)
        try:
            size = results.stat().st_size
        except FileNotFoundError:
            size = None
        if size != self._size:
            self._size = size
            self._tell(len(read_outcomes(results)), len(self._plan.parts), _next(self._plan) or "")
        return size


def _hung(ranks: Processes, plan: Plan, folder: Path, timeout_s: float) -> CounterpointError:
    """Return the error for a hang, after each rank has written its stack to its log."""
    abort(process.pid for process in ranks if exit_code(process) is None)
    wait_for_all(ranks, SETTLE_S)
    reason = f"no progress for {timeout_s:g} s {_during(plan)}"
    return hung(_remains(ranks, plan, folder), reason=reason, logs=str(folder))


def _remains(ranks: Processes, plan: Plan, folder: Path) -> list[Remains]:
    return [
        Remains(
            rank=rank,
            code=exit_code(process),
            failure=read_failure(Path(plan.errors), rank),
            log=tail(folder / f"rank{rank}.log"),
        )
        for rank, process in enumerate(ranks)
    ]


def _next(plan: Plan) -> str | None:
    """Return the part being measured, by name: the first in the plan without a result; None after the last one."""
    done = {outcome.scenario for outcome in read_outcomes(Path(plan.results))}
    return next((part.name for part in plan.parts if part.name not in done), None)


def _during(plan: Plan) -> str:
    return "after the last scenario" if (name := _next(plan)) is None else f"in scenario {name!r}"
