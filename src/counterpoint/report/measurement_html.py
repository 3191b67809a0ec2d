"""Draw `hidden` against T_c / T_g on one page: a panel per collective and launch order, a line per mechanism."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from counterpoint.records.measurement import Measurement, Row
from counterpoint.report import formatting as say
from counterpoint.report.measurement_text import mechanism_summaries
from counterpoint.report.safe_html import clean, write_page

__all__ = ["figure", "write_overlap_plot"]

ORDERS = {"compute_first": "compute first", "together": "together", "comm_first": "comm first"}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f")  # Okabe and Ito
DASHES = ("solid", "dash", "dot", "dashdot")
RATIOS = (0.0625, 0.125, 0.25, 0.5, 1, 2, 4, 8, 16)
MAX_ROWS = 1000  # of the table
FLOOR = -1.0  # what hides less is drawn here, as a triangle: one bad mechanism must not flatten the others
PANEL_PX = 260
LEGEND_ROW_PX = 28
LEGEND_WIDTH_PX = 900


def write_overlap_plot(path: Path, measurement: Measurement) -> None:
    """Write the page; `path` appears whole or not at all (about 5 MB, most of it plotly.js).

    Raises:
        OSError: the folder is missing or may not be written to.
    """
    drawn = figure(measurement.rows)
    write_page(
        path,
        "overlap",
        data={"plot": drawn} if measurement.rows else {},
        own="figures",
        plot=True,
        filters={
            "ms": say.milliseconds,
            "pct": say.percent,
            "size": say.size,
            "ratio": say.ratio,
            "order": lambda name: ORDERS.get(str(name), str(name)),
        },
        m=measurement,
        mechanisms=mechanism_summaries(measurement.rows),
        rows=measurement.rows[:MAX_ROWS],
        height=drawn["layout"]["height"],
    )


def figure(rows: Sequence[Row]) -> dict[str, Any]:
    """Return traces and layout for plotly, without the page's colours; text is escaped, since plotly reads tags.

    Points are rows, x measured; the line goes through the means of those that were asked for the same ratio.
    """
    mechanisms = list(dict.fromkeys(row.mechanism for row in rows))
    collectives = list(dict.fromkeys(row.collective for row in rows))
    orders = [order for order in ORDERS if any(row.order == order for row in rows)]
    traces: list[dict[str, Any]] = []
    for index, mechanism in enumerate(mechanisms):
        look = {"color": COLOURS[index % len(COLOURS)], "dash": DASHES[index // len(COLOURS) % len(DASHES)]}
        of = [row for row in rows if row.mechanism == mechanism]
        for y, collective in enumerate(collectives, start=1):
            for x, order in enumerate(orders, start=1):
                panel = [row for row in of if (row.collective, row.order) == (collective, order)]
                axes = {"xaxis": f"x{x}", "yaxis": f"y{y}"}
                traces += [{**trace, **axes} for trace in _traces(mechanism, look, panel)]
    named: set[str] = set()
    for trace in traces:  # one entry of the legend stands for a mechanism in all panels
        trace["showlegend"] = trace["legendgroup"] not in named
        named.add(trace["legendgroup"])
    return {"traces": traces, "layout": _layout(collectives, orders, mechanisms)}


def _traces(mechanism: str, look: dict[str, str], rows: Sequence[Row]) -> Iterable[dict[str, Any]]:
    by_ratio: dict[float, list[Row]] = {}
    for row in rows:
        if row.marked is None:
            by_ratio.setdefault(row.ratio or _x(row), []).append(row)
    means = sorted((fmean(map(_x, of)), fmean(row.hidden for row in of)) for of in by_ratio.values())
    shared = {"name": _escaped(mechanism), "legendgroup": _escaped(mechanism)}
    if means:
        x = tuple(ratio for ratio, _ in means)
        y = tuple(max(hidden, FLOOR) for _, hidden in means)
        yield {**shared, "mode": "lines", "line": {**look, "width": 2}, "x": x, "y": y, "hoverinfo": "skip"}
    if rows:
        yield {
            **shared,
            "mode": "markers",
            "marker": {"color": look["color"], "symbol": [_symbol(row) for row in rows], "size": 7},
            "x": [_x(row) for row in rows],
            "y": [max(row.hidden, FLOOR) for row in rows],
            "customdata": [row.hidden for row in rows],
            "text": [_escaped(_hover(row)) for row in rows],
            "hovertemplate": "%{text}<br>hidden %{customdata:.2f} at T_c/T_g %{x:.2f}<extra></extra>",
        }


def _symbol(row: Row) -> str:
    if row.marked is not None:
        return "x"
    return "circle" if row.hidden >= FLOOR else "triangle-down"


def _legend_px(mechanisms: Sequence[str]) -> int:
    """Return the height of the legend, which wraps: a name takes about 7 px a character and 60 px of line and space."""
    return LEGEND_ROW_PX * (1 + sum(60 + 7 * len(name) for name in mechanisms) // LEGEND_WIDTH_PX)


def _layout(collectives: Sequence[str], orders: Sequence[str], mechanisms: Sequence[str]) -> dict[str, Any]:
    legend_px = _legend_px(mechanisms)
    layout: dict[str, Any] = {
        "grid": {"rows": max(1, len(collectives)), "columns": max(1, len(orders)), "pattern": "coupled"},
        "height": 72 + legend_px + PANEL_PX * max(1, len(collectives)),
        "margin": {"l": 64, "r": 12, "t": 16 + legend_px, "b": 56},
        "legend": {"orientation": "h", "yref": "container", "y": 1.0, "yanchor": "top"},
    }
    for x, order in enumerate(orders, start=1):
        title = {"text": f"T_c / T_g, {ORDERS[order]}"}
        layout[f"xaxis{x}"] = {
            "type": "log",
            "title": title,
            "tickvals": RATIOS,
            "ticktext": [f"{it:g}" for it in RATIOS],
        }
    for y, collective in enumerate(collectives, start=1):
        layout[f"yaxis{y}"] = {
            "title": {"text": f"hidden, {_escaped(collective)}"},
            "zeroline": True,
            "range": [FLOOR - 0.1, 1.1],
        }
    return layout


def _x(row: Row) -> float:
    return row.best_comm_alone_us / row.compute_alone.us


def _hover(row: Row) -> str:
    marked = f", MARKED: {row.marked}" if row.marked else ""
    return f"{row.mechanism}: {row.workload} + {row.collective} {say.size(row.size_bytes)}{marked}"


def _escaped(text: str) -> str:
    return html.escape(clean(text, 240), quote=False)
