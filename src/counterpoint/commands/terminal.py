"""Check and write output files, print JSON and show progress, for all subcommands."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from counterpoint.errors import CounterpointError, Misconfigured
from counterpoint.rendering.files import is_stream, replacing

if TYPE_CHECKING:
    from rich.console import Console
    from typing_extensions import Buffer

NARROWEST = 80  # columns: below, lines are longer than a terminal


class ReaderGone(CounterpointError):
    """Is raised when the program that reads our output has ended, as `head` does."""


class _Stdout(io.FileIO):
    """Writes to standard output; the first failure raises `CounterpointError`, or `ReaderGone` if the reader has ended.

    rich and typer would handle an `OSError` themselves, but they let these errors pass.
    """

    failed = False

    def write(self, data: Buffer, /) -> int:
        """Write bytes; discard them after a failure, so that the interpreter can flush and end."""
        if self.failed:
            return memoryview(data).nbytes
        self.failed = True
        with writing("to standard output"):
            written = super().write(data)
        self.failed = False
        return written


def open_stdout() -> None:
    """Replace `sys.stdout` by a `_Stdout`, which prints a question mark for a character that it cannot encode."""
    original = sys.__stdout__
    if original is not None and sys.stdout is original:
        raw, terminal = _Stdout(original.fileno(), "wb", closefd=False), original.isatty()
        buffered = io.BufferedWriter(raw)
        sys.stdout = io.TextIOWrapper(buffered, original.encoding, errors="replace", line_buffering=terminal)


def end_by_sigpipe() -> NoReturn:
    """End this process by SIGPIPE, as other programs end when nobody reads their output any more."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGPIPE)
    raise SystemExit(128 + signal.SIGPIPE)  # the signal is blocked


def check_outputs(*paths: Path | None) -> None:
    """Raise `Misconfigured`, before any work is done, if an output file could not be written; the text says why."""
    for path in filter(None, paths):
        try:
            reason = _why_not(path)
        except OSError as error:
            reason = error.strerror
        if reason is not None:
            raise Misconfigured(f"cannot write {path}: {reason}")


def _why_not(path: Path) -> str | None:
    if path == Path("-"):
        return "only --json prints; name a file"
    if path.is_dir():
        return "it is a folder; name a file in it"
    if is_stream(path):
        return None if os.access(path, os.W_OK) else "it may not be written to"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    return None if os.access(path.parent, os.W_OK | os.X_OK) else f"the folder {path.parent} may not be written to"


@contextmanager
def writing(where: object) -> Iterator[None]:
    """Turn an `OSError` into `CounterpointError`, or into `ReaderGone` if the reader of a pipe has ended."""
    try:
        yield
    except BrokenPipeError:
        raise ReaderGone(f"cannot write {where}: its reader has ended") from None
    except OSError as error:
        raise CounterpointError(f"cannot write {where}: {error.strerror}") from None


def json_file(json: str | None) -> Path | None:
    """Return the file that `--json` names; None for `-` (print) or no `--json`; raise `Misconfigured` if unusable."""
    if json == "":
        raise Misconfigured("--json without a name; give a file, or - to print it")
    if json == "-" and sys.stdout is None:
        raise Misconfigured("--json - prints, and standard output is closed; name a file")
    return Path(json) if json is not None and json != "-" else None


def write_file(path: Path, content: bytes) -> None:
    """Write a file completely or keep the old one; raise CounterpointError, as `writing` does, if that fails."""
    with writing(path), replacing(path) as file:
        file.write(content)


def write_json(record: object, path: Path | None) -> None:
    """Write a record to `path` as indented JSON; if `path` is None, print it in one line."""
    import msgspec

    text = msgspec.json.encode(record)
    if path is None:
        sys.stdout.buffer.write(text + b"\n")
        sys.stdout.flush()
        return
    write_file(path, msgspec.json.format(text, indent=1) + b"\n")


def show(render: Callable[[Console], None], wrote: Iterable[Path | None] = (), *, in_a_file: int = NARROWEST) -> None:
    """Print by `render`, at least 80 columns wide (not on a terminal: `in_a_file`), then name the written files."""
    from rich.console import Console

    console = Console(soft_wrap=False)
    console.width = max(console.width, NARROWEST if console.is_terminal else in_a_file)
    render(console)
    for path in filter(None, wrote):
        console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress(quiet: bool, first: str) -> Iterator[Callable[[int, int, str], None]]:
    """Yield `tell(done, total, what)`, which moves a line on stderr, or does nothing where stderr is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total, what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(first, total=None)

        def tell(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total or None, description=what)

        yield tell
