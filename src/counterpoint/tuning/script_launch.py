"""Start a training script by its own launcher, but through a module of counterpoint, and watch the ranks.

    torchrun --nproc-per-node 2 train.py --lr 1
    torchrun --nproc-per-node 2 -m counterpoint.tuning.script_rank train.py --lr 1

The parent writes a `ScriptTask` into a folder and names its file in the environment; rank 0 writes a `ScriptResult`
beside it, and a rank that fails a `RankFailure` into `errors/`. No torch.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Literal

import msgspec

from counterpoint.errors import CounterpointError, Misconfigured, PeerTimeout, printable
from counterpoint.processes import (
    DEFAULTS,
    SETTLE_S,
    Remains,
    abort,
    died,
    exit_code,
    hung,
    read_failure,
    started,
    tail,
    watch,
    write_whole,
)
from counterpoint.records import Record
from counterpoint.rehearsed import is_rehearsal

TASK_VARIABLE = "COUNTERPOINT_TUNING_TASK"
OverlapCalls = Literal["never", "switched", "fixed"]
"""Says whether the script calls `counterpoint.overlap`, and whether the call can be undone between steps."""
TIMEOUT_S = 120.0
FIRST_STEP_S = 300.0  # added before the first step, while the model is built and compiled
LOG = "script.log"  # these are names inside the folder of a task
TASK, RESULT = "task.json", "result.json"  # a `ScriptTask`, and the `ScriptResult` of rank 0
ALIVE = "alive"  # rank 0 touches it after each step
ERRORS = "errors"  # folder of `RankFailure`s
PROCESSES = "processes"  # folder of files by rank, each with the number of its process
STACKS = "stacks{}.log"  # by rank: the stacks of its threads, written if the rank is told to end
_ENDED = re.compile(r"^\s*rank\s*:\s*(\d+) .*\n\s*exitcode\s*:\s*(-?\d+) ", re.MULTILINE)  # its last words

SCRIPT = "counterpoint.tuning.script_rank"
REHEARSED = "counterpoint.rehearsal.rank"
_ALLOWED = (
    "write 'torchrun [options] train.py [arguments]', 'python -m torch.distributed.run [options] train.py ...' or "
    "'python train.py ...', where a script may be a module (-m train), with variables before it (NAME=value torchrun)"
)
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_LAUNCHER = "torch.distributed.run"
_PYTHON_FLAGS = re.compile(r"-[bBdEIOPqRsSuvx]+")  # of Python, without a value; -c and -i run no script
_PYTHON_VALUES = ("-X", "-W")
_TORCHRUN_FLAGS = ("--standalone", "--virtual-local-rank")
_ATTACHED = re.compile(r"-[rt].+")  # a short option with its value: -t3
_TORCHRUN_REFUSED = ("--no-python", "--run-path", "-h", "--help")


class ScriptVariant(Record, frozen=True, kw_only=True):
    """Describes one way to run the script's steps: by torch's collectives or by the choices in a file."""

    name: str  # "stock", "tuned"
    file: str | None  # of the choices that `overlap` follows; None: torch's collectives


class ScriptTask(Record, frozen=True, kw_only=True):
    """Asks the ranks to record steps, or to run steps by several variants alternately and time them."""

    folder: str
    variants: tuple[ScriptVariant, ...] = ()  # none: record
    recorded_steps: int = 2
    warmup_steps: int = 3  # before all else: memory, compilation
    dropped_steps: int = 2  # after a change of variant: the first opens communicators, the second prepares calls
    block_steps: int = 4  # steps that are timed together
    rounds: int = 20  # at most; a round has one block for each variant
    min_rounds: int = 5
    budget_s: float = 60.0  # no round begins that would end later

    @property
    def needed_steps(self) -> int:
        """Return the fewest optimizer steps that the script must make for this task."""
        if not self.variants:
            return self.warmup_steps + 1 + self.recorded_steps
        return self.warmup_steps + self.min_rounds * len(self.variants) * (self.dropped_steps + self.block_steps)


class ScriptResult(Record, frozen=True, kw_only=True):
    """Holds what the ranks found: use of `overlap`, device, number of ranks, and step times."""

    overlap: OverlapCalls
    device: Literal["cuda", "cpu"]
    world_size: int
    blocks_us: tuple[tuple[float, ...], ...] = ()  # [variants, rounds], µs of a step of the slowest rank
    followed: dict[str, str] = msgspec.field(default_factory=dict)  # by variant: how many of its choices had effect


@dataclass(frozen=True, kw_only=True)
class RunCommand:
    """Holds a command that starts a script on several ranks, split at the script."""

    launcher: tuple[str, ...]  # what starts the script on each rank, with its options: torchrun --nproc-per-node 2
    options: dict[str, str]  # those of torchrun, by name with hyphens: {"--nproc-per-node": "2"}
    script: tuple[str, ...]  # the script, or `-m` and the module, and its arguments
    variables: dict[str, str] = field(default_factory=dict)  # of the environment, as written before the command
    given_as: str = "--run"  # what the user wrote it behind, for errors

    def arguments(self, program: str) -> tuple[str, ...]:
        """Return the command that runs the script through counterpoint's module `program`."""
        return (*self.launcher, "-m", program, *self.script)

    def __str__(self) -> str:
        return shlex.join([*self.launcher, *self.script])


def parse_command(text: str, given_as: str = "--run") -> RunCommand:
    """Split a command at its script; raise Misconfigured if no script is found, or in a rehearsal."""
    if is_rehearsal():
        raise Misconfigured(f"{given_as}: this is a rank of counterpoint rehearse, which starts no others")
    said = f"{given_as} {printable(text)!r}"
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise Misconfigured(f"{said}: {error}; {_ALLOWED}") from None
    variables: dict[str, str] = {}
    while words and (found := _VARIABLE.fullmatch(words[0])):
        variables[found[1]] = found[2]
        words = words[1:]
    program = PurePath(words[0]).name if words else ""
    options: dict[str, str] = {}
    if program == "torchrun":
        at, options = _torchrun(said, words, 1)
    elif _PYTHON.fullmatch(program):
        at = _after_python(said, words)
        if words[at : at + 2] == ["-m", _LAUNCHER]:
            at, options = _torchrun(said, words, at + 2)
    else:
        raise Misconfigured(f"{said} starts with {printable(program)!r}; {_ALLOWED}")
    script = words[at:]
    if not script or script == ["-m"] or (script[0] == "-m" and script[1].startswith("-")):
        raise Misconfigured(f"{said} names no script; {_ALLOWED}")
    program = script[: 1 + (script[0] == "-m")][-1]
    if program in (SCRIPT, REHEARSED):
        raise Misconfigured(f"{said}: leave out -m {program}, which is put there")
    return RunCommand(
        launcher=tuple(words[:at]), options=options, script=tuple(script), variables=variables, given_as=given_as
    )


def _after_python(said: str, words: Sequence[str]) -> int:
    """Return the index of the first word after Python's options."""
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "-"):
        if words[at] in _PYTHON_VALUES:
            at += 1
        elif not _PYTHON_FLAGS.fullmatch(words[at]) and not words[at].startswith(_PYTHON_VALUES):
            raise Misconfigured(f"{said}: python's option {printable(words[at])!r}; {_ALLOWED}")
        at += 1
    return at


def _torchrun(said: str, words: Sequence[str], at: int) -> tuple[int, dict[str, str]]:
    """Return the index where the script begins after torchrun's options, and the options by long name."""
    options = {}
    while at < len(words) and words[at].startswith("-"):
        word = words[at]
        name, is_one, value = word.partition("=")
        name = name.replace("_", "-")
        if name in _TORCHRUN_REFUSED:
            raise Misconfigured(f"{said}: {word} starts no script of Python; {_ALLOWED}")
        if name in ("-m", "--module"):
            break
        has_value = not (is_one or name in _TORCHRUN_FLAGS or _ATTACHED.fullmatch(word))
        options[name] = words[at + 1] if has_value and at + 1 < len(words) else value
        at += 1 + has_value
    return at, options


def launch_script(
    command: RunCommand, task: ScriptTask, *, variables: Mapping[str, str], timeout_s: float = TIMEOUT_S
) -> ScriptResult:
    """Return the result that rank 0 wrote, after running the script until the task is done; log to the task's folder.

    `variables` come on top of the environment of this process and of the command. `timeout_s` is the longest time
    without a finished step; the first one has five minutes more.

    Raises:
        Misconfigured: the command's program does not exist, or the script ended too early.
        PeerTimeout: ranks died, raised something or stopped making progress; names them and the log.
    """
    folder = Path(task.folder)
    write_whole(folder / TASK, task)
    run_ranks(
        command,
        SCRIPT,
        folder=folder,
        variables={**variables, TASK_VARIABLE: str(folder / TASK)},
        timeout_s=timeout_s,
        progress=lambda: modified(folder / ALIVE),
        lacking="no step of the script's optimizer ended",
    )
    try:
        return msgspec.json.decode((folder / RESULT).read_bytes(), type=ScriptResult)
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
    lacking: str,
) -> None:
    """Run a script to its end, each rank through the module `program`; write the log and the ranks' files to `folder`.

    `progress` is called again and again, and returns something else after progress. After `timeout_s` seconds without
    progress, and five minutes more at the start, `lacking` says what has not happened.

    Raises:
        Misconfigured: the command's program does not exist.
        PeerTimeout: ranks died, raised something or stopped making progress; names them and the log.
    """
    if not timeout_s > 0:
        raise Misconfigured(f"timeout {timeout_s:g} s; it must be more than 0")
    beside = {**DEFAULTS, **os.environ, **command.variables, **variables}
    beside["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), beside.get("PATH", os.defpath)])  # as this one
    with ExitStack() as stack:
        try:
            [launcher] = processes = stack.enter_context(started(command.arguments(program), [folder / LOG], [beside]))
        except OSError as error:
            given = printable(command.launcher[0])
            raise Misconfigured(f"{command.given_as}: {given} cannot be started: {error.strerror or error}") from None
        watch(
            processes,
            progress=progress,
            timeout_s=timeout_s,
            startup_s=FIRST_STEP_S,
            died=lambda: _died(folder, exit_code(launcher) or 0),
            hung=lambda: _hung(folder, f"{lacking} for {timeout_s:g} s"),
        )


def modified(path: Path) -> int:
    """Return when a file was last modified, in ns; 0 if there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _hung(folder: Path, reason: str) -> PeerTimeout:
    """Return the error for a hang, after each rank has written its stack to a file."""
    ranks = {int(path.name): int(path.read_text()) for path in (folder / PROCESSES).glob("[0-9]*")}
    abort(ranks.values())
    time.sleep(SETTLE_S * bool(ranks))
    remains = [Remains(rank=rank, code=None, log=tail(folder / STACKS.format(rank))) for rank in sorted(ranks)]
    return hung(remains, reason=reason, logs=str(folder / LOG))


def _died(folder: Path, code: int) -> CounterpointError:
    """Return the error for a script that ended with this exit code, from its ranks' files and torchrun's log."""
    text, errors = tail(folder / LOG), folder / ERRORS
    numbers = [int(path.stem.removeprefix("rank")) for path in errors.glob("rank*.json")]
    failures = {rank: failure for rank in numbers if (failure := read_failure(errors, rank)) is not None}
    root = _statuses(text.rpartition("Root Cause")[2]) or {0: code}
    found = {rank: status for rank, status in _statuses(text).items() if status != -signal.SIGTERM} | root
    at = next((failure.scenario for failure in failures.values() if failure.scenario), None)
    during = f"in {at} of the script" if at else "in the script"
    remains = [
        Remains(
            rank=rank,
            code=found.get(rank, code),
            failure=msgspec.structs.replace(failures[rank], scenario=None) if rank in failures else None,
            log=tail(folder / STACKS.format(rank)) or text,
        )
        for rank in sorted(found.keys() | failures.keys())
    ]
    if not any(rank.follows for rank in remains if rank.rank in root):  # else torchrun has seen two end at a time
        remains = [rank for rank in remains if rank.rank in root or rank.failure]
    return died(remains, during=during, logs=str(folder), log=LOG)


def _statuses(text: str) -> dict[int, int]:
    """Return exit codes by rank, as torchrun's log names them."""
    return {int(rank): int(status) for rank, status in _ENDED.findall(text)}
