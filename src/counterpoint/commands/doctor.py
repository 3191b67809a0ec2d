"""Run `counterpoint doctor`: parse, call, print. Exit codes: 0 nothing wrong, 1 a problem, 2 wrong use."""

from __future__ import annotations

from typing import Annotated

import typer

from counterpoint.commands.terminal import check_outputs, json_file, progress, show, write_json
from counterpoint.errors import Misconfigured

_TUNING = ".toml"  # ends the name of what `counterpoint tune` wrote
_TIMEOUT_S = 60.0


def doctor(
    check: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TRACES",
            help="Prove from traces of some steps that counterpoint took effect, and look at nothing else: a file, "
            "folder, glob or tar of Kineto JSON or Nsight SQLite, one per rank; may be repeated. With "
            "counterpoint.toml, too: that every choice of this tuning did.",
        ),
    ] = None,
    json: Annotated[str | None, typer.Option(help="Write the answer as JSON; - prints it (and only it).")] = None,
    bandwidth: Annotated[
        bool, typer.Option("--bandwidth/--no-bandwidth", help="Copy between GPUs: seconds, 512 MiB on each.")
    ] = True,
    device_checks: Annotated[
        bool, typer.Option("--device-checks", help="Import torch in a child process, too: some seconds.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings, too.")] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a driver that hangs is given up.", min=1.0)
    ] = _TIMEOUT_S,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No report and no progress.")] = False,
) -> None:
    """Is this machine set up to overlap at all? Looks at GPUs, links, NCCL, environment and network; needs no GPU."""
    json_path = json_file(json)
    check_outputs(json_path)
    if check:
        if "" in check:
            raise Misconfigured("--check without a name; give a trace file, or a folder with one for each rank")
        if not bandwidth or device_checks or strict or timeout != _TIMEOUT_S:
            raise Misconfigured("--check looks at traces, not at the machine: only --json and --quiet go with it")
        _check(check, json, quiet=quiet)
        return
    from counterpoint.doctor.checkup import collect_readings, examine, exit_code
    from counterpoint.machine.profile import own_profile, profile_of

    with progress(quiet, "looking") as tell:
        readings = collect_readings(
            bandwidth=bandwidth, torch=device_checks, limit_s=timeout, tell=lambda what: tell(0, 0, what)
        )
    kinds = [gpu.name for gpu in readings.gpus or readings.devices]
    profile = profile_of(kinds[0]) if kinds else own_profile(None)
    checkup = examine(readings, torch=device_checks, profile=profile)
    if json is not None:
        write_json(checkup, json_path)
    if not quiet and json != "-":
        from counterpoint.rendering.doctor_terminal import render_checkup

        show(lambda console: render_checkup(checkup, console))
    raise typer.Exit(exit_code(checkup.checks, strict=strict))


def _check(given: list[str], json: str | None, *, quiet: bool) -> None:
    """Print whether copy engines moved traces' communication, or a tuning took effect; exit with 0 if so, else 1."""
    traces = [name for name in given if not name.endswith(_TUNING)]
    tunings = [name for name in given if name.endswith(_TUNING)]
    if len(tunings) > 1:
        raise Misconfigured(f"--check with {len(tunings)} tunings; give one {_TUNING} file, and traces")
    if not traces:
        raise Misconfigured("--check with a tuning alone; give traces of two steps, too: --check traces/")
    from counterpoint.tuned.file import read_tuned
    from counterpoint.tuning.check import check

    with progress(quiet, "looking for traces") as tell:
        effect = check(traces, read_tuned(tunings[0]) if tunings else None, progress=tell)
    if json is not None:
        write_json(effect, json_file(json))
    if not quiet and json != "-":
        from counterpoint.rendering.effect_terminal import render_effect

        show(lambda console: render_effect(effect, console))
    raise typer.Exit(0 if effect.took_effect else 1)
