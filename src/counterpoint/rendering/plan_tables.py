"""Make and print the tables of a prediction: the step, its parts, curves, and the results of a search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from counterpoint.records.prediction import (
    Curve,
    FitError,
    Objective,
    ObservedStep,
    PlacementResult,
    PlanOutcome,
    Prediction,
    RankOrder,
    RatioError,
    SearchResult,
    TrainingRun,
)
from counterpoint.rendering import formatting as say
from counterpoint.rendering.figures import Figure
from counterpoint.rendering.table import BarPart, Column, LengthBar, Table, TableRow, row

if TYPE_CHECKING:
    from rich.console import Console

LOOKS = {  # of a part: class of its bar
    "tensor": "transfer",
    "context": "transfer",
    "expert": "transfer",
    "shards": "transfer",
    "gradients": "transfer",
    "bubble": "idle",
    "host": "idle",
    "stragglers": "wait",
    "shard_copies": "memcpy",
    "offload": "memcpy",
    "optimizer": "memcpy",
}
UNSURE = 0.05  # P(fits) is shown between this and 1 minus this


def render_prediction(found: Prediction, console: Console) -> None:
    """Print a prediction so that it is readable at 80 columns, without colour, and piped."""
    from counterpoint.rendering.print_table import QUIET, line, print_tables

    line(console, headline(found), "bold")
    if found.asked:
        line(console, "what if: " + ", ".join(f"{name} = {value}" for name, value in found.asked.items()))
    line(console, memory_line(found), "bold red" if found.fits is False else "")
    for said in filter(None, [stage_memory_line(found), *confidence_lines(found)]):
        line(console, said, QUIET)
    print_tables(tables(found), console)


def render_network_fit(errors: Sequence[FitError], host_bound: int, path: str | None, console: Console) -> None:
    """Print a fitted network's errors on sizes held out from the fit, and the file that it was written to."""
    from counterpoint.rendering.print_table import print_table

    left_out = [f"{host_bound} rows are left out: one process took as long to launch on all its GPUs"]
    use = f'wrote {path}: network = "{path}" in [cluster] of a job' if path else "--write-network mine.json keeps it"
    table = Table(
        title="Each third of the sizes predicted from the others, by operation and ranks",
        columns=(
            Column("operation", of=lambda e: e.operation),
            Column("ranks", say.count, lambda e: e.ranks),
            Column("sizes", say.count, lambda e: e.sizes),
            Column("error, mean", say.tenth_percent, lambda e: e.mean),
            Column("worst", say.tenth_percent, lambda e: e.worst),
            Column("NCCL's own\nmodel, mean", say.tenth_percent, lambda e: e.nccl_mean),
        ),
        rows=errors,
        notes=[*(left_out if host_bound else []), use],
    )
    print_table(table, console)


def tables(found: Prediction, figures: Mapping[str, Figure] | None = None) -> list[Table]:
    """Return all tables in reading order; `figures`: the figures of a page, by name of the curve, or `timeline`."""
    close = [] if found.comparisons is None else [comparison_line(found.comparisons)]
    made = [_observed(found.observed)] if found.observed else []
    if found.search is not None:
        made.append(_search(found.search, close))
    if any(search.choices for search in found.searches):
        made.append(_searches(found.searches))
    made.append(_parts(found))
    if found.run is not None:
        made.append(_run(found.run))
    if found.timeline:
        made.append(_stages(found, figures))
    for curve in found.curves:
        made += _curve(curve, (figures or {}).get(curve.name))
    if found.sensitivities:
        made.append(_sensitivities(found))
    if found.placement is not None:
        made.append(_placement(found.placement))
    return [*made, Table(title="What this rests on", notes=found.notes)]


def words(name: str) -> str:
    """Return the readable name of a step's part, a flag or a field: `weak_nodes` as "nodes"."""
    return name.removeprefix("weak_").replace("_", " ")


def _parts(found: Prediction) -> Table:
    longest = max(part.us for part in found.parts) or 1.0
    alone = ", ".join(f"{words(part.name)} {say.tenth_milliseconds(part.us)}" for part in found.comm)
    comm = say.tenth_milliseconds(sum(part.us for part in found.comm))
    notes = [
        f"{say.tenth_milliseconds(found.ideal_us)} ms if everything overlapped undisturbed, "
        f"{say.tenth_milliseconds(found.serial_us)} ms if nothing did",
        f"communication alone {comm} ms{f' ({alone})' if alone else ''}, "
        f"communication / compute {found.comm_to_compute:.2f}",
    ]
    if found.tokens_per_s is not None:
        notes.append(
            f"{found.tokens_per_s:,.0f} tokens/s, {found.model_tflops:.0f} TFLOP/s per GPU, "
            f"{found.micro_batches} micro-batch{'' if found.micro_batches == 1 else 'es'}"
        )
    return Table(
        title="Where the step goes",
        columns=(
            Column("part", of=lambda part: words(part.name)),
            Column("ms", say.tenth_milliseconds, lambda part: part.us),
            Column("share", say.tenth_percent, lambda part: part.us / found.step_us),
            Column("", of=lambda part: _bar(part.us / longest, LOOKS.get(part.name, "case")), is_bar=True),
            Column("", of=lambda part: part.means),
        ),
        rows=found.parts,
        notes=notes,
    )


def _observed(found: ObservedStep) -> Table:
    """Return a table of possible causes of an unusually slow or fast observed step, with the verdict as its unit."""
    change = found.step_us / found.usual_us - 1.0
    which = "slower" if change > 0 else "faster"
    return Table(
        title=f"Why it may be {which} than usual",
        unit=f"observed {say.tenth_milliseconds(found.step_us)} ms: {say.percent(abs(change))} {which} than the usual "
        f"{say.tenth_milliseconds(found.usual_us)} ms, and faster than {round(10 * found.faster_than)} of 10 such runs",
        columns=(
            Column("if", of=lambda cause: cause.name),
            Column("change", say.change, lambda cause: cause.us / found.predicted_us),
            Column("tell it by", of=lambda cause: cause.tell),
        ),
        rows=found.causes,
        notes=["each by itself, as a change of the predicted step; all times below are shifted to the observed step"],
    )


def _bar(share: float, look: str) -> LengthBar:
    return LengthBar([BarPart(look=look, share=share)])


def headline(found: Prediction) -> str:
    """Return one line with the step time, the MFU and the share of exposed communication."""
    exposed = say.percent(found.exposed_comm_us / found.step_us)
    mfu = "" if found.mfu is None else f"MFU {say.percent(found.mfu, digits=1)}, "
    sure = ""
    if found.interval is not None and found.interval.low_us < found.interval.high_us:
        ends = say.interval(found.interval.low_us, found.interval.high_us)
        sure = f" ({ends} with {say.percent(found.interval.level)} probability)"
    return (
        f"{found.model} on {found.gpus:,} × {found.gpu}: {say.tenth_milliseconds(found.step_us)} ms a step{sure}, "
        f"{mfu}{exposed} of it exposed communication"
    )


def memory_line(found: Prediction) -> str:
    """Return one line on whether the job fits in memory, with the probability."""
    if found.fits_probability is None:
        return found.verdict
    return f"{found.verdict}; P(fits) = {say.percent(found.fits_probability)}"


def stage_memory_line(found: Prediction) -> str:
    """Return one line with the memory of every pipeline stage; "" without a pipeline."""
    if len(found.stage_memory_gib) < 2:
        return ""
    return f"memory of the stages, GiB: {setting([f'{gib:.1f}' for gib in found.stage_memory_gib])}"


def confidence_lines(found: Prediction) -> list[str]:
    """Return lines on the model's past errors, and on the data from which the interval and P(fits) come."""
    lines = [f"error of the model: {found.validated}"]
    if found.interval is not None:
        each = found.interval
        wider = f"; {say.tenth_milliseconds(each.slowest_us)} ms of it for the slowest rank" if each.slowest_us else ""
        lines.append(
            f"interval: errors of {each.rows:,} measured steps of {len(each.sources)} sources, {each.alike:.1f} of "
            f"them alike; with its source left out, {say.percent(each.seen)} of steps like it lay within{wider}"
        )
    if found.fits_source:
        lines.append(f"P(fits): {found.fits_source}")
    return lines


def comparison_line(found: RatioError) -> str:
    """Return a line on the error of the predicted ratio of two choices' step times."""
    return (
        "≈ is too close to the first to call: the ratio of two ways to run one model on as many GPUs was off "
        f"by at most {say.percent(found.factor - 1, digits=1)} in {say.percent(found.level)} of {found.pairs:,} "
        f"measured pairs of {found.sources} sources"
    )


def run_lines(run: TrainingRun) -> list[str]:
    """Return lines on the time and cost of the whole training, and on its failures."""
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


def _run(run: TrainingRun) -> Table:
    return Table(
        title="The whole training",
        columns=(
            Column("lost", of=lambda loss: words(loss.name)),
            Column("days", lambda days: f"{days:,.2f}", lambda loss: loss.days),
            Column("share", say.tenth_percent, lambda loss: loss.days / run.days),
            Column("because", of=lambda loss: loss.means),
        ),
        rows=run.losses,
        notes=run_lines(run),
    )


def _stages(found: Prediction, figures: Mapping[str, Figure] | None) -> Table:
    """Return a table whose figure is the pipeline's timeline; only an HTML page shows the figure."""
    stages = len({bar.stage for bar in found.timeline})
    micro = f"{found.micro_batches} micro-batch{'' if found.micro_batches == 1 else 'es'}"
    drawn = f"; the first {4 * stages} are drawn" if (found.micro_batches or 0) > 4 * stages else ""
    unit = f"{stages} stage{'s' * (stages != 1)}, {micro}{drawn}; communication is inside the bars"
    return Table(title="The stages", unit=unit, figure=(figures or {}).get("timeline"))


def curve_title(curve: Curve) -> str:
    """Return the title of a curve: the help text of the flag that it sweeps, or the name of the field."""
    return f"Over {curve.name}" if "." in curve.name or not curve.means else curve.means.removesuffix(".")


def _curve(curve: Curve, figure: Figure | None) -> Iterator[Table]:
    """Yield a table of the step for each value of a curve and, if known, one of the whole training."""
    head = words(curve.name)
    yield Table(
        title=curve_title(curve),
        unit=curve.means if "." in curve.name else "",
        columns=(
            Column(head, limit=60),
            Column("GPUs", say.count),
            Column("step, ms", say.tenth_milliseconds),
            Column("P10 to P90", str, optional=True),
            Column("MFU", say.tenth_percent),
            Column("exposed", say.percent),
            Column("tokens/s", say.whole),
            Column("GiB", say.decimal),
            Column(""),
        ),
        rows=[_point(point) for point in curve.points],
        figure=figure,
    )
    if runs := [point for point in curve.points if point.run is not None]:
        yield Table(
            title=f"The whole training over {head}",
            columns=(
                Column(head, of=lambda point: point.label),
                Column("days", say.decimal, lambda point: point.run.days),
                Column("GPU-hours", say.whole, lambda point: point.run.gpu_hours),
                Column("cost", say.whole, lambda point: "" if point.run.cost is None else point.run.cost),
                Column("goodput", say.tenth_percent, lambda point: point.run.goodput),
            ),
            rows=runs,
        )


def _point(point: PlanOutcome) -> TableRow:
    if point.step_us is None:
        return row(point.label, point.why_not or "", tone="quiet")
    exposed = (point.exposed_comm_us or 0.0) / point.step_us
    spread = say.interval(point.low_us, point.high_us)
    gpus = "" if point.gpus is None else point.gpus
    rates = (point.mfu, exposed, point.tokens_per_s, point.memory_gib)
    return row(point.label, gpus, point.step_us, spread, *rates, fits_note(point))


def _sensitivities(found: Prediction) -> Table:
    def change(other: PlanOutcome) -> float:
        return (other.step_us or 0.0) / found.step_us - 1.0

    most = max(map(abs, map(change, found.sensitivities))) or 1.0
    return Table(
        title="What would change it",
        unit="step with one thing better, everything else as it is",
        columns=(
            Column("with", of=lambda it: it.label),
            Column("", is_bar=True, of=lambda it: _bar(abs(change(it)) / most, "case" if change(it) < 0 else "wait")),
            Column("step, ms", say.tenth_milliseconds, lambda it: it.step_us),
            Column("change", say.change, change),
        ),
        rows=found.sensitivities,
    )


def _search(search: SearchResult, close: Sequence[str]) -> Table:
    slower = search.considered - search.priced - search.too_large - search.impossible
    so_far = "" if search.complete else "so far "
    return Table(
        title=f"The fastest {so_far}of {search.considered:,} ways on {search.gpus:,} GPUs",
        unit=f"{search.too_large:,} do not fit, {search.impossible:,} cannot be, {slower:,} cannot be faster",
        columns=_way_columns(search.choices, search.objective),
        rows=search.choices,
        notes=[*close, *WAY_NOTES],
    )


def _way_columns(choices: Sequence[PlanOutcome], objective: Objective) -> tuple[Column, ...]:
    """Return the columns of a table of ways to divide a job; narrow terminals drop the layers first, MFU last."""

    def of(name: str) -> Callable[[PlanOutcome], str]:
        return lambda choice: setting(choice.settings[name])

    def why(choice: PlanOutcome) -> str:
        more = choice.more
        return BEST_BY[objective] if more is None else f"{words(more.name)} {say.change(more.change)}"

    names, layers = varying(choices), "parallel.stage_layers"
    return (
        *(Column(_head(name), str, of(name)) for name in names if name != layers and "recompute" not in name),
        *([Column("recompute", of=_recomputed)] if "training.recompute" in names else []),
        _objective_column(choices[0], objective),
        Column("GiB", say.decimal, lambda choice: choice.memory_gib),
        Column("P(fits)", say.percent, lambda choice: choice.fits_probability),
        Column("MFU", say.tenth_percent, lambda choice: choice.mfu, optional=True),
        Column("tokens/s", say.whole, lambda choice: choice.tokens_per_s, optional=True),
        *([] if objective == "step" else [replace(STEP, optional=True)]),
        Column("", of=lambda choice: "*" * choice.on_front + "≈" * choice.too_close),
        Column("why", of=why),
        *([Column("layers", of=of(layers), optional=True)] if layers in names else []),
    )


BEST_BY: dict[Objective, str] = {"step": "fastest", "cost": "cheapest", "goodput": "most tokens"}
STEP = Column("step, ms", say.tenth_milliseconds, lambda choice: choice.step_us)
WAY_NOTES = (
    "* no other way takes as little of step, GPUs and GiB",
    "why: the part that exceeds the first's by most, as a share of all that the first takes",
)


def _objective_column(first: PlanOutcome, objective: Objective) -> Column:
    """Return the column of the figure that `objective` ranks by; for a job without a price, cost is GPU-hours."""
    price = first.run.cost / first.run.gpu_hours if first.run and first.run.cost else None

    def useful_tokens_per_s(choice: PlanOutcome) -> float:
        return (choice.tokens_per_s or 0.0) * (choice.run.goodput if choice.run else 1.0)

    def cost(choice: PlanOutcome) -> float:
        return 1e9 * (price or 1.0) * (choice.gpus or 0) / useful_tokens_per_s(choice) / 3600

    if objective == "cost":
        return Column(f"{'cost' if price else 'GPU-h'} per\n10⁹ tokens", say.decimal, cost)
    return STEP if objective == "step" else Column("useful\ntokens/s", say.whole, useful_tokens_per_s)


def _recomputed(choice: PlanOutcome) -> str:
    """Return what backward recomputes, as text: modules, or else kind, method and number of layers."""
    said = [choice.settings[f"training.recompute{field}"] for field in ("", "_modules", "_method", "_num_layers")]
    return setting(said[1] or tuple(str(each) for each in said if each is not None))


def _searches(searches: Sequence[SearchResult]) -> Table:
    """Return a table of the best way for each number of GPUs; the notes say why no way fits some numbers."""
    choices, objective = [search.choices[0] for search in searches if search.choices], searches[0].objective
    return Table(
        title="The fastest way for each number of GPUs",
        unit=f"ranked by {objective}",
        columns=(Column("GPUs", say.count, lambda choice: choice.gpus), *_way_columns(choices, objective)),
        rows=choices,
        notes=[*(f"{each.gpus:,} GPUs: {each.why_not}" for each in searches if not each.choices), *WAY_NOTES],
    )


def _placement(placement: PlacementResult) -> Table:
    """Return a table of rank orders with their costs by network level; the notes explain each written file."""
    best = placement.orders[0]

    def cost_at(place: int) -> Callable[[RankOrder], float]:
        return lambda order: order.levels[place].cost

    levels = [Column(level.level, _three_digits, cost_at(place)) for place, level in enumerate(best.levels)]
    return Table(
        title="Where the ranks should be",
        unit="distance · bytes, the order found first",
        columns=(
            Column("order", of=lambda order: order.name),
            *levels,
            Column("cost", _three_digits, lambda order: order.cost),
            Column("over found", say.factor, lambda order: order.cost / best.cost if best.cost else 1.0),
            Column("longest, ms", say.tenth_milliseconds, lambda order: order.time_us),
        ),
        rows=placement.orders,
        notes=[f"{name}: {use}" for name, use in placement.files.items()],
    )


def _three_digits(value: float) -> str:
    return f"{value:.3g}"


def fits_note(point: PlanOutcome) -> str:
    """Return a note that a job does not fit in memory, or P(fits) where that is unsure; "" if the job surely fits."""
    said = "" if point.fits else "does not fit"
    probability = point.fits_probability
    if probability is None or not UNSURE < probability < 1.0 - UNSURE:
        return said
    return f"{said or 'fits'}, P = {say.percent(probability)}"


def setting(value: object) -> str:
    """Return a setting's value as text: items joined by spaces, runs of equal numbers as `3×8`."""
    if not isinstance(value, tuple | list):
        return "" if value is None else str(value)
    runs = [(each, sum(1 for _ in equal)) for each, equal in groupby(value)]
    return " ".join(str(each) if count == 1 else f"{count}×{each}" for each, count in runs)


def varying(choices: Sequence[PlanOutcome]) -> Sequence[str]:
    """Return the fields that differ from the default in a choice; "interleaved" does not count, `virtual` shows it."""
    fields = choices[0].settings if choices else {}
    told = (1, None, False, "1f1b", "interleaved")
    return [name for name in fields if any(each.settings[name] not in told for each in choices)]


def _head(field: str) -> str:
    name = field.partition(".")[2]
    return {"micro_batch": "micro"}.get(name, name)
