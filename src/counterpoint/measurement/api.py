"""Define `counterpoint.measure`: start a process per rank, merge results, and raise one error if ranks fail.

It does not import torch. Ranks get torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), so
that `torchrun --nproc-per-node 8 -m counterpoint.measurement.worker plan.json` starts the same program.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from counterpoint.errors import CounterpointError, Misconfigured, Unsupported
from counterpoint.machine.driver import visible_gpus
from counterpoint.machine.gpus import find_gpu
from counterpoint.measurement.suites import SMS, parts_of
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
    run_folder,
    started,
    tail,
    wait_for_all,
    watch,
)
from counterpoint.records.measurement import Block, Measurement, Outcome, Plan, Scenario

MIN_ROUNDS = 5  # two are dropped, and a median needs three
MAX_CPU_RANKS = 64
MAX_WAIT_S = 7 * 86400.0  # the longest that torch and JSON can represent


def measure(
    suite: str,
    *,
    device: str = "cuda",
    world_size: int | None = None,
    mechanisms: Sequence[str] | None = None,
    rounds: int = 12,
    timeout_s: float = 120.0,
    progress: Progress | None = None,
) -> Measurement:
    """Run a suite on GPUs of this machine, or with gloo on its CPUs, in one new process per rank.

    Args:
        suite: a name of `measurement/suites.py`, such as "quick", "pairs" or "conccl".
        device: "cuda", or "cpu" for the same pairs with gloo and threads.
        world_size: number of ranks; None: all visible GPUs, or 2 on CPUs.
        mechanisms: such as "nccl+max_ctas=8"; None: those of the suite.
        rounds: trials of each kind per scenario, of which the first two are dropped.
        timeout_s: longest time without a finished scenario (one minute more before the first).
        progress: called with (scenarios done, number of scenarios, what runs now).

    Returns:
        A row for each pair, mechanism and launch order, and one for each building block; times in µs.

    Raises:
        Misconfigured: an option has a value that is not allowed here.
        Unsupported: no torch, fewer than two GPUs, what a rank found missing, or no mechanism that can run.
        PeerTimeout: ranks died or hung; names them, and their logs.
    """
    ranks = count_ranks(device, world_size)
    sheet = find_gpu(_gpus()[0]) if device == "cuda" else None
    num_sms = SMS if sheet is None else sheet.sm.num_sms
    parts = parts_of(suite, device=device, world_size=ranks, mechanisms=mechanisms, num_sms=num_sms)
    return measure_parts(
        suite, parts, device=device, world_size=ranks, rounds=rounds, timeout_s=timeout_s,
        progress=progress,
    )  # fmt: skip


def count_ranks(device: str, world_size: int | None, *, verb: str = "measure") -> int:
    """Return the number of ranks to start: `world_size`, or one per visible GPU, or 2 on CPUs.

    Raises:
        Misconfigured: this process is one of several ranks, or there are not so many ranks, or no such device.
        Unsupported: no torch, or fewer than two GPUs. `verb` is the command that the text names.
    """
    if "RANK" in os.environ:
        raise Misconfigured(
            f"RANK={os.environ['RANK']} is set, so this already is one of several ranks; {verb} starts its own: "
            "run it once, without torchrun (or unset RANK)"
        )
    _require_torch(verb)
    if device not in ("cuda", "cpu"):
        raise Misconfigured(f"device {device!r}; allowed: cuda, cpu")
    return _world_size(device, world_size, len(_gpus(verb)) if device == "cuda" else 0)


def measure_parts(
    suite: str,
    parts: Sequence[Scenario | Block],
    *,
    device: str,
    world_size: int,
    rounds: int,
    timeout_s: float,
    budget_s: float | None = None,
    progress: Progress | None = None,
) -> Measurement:
    """Return the measurement of scenarios and building blocks, which must have distinct names, in their order.

    Only `measure` and `tune` start ranks, both by this function, with a `world_size` from `count_ranks`. After
    `budget_s` seconds nothing more is measured, and missing parts have no rows; None: everything is measured.

    Raises:
        Misconfigured: `rounds` or `timeout_s` is not allowed.
        Unsupported: nothing can be measured here; errors of `launch` are passed on, too.
    """
    until_s = None if budget_s is None else time.monotonic() + budget_s
    if rounds < MIN_ROUNDS:
        raise Misconfigured(f"rounds {rounds}; at least {MIN_ROUNDS}: the first two are dropped, and three must remain")
    if not timeout_s > 0:
        raise Misconfigured(f"timeout {timeout_s:g} s; it must be more than 0")
    with run_folder("counterpoint-measure-") as folder:
        results = folder / "results.jsonl"
        results.touch()
        plan = Plan(
            suite=suite,
            device="cuda" if device == "cuda" else "cpu",
            world_size=world_size,
            parts=tuple(parts),
            rounds=rounds,
            timeout_s=min(timeout_s + 2 * STARTUP_S, MAX_WAIT_S),  # `launch` gives up first, and says who was where
            results=str(results),
            errors=str(folder / "errors"),
            until_s=until_s,
        )
        launch(plan, folder=folder, timeout_s=timeout_s, progress=progress)
        measured = _gather(plan, read_outcomes(results))
    if measured.unavailable and not (measured.rows or measured.blocks):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in measured.unavailable.items())
        raise Unsupported(f"nothing could be measured here: {reasons}")
    return measured


def _require_torch(verb: str) -> None:
    if importlib.util.find_spec("torch") is None:
        raise Unsupported(f"torch is not installed; {verb} needs it: pip install 'counterpoint[torch]'")


def _gpus(verb: str = "measure") -> tuple[str, ...]:
    try:
        gpus = visible_gpus()
        reason = f"{('no GPU', 'one GPU')[len(gpus)]} is visible" if len(gpus) < 2 else None
    except Unsupported as error:
        reason = f"no GPU can be used: {error}"
    if reason is not None:
        raise Unsupported(f"{reason}; {verb} needs at least 2, or to try it on CPUs: --device cpu")
    return gpus


def _world_size(device: str, asked: int | None, gpus: int) -> int:
    if asked is not None and asked < 2:
        raise Misconfigured(f"{asked} rank{'s' * (asked != 1)}; a collective needs at least 2")
    if device == "cpu":
        if asked is not None and asked > MAX_CPU_RANKS:
            raise Misconfigured(f"{asked} ranks; at most {MAX_CPU_RANKS} on the CPUs of one machine")
        return asked or 2
    if asked is not None and asked > gpus:
        raise Misconfigured(f"{asked} ranks for {gpus} visible GPUs; one GPU holds one rank: at most {gpus}")
    return asked or gpus


def _gather(plan: Plan, outcomes: Sequence[Outcome]) -> Measurement:
    """Merge the outcomes of all parts into one measurement, in the plan's order; raise if a part is missing."""
    environment = next((outcome.environment for outcome in reversed(outcomes) if outcome.environment), None)
    place = {part.name: index for index, part in enumerate(plan.parts)}
    missing = [name for name in place if name not in {outcome.scenario for outcome in outcomes}]
    if environment is None or (missing and plan.until_s is None):
        lost = f"scenario {missing[0]!r}" if missing else "its environment"
        raise CounterpointError(f"the ranks ended without having measured {lost}; report this as a bug of counterpoint")
    program = Path(sys.argv[0]).name
    command = ("counterpoint" if program == "__main__.py" else program, *sys.argv[1:])  # as a user types it
    ordered = sorted(outcomes, key=lambda outcome: place[outcome.scenario])
    return Measurement(
        suite=plan.suite,
        environment=msgspec.structs.replace(environment, command=command),
        rounds=plan.rounds,
        dropped_rounds=plan.dropped_rounds,
        rows=tuple(row for outcome in ordered for row in outcome.rows),
        unavailable=_unavailable(plan, ordered),
        unmeasured={
            each.scenario: next(iter(each.unavailable.values()))
            for each in ordered
            if each.unavailable and not (each.rows or each.blocks)
        },
        blocks=tuple(block for outcome in ordered for block in outcome.blocks),
    )


def _unavailable(plan: Plan, outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Return why each mechanism was not measured for some parts; several reasons each name their operations."""
    what = {part.name: part.collective if isinstance(part, Scenario) else part.what for part in plan.parts}
    found: dict[str, dict[str, list[str]]] = {}
    for outcome in outcomes:
        for name, reason in outcome.unavailable.items():
            found.setdefault(name, {}).setdefault(reason, []).append(what[outcome.scenario])
    return {
        name: next(iter(reasons))
        if len(reasons) == 1
        else "; ".join(f"{', '.join(dict.fromkeys(of))}: {reason}" for reason, of in reasons.items())
        for name, reasons in found.items()
    }


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
    """Start ranks that run all of `plan`; return when all have ended well. The plan's results file must exist, empty.

    Call it from a thread that lives until it returns: the kernel kills the ranks when that thread ends. `folder` gets
    plan.json and rank<N>.log with all that the ranks print. `startup_s` is added to `timeout_s`, the longest time
    without a finished scenario, before the first one. `module` is what `python -m` starts.

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
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, PARENT_VARIABLE: os.getpid(),
    }  # fmt: skip
    return {"OMP_NUM_THREADS": str(threads), **DEFAULTS, **os.environ, **{key: str(it) for key, it in place.items()}}


def read_outcomes(path: Path) -> tuple[Outcome, ...]:
    """Return the outcomes in the complete lines of a results file, in order; raise Misconfigured if it was deleted."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise Misconfigured(f"{path} was taken away while it was needed; start again") from None
    return tuple(msgspec.json.decode(line, type=Outcome) for line in text[: text.rfind(b"\n") + 1].splitlines())


class _Results:
    """Watches a plan's results file for growth, and reports how many parts of the plan are finished."""

    def __init__(self, plan: Plan, tell: Progress) -> None:
        self._plan, self._tell = plan, tell
        self._size: int | None = -1

    def size(self) -> int | None:
        """Report progress if the results file has grown; return its size, or None if the file was deleted."""
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
    """Make each hanging rank write its stack to its log and abort; return the error for the hang."""
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
    """Return the name of the part being measured, the first of the plan without a result; None after the last."""
    done = {outcome.scenario for outcome in read_outcomes(Path(plan.results))}
    return next((part.name for part in plan.parts if part.name not in done), None)


def _during(plan: Plan) -> str:
    return "after the last scenario" if (name := _next(plan)) is None else f"in scenario {name!r}"
