"""Run `counterpoint tune`: parse, call, print."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from counterpoint.commands.interruption import adding, ending_cleanly
from counterpoint.commands.terminal import check_outputs, json_file, progress, show, write_file, write_json, writing
from counterpoint.errors import Misconfigured
from counterpoint.rendering.files import is_stream

if TYPE_CHECKING:
    from counterpoint.records.tuning import Tuned

_EXCLUDED = {  # by option that says what to do: the options that would have no effect
    "machine": ("source", "run", "to", "profile", "budget", "rounds", "html", "json"),
    "to": ("run", "profile", "device", "nproc", "budget", "rounds", "timeout", "json"),
    "run": ("source", "nproc"),
}
_WHY = {
    "machine": "it measures all of a machine",
    "to": "it writes what a tuning holds, and measures nothing",
    "run": "the command says how many ranks there are, and a script is recorded anew each time",
}


def tune(
    context: typer.Context,
    source: Annotated[
        Path | None,
        typer.Argument(
            help="Pairs of a step (pairs.toml), or traces of a job; with --to, a tuning.", show_default=False
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(help='Tune a training script: "torchrun --nproc-per-node 2 train.py". Whole steps confirm it.'),
    ] = None,
    machine: Annotated[
        bool, typer.Option("--machine", help="Measure this machine into a profile instead: up to two minutes.")
    ] = False,
    to: Annotated[str | None, typer.Option(help="Write a tuning for others: env, megatron-yaml, python.")] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Figures of this machine; by default COUNTERPOINT_PROFILE, or those that are shipped."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="What to write: by default counterpoint.toml; profile.json of --machine; standard output of --to."
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Draw before and after by pair: one self-contained page.")] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cuda (the default), or cpu: the same with gloo, to try it anywhere. A script has its own."),
    ] = None,
    nproc: Annotated[int | None, typer.Option(help="Ranks: by default as many as the pairs have.")] = None,
    budget: Annotated[
        float, typer.Option(help="Seconds after which no further pair is measured; as many for steps of --run.")
    ] = 120.0,
    rounds: Annotated[
        int, typer.Option(help="Trials of each kind per pair, 12 where time is short; the first two are dropped.")
    ] = 40,
    timeout: Annotated[
        float, typer.Option(help="Seconds without a finished pair or step after which the run ends.")
    ] = 120.0,
    json: Annotated[str | None, typer.Option(help="Write the choices as JSON; - prints them (and only them).")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No summary and no progress.")] = False,
) -> None:
    """Which mechanism for each of my pairs of operations? Needs torch, and 2 GPUs or --device cpu."""
    for option, excluded in _EXCLUDED.items():
        if _given(context, option):
            _refuse(context, option, excluded)
    if machine:
        _tune_machine(out or Path("profile.json"), device=device, nproc=nproc, timeout=timeout, quiet=quiet)
        return
    if (source is None) == (run is None):
        raise Misconfigured(
            "give one of SOURCE (pairs.toml or traces; with --to a tuning), --run 'torchrun ... train.py', "
            "and --machine for a profile"
        )
    if to is not None:
        assert source is not None, "--to goes without --run"
        _export(source, to, out, html)
        return
    out, json_path = out or Path("counterpoint.toml"), json_file(json)
    _check_outputs(source, out, html, json_path)
    with ending_cleanly(), progress(quiet, "starting ranks") as tell:
        if source is not None:
            from counterpoint.tuning import api

            tuned = api.tune(
                source, device=device or "cuda", world_size=nproc, profile=profile, budget_s=budget, rounds=rounds,
                timeout_s=timeout, progress=tell,
            )  # fmt: skip
        else:
            from counterpoint.tuning.script import tune_script

            tuned = tune_script(
                run or "", device=device, profile=profile, budget_s=budget, rounds=rounds, timeout_s=timeout,
                progress=tell,
            )  # fmt: skip
        _write(tuned, out, html, json_path)
    with adding(f"; the choices are in {out}"):
        if json == "-":
            write_json(tuned, None)
        elif not quiet:
            _print(tuned, out, html, json_path)


def _given(context: typer.Context, option: str) -> bool:
    source = context.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"


def _refuse(context: typer.Context, option: str, excluded: tuple[str, ...]) -> None:
    """Raise Misconfigured if an option was given that has no effect beside `option`."""
    wrong = next((name for name in excluded if _given(context, name)), None)
    if wrong is not None:
        name = "SOURCE" if wrong == "source" else f"--{wrong}"
        raise Misconfigured(f"{name} with --{option}: {_WHY[option]}; leave {name} out")


def _tune_machine(out: Path, *, device: str | None, nproc: int | None, timeout: float, quiet: bool) -> None:
    """Measure this machine, write its profile to `out`, and print the profile."""
    check_outputs(out)
    with ending_cleanly(), progress(quiet, "starting ranks") as tell:
        from counterpoint.machine.profile import profile_json
        from counterpoint.tuning.machine import tune_machine

        found = tune_machine(device=device or "cuda", world_size=nproc, timeout_s=timeout, progress=tell)
        write_file(out, profile_json(found))
    if not quiet:
        print(found, *(f"{group} left out: {why}" for group, why in found.left_out.items()), sep="\n")
        print(f"wrote {out}: export COUNTERPOINT_PROFILE={out}")


def _export(source: Path, form: str, out: Path | None, html: Path | None) -> None:
    """Write a tuning in another format, to a file or to standard output, and as a page if `html` is given."""
    from counterpoint.tuned.file import read_tuned
    from counterpoint.tuning.exporters import export

    _check_outputs(source, out, html)
    tuned = read_tuned(source)
    text = export(tuned, form, str(source))
    if html is not None:
        _draw(tuned, html)
    if out is None:
        sys.stdout.write(text)
    else:
        write_file(out, text.encode())


def _write(tuned: Tuned, out: Path, html: Path | None, json_path: Path | None) -> None:
    from counterpoint.tuned.file import tuned_toml

    write_file(out, tuned_toml(tuned).encode())
    if html is not None:
        _draw(tuned, html)
    if json_path is not None:
        write_json(tuned, json_path)


def _draw(tuned: Tuned, html: Path) -> None:
    from counterpoint.rendering.tuning_tables import write_tuning_page

    with writing(html):
        write_tuning_page(html, tuned)


def _print(tuned: Tuned, out: Path, *others: Path | None) -> None:
    """Print the choices and the names of written files; if a pair gets a mechanism, say last how to use the tuning."""
    from counterpoint.rendering.tuning_tables import render_tuned

    show(lambda console: render_tuned(tuned, console), (*others, out))
    if any(not pair.is_left for pair in tuned.pair):
        named = f"COUNTERPOINT_TUNED={shlex.quote(str(out))}"
        print(f'use it: {named} torchrun ..., or counterpoint.overlap(model, tuned="{out}")')


def _check_outputs(source: Path | None, *outputs: Path | None) -> None:
    """Raise Misconfigured if an output cannot be written, or would replace the source or another output."""
    check_outputs(*outputs)
    paths = [path.resolve() for path in (source, *outputs) if path is not None]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None and not is_stream(twice):
        raise Misconfigured(f"{twice.name} is named twice; give SOURCE and each output a file of its own")
