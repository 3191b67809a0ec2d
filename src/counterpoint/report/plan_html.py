"""Write a prediction as one page: where the step goes, the stages' timeline, scaling curves, sensitivity bars."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from counterpoint.records.prediction import Bar, Curve, Prediction
from counterpoint.report import formatting as say
from counterpoint.report.plan_terminal import headline
from counterpoint.report.safe_html import clean, write_page

__all__ = ["curves_figure", "timeline_figure", "write_plan_page"]

LOOKS = {  # of a part: class of its bar
    "tensor": "transfer",
    "context": "transfer",
    "expert": "transfer",
    "shards": "transfer",
    "gradients": "transfer",
    "bubble": "idle",
    "stragglers": "wait",
    "shard_copies": "memcpy",
    "optimizer": "memcpy",
}
KINDS = {"F": ("forward", "--compute"), "B": ("backward", "--overlapped"), "W": ("weight gradients", "--memcpy")}
STAGE_PX = 22
CURVE_PX = 300


def write_plan_page(path: Path, found: Prediction) -> None:
    """Write the page, or raise OSError; `path` appears whole or not at all (about 5 MB, most of it plotly.js)."""
    figures = {}
    if found.timeline:
        figures["timeline-plot"] = timeline_figure(found.timeline)
    for number, curve in enumerate(found.curves):
        figures[f"curve-{number}"] = curves_figure(curve)
    write_page(
        path,
        "plan",
        data=figures,
        own="figures",
        plot=bool(figures),
        filters={"ms": say.milliseconds, "pct": say.percent, "signed": partial(say.percent, digits=1, sign=True)},
        p=found,
        headline=headline(found),
        looks=LOOKS,
        longest=max(part.us for part in found.parts),
        most=max((abs(each.change) for each in found.sensitivities), default=0.0) or 1.0,
        heights={name: figure["layout"]["height"] for name, figure in figures.items()},
        stages=len({bar.stage for bar in found.timeline}),
    )


def timeline_figure(bars: Sequence[Bar]) -> dict[str, Any]:
    """Return a row for each stage, the first on top; a bar for each forward and backward of a micro-batch."""
    stages = sorted({bar.stage for bar in bars})
    return {
        "traces": list(_kinds(bars)),
        "layout": {
            "barmode": "overlay",
            "bargap": 0.15,
            "height": 120 + STAGE_PX * len(stages),
            "margin": {"l": 64, "r": 12, "t": 36, "b": 48},
            "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom"},
            "xaxis": {"title": {"text": "ms"}},
            "yaxis": {"title": {"text": "stage"}, "autorange": "reversed", "tickvals": stages, "type": "category"},
        },
    }


def _kinds(bars: Sequence[Bar]) -> Iterator[dict[str, Any]]:
    for kind, (name, colour) in KINDS.items():
        of = [bar for bar in bars if bar.kind == kind]
        if of:
            yield {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": [str(bar.stage) for bar in of],
                "base": [bar.start_us / 1e3 for bar in of],
                "x": [(bar.end_us - bar.start_us) / 1e3 for bar in of],
                "text": [f"micro-batch {bar.micro}, part {bar.part}" for bar in of],
                "textposition": "none",
                "hovertemplate": "%{text}: %{x:.2f} ms from %{base:.2f}<extra>" + name + "</extra>",
                "marker": {"color": colour, "line": {"width": 0.5, "color": "rgba(127,127,127,.5)"}},
            }


def curves_figure(curve: Curve) -> dict[str, Any]:
    """Return step time, MFU and the exposed share, each on an axis of its own, over the values of the curve."""
    points = [point for point in curve.points if point.step_us is not None]
    values = [html.escape(clean(point.value, 40), quote=False) for point in points]
    shown = (
        ("step, ms", [(point.step_us or 0.0) / 1e3 for point in points], "--overlapped", ",.4~r"),
        ("MFU", [point.mfu for point in points], "--compute", ".1%"),
        ("exposed", [(point.exposed_comm_us or 0.0) / (point.step_us or 1.0) for point in points], "--transfer", ".1%"),
    )
    layout: dict[str, Any] = {
        "grid": {"rows": 1, "columns": len(shown), "pattern": "independent"},
        "height": CURVE_PX,
        "showlegend": False,
        "margin": {"l": 56, "r": 12, "t": 12, "b": 56},
    }
    traces = []
    for number, (name, y, colour, digits) in enumerate(shown, start=1):
        axes = {"xaxis": f"x{number}", "yaxis": f"y{number}"}
        look = {"line": {"color": colour, "width": 2}, "marker": {"color": colour, "size": 7}}
        traces.append({"name": name, "mode": "lines+markers", "x": values, "y": y, **axes, **look})
        layout[f"xaxis{number}"] = {"title": {"text": clean(curve.name, 40)}, "type": "category"}
        layout[f"yaxis{number}"] = {"title": {"text": name}, "rangemode": "tozero", "tickformat": digits}
    return {"traces": traces, "layout": layout}
