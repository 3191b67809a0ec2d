"""Start one process per rank on this machine, watch them, leave none behind, and report in one error why a rank ended.

The ranks get torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), so that `torchrun
--nproc-per-node 8 -m counterpoint.measurement.worker plan.json` starts the same program. torchrun's agent itself
is not used on one machine: it would import torch once more (seconds), restart and rendezvous are not wanted, and the
parent of a rank is the only one who learns by which signal it died.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from counterpoint.errors import CounterpointError, Misconfigured, PeerTimeout, Unsupported, printable
from counterpoint.records.measurement import Outcome, Plan, RankFailure

Progress = Callable[[int, int, str], None]  # scenarios done, scenarios in all, what runs now

PARENT_VARIABLE = "COUNTERPOINT_PARENT_PID"  # tells a rank who started it; not set under torchrun
WORKER = "counterpoint.measurement.worker"
STARTUP_S = 60.0  # torch's import, CUDA's and NCCL's start, on top of the timeout
POLL_S = 0.05
SETTLE_S = 1.0  # how long the other ranks may report after the first one has failed
REAP_S = 30.0  # a driver may take seconds to free a GPU's memory
LOG_TAIL_BYTES = 64 << 10

VARIABLES = ("NCCL_", "CUDA_", "TORCH_", "NVSHMEM_", "PYTORCH_", "OMP_")  # prefixes of variables that change results
DEFAULTS = {  # of every rank; what the user has set wins
    "NCCL_NVLS_ENABLE": "0",  # NVLink multicast stays off
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
# NoEffect is raised again as its base class: a `RankFailure` has its whole text, but not its fields
OURS = {"Misconfigured": Misconfigured, "Unsupported": Unsupported, "NoEffect": Unsupported}
SILENT = "did not answer (stopped, or in a driver call)"
_LOST = re.compile(r"[Cc]onnection (closed|reset)")  # by a peer, as gloo says
REPEATED = "PeerFailed"  # raised by a rank that repeats what another one told it
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')  # as faulthandler writes it
_LAUNCHER = re.compile("/counterpoint/(rehearsal|tuning/script)/")  # at the root of every stack of a script


def launch(
    plan: Plan,
    *,
    folder: Path,
    timeout_s: float,
    startup_s: float = STARTUP_S,
    progress: Progress | None = None,
    module: str = WORKER,
) -> None:
    """Run every scenario of `plan`, whose file of results is there and empty; return when all ranks have ended well.

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
    with _started(plan, plan_file, module) as processes:
        _watch(processes, plan, folder, timeout_s, startup_s, progress or (lambda done, total, what: None))


def read_outcomes(path: Path) -> tuple[Outcome, ...]:
    """Return the outcomes whose lines are whole, in the order measured; raise Misconfigured if the file is gone."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise Misconfigured(f"{path} was taken away while it was needed; start again") from None
    return tuple(msgspec.json.decode(line, type=Outcome) for line in text[: text.rfind(b"\n") + 1].splitlines())


@contextmanager
def _started(plan: Plan, plan_file: Path, module: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start each rank in a session of its own: Ctrl-C reaches the parent alone, which then kills all."""
    command = [sys.executable, "-P", "-X", "faulthandler", "-m", module, str(plan_file)]
    processes: list[subprocess.Popen[bytes]] = []
    with reserved_port() as port:
        try:
            for rank in range(plan.world_size):
                with (plan_file.parent / f"rank{rank}.log").open("wb") as log:
                    variables = _environment(rank, plan.world_size, port)
                    process = subprocess.Popen(
                        command,
                        env=variables,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                processes.append(process)
            yield processes
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so its number is still its own
            for process in processes:
                with suppress(subprocess.TimeoutExpired):  # stuck in the kernel, where it dies when that lets go
                    process.wait(timeout=REAP_S)


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port of this host that no other program gets while the block runs, yet rank 0 may listen on it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


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


def _watch(
    processes: Sequence[subprocess.Popen[bytes]],
    plan: Plan,
    folder: Path,
    timeout_s: float,
    startup_s: float,
    tell: Progress,
) -> None:
    """Return when all ranks have exited with 0; raise once one exits otherwise, or if no new result comes in time."""
    size: int | None = -1
    deadline = time.monotonic() + startup_s + timeout_s
    while True:
        codes = [_exit_code(process) for process in processes]  # before the results: none can come after
        if (now := _size(Path(plan.results))) != size:
            deadline = max(deadline if size == -1 else 0.0, time.monotonic() + timeout_s)
            size = now
            tell(len(read_outcomes(Path(plan.results))), len(plan.parts), _next(plan) or "")
        if any(codes):
            _wait_for_all(processes, SETTLE_S)
            remains = [_remains(rank, process, plan, folder) for rank, process in enumerate(processes)]
            raise died(remains, during=_during(plan), logs=str(folder))
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            raise _hang(processes, plan, folder, timeout_s)
        time.sleep(POLL_S)


def _size(results: Path) -> int | None:
    """Return the size of the results file; None if it was deleted, which `read_outcomes` then reports."""
    try:
        return results.stat().st_size
    except FileNotFoundError:
        return None


def _hang(
    processes: Sequence[subprocess.Popen[bytes]], plan: Plan, folder: Path, timeout_s: float
) -> CounterpointError:
    """Return the error for a hang, after each rank has logged its stack, as faulthandler does at SIGABRT."""
    for process in processes:
        if _exit_code(process) is None:
            resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
            os.kill(process.pid, signal.SIGABRT)
    _wait_for_all(processes, SETTLE_S)
    remains = [_remains(rank, process, plan, folder) for rank, process in enumerate(processes)]
    return hung(remains, during=_during(plan), logs=str(folder), timeout_s=timeout_s)


def _wait_for_all(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(_exit_code(process) is None for process in processes):
        time.sleep(POLL_S)


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Return what `Popen.poll` would, but do not reap the process: its pid stays reserved until its group is killed."""
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _remains(rank: int, process: subprocess.Popen[bytes], plan: Plan, folder: Path) -> Remains:
    failure = None
    with suppress(OSError, msgspec.DecodeError):  # none, or cut short by a kill: the exit status and log remain
        failure = msgspec.json.decode((Path(plan.errors) / f"rank{rank}.json").read_bytes(), type=RankFailure)
    with (folder / f"rank{rank}.log").open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        text = log.read().decode(errors="replace")
    return Remains(rank=rank, code=_exit_code(process), failure=failure, log=text)


def _next(plan: Plan) -> str | None:
    """Return the name of the part being measured, the first of the plan without a result; None after the last one."""
    done = {outcome.scenario for outcome in read_outcomes(Path(plan.results))}
    return next((part.name for part in plan.parts if part.name not in done), None)


def _during(plan: Plan) -> str:
    return "after the last scenario" if (name := _next(plan)) is None else f"in scenario {name!r}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Remains:
    """Holds what a rank left: exit status (negative: a signal; None: it runs), its failure, the end of its log."""

    rank: int
    code: int | None
    failure: RankFailure | None = None
    log: str = ""

    @property
    def follows(self) -> bool:
        """Return whether the rank failed because it lost another one, or repeats what that one told it."""
        failed = self.failure
        return failed is not None and (failed.kind == REPEATED or _LOST.search(failed.text) is not None)


def died(ranks: Sequence[Remains], *, during: str, logs: str, log: str | None = None) -> CounterpointError:
    """Return the error to raise when a rank has ended badly: the cause, not what followed on other ranks.

    One of our own exceptions comes first, then a signal, then other exceptions, then a rank that left only its log. A
    rank that lost its connection to another one, or repeats what that told it, comes after that one. `logs` is the
    folder of the logs, `log` the name of that of all ranks; None: each has its own.
    """
    said = [r for r in ranks if r.failure is not None]
    told = sorted(said, key=lambda r: r.follows)
    killed = [r for r in ranks if r.code is not None and r.code < 0]
    ours = next((r.failure for r in told if r.failure and r.failure.kind in OURS), None)
    if ours is not None:
        same = _alike(told, ours)
        return OURS[ours.kind](f"{printable(ours.text, 600)} ({_names(same)} {_at(ours, during)})")
    if killed:
        same = [r for r in killed if r.code == killed[0].code]
        reason = f"{_names(same)} {'was' if len(same) == 1 else 'were'} killed by {_signal(same[0])} {during}"
        at = _where(same[0])
        reason += f", rank {same[0].rank} {at}" if at != SILENT else ""
    elif told and (failure := told[0].failure) is not None:
        same = _alike(told, failure)
        reason = f"{_names(same)} failed {_at(failure, during)}: {failure.kind}: {printable(failure.text, 160)}"
    else:
        same = [r for r in ranks if r.code][:1]
        last = next((line for line in reversed(same[0].log.splitlines()) if line.strip()), "it left no word")
        reason = f"{_names(same)} exited with {same[0].code} {during}: {printable(last.strip(), 160)}"
    return PeerTimeout(f"{reason}; log: {logs}/{log or f'rank{same[0].rank}.log'}", ranks=_ranks(same))


def _alike(told: Sequence[Remains], failure: RankFailure) -> list[Remains]:
    return [r for r in told if r.failure and (r.failure.kind, r.failure.text) == (failure.kind, failure.text)]


def _at(failure: RankFailure, during: str) -> str:
    return f"in scenario {failure.scenario!r}" if failure.scenario else during


def hung(ranks: Sequence[Remains], *, during: str, logs: str, timeout_s: float) -> PeerTimeout:
    """Return the error to raise when no result has come for `timeout_s`; the logs end with faulthandler's stacks."""
    reason = f"no progress for {timeout_s:g} s {during}: {stuck_at(ranks)}"
    return PeerTimeout(f"{reason}; raise --timeout if it was only slow; logs: {logs}", ranks=_ranks(ranks))


def stuck_at(ranks: Sequence[Remains]) -> str:
    """Return in words where up to four ranks stand, those first that did not answer: the likely cause."""
    first = sorted(ranks, key=lambda r: _where(r) != SILENT)
    return "; ".join(f"rank {r.rank} {_where(r)}" for r in first[:4]) + ("; …" if len(ranks) > 4 else "")


def _where(rank: Remains) -> str:
    """Return in words the innermost stack frame of the rank's main thread in counterpoint, or else at all."""
    if rank.code is not None and rank.code >= 0:
        return "had ended"
    threads = rank.log.rpartition("Fatal Python error")[2]  # the main one, which gets the signal, comes last
    frames = [match.groupdict() for match in FRAME.finditer(threads.rpartition("Current thread")[2])]
    if not frames:
        return SILENT
    frame = next((f for f in frames if "/counterpoint/" in f["file"] and not _LAUNCHER.search(f["file"])), frames[0])
    return f"was in {frame['function']} ({frame['file'].rpartition('/')[2]}:{frame['line']})"


def _signal(rank: Remains) -> str:
    number = -(rank.code or 0)
    if number == signal.SIGKILL:
        return "SIGKILL (by someone, or by the kernel for want of memory)"
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _names(ranks: Sequence[Remains]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(str(r.rank) for r in ranks)}"


def _ranks(ranks: Sequence[Remains]) -> tuple[int, ...]:
    return tuple(r.rank for r in ranks)
