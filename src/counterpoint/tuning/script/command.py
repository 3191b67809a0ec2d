"""Put a program of counterpoint between a launcher and the script that it starts. No torch.

torchrun --nproc-per-node 2 train.py --lr 1
torchrun --nproc-per-node 2 -m counterpoint.tuning.script.rank train.py --lr 1
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from counterpoint.errors import Misconfigured, printable
from counterpoint.rehearsed import is_rehearsal

SCRIPT = "counterpoint.tuning.script.rank"
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
_TORCHRUN_FLAGS = ("--standalone", "--virtual-local-rank", "--virtual_local_rank")
_ATTACHED = re.compile(r"-[rt].+")  # a short option with its value: -t3
_TORCHRUN_REFUSED = ("--no-python", "--no_python", "--run-path", "--run_path", "-h", "--help")


@dataclass(frozen=True, kw_only=True)
class RunCommand:
    """Holds a command that starts a script on several ranks, taken apart at the script.

    Args:
        launcher: what starts the script on each rank, with its options: `torchrun --nproc-per-node 2`.
        script: the script, or `-m` and the module, and its arguments.
        variables: of the environment, as written before the command.
        given_as: what the user wrote it behind, for errors.
    """

    launcher: tuple[str, ...]
    script: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)
    given_as: str = "--run"

    def arguments(self, program: str) -> tuple[str, ...]:
        """Return the command that runs a module of counterpoint, which runs the script."""
        return (*self.launcher, "-m", program, *self.script)

    def __str__(self) -> str:
        return shlex.join([*self.launcher, *self.script])


def parse_command(text: str, given_as: str = "--run") -> RunCommand:
    """Return the parts of a command; raise Misconfigured if its script cannot be told, or in a rehearsal."""
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
    if program == "torchrun":
        at = _after_options(said, words, 1, _TORCHRUN_FLAGS, refused=_TORCHRUN_REFUSED)
    elif _PYTHON.fullmatch(program):
        at = _after_python(said, words)
    else:
        raise Misconfigured(f"{said} starts with {printable(program)!r}; {_ALLOWED}")
    script = words[at:]
    if not script or script == ["-m"] or (script[0] == "-m" and script[1].startswith("-")):
        raise Misconfigured(f"{said} names no script; {_ALLOWED}")
    program = script[: 1 + (script[0] == "-m")][-1]
    if program in (SCRIPT, REHEARSED):
        raise Misconfigured(f"{said}: leave out -m {program}, which is put there")
    return RunCommand(launcher=tuple(words[:at]), script=tuple(script), variables=variables, given_as=given_as)


def _after_python(said: str, words: Sequence[str]) -> int:
    """Return where the script begins behind Python's options; torch's launcher and its own are passed over."""
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "-"):
        if words[at] in _PYTHON_VALUES:
            at += 1
        elif not _PYTHON_FLAGS.fullmatch(words[at]) and not words[at].startswith(_PYTHON_VALUES):
            raise Misconfigured(f"{said}: python's option {printable(words[at])!r}; {_ALLOWED}")
        at += 1
    if words[at : at + 2] == ["-m", _LAUNCHER]:
        return _after_options(said, words, at + 2, _TORCHRUN_FLAGS, refused=_TORCHRUN_REFUSED)
    return at


def _after_options(said: str, words: Sequence[str], at: int, flags: Sequence[str], *, refused: Sequence[str]) -> int:
    """Return where the script begins behind torchrun's options, of which all but `flags` have a value."""
    while at < len(words) and words[at].startswith("-"):
        word = words[at]
        if word in refused:
            raise Misconfigured(f"{said}: {word} starts no script of Python; {_ALLOWED}")
        if word in ("-m", "--module"):
            break
        at += 1 if word in flags or "=" in word or _ATTACHED.fullmatch(word) else 2
    return at
