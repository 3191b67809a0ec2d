"""Define `counterpoint.measure`, which runs in the parent process of the ranks and imports no torch."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import msgspec

from counterpoint.errors import CounterpointError, Misconfigured, PeerTimeout, Unsupported
from counterpoint.machine.driver import visible_gpus
from counterpoint.measurement.launch import STARTUP_S, VARIABLES, Progress, launch
from counterpoint.measurement.resume import finished, resumable
from counterpoint.measurement.suites import blocks_of, scenarios_of
from counterpoint.records.measurement import Measurement, Outcome, Plan, Scenario
from counterpoint.version import VERSION

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
    partial: Path | None = None,
    fresh: bool = False,
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
        partial: finished scenarios are kept in this file and not measured again; the caller removes it.
        fresh: throw away what `partial` holds.
        progress: called as (scenarios done, in all, what runs now).

    Returns:
        A row for each pair, mechanism and launch order, and one for each building block; times in µs.

    Raises:
        Misconfigured: an option has a value that is not allowed here, or `partial` is of another run.
        Unsupported: no torch, fewer than two GPUs, what a rank found missing, or no mechanism that can run.
        PeerTimeout: ranks died or hung; names them, and their logs.
    """
    if "RANK" in os.environ:
        raise Misconfigured(
            f"RANK={os.environ['RANK']} is set, so this already is one of several ranks; measure starts its own: "
            "run it once, without torchrun (or unset RANK)"
        )
    torch = _torch_version()
    if device not in ("cuda", "cpu"):
        raise Misconfigured(f"device {device!r}; allowed: cuda, cpu")
    gpus = _gpus() if device == "cuda" else ()
    ranks = _world_size(device, world_size, len(gpus))
    if rounds < MIN_ROUNDS:
        raise Misconfigured(f"rounds {rounds}; at least {MIN_ROUNDS}: the first two are dropped, and three must remain")
    if not timeout_s > 0:
        raise Misconfigured(f"timeout {timeout_s:g} s; it must be more than 0")
    with run_folder() as folder:
        results = partial or folder / "results.jsonl"
        plan = Plan(
            suite=suite,
            device="cuda" if device == "cuda" else "cpu",
            world_size=ranks,
            scenarios=scenarios_of(suite, device=device, mechanisms=mechanisms),
            blocks=blocks_of(suite, device=device, world_size=ranks, mechanisms=mechanisms),
            rounds=rounds,
            timeout_s=min(timeout_s + 2 * STARTUP_S, MAX_WAIT_S),  # `launch` gives up first, and says who was where
            results=str(results.absolute()),
            errors=str(folder / "errors"),
        )
        names = {part.name for part in plan.parts}
        with resumable(results, _identity(plan, gpus, torch), fresh=fresh, names=names):
            if len(finished(results)) < len(names):
                launch(plan, folder=folder, timeout_s=timeout_s, progress=progress)
            measured = _gather(plan, finished(results))
            if measured.unavailable and not (measured.rows or measured.blocks):
                results.unlink()  # nothing to go on with, once the reasons are gone
                reasons = "; ".join(f"{name}: {reason}" for name, reason in measured.unavailable.items())
                raise Unsupported(f"nothing could be measured here: {reasons}")
            return measured


def _torch_version() -> str:
    if importlib.util.find_spec("torch") is None:
        raise Unsupported("torch is not installed; measure needs it: pip install 'counterpoint[torch]'")
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:  # built from source, on the path
        return "unknown"


def _gpus() -> tuple[str, ...]:
    try:
        gpus = visible_gpus()
        reason = f"{('no GPU', 'one GPU')[len(gpus)]} is visible" if len(gpus) < 2 else None
    except Unsupported as error:
        reason = f"no GPU can be used: {error}"
    if reason is not None:
        raise Unsupported(f"{reason}; measure needs at least 2, or to try it on CPUs: --device cpu")
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


def _identity(plan: Plan, gpus: Sequence[str], torch: str) -> dict[str, str]:
    """Return what must be equal in two runs before their results are mixed, as texts for error messages."""
    return {
        "suite": plan.suite,
        "device": plan.device,
        "world_size": str(plan.world_size),
        "rounds": str(plan.rounds),
        "mechanisms": ", ".join(dict.fromkeys(name for scenario in plan.scenarios for name in scenario.mechanisms)),
        "scenarios": hashlib.sha256(msgspec.json.encode((plan.scenarios, plan.blocks))).hexdigest()[:12],
        "gpu": ", ".join(dict.fromkeys(gpus)) or "none",
        "variables": " ".join(f"{key}={it}" for key, it in sorted(os.environ.items()) if key.startswith(VARIABLES)),
        "torch": torch,
        "counterpoint": VERSION,
    }


def _gather(plan: Plan, outcomes: Sequence[Outcome]) -> Measurement:
    """Return all outcomes as one measurement, in the plan's order."""
    environment = next((outcome.environment for outcome in reversed(outcomes) if outcome.environment), None)
    place = {part.name: index for index, part in enumerate(plan.parts)}
    missing = [name for name in place if name not in {outcome.scenario for outcome in outcomes}]
    if environment is None or missing:
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
        blocks=tuple(block for outcome in ordered for block in outcome.blocks),
    )


def _unavailable(plan: Plan, outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Return why each mechanism was not measured, or not everywhere; several reasons each name their operations."""
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


@contextmanager
def run_folder(prefix: str = "counterpoint-measure-") -> Iterator[Path]:
    """Make a folder for plan, logs and errors of one run; it is kept after a PeerTimeout, whose text names the logs."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    except PeerTimeout:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
