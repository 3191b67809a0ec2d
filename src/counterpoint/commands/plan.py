"""`counterpoint plan`: parse, call, print."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from counterpoint.commands.terminal import check_folders
from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.what_if import WHAT_IFS

if TYPE_CHECKING:
    from counterpoint.records.prediction import Prediction

__all__ = ["plan"]

MIN_WIDTH = 80


def _with_what_ifs(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each what-if, which it gets as `asked`: --nodes 16 as {"nodes": "16"}."""

    def wrapped(**given: Any) -> None:
        asked = {name: given.pop(name) for name in WHAT_IFS}
        command(asked={name: value for name, value in asked.items() if value is not None}, **given)

    own = [each for each in inspect.signature(command, eval_str=True).parameters.values() if each.name != "asked"]
    more = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                str | None,
                typer.Option(metavar="VALUE", help=f"{what.means}; {what.unit}.", rich_help_panel="What if"),
            ],
        )
        for name, what in WHAT_IFS.items()
    ]
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own] + more
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
    wrapped.__doc__, wrapped.__name__ = command.__doc__, command.__name__
    return wrapped


@_with_what_ifs
def plan(
    asked: Mapping[str, str],
    job: Annotated[Path | None, typer.Argument(help="A job as TOML, such as those of examples/plan.")] = None,
    from_trace: Annotated[
        Path | None, typer.Option(help="Instead of a job: traces of all ranks of a real one, as diagnose reads them.")
    ] = None,
    recorded_on: Annotated[
        str | None, typer.Option(help="With --from-trace: the network it was recorded on; one node needs none.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Another value for a field of the job, as in parallel.tp=4.")
    ] = None,
    sweep: Annotated[
        list[str] | None, typer.Option(help="A curve over values of a what-if or a field: nodes=1,2,4,8.")
    ] = None,
    search: Annotated[bool, typer.Option("--search", help="The fastest way to divide the job that fits.")] = False,
    explain: Annotated[
        str | None, typer.Option(help="Why a number is what it is: step, exposed_comm, mfu, ...")
    ] = None,
    topology: Annotated[
        Path | None, typer.Option(help="Where should the ranks be? Slurm's or Topograph's file, or a measured matrix.")
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(help="With --topology: the job's hosts in their order, as in n[1-4],n7.")
    ] = None,
    launch_files: Annotated[
        Path | None, typer.Option(help="With --topology: a folder for rankfile, hostfile, SLURM_HOSTFILE, DeviceMesh.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page: timeline, scaling curves, sensitivities.")] = None,
    json: Annotated[str | None, typer.Option(help="- prints the prediction as JSON (and only it).")] = None,
) -> None:
    """What would more nodes, accumulation, compression, another placement do? Needs no GPU."""
    if json not in (None, "-"):
        raise Misconfigured(f"--json {json}; only - is allowed, which prints")
    if explain is not None and json is not None:
        raise Misconfigured("--explain prints text, --json - only JSON: give one of them")
    check_folders(html)
    if topology is None and (hosts or launch_files) is not None:
        raise Misconfigured("--hosts and --launch-files are about --topology: give it, too")
    if launch_files is not None and not launch_files.is_dir():
        raise Misconfigured(f"--launch-files {launch_files}: there is no such folder")
    if from_trace is not None:
        given = {
            "a job": job, "--set": set_, "--sweep": sweep, "--search": search or None, "--explain": explain,
            "--topology": topology,
        }  # fmt: skip
        found = _from_trace(
            from_trace, recorded_on, asked, [name for name, value in given.items() if value is not None]
        )
    elif recorded_on is not None:
        raise Misconfigured("--recorded-on is about --from-trace: give both, or a network in the job")
    elif job is None:
        raise Misconfigured("there is nothing to plan: give a job, such as those of examples/plan, or --from-trace")
    else:
        tables, changes = _changed(job, asked, set_ or [])
        if explain is not None:
            _explain(tables, explain)
            return
        found = _answered(tables, changes, sweep or [], search=search, detailed=html is not None)
        if topology is not None:
            found = _placed(found, tables, topology, hosts, launch_files)
    if html is not None:
        from counterpoint.report.plan_page import write_plan_page

        write_plan_page(html, found)
    _print(found, html, json=json == "-")


def _from_trace(traces: Path, recorded_on: str | None, asked: Mapping[str, str], also: list[str]) -> Prediction:
    from counterpoint.diagnose.api import diagnose
    from counterpoint.plan.trace_answer import answer_from_trace

    if also:
        raise Misconfigured(f"{also[0]} with --from-trace: a trace has no fields to change; give a job instead of it")
    return answer_from_trace(diagnose(str(traces)).diagnosis, recorded_on=recorded_on, asked=asked)


def _explain(tables: dict[str, Any], word: str) -> None:
    from counterpoint.plan.explain import explain
    from counterpoint.plan.job_file import parse_job

    print("\n".join(explain(parse_job(tables), word)))


def _changed(job: Path, asked: Mapping[str, str], sets: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The job's tables after fields and then what-ifs were changed, and all that was asked."""
    from counterpoint.plan.job_file import read_tables
    from counterpoint.plan.what_if import edited

    tables = read_tables(job)
    changes = dict(_assignment("--set", text) for text in sets) | dict(asked)
    for name, value in changes.items():
        tables = edited(tables, name, value)
    return tables, changes


def _assignment(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise Misconfigured(f"{option} {printable(text)}: give FIELD=VALUE, as in parallel.tp=4")
    return name.strip(), value.strip()


def _values(text: str) -> tuple[str, list[str]]:
    name, values = _assignment("--sweep", text)
    return name, [value.strip() for value in values.split(",")]


def _answered(
    tables: dict[str, Any], changes: Mapping[str, str], sweeps: list[str], *, search: bool, detailed: bool
) -> Prediction:
    import msgspec

    from counterpoint.plan.answer import answer, curve, searched
    from counterpoint.plan.job_file import parse_job

    found = answer(tables, asked=changes, detailed=detailed)
    curves = found.curves + tuple(curve(tables, *_values(text)) for text in sweeps)
    result = None
    if search:
        from counterpoint.plan.search import search as fastest

        result = searched(fastest(parse_job(tables)))
    return msgspec.structs.replace(found, curves=curves, search=result)


def _placed(
    found: Prediction, tables: dict[str, Any], topology: Path, hosts: str | None, folder: Path | None
) -> Prediction:
    import msgspec

    from counterpoint.plan.job_file import parse_job
    from counterpoint.plan.place_answer import place_job
    from counterpoint.report.files import replacing

    placement, files = place_job(parse_job(tables), topology, hosts)
    if folder is not None:
        for file in files:
            with replacing(folder / file.name) as opened:
                opened.write(file.text.encode())
    return msgspec.structs.replace(found, placement=placement)


def _print(found: Prediction, html: Path | None, *, json: bool) -> None:
    import msgspec

    if json:
        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
        sys.stdout.flush()
        return
    from rich.console import Console

    from counterpoint.report.plan_table import render_prediction

    console = Console(soft_wrap=False)
    console.width = max(console.width, MIN_WIDTH)
    render_prediction(found, console)
    if html is not None:
        console.print(f"wrote {html}", markup=False, highlight=False, soft_wrap=True)
