"""Run `counterpoint plan`: parse, call, print."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from counterpoint.commands.terminal import check_outputs, json_file, progress, show, write_file, write_json, writing
from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.job.changes import build_job, swept

if TYPE_CHECKING:
    from counterpoint.plan.job.job import Job
    from counterpoint.plan.observed import Anchor
    from counterpoint.records.prediction import Prediction, SearchResult


BEST = 10  # ways that --search lists


def plan(
    job: Annotated[
        Path | None,
        typer.Argument(
            help="A job as TOML (examples/plan), a config.json of Hugging Face, or the list of arguments that a run of "
            "Megatron-LM prints."
        ),
    ] = None,
    from_trace: Annotated[
        Path | None,
        typer.Option(help="Start from traces of all ranks, as diagnose reads them; with a job, they are --observed."),
    ] = None,
    observed: Annotated[
        str | None, typer.Option(help="Judge a step that the job took, as 9.2s, and shift what-ifs by its error.")
    ] = None,
    recorded_on: Annotated[
        str | None, typer.Option(help="Name the network that --from-trace was recorded on; one node needs none.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Train on another GPU; the network stays.")] = None,
    network: Annotated[str | None, typer.Option(help="Join the GPUs by another network, named or a file.")] = None,
    nodes: Annotated[str | None, typer.Option(help="Train on so many nodes, with the same batch.")] = None,
    weak_nodes: Annotated[
        str | None, typer.Option(help="Train on so many nodes; the batch grows with their number.")
    ] = None,
    mechanism: Annotated[
        str | None, typer.Option(help="Change how collectives overlap with compute: nccl, zero_sm, ideal, ...")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Give a field of the job another value, as in parallel.tp=4.")
    ] = None,
    sweep: Annotated[
        list[str] | None, typer.Option(help="Draw a curve over values of --nodes or a field: nodes=1,2,4,8.")
    ] = None,
    search: Annotated[bool, typer.Option("--search", help="Find the fastest way to divide the job that fits.")] = False,
    fix: Annotated[
        list[str] | None,
        typer.Option(help="Let --search try only these values of an axis, as in tp=8 or micro_batch=1,2."),
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(help="Let --search find the fastest way for each number of GPUs, as in 64,128,256.")
    ] = None,
    top: Annotated[
        int | None, typer.Option(help="List so many ways of --search; 10 unless given.", min=1, max=10_000)
    ] = None,
    objective: Annotated[
        str | None, typer.Option(help="Rank the numbers of --gpus by step (left out), cost or goodput.")
    ] = None,
    min_fits: Annotated[
        float | None, typer.Option(help="Let --search list only ways that fit in memory with this probability, as 0.9.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the ways that --search lists as CSV.")] = None,
    winner: Annotated[
        Path | None, typer.Option(help="Write the job in the fastest way of --search as TOML, to go on from.")
    ] = None,
    explain: Annotated[
        str | None, typer.Option(help="Say why a number is what it is: step, exposed_comm, mfu, ...")
    ] = None,
    topology: Annotated[
        Path | None,
        typer.Option(help="Place the ranks on hosts of Slurm's or Topograph's file, or of a measured matrix."),
    ] = None,
    topology_name: Annotated[
        str | None, typer.Option(help="Choose one topology of a topology.yaml; else the cluster's default is taken.")
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(help="List the job's hosts for --topology in their order, as in n[1-4],n7.")
    ] = None,
    launch_files: Annotated[
        Path | None,
        typer.Option(help="Write rankfile, hostfile, SLURM_HOSTFILE and DeviceMesh of --topology to this folder."),
    ] = None,
    write_job: Annotated[
        Path | None, typer.Option(help="Write the job, as it is after all changes, as TOML to go on from.")
    ] = None,
    fit: Annotated[
        list[str] | None,
        typer.Option(metavar="[OPERATION=]FILE", help="Fit your own network to what nccl-tests printed; no job."),
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Say the ranks of --fit where its files do not.")] = None,
    write_network: Annotated[
        Path | None, typer.Option(help="Write the network of --fit as JSON, for [cluster] network of a job.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page: timeline, scaling curves, sensitivities.")] = None,
    json: Annotated[str | None, typer.Option(help="Write the prediction as JSON; - prints it (and only it).")] = None,
) -> None:
    """Predict what more nodes, accumulation, compression or another placement would do to a job; this needs no GPU."""
    flags = {"gpu": gpu, "network": network, "nodes": nodes, "weak_nodes": weak_nodes, "mechanism": mechanism}
    asked = _changes(set_ or [], {name: value for name, value in flags.items() if value is not None})
    others = {"--json": json, "--html": html, "--search": search or None, "--sweep": sweep, "--topology": topology}
    others |= {"--observed": observed, "--from-trace": from_trace}
    _check_explain(explain, _named(others))
    json_path = json_file(json)
    check_outputs(html, json_path, csv, winner)
    looking = _looking(search, _Looking(tuple(fix or ()), gpus, top, csv, winner, min_fits, objective))
    _check_placement(topology, topology_name, hosts, launch_files)
    if fit:
        given = {
            "a job": job, "--from-trace": from_trace, "--recorded-on": recorded_on, "--set": set_, "--sweep": sweep,
            "--search": search or None, "--explain": explain, "--topology": topology, "--html": html,
            "--write-job": write_job, "--observed": observed,
        }  # fmt: skip
        _fit(fit, ranks, asked, _named(given), write_network, json, json_path)
        return
    _check_fit(ranks, write_network)
    if observed is not None and (job is None or from_trace is not None):
        raise Misconfigured("--observed is the step of a job: give it with a job, and either it or --from-trace")
    if from_trace is not None and job is None:
        given = {
            "--sweep": sweep, "--search": search or None, "--explain": explain, "--topology": topology,
            "--write-job": write_job,
        }  # fmt: skip
        found = _from_trace(from_trace, recorded_on, asked, _named(given))
    elif recorded_on is not None:
        raise Misconfigured("--recorded-on is about --from-trace without a job: give both, or a network in the job")
    elif job is None:
        raise Misconfigured("there is nothing to plan: give a job, such as those of examples/plan, or --from-trace")
    else:
        request = _Request(job, asked, _observed_us(observed, from_trace))
        if write_job is not None:
            request.write_job(write_job)
        if explain is not None:
            request.explain(explain)
            return
        found = request.answer(sweep or [], looking, detailed=html is not None)
        if topology is not None:
            found = request.placed(found, topology, topology_name, hosts, launch_files)
    _write(found, html, json, json_path)


def _observed_us(text: str | None, traces: Path | None) -> float | None:
    """Return the µs of a job's observed step, from --observed or else from the traces; None without both."""
    if traces is None:
        from counterpoint.plan.observed import read_duration

        return None if text is None else read_duration(text)
    from counterpoint.diagnosis.api import diagnose
    from counterpoint.plan.from_trace import measured_step

    return measured_step(diagnose(str(traces)).diagnosis).step_us


def _named(given: Mapping[str, object]) -> list[str]:
    """Return the names of the options that were given a value."""
    return [name for name, value in given.items() if value is not None]


def _check_explain(explain: str | None, also: list[str]) -> None:
    if explain is not None and also:
        raise Misconfigured(f"--explain prints a formula and nothing else: give it, or {also[0]}, not both")


def _check_fit(ranks: int | None, path: Path | None) -> None:
    """Raise Misconfigured if options of --fit are given without --fit."""
    if ranks is not None or path is not None:
        raise Misconfigured("--ranks and --write-network are about --fit: give what nccl-tests printed, too")


def _fit(
    files: list[str], ranks: int | None, asked: Mapping[str, str], also: list[str], path: Path | None,
    json: str | None, json_path: Path | None,
) -> None:  # fmt: skip
    """Fit a network to nccl-tests output, print the errors of the fit, and write the network to `path`."""
    if also or asked.keys() - {"gpu", "network"}:
        other = (also or [f"--{name.replace('_', '-')}" for name in asked if name not in ("gpu", "network")])[0]
        raise Misconfigured(f"--fit with {other}: it fits a network and plans nothing; name the network in a job then")
    check_outputs(path)
    if path is not None and path.suffix != ".json":
        raise Misconfigured(f"--write-network {printable(str(path), 200)}: give a name that ends with .json")
    from counterpoint.plan.network.fit import fit_network
    from counterpoint.rendering.plan_tables import render_network_fit

    found = fit_network(files, network=asked.get("network"), gpu=asked.get("gpu"), ranks=ranks)
    if path is not None:
        write_json(found.network, path)
    if json is not None:
        write_json(found, json_path)
    if json != "-":
        show(lambda console: render_network_fit(found.errors, found.host_bound, str(path) if path else None, console))


def _check_placement(topology: Path | None, name: str | None, hosts: str | None, launch_files: Path | None) -> None:
    if topology is None and (hosts or launch_files or name) is not None:
        raise Misconfigured("--topology-name, --hosts and --launch-files are about --topology: give it, too")
    if launch_files is not None:
        with writing(launch_files):
            above = next(each for each in (launch_files, *launch_files.absolute().parents) if each.exists())
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise Misconfigured(f"--launch-files {launch_files}: {above} is no folder that may be written to")


def _from_trace(traces: Path, recorded_on: str | None, asked: Mapping[str, str], also: list[str]) -> Prediction:
    from counterpoint.diagnosis.api import diagnose
    from counterpoint.plan.from_trace import answer_from_trace

    if also:
        raise Misconfigured(f"{also[0]} with --from-trace: a trace is no job; give a job instead of it")
    return answer_from_trace(diagnose(str(traces)).diagnosis, recorded_on=recorded_on, asked=asked)


def _changes(texts: list[str], flags: Mapping[str, str]) -> dict[str, str]:
    """Return the changes by name, from flags and --set; raise Misconfigured where a name has two values."""
    changes = dict(flags)
    for text in texts:
        name, value = _assignment("--set", text)
        if changes.setdefault(name, value) != value:
            raise Misconfigured(f"--set {printable(name, 80)} comes twice, with two values: give one of them")
    return changes


def _assignment(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise Misconfigured(f"{option} {printable(text)}: give FIELD=VALUE, as in parallel.tp=4")
    return name.strip(), value.strip()


class _Looking(NamedTuple):
    """Holds the settings of --search and the files that it writes."""

    fix: tuple[str, ...]
    gpus: str | None
    top: int | None
    csv: Path | None
    winner: Path | None
    min_fits: float | None
    objective: str | None

    def results(self, job: Job, anchor: Anchor | None) -> tuple[SearchResult, ...]:
        """Return the search's results, and write the files that were asked for; `anchor`: the job's observed step."""
        from counterpoint.plan.job.job import job_toml
        from counterpoint.plan.search.search import chosen_job, search_each
        from counterpoint.plan.search.space import read_fixed
        from counterpoint.rendering.search_csv import search_csv

        counts = [None] if self.gpus is None else _numbers("--gpus", self.gpus)
        with progress(quiet=False, first="search") as tell:

            def told(done: int, total: int, fastest_us: float | None) -> None:
                tell(done, total, "search" if fastest_us is None else f"search: {fastest_us / 1e3:,.1f} ms so far")

            found = search_each(
                job, counts, best=self.top or BEST, fixed=read_fixed(self.fix), progress=told, anchor=anchor,
                min_fits=self.min_fits, objective=self.objective or "step",
            )  # fmt: skip
        if self.csv is not None:
            write_file(self.csv, search_csv(found).encode())
        if self.winner is not None:
            write_file(self.winner, job_toml(chosen_job(job, found[0])).encode())
        return found


def _looking(search: bool, asked: _Looking) -> _Looking | None:
    """Return the settings of a search, None without --search; raise Misconfigured for flags that need --search."""
    given = [name.replace("_", "-") for name, value in asked._asdict().items() if value not in (None, ())]
    if given and not search:
        raise Misconfigured(f"--{given[0]} is about --search: give it, too")
    return asked if search else None


def _numbers(flag: str, text: str) -> list[int | None]:
    """Return the numbers in a text such as "8,16,32"."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < len(part) < 9 and int(part) for part in parts):
        raise Misconfigured(f"{flag} {printable(text, 80)}: give numbers from 1, as in 64,128,256")
    return [int(part) for part in parts]


class _Request:
    """Holds the job read from a file, with all changes that were asked for."""

    def __init__(self, path: Path, changes: dict[str, str], observed_us: float | None) -> None:
        from counterpoint.plan.job.foreign.read_job_file import read_job_file
        from counterpoint.plan.observed import Anchor

        self.changes = changes
        self.tables, self.notes = read_job_file(path, changes)
        self.job = build_job(self.tables, changes)
        self.anchor = None if observed_us is None else Anchor.of(build_job(self.tables, {}), observed_us)

    def write_job(self, path: Path) -> None:
        from counterpoint.plan.job.job import job_toml

        write_file(path, job_toml(self.job).encode())

    def explain(self, word: str) -> None:
        from counterpoint.plan.explain import explain

        print("\n".join(explain(self.job, word)))

    def answer(self, sweeps: list[str], looking: _Looking | None, *, detailed: bool) -> Prediction:
        from msgspec.structs import replace

        from counterpoint.plan.answer import answer, curve

        found = answer(self.job, asked=self.changes, detailed=detailed, anchor=self.anchor)
        curves = list(found.curves)
        for text in sweeps:
            name, values = _assignment("--sweep", text)
            each = [value.strip() for value in values.split(",")]
            curves.append(curve(name, swept(self.tables, self.changes, name, each), self.anchor))
        found = replace(found, curves=tuple(curves), notes=found.notes + self.notes)
        if looking is None:
            return found
        results = looking.results(self.job, self.anchor)
        return replace(found, search=results[0] if len(results) == 1 else None, searches=results[1:] and results)

    def placed(
        self, found: Prediction, topology: Path, name: str | None, hosts: str | None, folder: Path | None
    ) -> Prediction:
        from msgspec.structs import replace

        from counterpoint.plan.answer import place_job
        from counterpoint.rendering.files import replacing

        placement, files = place_job(self.job, topology, hosts, name=name)
        if folder is not None:
            with writing(folder), ExitStack() as all_or_none:
                folder.mkdir(parents=True, exist_ok=True)
                for file in files:
                    opened = all_or_none.enter_context(replacing(folder / file.name))
                    opened.write(file.text.encode())
                    opened.flush()
        return replace(found, placement=placement)


def _write(found: Prediction, html: Path | None, json: str | None, json_path: Path | None) -> None:
    if html is not None:
        from counterpoint.rendering.plan_html import write_plan_page

        with writing(html):
            write_plan_page(html, found)
    if json is not None:
        write_json(found, json_path)
    if json == "-":
        return
    from counterpoint.rendering.plan_tables import render_prediction

    show(lambda console: render_prediction(found, console), [html])
