"""Draw the hidden fraction against T_c / T_g on a page: a panel per collective and order, a line per mechanism."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from counterpoint.records.measurement import Measurement, Row
from counterpoint.rendering import formatting as say
from counterpoint.rendering.figures import Axis, Figure, Look, Marks, Panel, Symbol
from counterpoint.rendering.measurement_tables import (
    ORDERS,
    detail_tables,
    mechanism_summaries,
    scope,
    summary_tables,
    where_table,
)
from counterpoint.rendering.safe_html import Page, clean, write_page
from counterpoint.rendering.table import Table

COLOURS = 8  # --series-1 to --series-8 of page.css
DASHES = ((), (9, 5), (2, 3), (9, 3, 2, 3))
RATIOS = (0.0625, 0.125, 0.25, 0.5, 1, 2, 4, 8, 16)
MAX_TABLES = 300
OPEN_TABLES = 12  # up to this number all are open
FLOOR = -1.0  # lower values are drawn here, as triangles: one bad mechanism must not flatten the others
PANEL_PX = 260


def write_overlap_plot(path: Path, measurement: Measurement) -> None:
    """Write a measurement as a page; `path` appears complete or not at all.

    Raises:
        OSError: the folder is missing or may not be written to.
    """
    tables = [*summary_tables(measurement), *_details(measurement), where_table(measurement)]
    if measurement.rows:
        unit = (
            "1: all of the shorter side; 0: as slow as one after the other; crosses are marked rows, "
            "triangles hide less than −1"
        )
        tables.insert(0, Table(title="Hidden by ratio and order", unit=unit, figure=figure(measurement.rows)))
    page = Page(
        title="how much overlap this machine allows",
        kind="measurement",
        scope=scope(measurement),
        headline=_headline(measurement),
        tables=tables,
    )
    write_page(path, page)


def _headline(measurement: Measurement) -> str:
    best = next(iter(mechanism_summaries(measurement.rows)), None)
    if best is None:
        return "No pair was measured"
    if best.hidden is None:
        return "No row can be believed: all are marked"
    hides = f"{best.mechanism} hides {say.percent(best.hidden)} of the shorter side on average"
    return f"{hides}, {say.percent(best.lowest)} at worst"


def _details(measurement: Measurement) -> list[Table]:
    """Return a table for each of the first `MAX_TABLES` pairs and matmuls, folded if there are many tables."""
    found = detail_tables(measurement)
    shown = [replace(table, folded=len(found) > OPEN_TABLES) for table in found[:MAX_TABLES]]
    if len(shown) < len(found):
        shown.append(Table(title="More", notes=[f"The first {len(shown)} of {len(found)} tables; --out holds all."]))
    return shown


def figure(rows: Sequence[Row]) -> Figure:
    """Return a figure with a row of panels per collective and a column per launch order, all with the same axes.

    Each point is a row at its measured ratio; a line joins the means of the rows for which the same ratio was
    requested.
    """
    mechanisms = list(dict.fromkeys(row.mechanism for row in rows))
    collectives = list(dict.fromkeys(row.operation for row in rows))
    orders = [order for order in ORDERS if any(row.order == order for row in rows)]
    y = Axis(label="hidden", low=FLOOR - 0.1, high=1.1)
    panels = []
    for collective, order in itertools.product(collectives, orders):
        here = [row for row in rows if (row.operation, row.order) == (collective, order)]
        marks = [
            each
            for look, mechanism in enumerate(mechanisms)
            for each in _marks(look, [row for row in here if row.mechanism == mechanism])
        ]
        panels.append(Panel(title=f"{clean(collective, 240)}, {ORDERS[order]}", x=_ratio_axis(rows), y=y, marks=marks))
    return Figure(
        looks=[
            Look(
                name=clean(mechanism, 240),
                colour=f"--series-{index % COLOURS + 1}",
                dash=DASHES[index // COLOURS % len(DASHES)],
            )
            for index, mechanism in enumerate(mechanisms)
        ],
        panels=panels,
        columns=max(1, len(orders)),
        height=PANEL_PX,
        shared=True,
    )


def _ratio_axis(rows: Sequence[Row]) -> Axis:
    """Return the axis of T_c / T_g, a fifth longer on both sides than the measured range."""
    x = [_x(row) for row in rows]
    ticks = [(ratio, f"{ratio:g}") for ratio in RATIOS]
    return Axis(label="T_c / T_g", low=min(x) / 1.2, high=max(x) * 1.2, log=True, ticks=ticks)


def _marks(look: int, rows: Sequence[Row]) -> Iterable[Marks]:
    by_ratio: dict[float, list[Row]] = {}
    for row in rows:
        if row.marked is None:
            by_ratio.setdefault(row.ratio or _x(row), []).append(row)
    means = sorted((fmean(map(_x, of)), fmean(row.hidden for row in of)) for of in by_ratio.values())
    if means:
        x, y = zip(*means, strict=True)
        yield Marks(kind="line", look=look, x=x, y=[max(hidden, FLOOR) for hidden in y])
    if rows:
        yield Marks(
            kind="points",
            look=look,
            x=[_x(row) for row in rows],
            y=[max(row.hidden, FLOOR) for row in rows],
            texts=[_text(row) for row in rows],
            symbols=[_symbol(row) for row in rows],
        )


def _symbol(row: Row) -> Symbol:
    if row.marked is not None:
        return "cross"
    return "circle" if row.hidden >= FLOOR else "triangle"


def _x(row: Row) -> float:
    return row.best_comm_alone_us / row.compute_alone.us


def _text(row: Row) -> str:
    """Return the tooltip of a row's point: `hidden`, T_c / T_g, the pair, and why the row is marked."""
    marked = f", MARKED: {row.marked}" if row.marked else ""
    hidden = f"hidden {row.hidden:.2f} at T_c/T_g {_x(row):.2f}"
    return clean(f"{hidden}: {row.workload} + {row.collective} {say.size(row.size_bytes)}{marked}", 240)
