"""A prediction on a terminal: the step, where it goes, whether it fits, then curves and what a search has found."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from counterpoint.errors import printable
from counterpoint.records.prediction import Curve, PlacementResult, Prediction, SearchResult
from counterpoint.report import wording as say

__all__ = ["headline", "render_prediction"]

QUIET = "bright_black"
BAR = 24  # characters


def headline(found: Prediction) -> str:
    """One line: how long, how much of the machine it uses, what is exposed."""
    exposed = say.percent(found.exposed_comm_us / found.step_us)
    mfu = "" if found.mfu is None else f"MFU {say.percent(found.mfu, digits=1)}, "
    return (
        f"{found.model} on {found.gpus:,} × {found.gpu}: {say.milliseconds(found.step_us, 1)} ms a step, "
        f"{mfu}{exposed} of it exposed communication"
    )


def render_prediction(found: Prediction, console: Console) -> None:
    """Print a prediction. Readable at 80 columns, without colour, and piped."""
    console.print(_text(headline(found), "bold"), soft_wrap=True)
    if found.asked:
        asked = ", ".join(f"{name} = {value}" for name, value in found.asked.items())
        console.print(_text(f"what if: {asked}"), soft_wrap=True)
    console.print(_text(found.verdict, "bold red" if found.fits is False else ""), soft_wrap=True)
    console.print(_text(f"error of the model: {found.validated}", QUIET), soft_wrap=True)
    _parts(found, console)
    _frame(found, console)
    for curve in found.curves:
        _curve(curve, console)
    if found.sensitivities:
        _heading(console, "What would change it")
        table = _table("", "step, ms", "change")
        for each in found.sensitivities:
            table.add_row(
                _text(each.name), say.milliseconds(each.step_us, 1), say.percent(each.change, digits=1, sign=True)
            )
        console.print(table)
    if found.search is not None:
        _search(found.search, console)
    if found.placement is not None:
        _placement(found.placement, console)
    for note in found.notes:
        console.print(_text(f"· {note}", QUIET), soft_wrap=True)


def _parts(found: Prediction, console: Console) -> None:
    _heading(console, "Where the step goes")
    table = _table("", "ms", "share", "", "")
    for part in found.parts:
        share = part.us / found.step_us
        bar = "█" * round(share * BAR)
        table.add_row(
            _text(part.name), say.milliseconds(part.us, 1), say.percent(share, digits=1), bar, _text(part.means, QUIET)
        )
    console.print(table)


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
        console.print(_text(line), soft_wrap=True)


def _curve(curve: Curve, console: Console) -> None:
    _heading(console, f"{curve.name}{f': {curve.unit}' if curve.unit else ''}")
    table = _table("value", "step, ms", "MFU", "exposed", "tokens/s", "GiB", "")
    for point in curve.points:
        if point.step_us is None:
            table.add_row(_text(point.value), "", "", "", "", "", _text(point.why_not or "", QUIET))
            continue
        exposed = say.percent((point.exposed_comm_us or 0.0) / point.step_us)
        fits = "" if point.fits else "does not fit"
        table.add_row(
            _text(point.value), say.milliseconds(point.step_us, 1), say.percent(point.mfu, digits=1), exposed,
            f"{point.tokens_per_s:,.0f}", f"{point.memory_gib:.1f}", fits,
        )  # fmt: skip
    console.print(table)


def _search(search: SearchResult, console: Console) -> None:
    _heading(
        console,
        f"The fastest of {search.considered:,} ways ({search.too_large:,} do not fit, {search.impossible:,} cannot be)",
    )
    names = _varying(search)
    table = _table(*(name.partition(".")[2] for name in names), "step, ms", "MFU", "GiB")
    for choice in search.choices:
        settings = (str(choice.settings[name]) for name in names)
        table.add_row(
            *settings,
            say.milliseconds(choice.step_us, 1),
            say.percent(choice.mfu, digits=1),
            f"{choice.memory_gib:.1f}",
        )
    console.print(table)


def _placement(placement: PlacementResult, console: Console) -> None:
    """Cost of each order by level, and what would set the first one up."""
    best = placement.orders[0]
    _heading(console, "Where the ranks should be: distance · bytes, the order found first")
    table = _table("order", *(level.level for level in best.levels), "cost", "over found", "longest, ms")
    for order in placement.orders:
        over = order.cost / best.cost if best.cost else 1.0
        table.add_row(
            _text(order.name), *(f"{level.cost:.3g}" for level in order.levels), f"{order.cost:.3g}",
            say.factor(over), say.milliseconds(order.time_us, 1),
        )  # fmt: skip
    console.print(table)
    for name, use in placement.files.items():
        console.print(_text(f"{name}: {use}"), soft_wrap=True)


def _varying(search: SearchResult) -> Sequence[str]:
    """Fields that are not everywhere 1: the others would be columns of ones."""
    fields = search.choices[0].settings
    return [name for name in fields if any(choice.settings[name] != 1 for choice in search.choices)]


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=QUIET)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number == 0 or not name else "right", overflow="fold")
    return table


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(_text(text, "bold"), soft_wrap=True)


def _text(value: str, style: str = "") -> Text:
    return Text(printable(value, 600), style=style)
