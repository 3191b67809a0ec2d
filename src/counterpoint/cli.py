"""Run the command `counterpoint`. It exits with 0 (fine), 1 (a gate or check failed), 2 (wrong use) or 128 + signal."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from counterpoint.commands.diagnose import diagnose
from counterpoint.commands.digest import digest
from counterpoint.commands.doctor import doctor
from counterpoint.commands.measure import measure
from counterpoint.commands.plan import plan
from counterpoint.commands.rehearse import rehearse
from counterpoint.commands.terminal import ReaderGone, end_by_sigpipe, open_stdout
from counterpoint.commands.tune import tune
from counterpoint.errors import CounterpointError, printable
from counterpoint.version import VERSION

MAX_MESSAGE = 2000  # characters
UsageError: tuple[type[Exception], ...] = typer.BadParameter.__bases__  # the base classes of typer's errors of usage

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Make computation and communication run at the same time on multi-GPU PyTorch jobs.",
)


def main() -> None:
    """Run a subcommand; turn every expected error into one line on stderr and exit code 2."""
    open_stdout()
    code: object = None
    try:
        try:
            code = app(standalone_mode=False)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except ReaderGone:  # the reader of our output has ended, such as `head`: end by SIGPIPE, without a message
        end_by_sigpipe()
    except CounterpointError as error:
        _end(str(error))
    except UsageError as error:  # an option that does not exist, or lacks its value
        _end(f"{error.format_message().rstrip('.')}; --help lists what there is")  # type: ignore[attr-defined]
    if code:
        raise SystemExit(code)


def _end(message: str) -> NoReturn:
    """Print a message on one line, with control characters escaped, and exit with code 2."""
    print(f"counterpoint: {printable(message, MAX_MESSAGE)}", file=sys.stderr)
    raise SystemExit(2) from None


def _version(wanted: bool) -> None:
    if wanted:
        print(f"counterpoint {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Accept the options before a subcommand, such as `--version`; commands/ has the subcommands."""


app.command()(diagnose)
app.command()(digest)
app.command()(measure)
app.command()(tune)
app.command()(plan)
app.command()(rehearse)
app.command()(doctor)
