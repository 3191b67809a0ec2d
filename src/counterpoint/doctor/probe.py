"""Ask a driver, which may crash or hang, in a child process with a time limit.

The child runs this module with the name of a probe: it prints one reading as JSON, or fails with the reason.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from counterpoint.doctor.read_gpus import measure_bandwidth, read_cuda, read_nvml
from counterpoint.doctor.system import read_nccl, read_torch_runtime
from counterpoint.errors import printable
from counterpoint.machine.driver import ProbeFailed, ProbeUnavailable
from counterpoint.records import Record

PROBES: dict[str, Callable[[], Record]] = {
    "nvml": read_nvml,
    "cuda": read_cuda,
    "nccl": read_nccl,
    "torch": read_torch_runtime,
    "bandwidth": measure_bandwidth,
}
_EXIT_UNAVAILABLE = 3  # exit code of a probe that could not look; the reason is the last line of its stderr
_EXIT_FAILED = 4  # exit code of a probe that looked, and what it asked failed
_MAX_BYTES = 16 << 20
_PACKAGE_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Holds the output of a child process, or the reason why the process gave no output."""

    output: bytes | None
    reason: str | None = None
    failed: bool = False  # the child hung or crashed, or a function that it called failed


def ask_probe(probe: str, *, limit_s: float, without: Sequence[str] = ()) -> Answer:
    """Run one of `PROBES` in a child process for at most `limit_s` s, without the environment variables `without`."""
    environment = {name: value for name, value in os.environ.items() if name not in without}
    above = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([str(_PACKAGE_ROOT), *([above] if above else [])])
    environment["PYTHONSAFEPATH"] = "1"  # do not import modules from the user's current folder
    return run_child([sys.executable, "-m", "counterpoint.doctor.probe", probe], limit_s=limit_s, env=environment)


def run_child(command: Sequence[str], *, limit_s: float, env: Mapping[str, str] | None = None) -> Answer:
    """Return the output of `command`, or why it gave none in `limit_s` seconds; a failing command never raises.

    Its output goes to files: a process stuck in the kernel cannot be killed, and would keep a pipe open for ever.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return Answer(output=None, reason=f"no answer within {limit_s:g} s; {_end(process)}", failed=True)
        finally:
            if process.poll() is None:  # Ctrl-C does not reach a child in a session of its own
                _end(process)
        out.seek(0)
        err.seek(0)
        if code == 0:
            return Answer(output=out.read(_MAX_BYTES))
        return Answer(output=None, reason=_why(code, err.read(_MAX_BYTES)), failed=code < 0 or code == _EXIT_FAILED)


def _end(process: subprocess.Popen[bytes]) -> str:
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(2)
    except ProcessLookupError:
        process.wait(2)
    except subprocess.TimeoutExpired:
        return f"process {process.pid} is stuck in the kernel and cannot be killed"
    return "the process was killed"


def _why(code: int, stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines()
    last = printable(lines[-1]) if lines else "it said nothing"
    if code in (_EXIT_UNAVAILABLE, _EXIT_FAILED):
        return last
    if code < 0:
        return f"the process died of {signal.Signals(-code).name} ({last})"
    return f"the process ended with exit code {code} ({last})"


def main() -> int:
    """Run the probe that the first argument names; write its reading to stdout, all else to stderr."""
    result = os.dup(1)
    os.dup2(2, 1)
    try:
        reading = PROBES[sys.argv[1]]()
    except ProbeUnavailable as reason:
        print(reason, file=sys.stderr)
        return _EXIT_FAILED if isinstance(reason, ProbeFailed) else _EXIT_UNAVAILABLE
    with os.fdopen(result, "wb") as out:
        out.write(msgspec.json.encode(reading))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
