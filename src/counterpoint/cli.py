"""`counterpoint`: parse, call, print. Exit codes: 0 fine, 1 a gate did not hold, 2 wrong input or use, 128 + signal."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from typing import Annotated

import typer

from counterpoint import __version__
from counterpoint.commands.diagnose import diagnose
from counterpoint.commands.doctor import doctor
from counterpoint.commands.measure import measure
from counterpoint.commands.plan import plan
from counterpoint.errors import CounterpointError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Make computation and communication run at the same time on multi-GPU PyTorch jobs.",
)


def main() -> None:
    """Entry point: turns every expected error into one line on stderr and exit code 2."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a letter shows a question mark
    try:
        app()
    except CounterpointError as error:
        print(f"counterpoint: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(2) from None


def _version(wanted: bool) -> None:
    if wanted:
        print(f"counterpoint {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Verbs are added below as their rooms open; each lives in commands/<verb>.py."""


app.command()(diagnose)
app.command()(measure)
app.command()(plan)
app.command()(doctor)
