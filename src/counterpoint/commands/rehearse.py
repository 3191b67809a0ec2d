"""Run `counterpoint rehearse`: parse, call, print."""

from __future__ import annotations

from typing import Annotated

import typer

from counterpoint.commands.interruption import ending_cleanly
from counterpoint.commands.terminal import check_outputs, json_file, show, write_json


def rehearse(
    command: Annotated[
        str, typer.Argument(help='What starts the script: "torchrun --nproc-per-node 8 train.py".', show_default=False)
    ],
    hosts: Annotated[int, typer.Option(help="Count the ranks as those of so many hosts, in equal parts.")] = 1,
    device: Annotated[
        str | None,
        typer.Option(help="cuda (the default), or cpu: ranks see no GPU, and a script that runs on CPUs uses gloo."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds in which no rank prints anything or ends a step, after which the run ends.")
    ] = 600.0,
    json: Annotated[str | None, typer.Option(help="Write the answer as JSON; - prints it (and only it).")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not print what the ranks print.")] = False,
) -> None:
    """Does my script do the right thing on N GPUs? Runs all ranks on one GPU: values and order hold, times do not."""
    json_path = json_file(json)
    check_outputs(json_path)
    with ending_cleanly():
        from counterpoint.rehearsal import api

        found = api.rehearse(command, device=device, hosts=hosts, timeout_s=timeout, echo=not quiet and json != "-")
    if json is not None:
        write_json(found, json_path)
    if json != "-":
        from counterpoint.rendering.rehearsal_terminal import render_rehearsal

        show(lambda console: render_rehearsal(found, console))
