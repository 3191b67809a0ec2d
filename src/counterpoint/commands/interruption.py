"""End an interrupted command with all its ranks, and say in a later error where the command's results are."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import typer

from counterpoint.commands.terminal import ReaderGone
from counterpoint.errors import CounterpointError


@contextmanager
def adding(hint: str) -> Iterator[None]:
    """Append `hint`, which says where the results are, to a CounterpointError raised inside the block."""
    try:
        yield
    except ReaderGone:
        raise
    except CounterpointError as error:
        raise CounterpointError(f"{error}{hint}") from None


@contextmanager
def ending_cleanly() -> Iterator[None]:
    """End all ranks on Ctrl-C, SIGTERM or a closed terminal, then exit with 128 + the signal's number."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # a second one must not interrupt the killing of ranks
        raise _Stopped(number)

    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: now for number in asked if (now := signal.getsignal(number)) is not signal.SIG_IGN}  # nohup
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    except _Stopped as stopped:
        print(f"counterpoint: stopped by {signal.Signals(stopped.number).name}", file=sys.stderr)
        raise typer.Exit(128 + stopped.number) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Stopped(BaseException):
    """Is raised by a signal that asks this process to end; no `except Exception` catches it."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(number)
