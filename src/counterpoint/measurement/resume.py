"""Keep finished results in a file of JSON lines, so that the same command goes on after an interruption.

The first line says what is measured where; each later one is an `Outcome`, appended by rank 0 and flushed. The header
also reads as an `Outcome` of the scenario "", so that a reader of outcomes needs no special case.
"""

from __future__ import annotations

import fcntl
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import msgspec

from counterpoint.errors import Misconfigured, printable
from counterpoint.records import Record
from counterpoint.records.measurement import Outcome


class _Header(Record, frozen=True, kw_only=True):
    """Holds what must be equal in two runs before their results are mixed, as texts for error messages."""

    identity: dict[str, str]
    scenario: str = ""


@contextmanager
def resumable(
    path: Path, identity: dict[str, str], *, fresh: bool, names: Container[str] | None = None
) -> Iterator[None]:
    """Open `path` to be appended to, and lock out a second run until the block ends.

    Args:
        path: the file of results; it is made if it is missing.
        identity: suite, device, GPU, versions ...: results of another identity are never mixed with these.
        fresh: throw away what is there.
        names: scenarios and blocks that outcomes may be about; None: any.

    Raises:
        Misconfigured: the file is of another run, not ours, damaged, being written by another process, or cannot be
            written.
    """
    try:
        opened = path.open("a+b", buffering=0)  # what fails, fails here and not when it is closed
    except OSError as error:
        raise Misconfigured(f"cannot write {path}: {error.strerror}") from None
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Misconfigured(
                f"{path} is being written by another counterpoint measure; wait or choose --out"
            ) from None
        file.seek(0)
        text = b"" if fresh else file.read()
        whole = text[: text.rfind(b"\n") + 1]  # a line cut short by a kill is measured again
        header, *outcomes = whole.splitlines() or [text]
        found = _identity(path, header) if header else {}
        if outcomes:
            _agree(path, found, identity)
            file.truncate(len(whole))
            _check_outcomes(path, names)
        else:  # nothing to lose
            _begin(path, file, identity)
        try:
            yield
        finally:
            if path.exists() and path.read_bytes().count(b"\n") < 2:
                path.unlink()  # a header alone: nothing to go on with


def _begin(path: Path, file: FileIO, identity: dict[str, str]) -> None:
    """Write the header into an empty file."""
    try:
        file.truncate(0)
        file.write(msgspec.json.encode(_Header(identity=identity)) + b"\n")
    except OSError as error:
        path.unlink()
        raise Misconfigured(f"cannot write {path}: {error.strerror}") from None


def _check_outcomes(path: Path, names: Container[str] | None) -> None:
    """Raise Misconfigured for a damaged line, a scenario that is there twice, or one that was not asked for."""
    seen = Counter(outcome.scenario for outcome in finished(path))
    for name, times in seen.items():
        if times > 1 or (names is not None and name not in names):
            what = f"holds {printable(name)!r} {times} times" if times > 1 else f"holds the unknown {printable(name)!r}"
            raise Misconfigured(f"{path} is damaged (it {what}); discard it with --fresh")


def _identity(path: Path, header: bytes) -> dict[str, str]:
    try:
        return msgspec.json.decode(header, type=_Header).identity
    except msgspec.DecodeError:
        raise Misconfigured(f"{path} was not written by counterpoint measure; --fresh overwrites it") from None


def _agree(path: Path, found: dict[str, str], identity: dict[str, str]) -> None:
    for key in sorted(identity.keys() | found.keys()):
        was, now = found.get(key) or "nothing", identity.get(key) or "nothing"
        if was != now:
            raise Misconfigured(
                f"{path} holds results of another run ({key} was {printable(was)}, is {printable(now)}): "
                "repeat that command, or discard them with --fresh"
            )


def finished(path: Path) -> tuple[Outcome, ...]:
    """Return every whole outcome in the file, in the order measured; raise Misconfigured if it is damaged or gone."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise Misconfigured(f"{path} was taken away while it was needed; start again") from None
    lines = text[: text.rfind(b"\n") + 1].splitlines()
    try:
        outcomes = tuple(msgspec.json.decode(line, type=Outcome) for line in lines)
    except msgspec.DecodeError as error:
        raise Misconfigured(f"{path} is damaged ({error}); discard it with --fresh") from None
    return tuple(outcome for outcome in outcomes if outcome.scenario)
