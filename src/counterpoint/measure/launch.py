"""Start one process per rank on this machine, watch them, and leave none behind.

The ranks get torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), so that
`torchrun --nproc-per-node 8 -m counterpoint.measure.worker plan.json` starts the same program. torchrun's agent itself
is not used on one machine: it would import torch once more (seconds), restart and rendezvous are not wanted, and the
parent of a rank is the only one who learns by which signal it died.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from counterpoint.errors import CounterpointError
from counterpoint.measure.failures import Remains, died, hung
from counterpoint.measure.orphans import PARENT_VARIABLE
from counterpoint.measure.partial import finished
from counterpoint.records import Failure, Plan

__all__ = ["STARTUP_S", "VARIABLES", "Tell", "launch"]

Tell = Callable[[int, int, str], None]  # scenarios done, scenarios in all, what runs now

WORKER = "counterpoint.measure.worker"
STARTUP_S = 60.0  # torch's import, CUDA's and NCCL's start, on top of the timeout
POLL_S = 0.05
SETTLE_S = 1.0  # after the first rank has ended badly, the others may say what they saw
REAP_S = 30.0  # a driver may take seconds to free a GPU's memory
LOG_TAIL_BYTES = 64 << 10

VARIABLES = ("NCCL_", "CUDA_", "TORCH_", "NVSHMEM_", "PYTORCH_", "OMP_")  # beginnings of those that change results
DEFAULTS = {  # of every rank; what the user has set wins
    "NCCL_NVLS_ENABLE": "0",  # NVLink multicast stays off
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


def launch(
    plan: Plan,
    *,
    folder: Path,
    timeout_s: float,
    startup_s: float = STARTUP_S,
    progress: Tell | None = None,
    module: str = WORKER,
) -> None:
    """Run every scenario of `plan` that `plan.results` does not hold yet; returns when all ranks have ended well.

    Call it from a thread that lives until it returns: the kernel kills the ranks when that thread ends.

    Args:
        plan: what to measure; its `errors` folder is made if it is missing.
        folder: gets plan.json and rank<N>.log with all that the ranks print.
        timeout_s: longest time without a finished scenario.
        startup_s: added to it before the first one.
        progress: called as (scenarios done, in all, what runs now).
        module: what `python -m` starts; it takes the path of plan.json.

    Raises:
        Misconfigured, Unsupported: a rank raised it; the text is the rank's.
        PeerTimeout: ranks died, raised something else or stopped making progress; names them and their logs.
    """
    plan_file = folder / "plan.json"
    plan_file.write_bytes(msgspec.json.encode(plan))
    Path(plan.errors).mkdir(exist_ok=True)
    with _started(plan, plan_file, module) as processes:
        _watch(processes, plan, folder, timeout_s, startup_s, progress or (lambda done, total, what: None))


@contextmanager
def _started(plan: Plan, plan_file: Path, module: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One process per rank, each in a session of its own: Ctrl-C reaches the parent alone, which then kills all."""
    command = [sys.executable, "-P", "-X", "faulthandler", "-m", module, str(plan_file)]
    processes: list[subprocess.Popen[bytes]] = []
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # reserved, yet rank 0 may listen on it
        held.bind(("127.0.0.1", 0))
        try:
            for rank in range(plan.world_size):
                with (plan_file.parent / f"rank{rank}.log").open("wb") as log:
                    variables = _environment(rank, plan.world_size, held.getsockname()[1])
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
    tell: Tell,
) -> None:
    """Return when all have ended with 0; raise as soon as one has not, or when results stop coming."""
    size: int | None = -1
    deadline = time.monotonic() + startup_s + timeout_s
    while True:
        codes = [_exit_code(process) for process in processes]  # before the results: none can come after
        if (now := _size(Path(plan.results))) != size:
            deadline = max(deadline if size == -1 else 0.0, time.monotonic() + timeout_s)
            size = now
            tell(len(finished(Path(plan.results))), len(plan.parts), _next(plan) or "")
        if any(codes):
            raise _why(processes, plan, folder)
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            raise _stuck(processes, plan, folder, timeout_s)
        time.sleep(POLL_S)


def _size(results: Path) -> int | None:
    """None if somebody took the file away, which `finished` then says."""
    try:
        return results.stat().st_size
    except FileNotFoundError:
        return None


def _why(processes: Sequence[subprocess.Popen[bytes]], plan: Plan, folder: Path) -> CounterpointError:
    _wait_for_all(processes, SETTLE_S)
    remains = [_remains(rank, process, plan, folder) for rank, process in enumerate(processes)]
    return died(remains, during=_during(plan), logs=str(folder))


def _stuck(
    processes: Sequence[subprocess.Popen[bytes]], plan: Plan, folder: Path, timeout_s: float
) -> CounterpointError:
    """Make every rank write its stack, by the signal that faulthandler answers even inside a C call."""
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
    """As `Popen.poll`, but the process stays a zombie: its number cannot go to another before its group is killed."""
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _remains(rank: int, process: subprocess.Popen[bytes], plan: Plan, folder: Path) -> Remains:
    failure = None
    with suppress(OSError, msgspec.DecodeError):  # none, or cut short by a kill: the exit status and log remain
        failure = msgspec.json.decode((Path(plan.errors) / f"rank{rank}.json").read_bytes(), type=Failure)
    with (folder / f"rank{rank}.log").open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        text = log.read().decode(errors="replace")
    return Remains(rank=rank, code=_exit_code(process), failure=failure, log=text)


def _next(plan: Plan) -> str | None:
    """What is being measured: the ranks take scenarios, then blocks, in the plan's order."""
    done = {outcome.scenario for outcome in finished(Path(plan.results))}
    return next((part.name for part in plan.parts if part.name not in done), None)


def _during(plan: Plan) -> str:
    return "after the last scenario" if (name := _next(plan)) is None else f"in scenario {name!r}"
