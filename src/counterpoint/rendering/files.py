"""Write files that appear complete or not at all; devices, pipes and open descriptors are written directly."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_STANDARD = {"/dev/stdout": 1, "/dev/stderr": 2}


def is_stream(path: Path) -> bool:
    """Return whether `path` is a device, a pipe or an open descriptor, which a file must not replace.

    Raises:
        OSError: the path cannot be looked at.
    """
    return _descriptor(path) is not None or (path.exists() and not (path.is_file() or path.is_dir()))


def _descriptor(path: Path) -> int | None:
    """Return the number of the open descriptor that `path` names, as a shell's `>(...)` does; None if it names none."""
    match = re.fullmatch(r"/(?:dev|proc/self)/fd/(\d+)", str(path))
    return int(match[1]) if match else _STANDARD.get(str(path))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the block ends without an error; otherwise `path` stays as it was.

    A link stays, and the file that it names is replaced. A path that `is_stream` is written to directly.

    Yields:
        The file, opened for bytes.

    Raises:
        OSError: the folder is missing or may not be written to.
    """
    descriptor = _descriptor(path)
    if descriptor is not None:
        with os.fdopen(os.dup(descriptor), "wb") as file:  # a copy goes on where the shell's own output stands
            yield file
    elif is_stream(path):
        with path.open("wb") as file:
            yield file
    else:
        with _new_file(path.resolve()) as file:
            yield file


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file in the same folder, so that one rename inside the file system can replace `path`."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)  # mkstemp makes it private; a report is an ordinary file
        temporary.replace(path)
    except BaseException:
        temporary.unlink()
        raise
