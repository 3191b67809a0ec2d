"""Define all exceptions of counterpoint; each message says what was given, what is allowed, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial


class CounterpointError(Exception):
    """Is the base class of all errors that counterpoint raises on purpose; the command line then exits with code 2."""


class Unsupported(CounterpointError):
    """Says that the machine or its software lacks something that is needed, which the message names."""


class NoEffect(Unsupported):
    """Says that a control (a setting, such as a limit of a GEMM's SMs) was applied, but did not change what ran.

    Args:
        control: the control as it was asked for, such as `gemm_sms=108`.
        asked: what should have been seen.
        seen: what was seen instead.
        fix: what to do instead.
    """

    def __init__(self, control: str, *, asked: str, seen: str, fix: str) -> None:
        self.control, self.asked, self.seen, self.fix = control, asked, seen, fix
        super().__init__(printable(f"{control} had no effect: asked for {asked}, saw {seen}; {fix}"))

    def __reduce__(self) -> tuple[object, ...]:
        return partial(NoEffect, self.control, asked=self.asked, seen=self.seen, fix=self.fix), ()


class PeerTimeout(CounterpointError):
    """Says that ranks died or did not answer in time; the message names these ranks and what they did last."""

    def __init__(self, reason: str, *, ranks: tuple[int, ...] = ()) -> None:
        self.reason, self.ranks = reason, ranks
        super().__init__(printable(reason))

    def __reduce__(self) -> tuple[object, ...]:
        return partial(PeerTimeout, self.reason, ranks=self.ranks), ()


class Misconfigured(CounterpointError, ValueError):
    """Says that an option or argument has a value that is not allowed; the message names the allowed values."""


class NoSuchValue(Misconfigured):
    """Says that an option or field can never have the given value, whatever the other options are."""


class BadTrace(CounterpointError):
    """Says that a trace cannot be read, or that several traces cannot be of one job.

    `path` is the file (or `archive!member`) at fault, `offset` the byte in it, decompressed, at which reading failed.
    """

    def __init__(self, reason: str, *, path: str | None = None, offset: int | None = None) -> None:
        self.reason, self.path, self.offset = reason, path, offset
        where = "" if path is None else f"{printable(path)}: "
        at = "" if offset is None else f" (at byte {offset})"
        super().__init__(f"{where}{printable(reason)}{at}")

    def __reduce__(self) -> tuple[object, ...]:  # it crosses the boundary of reader processes
        return partial(BadTrace, self.reason, path=self.path, offset=self.offset), ()


@contextmanager
def needs_triton(what: str) -> Iterator[None]:
    """Raise `Unsupported` if an import in the `with` block fails, saying that `what` (a plural noun) need Triton."""
    try:
        yield
    except ImportError as error:
        raise Unsupported(f"{what} need Triton: {error}; install triton 3.6 or newer") from error


def printable(text: str, limit: int = 400) -> str:
    """Return `text` with control characters escaped, cut at `limit` characters: safe to print on a terminal."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
