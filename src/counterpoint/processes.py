"""Start the processes of ranks, watch them, end them all, and report in one error why a rank failed. No torch.

`measurement/api.py` starts each rank itself, with torchrun's environment: torchrun's agent would import torch once more
(seconds), restart and rendezvous are not wanted, and only a rank's parent learns by which signal the rank
died. `tuning/script_launch.py` starts the launcher that a user names, whose processes are the ranks.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from counterpoint.errors import CounterpointError, Misconfigured, PeerTimeout, Unsupported, printable
from counterpoint.records import Record
from counterpoint.records.measurement import RankFailure

Progress = Callable[[int, int, str], None]  # parts done, parts in all, what runs now
Processes = Sequence[subprocess.Popen[bytes]]

PARENT_VARIABLE = "COUNTERPOINT_PARENT_PID"  # tells a rank who started it; not set under torchrun
DEFAULTS = {  # environment of every rank, unless the user has set a variable
    "NCCL_NVLS_ENABLE": "0",  # NVLink multicast stays off
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
POLL_S = 0.05
SETTLE_S = 1.0  # how long the other ranks may report after the first one has failed
REAP_S = 30.0  # a driver may take seconds to free a GPU's memory
LOG_TAIL_BYTES = 64 << 10
_PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h

# NoEffect is raised again as its base class: a `RankFailure` has its whole text, but not its fields
OURS = {"Misconfigured": Misconfigured, "Unsupported": Unsupported, "NoEffect": Unsupported}
SILENT = "did not answer (stopped, or in a driver call)"
REPEATED = "PeerFailed"  # raised by a rank that repeats what another one told it
_LOST = re.compile(r"[Cc]onnection (closed|reset)")  # by a peer, as gloo says
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')  # as faulthandler writes it
_LAUNCHER = re.compile("/counterpoint/(rehearsal/|tuning/script)")  # our launchers, at the root of every stack


@contextmanager
def run_folder(prefix: str) -> Iterator[Path]:
    """Make a folder for tasks, logs and errors of the ranks; keep it only after a PeerTimeout, which names the logs."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    except PeerTimeout:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port of this host on which rank 0 may listen, and which no other program gets in the `with` block."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@contextmanager
def started(
    command: Sequence[str], logs: Iterable[Path], environments: Iterable[Mapping[str, str]]
) -> Iterator[Processes]:
    """Yield processes that run `command`, one for each log and environment; kill them and their children at the end.

    Each process has a session of its own: Ctrl-C reaches the parent alone, which then kills all of them. Raises OSError
    if the program does not exist.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for path, environment in zip(logs, environments, strict=True):
            with path.open("wb") as log:
                process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            processes.append(process)
        yield processes
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the process is not reaped yet, so no other process has its pid
        for process in processes:
            with suppress(subprocess.TimeoutExpired):  # it is stuck in the kernel, and dies when it leaves that
                process.wait(timeout=REAP_S)


def watch(
    processes: Processes,
    *,
    progress: Callable[[], object],
    timeout_s: float,
    startup_s: float,
    died: Callable[[], CounterpointError],
    hung: Callable[[], CounterpointError],
) -> None:
    """Wait until all processes have exited with code 0; raise an error if one fails or no progress comes in time.

    `progress` is called again and again, and returns another value after progress. After `timeout_s` seconds without
    progress (`startup_s` more before the first) the error that `hung` returns is raised, while the processes still run;
    once a process has exited with another code, and the others had a second to end, the error that `died` returns.
    """
    seen, last = progress(), time.monotonic() + startup_s
    while True:
        codes = [exit_code(process) for process in processes]  # read before the progress: after an exit there is none
        if (now := progress()) != seen:
            seen, last = now, time.monotonic()
        if any(codes):
            wait_for_all(processes, SETTLE_S)
            raise died()
        if all(code == 0 for code in codes):
            return
        if time.monotonic() - last > timeout_s:
            raise hung()
        time.sleep(POLL_S)


def exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Return a process's exit code, None if it runs, without reaping it, so that its pid stays reserved."""
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def wait_for_all(processes: Processes, seconds: float) -> None:
    """Wait until all processes have ended, or for at most `seconds`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(exit_code(process) is None for process in processes):
        time.sleep(POLL_S)


def abort(pids: Iterable[int]) -> None:
    """Send SIGABRT to processes, so that faulthandler writes their stacks, and suppress core dumps."""
    for pid in pids:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
            os.kill(pid, signal.SIGABRT)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies; call it first, before torch is imported."""
    # the kernel does it, so it works in the middle of a collective, and when the parent got SIGKILL
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is not None and os.getppid() != int(parent):  # it died before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def write_whole(path: Path, record: Record) -> None:
    """Write a record as JSON to a new file, then rename it, so that a reader finds the whole file or none."""
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(record))
    part.replace(path)


def failure_file(errors: Path, rank: int) -> Path:
    """Return the path of the file to which a rank writes why it failed, as a `RankFailure`."""
    return errors / f"rank{rank}.json"


@contextmanager
def leaving_word(errors: Path, rank: int, at: Callable[[], str | None]) -> Iterator[None]:
    """If the `with` block raises, write the error, with the scenario that `at` names, to a file; exit with code 1."""
    try:
        yield
    except Exception as error:
        if not isinstance(error.__cause__, SystemExit):  # Python prints no traceback of a SystemExit either
            traceback.print_exc()  # into the log
        text = " ".join(str(error).split())[:1000]
        failure = RankFailure(rank=rank, kind=type(error).__name__, text=text, scenario=at())
        write_whole(failure_file(errors, rank), failure)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a communicator that lost a peer would hold up a normal exit


def read_failure(errors: Path, rank: int) -> RankFailure | None:
    """Return why a rank failed; None if it wrote no reason, or was killed while it wrote."""
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(failure_file(errors, rank).read_bytes(), type=RankFailure)
    return None


def tail(log: Path) -> str:
    """Return the last 64 KiB of a log as text; "" if there is no such file."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remains:
    """Holds a rank's exit code (negative: a signal; None: the rank still runs), failure and end of log."""

    rank: int
    code: int | None
    failure: RankFailure | None = None
    log: str = ""

    @property
    def follows(self) -> bool:
        """Return whether the rank failed only as a consequence: it lost another rank, or repeats that rank's error."""
        failed = self.failure
        return failed is not None and (failed.kind == REPEATED or _LOST.search(failed.text) is not None)


def died(ranks: Sequence[Remains], *, during: str, logs: str, log: str | None = None) -> CounterpointError:
    """Return the error to raise when ranks have failed: the cause, not other ranks' failures that follow from it.

    One of our own exceptions comes first, then a signal, then other exceptions, then a rank that left only its log. A
    rank that lost its connection to another rank, or repeats that rank's error, comes after that rank. `logs` is the
    folder of the logs, `log` the name of one log of all ranks; None: each rank has its own.
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


def hung(ranks: Sequence[Remains], *, reason: str, logs: str) -> PeerTimeout:
    """Return the error to raise when ranks made no progress in time; its message says where up to four ranks are.

    Ranks that did not answer come first, as the likely cause. The logs end with the stacks of `abort`.
    """
    first = sorted(ranks, key=lambda r: _where(r) != SILENT)
    stuck = "; ".join(f"rank {r.rank} {_where(r)}" for r in first[:4]) + ("; …" if len(ranks) > 4 else "")
    at = f": {stuck}" if ranks else ""
    return PeerTimeout(f"{reason}{at}; raise --timeout if it was only slow; logs: {logs}", ranks=_ranks(ranks))


def _alike(told: Sequence[Remains], failure: RankFailure) -> list[Remains]:
    return [r for r in told if r.failure and (r.failure.kind, r.failure.text) == (failure.kind, failure.text)]


def _at(failure: RankFailure, during: str) -> str:
    return f"in scenario {failure.scenario!r}" if failure.scenario else during


def _where(rank: Remains) -> str:
    """Return in words where a rank's main thread is: the innermost stack frame in counterpoint, or in any file."""
    if rank.code is not None and rank.code >= 0:
        return "had ended"
    threads = rank.log.rpartition("Fatal Python error")[2]  # the main thread, which gets the signal, comes last
    frames = [match.groupdict() for match in _FRAME.finditer(threads.rpartition("Current thread")[2])]
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
