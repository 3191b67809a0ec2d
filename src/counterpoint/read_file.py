"""Read a small text file that a user names; if it cannot be read, the error says why in one line."""

from __future__ import annotations

import tomllib
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

from counterpoint.errors import Misconfigured, printable

DESCRIPTORS = ("/dev/fd/", "/proc/self/fd/", "/dev/stdin")  # pipes of a shell's `<(...)` and `-`, which have a writer


def read_text(path: Path, *, limit: int, advice: str) -> str:
    """Return the text of a file, without a byte order mark.

    Args:
        path: a file; pipes and devices are read only if they are open already, since others may never end.
        limit: most bytes that the file may have.
        advice: what the user should give instead, for error messages.

    Raises:
        Misconfigured: the file cannot be read, is too large or is no UTF-8.
    """
    name = printable(str(path), 200)
    try:
        mode = path.stat().st_mode
        readable = S_ISREG(mode) or S_ISDIR(mode) or str(path).startswith(DESCRIPTORS)
        content = _head(path, limit) if readable else b""
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        why = error.strerror if isinstance(error, OSError) else error
        raise Misconfigured(f"{name}: {why}; {advice}") from None
    if not readable:
        raise Misconfigured(f"{name}: a device, a socket or a named pipe; {advice}")
    if len(content) > limit:
        raise Misconfigured(f"{name}: larger than {limit:,} bytes; {advice}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Misconfigured(f"{name}: byte {error.start} is not UTF-8; save it as UTF-8") from None


def parse_toml(text: str, name: str, advice: str) -> dict[str, Any]:
    """Return the tables of TOML text; `name` and `advice` go into the error message.

    Raises:
        Misconfigured: the text is no TOML.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        why = "tables and arrays are nested too deep"
    except tomllib.TOMLDecodeError as error:
        why = f"not TOML: {printable(str(error), 200)}"
    except ValueError:  # int() raises it
        why = "a number has thousands of digits"
    raise Misconfigured(f"{name}: {why}; {advice}")


def _head(path: Path, limit: int) -> bytes:
    with path.open("rb") as file:
        return file.read(limit + 1)
