"""Run `counterpoint diagnose`: parse, call, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from counterpoint.commands.terminal import check_outputs, json_file, progress, write_json, writing
from counterpoint.errors import BadTrace, Misconfigured

if TYPE_CHECKING:
    from counterpoint.diagnosis.api import Result
    from counterpoint.records.diagnosis import Diagnosis


def diagnose(
    traces: Annotated[
        list[str], typer.Argument(help="File, folder, glob, tar or zip of traces, one per rank; - is standard input.")
    ],
    out: Annotated[Path | None, typer.Option(help="Write the report: one self-contained HTML file.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write a timeline for ui.perfetto.dev.")] = None,
    json: Annotated[str | None, typer.Option(help="Write the diagnosis as JSON; - prints it (and only it).")] = None,
    gate: Annotated[list[str] | None, typer.Option(help="A bound, as in 'exposed_comm<8%'; may be repeated.")] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="An earlier --json file that gates must not fall behind.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(help="How far a gate may fall behind the baseline, in %; 5 if it is not given.", min=0.0),
    ] = None,
    engine: Annotated[str, typer.Option(help="Who reads the ranks: local or dask.")] = "local",
    scheduler: Annotated[str | None, typer.Option(help="Address of the Dask scheduler (tcp://HOST:8786).")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes of engine local; by default one per core.")] = None,
    max_trace_gb: Annotated[float, typer.Option(help="Most that one trace may expand to, in GiB.", min=0.001)] = 8.0,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="All findings, reasons and tables.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No summary and no progress.")] = False,
) -> None:
    """Why does my step wait? Diagnose the traces of one or all ranks of a job; needs no GPU and no torch."""
    from counterpoint.diagnosis import api
    from counterpoint.diagnosis.engine import Engine
    from counterpoint.diagnosis.gate import check_gate, parse_gate
    from counterpoint.trace.source import Limits

    gates = [parse_gate(text) for text in gate or []]
    if baseline is not None and not gates:
        raise Misconfigured("--baseline is what --gate compares with; give at least one --gate")
    if tolerance is not None and baseline is None:
        raise Misconfigured("--tolerance is how far a gate may fall behind --baseline; give one")
    before = _read_baseline(baseline) if baseline is not None else None
    limits = Limits(trace_bytes=int(max_trace_gb * (1 << 30)))
    chosen = Engine(name=engine, workers=workers, scheduler=scheduler)
    json_path = json_file(json)
    check_outputs(out, perfetto, json_path)
    with progress(quiet, "looking for traces") as tell:
        result = api.diagnose(traces, engine=chosen, limits=limits, progress=tell)
        if out is not None or perfetto is not None:
            tell(0, 0, "drawing")
            _draw(result, out, perfetto)
        if json is not None:
            write_json(result.diagnosis, json_path)
    if not quiet and json != "-":
        _summary(result.diagnosis, [p for p in (out, perfetto) if p is not None], verbose=verbose)
    allowed = (5.0 if tolerance is None else tolerance) / 100
    checks = [check_gate(g, result.diagnosis, before, allowed) for g in gates]
    for check in checks:
        print(f"gate {check.text}: {'pass' if check.passed else 'FAIL'} ({check.reason})", file=sys.stderr)
    if not all(check.passed for check in checks):
        raise typer.Exit(1)


def _draw(result: Result, out: Path | None, perfetto: Path | None) -> None:
    if out is not None:
        from counterpoint.report.diagnosis_html import write_html

        with writing(out):
            write_html(out, result.diagnosis, result.lanes)
    if perfetto is not None:
        from counterpoint.report.diagnosis_perfetto import write_perfetto

        with writing(perfetto):
            write_perfetto(perfetto, result.diagnosis, result.stream_lanes)


def _summary(diagnosis: Diagnosis, written: list[Path], *, verbose: bool) -> None:
    from rich.console import Console

    from counterpoint.report.diagnosis_terminal import render

    console = Console(soft_wrap=False)
    render(diagnosis, console, verbose=verbose)
    for path in written:
        console.print(f"wrote {path}", markup=False, highlight=False)


def _read_baseline(path: Path) -> Diagnosis:
    import msgspec

    from counterpoint.records.diagnosis import SCHEMA, Diagnosis

    try:
        found = msgspec.json.decode(path.read_bytes(), type=Diagnosis)
    except OSError as error:
        raise BadTrace(f"the baseline cannot be read: {error.strerror}", path=str(path)) from None
    except msgspec.DecodeError as error:
        raise BadTrace(f"not a diagnosis written by --json: {error}", path=str(path)) from None
    if found.schema != SCHEMA:
        raise BadTrace(f"schema {found.schema!r}; this version compares {SCHEMA}", path=str(path))
    return found
