"""`counterpoint doctor`: parse, call, print. Exit codes: 0 nothing wrong, 1 a problem, 2 wrong use."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from counterpoint.commands.terminal import check_folders, progress
from counterpoint.errors import Misconfigured

__all__ = ["doctor"]


def doctor(
    json: Annotated[str | None, typer.Option(help="Write the checkup as JSON; - prints it (and only it).")] = None,
    bandwidth: Annotated[
        bool, typer.Option("--bandwidth/--no-bandwidth", help="Copy between GPUs: seconds, 512 MiB on each.")
    ] = True,
    device_checks: Annotated[
        bool, typer.Option("--device-checks", help="Import torch in a child process, too: some seconds.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings, too.")] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a driver that hangs is given up.", min=1.0)
    ] = 60.0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No report and no progress.")] = False,
) -> None:
    """Is this machine set up to overlap at all? Looks at GPUs, links, NCCL, environment and network; needs no GPU."""
    from counterpoint.machine.checkup import examine, exit_code
    from counterpoint.machine.look import look

    if json == "":
        raise Misconfigured("--json without a name; give a file, or - to print it")
    path = Path(json) if json and json != "-" else None
    check_folders(path)
    with progress(quiet, "looking") as tell:
        readings = look(bandwidth=bandwidth, torch=device_checks, limit_s=timeout, tell=lambda what: tell(0, 0, what))
    checkup = examine(readings, torch=device_checks)
    if json is not None:
        _write(checkup, path)
    if not quiet and json != "-":
        from rich.console import Console

        from counterpoint.report.checkup import render_checkup

        render_checkup(checkup, Console(soft_wrap=False))
    raise typer.Exit(exit_code(checkup.checks, strict=strict))


def _write(checkup: object, path: Path | None) -> None:
    import msgspec

    text = msgspec.json.encode(checkup)
    if path is None:
        sys.stdout.buffer.write(text + b"\n")
        sys.stdout.flush()
        return
    from counterpoint.report.files import replacing

    try:
        with replacing(path) as file:
            file.write(msgspec.json.format(text, indent=1) + b"\n")
    except OSError as error:
        raise Misconfigured(f"cannot write {path}: {error.strerror}; name a file that may be written") from None
