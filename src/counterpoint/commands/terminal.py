"""What the verbs share: output folders that are there, and a line that moves on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from counterpoint.errors import Misconfigured

__all__ = ["check_folders", "progress"]


def check_folders(*paths: Path | None) -> None:
    """Refuse output files that could not be written, before any work is done: they replace what lies there.

    Raises:
        Misconfigured: names the folder that is missing or closed, or what lies in the way.
    """
    for path in paths:
        if path is None:
            continue
        if not path.parent.is_dir():
            raise Misconfigured(f"cannot write {path}: there is no folder {path.parent}")
        if path.is_dir():
            raise Misconfigured(f"cannot write {path}: it is a folder; name a file in it")
        if path.exists() and not path.is_file():  # a device or pipe would be replaced, not written to
            raise Misconfigured(f"cannot write {path}: it is no ordinary file; name another one")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise Misconfigured(f"cannot write {path}: the folder {path.parent} may not be written to")


@contextmanager
def progress(quiet: bool, first: str) -> Iterator[Callable[[int, int, str], None]]:
    """A line on stderr that moves as `tell(done, total, what)` is called; nothing where nobody looks."""
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
