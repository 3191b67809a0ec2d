"""Runs commands: `counterpoint` in this process where the process is not the point, or a program in one of its own."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
COUNTERPOINT = (sys.executable, "-W", "error", "-c", "from counterpoint.cli import main; main()")
HANG_S = 3000.0  # whatever takes so long hangs; a machine at any load takes less


@dataclass(frozen=True)
class Ended:
    """What a command left: its exit code and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def counterpoint(*arguments: object, folder: Path | None = None) -> Ended:
    """Run `counterpoint ARGUMENTS` in this process, as `main` does, on a terminal of 80 columns."""
    from counterpoint.cli import main

    code: object = 0
    with (
        patch.object(sys, "argv", ["counterpoint", *map(str, arguments)]),
        patch.dict(os.environ, COLUMNS="80"),
        chdir(folder) if folder else nullcontext(),
        _printed() as (out, err),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    assert code is None or isinstance(code, int), code
    return Ended(code or 0, *(stream.buffer.getvalue().decode() for stream in (out, err)))  # type: ignore[attr-defined]


@contextmanager
def _printed() -> Iterator[tuple[io.TextIOWrapper, io.TextIOWrapper]]:
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        yield out, err


def program(
    command: Sequence[object], *, folder: Path | None = None, variables: Mapping[str, str] | None = None,
    timeout_s: float = HANG_S,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a command in a session and a process of its own, in the folder, with the environment if that is given."""
    return subprocess.run(
        [*map(str, command)], cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=timeout_s,
        start_new_session=True,
    )  # fmt: skip
