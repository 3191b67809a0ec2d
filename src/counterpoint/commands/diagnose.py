"""Run `counterpoint diagnose`: parse, call, print."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from counterpoint.commands.terminal import check_outputs, json_file, progress, show, write_file, write_json, writing
from counterpoint.errors import Misconfigured

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from counterpoint.diagnosis.api import Result
    from counterpoint.diagnosis.reading.digest import Engine
    from counterpoint.records.diagnosis import Comparison, Diagnosis
    from counterpoint.trace.source import Limits


def diagnose(
    traces: Annotated[
        list[str],
        typer.Argument(help="File, folder, glob or tar of traces, one per rank; or dumps of NCCL's flight recorder."),
    ],
    out: Annotated[Path | None, typer.Option(help="Write the report: one self-contained HTML file.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write a timeline for ui.perfetto.dev.")] = None,
    json: Annotated[str | None, typer.Option(help="Write the diagnosis as JSON; - prints it (and only it).")] = None,
    gate: Annotated[
        list[str] | None, typer.Option(help="A bound, as in 'exposed_comm<8%' or 'step<against+5%'; may be repeated.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="Traces or --json file of an earlier run: say what grew; --json then writes the comparison."),
    ] = None,
    nccl_log: Annotated[
        list[str] | None,
        typer.Option(help="Logs of NCCL_DEBUG=INFO or NCCL Inspector: file, folder or glob; may be repeated."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="GPUs of the job: say what exposed communication costs a day.")
    ] = None,
    price_per_gpu_hour: Annotated[
        float | None, typer.Option(help="The same in money; --gpus is then by default one for each rank.")
    ] = None,
    operators: Annotated[
        bool, typer.Option("--operators", help="Show which operators and kernels take the GPU's time, and their rates.")
    ] = False,
    save_operators: Annotated[
        Path | None, typer.Option(help="Write operators and kernels to a file: FILE.csv or FILE.parquet.")
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
    from counterpoint.diagnosis.comparison import check_gate, parse_gate
    from counterpoint.diagnosis.cost import with_cost
    from counterpoint.diagnosis.operator_file import check_name, operators_file
    from counterpoint.diagnosis.reading.digest import Engine
    from counterpoint.rendering.operator_tables import ON_PAGE, ON_TERMINAL
    from counterpoint.trace.flight_recorder import find_dumps
    from counterpoint.trace.source import Limits

    gates = [parse_gate(text) for text in gate or []]
    if against is None and any(g.against for g in gates):
        raise Misconfigured("a gate is against an earlier run; name it by --against RUN")
    limits = Limits.of_gb(max_trace_gb)
    chosen = Engine(name=engine, workers=workers, scheduler=scheduler)
    json_path = json_file(json)
    check_outputs(out, perfetto, json_path, save_operators)
    check_name(save_operators)
    if dumps := find_dumps(traces):
        _refuse_with_dumps(out, perfetto, gate, against, operators, save_operators, nccl_log, gpus, price_per_gpu_hour)
        _hang(dumps, json, json_path, quiet=quiet)
        return
    with progress(quiet, "looking for traces") as tell:
        earlier = None if against is None else _earlier(against, chosen, limits, tell)
        result = api.diagnose(traces, engine=chosen, limits=limits, progress=tell, nccl_logs=nccl_log or ())
        if gpus is not None or price_per_gpu_hour is not None:
            costed = with_cost(result.diagnosis, gpus=gpus, price_per_gpu_hour=price_per_gpu_hour)
            result = replace(result, diagnosis=costed)
        compared = result.against(earlier) if earlier is not None else None
        if out is not None or perfetto is not None:
            tell(0, 0, "drawing")
            _draw(result, out, perfetto)
        if save_operators is not None:
            write_file(save_operators, operators_file(result.diagnosis.operators, save_operators.suffix))
        if json is not None:
            write_json(compared or result.diagnosis, json_path)
    if not quiet and json != "-":
        written = [p for p in (out, perfetto, save_operators) if p is not None]
        most = 0 if not operators else ON_PAGE if verbose else ON_TERMINAL
        _summary(result.diagnosis, compared, written, verbose=verbose, operators=most)
    checks = [check_gate(g, result.diagnosis, earlier) for g in gates]
    for check in checks:
        print(f"gate {check.text}: {'pass' if check.passed else 'FAIL'} ({check.reason})", file=sys.stderr)
    if not all(check.passed for check in checks):
        raise typer.Exit(1)


def _draw(result: Result, out: Path | None, perfetto: Path | None) -> None:
    if out is not None:
        from counterpoint.rendering.diagnosis_html import write_html

        with writing(out):
            write_html(out, result.diagnosis, result.lanes)
    if perfetto is not None:
        from counterpoint.rendering.diagnosis_perfetto import write_perfetto

        with writing(perfetto):
            write_perfetto(perfetto, result.diagnosis, result.stream_lanes)


def _refuse_with_dumps(*options: object) -> None:
    """Raise Misconfigured if an option is given that has no effect on the diagnosis of a hang."""
    if any(options):
        raise Misconfigured(
            "flight-recorder dumps have no page, timeline, gate, comparison, operators, log or cost; leave the option"
        )


def _hang(dumps: list[Path], json: str | None, json_path: Path | None, *, quiet: bool) -> None:
    """Print which ranks are missing in a hang, and write the record to `json_path` if `json` is given."""
    from counterpoint.diagnosis.hang import diagnose_hang
    from counterpoint.rendering.diagnosis_terminal import render_hang

    hang = diagnose_hang(dumps)
    if json is not None:
        write_json(hang, json_path)
    if not quiet and json != "-":
        show(lambda console: render_hang(hang, console))


def _earlier(source: str, engine: Engine, limits: Limits, progress: Callable[[int, int, str], None]) -> Diagnosis:
    from counterpoint.diagnosis import api
    from counterpoint.diagnosis.comparison import is_diagnosis, read_diagnosis

    if is_diagnosis(source):
        return read_diagnosis(Path(source))
    return api.diagnose(source, engine=engine, limits=limits, progress=progress).diagnosis


def _summary(
    diagnosis: Diagnosis, compared: Comparison | None, written: list[Path], *, verbose: bool, operators: int
) -> None:
    from counterpoint.rendering.comparison_terminal import render_comparison
    from counterpoint.rendering.diagnosis_terminal import render

    def both(console: Console) -> None:
        if compared is None or verbose:
            render(diagnosis, console, verbose=verbose, operators=operators)
        if compared is not None:
            render_comparison(compared, console, operators=operators)

    show(both, written)
