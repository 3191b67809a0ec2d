"""Start a script under a launcher, watch its ranks, and report in one error why it ended. No torch."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from counterpoint.errors import CounterpointError, Misconfigured, PeerTimeout, printable
from counterpoint.measurement.launch import DEFAULTS, LOG_TAIL_BYTES, POLL_S, REAP_S, SETTLE_S, Remains, died, stuck_at
from counterpoint.records.measurement import RankFailure
from counterpoint.tuning.script.command import SCRIPT, RunCommand
from counterpoint.tuning.script.task import (
    TASK_VARIABLE,
    ScriptResult,
    ScriptTask,
    alive_file,
    process_file,
    result_file,
    stack_file,
    task_file,
    write_whole,
)

TIMEOUT_S = 120.0
FIRST_STEP_S = 300.0  # more before the first step: a model is made, and compiled
LOG = "script.log"
_TORCHRUN = re.compile(r"^\s*rank\s*:\s*(\d+) .*\n\s*exitcode\s*:\s*(-?\d+) ", re.MULTILINE)  # its last words


def launch_script(
    command: RunCommand, task: ScriptTask, *, variables: Mapping[str, str], timeout_s: float = TIMEOUT_S
) -> ScriptResult:
    """Run the script until the task is done.

    Args:
        command: that starts the script.
        task: whose folder exists; it gets the log.
        variables: of the environment, beside those of this process and of the command.
        timeout_s: longest time without a finished step; the first one has five minutes more.

    Returns:
        What rank 0 wrote.

    Raises:
        Misconfigured: the program of the command is not there, or the script ended too early.
        PeerTimeout: ranks died, raised something or stopped making progress; names them and the log.
    """
    folder = Path(task.folder)
    write_whole(task_file(folder), task)
    run_ranks(
        command,
        SCRIPT,
        folder=folder,
        variables={**variables, TASK_VARIABLE: str(task_file(folder))},
        timeout_s=timeout_s,
        progress=lambda: modified(alive_file(folder)),
        hung="no step of the script's optimizer ended",
    )
    try:
        return msgspec.json.decode(result_file(folder).read_bytes(), type=ScriptResult)
    except (OSError, msgspec.DecodeError):
        raise PeerTimeout(
            f"the script ended without a step of an optimizer of torch in its first process; log: {folder / LOG}"
        ) from None


def run_ranks(
    command: RunCommand,
    program: str,
    *,
    folder: Path,
    variables: Mapping[str, str],
    timeout_s: float,
    progress: Callable[[], object],
    hung: str,
) -> None:
    """Run a script to its end, on each rank by a program of ours, which leaves its words in a folder (`task.py`).

    Args:
        command: that starts the script.
        program: module that `python -m` starts on each rank.
        folder: gets the log, and what the ranks leave.
        variables: of the environment, beside those of this process and of the command.
        timeout_s: longest time without progress; up to the first progress there are five minutes more.
        progress: called again and again; returns something else after progress.
        hung: says what has not happened for `timeout_s`.

    Raises:
        Misconfigured: the program of the command is not there.
        PeerTimeout: ranks died, raised something or stopped making progress; names them and the log.
    """
    if not timeout_s > 0:
        raise Misconfigured(f"timeout {timeout_s:g} s; it must be more than 0")
    beside = {**DEFAULTS, **os.environ, **command.variables, **variables}
    beside["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), beside.get("PATH", os.defpath)])  # as this one
    with (folder / LOG).open("wb") as log:
        try:
            process = subprocess.Popen(
                command.arguments(program),
                env=beside,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            given = printable(command.launcher[0])
            raise Misconfigured(f"{command.given_as}: {given} cannot be started: {error.strerror or error}") from None
    try:
        _watch(process, folder, timeout_s, progress, hung)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=REAP_S)


def _watch(
    process: subprocess.Popen[bytes], folder: Path, timeout_s: float, progress: Callable[[], object], hung: str
) -> None:
    """Return when the script has ended well; raise if it ends otherwise, or if there is no progress in time."""
    last, seen = time.monotonic() + FIRST_STEP_S, progress()
    while True:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # its group's number stays
        now = progress()
        if ended is not None:
            if (ended.si_code, ended.si_status) == (os.CLD_EXITED, 0):
                return
            raise _died(folder, ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
        if now != seen:
            seen, last = now, time.monotonic()
        if time.monotonic() - last > timeout_s:
            raise _hung(folder, f"{hung} for {timeout_s:g} s")
        time.sleep(POLL_S)


def _hung(folder: Path, reason: str) -> PeerTimeout:
    """Return the error for a hang, after each rank has written its stack, as faulthandler does at SIGABRT."""
    ranks = {int(path.name): int(path.read_text()) for path in process_file(folder, 0).parent.glob("[0-9]*")}
    for pid in ranks.values():
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
            os.kill(pid, signal.SIGABRT)
    time.sleep(SETTLE_S * bool(ranks))
    remains = [Remains(rank=rank, code=None, log=_stacks(folder, rank)) for rank in sorted(ranks)]
    at = f": {stuck_at(remains)}" if remains else ""
    return PeerTimeout(f"{reason}{at}; log: {folder / LOG}", ranks=tuple(ranks))


def _stacks(folder: Path, rank: int) -> str:
    """Return what faulthandler has written when a rank was killed by a signal; empty if it was not."""
    try:
        return stack_file(folder, rank).read_text(errors="replace")
    except FileNotFoundError:
        return ""


def modified(path: Path) -> int:
    """Return when a file was last changed, in ns; 0 where there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _died(folder: Path, code: int) -> CounterpointError:
    """Return why the script has ended with this exit code, by what its ranks and torchrun have left."""
    with (folder / LOG).open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        text = log.read().decode(errors="replace")
    failures = dict(filter(None, map(_failure, (folder / "errors").glob("rank*.json"))))
    root = _statuses(text.rpartition("Root Cause")[2]) or {0: code}
    found = {rank: status for rank, status in _statuses(text).items() if status != -signal.SIGTERM} | root
    at = next((failure.scenario for failure in failures.values() if failure.scenario), None)
    during = f"in {at} of the script" if at else "in the script"
    remains = [
        Remains(
            rank=rank,
            code=found.get(rank, code),
            failure=_without_step(failures.get(rank)),
            log=_stacks(folder, rank) or text,
        )
        for rank in sorted(found.keys() | failures.keys())
    ]
    if not any(rank.follows for rank in remains if rank.rank in root):  # else torchrun has seen two end at a time
        remains = [rank for rank in remains if rank.rank in root or rank.failure]
    return died(remains, during=during, logs=str(folder), log=LOG)


def _statuses(text: str) -> dict[int, int]:
    """Return the exit codes of ranks in words of torchrun."""
    return {int(rank): int(status) for rank, status in _TORCHRUN.findall(text)}


def _without_step(failure: RankFailure | None) -> RankFailure | None:
    return None if failure is None else msgspec.structs.replace(failure, scenario=None)


def _failure(path: Path) -> tuple[int, RankFailure] | None:
    with suppress(OSError, msgspec.DecodeError):
        failure = msgspec.json.decode(path.read_bytes(), type=RankFailure)
        return failure.rank, failure
    return None
