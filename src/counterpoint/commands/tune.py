"""Run `counterpoint tune`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from counterpoint.commands.interruption import adding, ending_cleanly
from counterpoint.commands.terminal import check_outputs, json_file, progress, write_file, write_json
from counterpoint.errors import Misconfigured
from counterpoint.rendering.files import is_stream


def tune(
    source: Annotated[Path, typer.Argument(help="A file of pairs of a step: pairs.toml.")],
    profile: Annotated[
        Path | None,
        typer.Option(help="Figures of this machine; by default COUNTERPOINT_PROFILE, or those that are shipped."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Write the choices.")] = Path("counterpoint.toml"),
    device: Annotated[str, typer.Option(help="cuda, or cpu: the same with gloo, to try it anywhere.")] = "cuda",
    nproc: Annotated[int | None, typer.Option(help="Ranks: by default as many as the pairs have.")] = None,
    budget: Annotated[float, typer.Option(help="Seconds after which no further pair is measured.")] = 120.0,
    rounds: Annotated[int, typer.Option(help="Trials of each kind per pair; the first two are dropped.")] = 12,
    timeout: Annotated[float, typer.Option(help="Seconds without a finished pair after which the run ends.")] = 120.0,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh/--resume", help="Discard what an interrupted run left near --out, or (by default) go on with it."
        ),
    ] = False,
    json: Annotated[str | None, typer.Option(help="Write the choices as JSON; - prints them (and only them).")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No summary and no progress.")] = False,
) -> None:
    """Which mechanism for each of my pairs of operations? Needs torch, and 2 GPUs or --device cpu."""
    json_path = json_file(json)
    _check_outputs(source, out, json_path)
    partial = None if is_stream(out) else out.with_name(out.name + ".partial.jsonl")
    check_outputs(partial)
    with ending_cleanly(partial, fresh=fresh), progress(quiet, "starting ranks") as tell:
        from counterpoint.pair.tuned_file import tuned_toml
        from counterpoint.tuning import api

        tuned = api.tune(
            source, device=device, world_size=nproc, profile=profile, budget_s=budget, rounds=rounds,
            timeout_s=timeout, partial=partial, fresh=fresh, progress=tell,
        )  # fmt: skip
        with adding(f"; what was measured is kept in {partial}: the same command goes on" if partial else ""):
            write_file(out, tuned_toml(tuned).encode())
            if json_path is not None:
                write_json(tuned, json_path)
    if partial is not None:
        partial.unlink(missing_ok=True)  # only now: the choices are safe
    with adding(f"; the choices are in {out}"):
        if json == "-":
            write_json(tuned, None)
        elif not quiet:
            from rich.console import Console

            from counterpoint.rendering.tuning_terminal import render_tuned

            console = Console(soft_wrap=False)
            render_tuned(tuned, console)
            console.print(f"wrote {out}", markup=False, highlight=False, soft_wrap=True)


def _check_outputs(source: Path, out: Path, json_path: Path | None) -> None:
    """Raise Misconfigured if an output cannot be written, or would replace what is read or another output."""
    check_outputs(out, json_path)
    paths = [source.resolve(), out.resolve(), *([json_path.resolve()] if json_path else [])]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None and not is_stream(twice):
        raise Misconfigured(f"{twice.name} is named twice; give SOURCE, --out and --json files of their own")
