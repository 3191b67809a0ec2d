"""The one exception tree. Every text says what came, what is allowed, and what to do."""

from __future__ import annotations

__all__ = ["BadTrace", "CounterpointError", "Misconfigured", "Unsupported"]


class CounterpointError(Exception):
    """Base of every error that counterpoint raises on purpose; the command line prints it and exits with 2."""


class Unsupported(CounterpointError):
    """The machine, or what is installed on it, lacks something; the text names what is missing."""


class Misconfigured(CounterpointError, ValueError):
    """An option or argument that cannot mean anything; the text names the allowed values."""


class BadTrace(CounterpointError):
    """A trace that cannot be read, or ranks that cannot belong together.

    Args:
        reason: what is wrong and what to do about it.
        path: the file (or `archive!member`) at fault, if one is.
        offset: byte offset in the (decompressed) file at which reading failed, if known.
    """

    def __init__(self, reason: str, *, path: str | None = None, offset: int | None = None) -> None:
        self.reason, self.path, self.offset = reason, path, offset
        where = "" if path is None else f"{printable(path)}: "
        at = "" if offset is None else f" (at byte {offset})"
        super().__init__(f"{where}{printable(reason)}{at}")

    def __reduce__(self) -> tuple[object, ...]:  # it crosses the boundary of reader processes
        return _rebuild_bad_trace, (self.reason, self.path, self.offset)


def _rebuild_bad_trace(reason: str, path: str | None, offset: int | None) -> BadTrace:
    return BadTrace(reason, path=path, offset=offset)


def printable(text: str, limit: int = 400) -> str:
    """`text` with control characters escaped and cut at `limit`: safe to print on a terminal."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
