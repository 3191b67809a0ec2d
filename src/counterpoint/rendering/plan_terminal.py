"""Print a prediction on a terminal: the step, where it goes, whether it fits, curves, what a search has found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from counterpoint.records.prediction import (
    Curve,
    FitError,
    PlacementResult,
    PlanOutcome,
    Prediction,
    RatioError,
    SearchResult,
    TrainingRun,
)
from counterpoint.rendering import formatting as say

BAR = 24  # characters
FIGURES = ("step, ms", "MFU", "GiB", "P(fits)", "")  # of a way to divide a job
UNSURE = 0.05  # a probability between this and the rest to 1 is shown


def headline(found: Prediction) -> str:
    """Return one line with the step time, the MFU and the share of exposed communication."""
    exposed = say.percent(found.exposed_comm_us / found.step_us)
    mfu = "" if found.mfu is None else f"MFU {say.percent(found.mfu, digits=1)}, "
    sure = ""
    if found.interval is not None:
        ends = say.interval(found.interval.low_us, found.interval.high_us)
        sure = f" ({ends} with {say.percent(found.interval.level)} probability)"
    return (
        f"{found.model} on {found.gpus:,} × {found.gpu}: {say.milliseconds(found.step_us, 1)} ms a step{sure}, "
        f"{mfu}{exposed} of it exposed communication"
    )


def memory_line(found: Prediction) -> str:
    """Return whether the job fits, and how probable that is."""
    if found.fits_probability is None:
        return found.verdict
    return f"{found.verdict}; P(fits) = {say.percent(found.fits_probability)}"


def stage_memory_line(found: Prediction) -> str:
    """Return the memory of every pipeline stage; "" without a pipeline."""
    if len(found.stage_memory_gib) < 2:
        return ""
    return f"memory of the stages, GiB: {setting([f'{gib:.1f}' for gib in found.stage_memory_gib])}"


def confidence_lines(found: Prediction) -> list[str]:
    """Return how far off the model was, what the interval rests on, and what P(fits) does."""
    lines = [f"error of the model: {found.validated}"]
    if found.interval is not None:
        each = found.interval
        alike = (
            f"with the same {', '.join(each.alike)}"
            if each.alike
            else f"of any kind, {say.percent(each.errors_within)} of them within: none are like it"
        )
        other = f"; {', '.join(each.differ)} may differ" if each.alike and each.differ else ""
        wider = f"; {say.milliseconds(each.slowest_us, 1)} ms of it for the slowest rank" if each.slowest_us else ""
        lines.append(
            f"interval: errors of {each.rows} measured steps of {len(each.sources)} sources {alike}{other}{wider}"
        )
    if found.fits_source:
        lines.append(f"P(fits): {found.fits_source}")
    return lines


def comparison_line(found: RatioError) -> str:
    """Return by how much the ratio of two choices of a search may be off."""
    return (
        "≈ is too close to the first to call: the ratio of two ways to run one model on as many GPUs was off "
        f"by at most {say.percent(found.factor - 1, digits=1)} in {say.percent(found.level)} of {found.pairs:,} "
        f"measured pairs of {found.sources} sources"
    )


def change(other: PlanOutcome, found: Prediction) -> float:
    """Return by which part the step of another job is longer, below 0 if it is shorter."""
    return (other.step_us or 0.0) / found.step_us - 1.0


def render_prediction(found: Prediction, console: Console) -> None:
    """Print a prediction. Readable at 80 columns, without colour, and piped."""
    console.print(say.text(headline(found), "bold"), soft_wrap=True)
    if found.asked:
        asked = ", ".join(f"{name} = {value}" for name, value in found.asked.items())
        console.print(say.text(f"what if: {asked}"), soft_wrap=True)
    console.print(say.text(memory_line(found), "bold red" if found.fits is False else ""), soft_wrap=True)
    for line in filter(None, [stage_memory_line(found), *confidence_lines(found)]):
        console.print(say.text(line, say.QUIET), soft_wrap=True)
    _parts(found, console)
    _frame(found, console)
    if found.run is not None:
        _run(found.run, console)
    for curve in found.curves:
        _curve(curve, console)
    if found.sensitivities:
        _heading(console, "What would change it")
        changes = (
            (each.label, say.milliseconds(each.step_us, 1), say.percent(change(each, found), digits=1, sign=True))
            for each in found.sensitivities
        )
        _table(console, ("", "step, ms", "change"), changes)
    _ways(found, console)
    if found.placement is not None:
        _placement(found.placement, console)
    for note in found.notes:
        console.print(say.text(f"· {note}", say.QUIET), soft_wrap=True)


def render_network_fit(errors: Sequence[FitError], host_bound: int, path: str | None, console: Console) -> None:
    """Print how far a fitted network is off on sizes that it had not seen, and where it is."""
    console.print(say.text("Each third of the sizes predicted from the others, by operation and ranks", "bold"))
    rows = (
        (
            each.operation, str(each.ranks), str(each.sizes), say.percent(each.mean, digits=1),
            say.percent(each.worst, digits=1), say.percent(each.nccl_mean, digits=1),
        )
        for each in errors
    )  # fmt: skip
    _table(console, ("", "ranks", "sizes", "error, mean", "worst", "NCCL's own model, mean"), rows)
    if host_bound:
        console.print(say.text(f"{host_bound} rows are left out: one process took as long to launch on all its GPUs"))
    use = f'wrote {path}: network = "{path}" in [cluster] of a job' if path else "--write-network mine.json keeps it"
    console.print(say.text(use), soft_wrap=True)


def _parts(found: Prediction, console: Console) -> None:
    _heading(console, "Where the step goes")
    rows = (
        (
            part.name, say.milliseconds(part.us, 1), say.percent(share, digits=1), "█" * round(share * BAR),
            say.text(part.means, say.QUIET),
        )
        for part in found.parts
        for share in [part.us / found.step_us]
    )  # fmt: skip
    _table(console, ("", "ms", "share", "", ""), rows)


def _frame(found: Prediction, console: Console) -> None:
    alone = ", ".join(f"{part.name} {say.milliseconds(part.us, 1)}" for part in found.comm)
    comm = sum(part.us for part in found.comm)
    lines = [
        f"{say.milliseconds(found.ideal_us, 1)} ms if everything overlapped undisturbed, "
        f"{say.milliseconds(found.serial_us, 1)} ms if nothing did",
        f"communication alone {say.milliseconds(comm, 1)} ms{f' ({alone})' if alone else ''}, "
        f"communication / compute {found.comm_to_compute:.2f}",
    ]
    if found.tokens_per_s is not None:
        lines.append(
            f"{found.tokens_per_s:,.0f} tokens/s, {found.model_tflops:.0f} TFLOP/s per GPU, "
            f"{found.micro_batches} micro-batch{'' if found.micro_batches == 1 else 'es'}"
        )
    for line in lines:
        console.print(say.text(line), soft_wrap=True)


def run_lines(run: TrainingRun) -> list[str]:
    """Return what the whole training takes and costs, and what fails in it."""
    spread = f" ({run.low_days:,.1f} to {run.high_days:,.1f})" if run.low_days and run.high_days else ""
    cost = "" if run.cost is None else f", {run.cost:,.0f} at the price per GPU-hour"
    lines = [
        f"{run.days:,.1f} days{spread}, {run.gpu_hours:,.0f} GPU-hours{cost}, goodput "
        f"{say.percent(run.goodput, digits=1)}: {run.steps:,} steps, {run.tokens / 1e9:,.1f} billion tokens"
    ]
    if run.failure_hours is not None:
        lines.append(f"{run.failures:,.1f} failures, one every {run.failure_hours:,.2f} h")
    if run.checkpoint_minutes is not None:
        lines.append(f"a checkpoint every {run.checkpoint_minutes:,.1f} min of work")
    return lines


def _run(run: TrainingRun, console: Console) -> None:
    _heading(console, "The whole training")
    for line in run_lines(run):
        console.print(say.text(line), soft_wrap=True)
    rows = (
        (loss.name, f"{loss.days:,.2f}", say.percent(loss.days / run.days, digits=1), say.text(loss.means, say.QUIET))
        for loss in run.losses
    )
    _table(console, ("", "days", "share", ""), rows)


def _curve(curve: Curve, console: Console) -> None:
    _heading(console, f"{curve.name}{f': {curve.means}' if curve.means else ''}".removesuffix("."))
    columns = ("value", "GPUs", "step, ms", "P10, P90", "MFU", "exposed", "tokens/s", "GiB", "")
    _table(console, columns, map(_point, curve.points))
    if any(point.run for point in curve.points):
        _runs(curve, console)


def _runs(curve: Curve, console: Console) -> None:
    rows = (
        (
            point.label, f"{point.run.days:,.1f}", f"{point.run.gpu_hours:,.0f}",
            "" if point.run.cost is None else f"{point.run.cost:,.0f}", say.percent(point.run.goodput, digits=1),
        )
        for point in curve.points
        if point.run is not None
    )  # fmt: skip
    _table(console, ("value", "days", "GPU-hours", "cost", "goodput"), rows)


def _point(point: PlanOutcome) -> tuple[str | Text, ...]:
    if point.step_us is None:
        return (point.label, "", "", "", "", "", "", "", say.text(point.why_not or "", say.QUIET))
    return (
        point.label, "" if point.gpus is None else f"{point.gpus:,}", say.milliseconds(point.step_us, 1),
        _spread(point), say.percent(point.mfu, digits=1),
        say.percent((point.exposed_comm_us or 0.0) / point.step_us), f"{point.tokens_per_s:,.0f}",
        f"{point.memory_gib:.1f}", fits_note(point),
    )  # fmt: skip


def _spread(point: PlanOutcome) -> str:
    """Return the ends of a point's interval over its step: -4%, +12%."""
    ends = [end for end in (point.low_us, point.high_us) if end is not None and point.step_us]
    return ", ".join(say.percent(end / (point.step_us or 1.0) - 1.0, sign=True) for end in ends)


def fits_note(point: PlanOutcome) -> str:
    """Return whether the job of a point fits, where that is not sure."""
    said = "" if point.fits else "does not fit"
    probability = point.fits_probability
    if probability is None or not UNSURE < probability < 1.0 - UNSURE:
        return said
    return f"{said or 'fits'}, P = {say.percent(probability)}"


def _ways(found: Prediction, console: Console) -> None:
    if found.search is not None:
        _search(found.search, console)
    if found.searches:
        _searches(found.searches, console)
    if found.comparisons is not None and (found.search is not None or found.searches):
        console.print(say.text(comparison_line(found.comparisons), say.QUIET), soft_wrap=True)


def _search(search: SearchResult, console: Console) -> None:
    slower = search.considered - search.priced - search.too_large - search.impossible
    _heading(
        console,
        f"The fastest of {search.considered:,} ways on {search.gpus:,} GPUs ({search.too_large:,} do not fit, "
        f"{search.impossible:,} cannot be, {slower:,} cannot be faster)",
    )
    names = varying(search.choices)
    columns = (*map(_column, names), *FIGURES)
    _table(console, columns, (_choice(choice, names) for choice in search.choices))


def _searches(searches: Sequence[SearchResult], console: Console) -> None:
    """Print the fastest way for each number of GPUs; tokens/s of a GPU over those with the fewest GPUs."""
    _heading(console, "The fastest way for each number of GPUs")
    names = varying([search.choices[0] for search in searches if search.choices])
    first = next(search for search in searches if search.choices)
    base = (first.choices[0].tokens_per_s or 0.0) / first.gpus
    rows: list[tuple[object, ...]] = []
    for search in searches:
        if not search.choices:
            rows.append((f"{search.gpus:,}", *("" for _ in (*names, *FIGURES, "")), search.why_not or ""))
            continue
        choice = search.choices[0]
        tokens = choice.tokens_per_s or 0.0
        share = say.percent(tokens / search.gpus / base) if base else ""
        cells = _choice(choice, names)
        rows.append((f"{search.gpus:,}", *cells[: len(names)], f"{tokens:,.0f}", share, *cells[len(names) :]))
    columns = ("GPUs", *map(_column, names), "tokens/s", "per GPU", *FIGURES)
    _table(console, columns, rows)


def _choice(choice: PlanOutcome, names: Sequence[str]) -> tuple[object, ...]:
    return (
        *(setting(choice.settings[name]) for name in names), say.milliseconds(choice.step_us, 1),
        say.percent(choice.mfu, digits=1), f"{choice.memory_gib:.1f}", say.percent(choice.fits_probability),
        "≈" if choice.too_close else "",
    )  # fmt: skip


def setting(value: object) -> str:
    """Return a value of a choice: names joined, equal neighbours of a list of numbers counted."""
    if not isinstance(value, tuple | list):
        return "" if value is None else str(value)
    runs = [(each, sum(1 for _ in equal)) for each, equal in groupby(value)]
    return " ".join(str(each) if count == 1 else f"{count}×{each}" for each, count in runs)


def _placement(placement: PlacementResult, console: Console) -> None:
    """Print the cost of each rank order by network level, and how to use the files that set up the first one."""
    best = placement.orders[0]
    _heading(console, "Where the ranks should be: distance · bytes, the order found first")
    columns = ("order", *(level.level for level in best.levels), "cost", "over found", "longest, ms")
    rows = (
        (
            order.name, *(f"{level.cost:.3g}" for level in order.levels), f"{order.cost:.3g}",
            say.factor(order.cost / best.cost if best.cost else 1.0), say.milliseconds(order.time_us, 1),
        )
        for order in placement.orders
    )  # fmt: skip
    _table(console, columns, rows)
    for name, use in placement.files.items():
        console.print(say.text(f"{name}: {use}"), soft_wrap=True)


def varying(choices: Sequence[PlanOutcome]) -> Sequence[str]:
    """Return the fields that some choice sets: others would be columns of ones. `virtual` says what is interleaved."""
    fields = choices[0].settings if choices else {}
    told = (1, None, False, "1f1b", "interleaved")
    return [name for name in fields if any(each.settings[name] not in told for each in choices)]


def _column(field: str) -> str:
    name = field.partition(".")[2]
    return {"micro_batch": "micro", "stage_layers": "layers"}.get(name, name.removeprefix("recompute_"))


def _table(console: Console, columns: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
    say.print_table(console, columns, rows, left=(columns[0], ""), padding=2)


def _heading(console: Console, title: str) -> None:
    console.print()
    console.print(say.text(title, "bold"), soft_wrap=True)
