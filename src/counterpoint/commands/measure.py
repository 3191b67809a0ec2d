"""Run `counterpoint measure`: parse, call, print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from counterpoint.commands.interruption import adding, ending_cleanly
from counterpoint.commands.terminal import check_outputs, json_file, progress, show, write_file, write_json, writing
from counterpoint.errors import Misconfigured
from counterpoint.rendering.files import is_stream

if TYPE_CHECKING:
    from counterpoint.records.measurement import Measurement


IN_A_FILE = 140  # columns where output is no terminal: mechanisms with three controls fit in a line


def measure(
    suite: Annotated[str, typer.Argument(help="quick, pairs, conccl, resource-aware, forum, tensor, expert, machine.")],
    mechanism: Annotated[
        list[str] | None, typer.Option(help="Only this mechanism, as in nccl+max_ctas=8; may be repeated.")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu: the same pairs with gloo, to try it anywhere.")] = "cuda",
    nproc: Annotated[int | None, typer.Option(help="Ranks: by default all GPUs; 2 on CPUs.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write all results as JSON, and a table next to it (.md).")] = None,
    html: Annotated[
        Path | None, typer.Option(help="All tables, and hidden drawn by ratio and order: one self-contained page.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Trials of each kind per pair; the first two are dropped.")] = 12,
    timeout: Annotated[float, typer.Option(help="Seconds without a finished pair after which the run ends.")] = 120.0,
    json: Annotated[str | None, typer.Option(help="Write all results as JSON; - prints them (and only them).")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the last line; no progress.")] = False,
) -> None:
    """How much overlap does this machine allow, by which mechanism? Needs torch, and 2 GPUs or --device cpu."""
    json_path = json_file(json)
    check_outputs(out, html, json_path)
    if out is not None and out.suffix == ".md":
        raise Misconfigured(
            f"--out {out} is where the table goes; name the JSON file, as in {out.with_suffix('.json')}"
        )
    table = None if out is None or is_stream(out) else out.with_suffix(".md")
    check_outputs(table)
    if html is not None and html.resolve() in {path.resolve() for path in (table, table and out) if path}:
        raise Misconfigured(f"--html {html} is where --out puts its results or their table; name another file")
    with ending_cleanly(), progress(quiet, "starting ranks") as tell:
        from counterpoint.measurement import api

        measured = api.measure(
            suite, device=device, world_size=nproc, mechanisms=mechanism, rounds=rounds, timeout_s=timeout,
            progress=tell,
        )  # fmt: skip
        _write(measured, out, table, html)
        if json_path is not None:
            write_json(measured, json_path)
    with adding(f"; the results are in {out}" if out else ""):
        if json == "-":
            write_json(measured, None)
        else:
            _print(measured, out, (out, table, html), quiet=quiet)


def _write(measured: Measurement, out: Path | None, table: Path | None, html: Path | None) -> None:
    if out is not None:
        import msgspec

        text = msgspec.json.encode(measured)
        for first_key in (b'{"scenario"', b'{"what"'):  # a line for each row; in a string the quotes are escaped
            text = text.replace(first_key, b"\n" + first_key)
        write_file(out, text + b"\n")
    if table is not None:
        from counterpoint.rendering.measurement_tables import markdown

        write_file(table, markdown(measured).encode())
    if html is not None:
        from counterpoint.rendering.measurement_html import write_overlap_plot

        with writing(html):
            write_overlap_plot(html, measured)


def _print(measured: Measurement, out: Path | None, wrote: Sequence[Path | None], *, quiet: bool) -> None:
    import msgspec

    from counterpoint.rendering.measurement_tables import summary

    if not quiet:
        from counterpoint.rendering.measurement_tables import render

        show(lambda console: render(measured, console), wrote, in_a_file=IN_A_FILE)
    print(msgspec.json.encode(summary(measured, None if out is None else str(out))).decode(), flush=True)
