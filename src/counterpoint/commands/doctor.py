"""Run `counterpoint doctor`: parse, call, print. Exit codes: 0 nothing wrong, 1 a problem, 2 wrong use."""

from __future__ import annotations

from typing import Annotated

import typer

from counterpoint.commands.terminal import check_outputs, json_file, progress, write_json


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
    from counterpoint.machine.checkup import collect_readings, examine, exit_code
    from counterpoint.machine.profile import profile_of

    json_path = json_file(json)
    check_outputs(json_path)
    with progress(quiet, "looking") as tell:
        readings = collect_readings(
            bandwidth=bandwidth, torch=device_checks, limit_s=timeout, tell=lambda what: tell(0, 0, what)
        )
    kinds = [gpu.name for gpu in readings.gpus or readings.devices]
    profile = profile_of(kinds[0]) if kinds else None
    checkup = examine(readings, torch=device_checks, profile=profile)
    if json is not None:
        write_json(checkup, json_path)
    if not quiet and json != "-":
        from rich.console import Console

        from counterpoint.rendering.doctor_terminal import render_checkup

        render_checkup(checkup, Console(soft_wrap=False))
    raise typer.Exit(exit_code(checkup.checks, strict=strict))
