"""Ask something that may crash or hang, such as a driver, in a child process that is ended in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from counterpoint.errors import printable

__all__ = ["BLIND", "BROKEN", "Answer", "ask", "run_child"]

BLIND = 3  # exit code of a probe that could not look; the reason is the last line of its stderr
BROKEN = 4  # of one that looked, and what it asked failed
_MAX_BYTES = 16 << 20
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What the child printed, or why there is nothing; `broken` if it hung, crashed, or what it asked failed."""

    output: bytes | None
    reason: str | None = None
    broken: bool = False


def ask(probe: str, *, limit_s: float, without: Sequence[str] = ()) -> Answer:
    """Run one probe of `counterpoint.machine.probe` in a child.

    Args:
        probe: its name, such as "nvml".
        limit_s: seconds after which the child is killed.
        without: variables that the child does not get.
    """
    environment = {name: value for name, value in os.environ.items() if name not in without}
    above = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([str(_PACKAGE_ROOT), *([above] if above else [])])
    environment["PYTHONSAFEPATH"] = "1"  # the folder that the user stands in is not a place for modules
    return run_child([sys.executable, "-m", "counterpoint.machine.probe", probe], limit_s=limit_s, env=environment)


def run_child(command: Sequence[str], *, limit_s: float, env: Mapping[str, str] | None = None) -> Answer:
    """Run `command` for at most `limit_s` seconds and give back its standard output. Never raises for what it does.

    Its output goes to files: a process stuck in the kernel cannot be killed, and would keep a pipe open for ever.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return Answer(output=None, reason=f"no answer within {limit_s:g} s; {_end(process)}", broken=True)
        finally:
            if process.poll() is None:  # Ctrl-C does not reach a child in a session of its own
                _end(process)
        out.seek(0)
        err.seek(0)
        if code == 0:
            return Answer(output=out.read(_MAX_BYTES))
        return Answer(output=None, reason=_why(code, err.read(_MAX_BYTES)), broken=code < 0 or code == BROKEN)


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
    if code in (BLIND, BROKEN):
        return last
    if code < 0:
        return f"the process died of {signal.Signals(-code).name} ({last})"
    return f"the process ended with exit code {code} ({last})"
