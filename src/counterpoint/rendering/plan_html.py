"""Write a prediction as one HTML page: parts of the step, pipeline timeline, scaling curves, sensitivity bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from counterpoint.records.prediction import Bar, Curve, PlanOutcome, Prediction
from counterpoint.rendering import formatting as say
from counterpoint.rendering.figures import Axis, Figure, Look, Marks, Panel
from counterpoint.rendering.plan_terminal import (
    change,
    comparison_line,
    confidence_lines,
    fits_note,
    headline,
    memory_line,
    run_lines,
    setting,
    stage_memory_line,
    varying,
)
from counterpoint.rendering.safe_html import clean, write_page

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
    "optimizer": "memcpy",
}
KINDS = {"F": ("forward", "--compute"), "B": ("backward", "--overlapped"), "W": ("weight gradients", "--memcpy")}
STAGE_PX = 22
CURVE_PX = 260
TICK = 10  # characters of a name below an axis
LONG_US = 1e8  # from here on seconds, whose numbers fit beside an axis


def write_plan_page(path: Path, found: Prediction) -> None:
    """Write the page, or raise OSError; `path` appears whole or not at all."""
    figures = {}
    if found.timeline:
        figures["timeline-plot"] = timeline_figure(found.timeline)
    for number, curve in enumerate(found.curves):
        if any(point.step_us is not None for point in curve.points):
            figures[f"curve-{number}"] = curves_figure(curve)
    write_page(
        path,
        "plan",
        data=figures,
        own="figures",
        plot=bool(figures),
        filters={
            "ms": say.milliseconds,
            "pct": say.percent,
            "signed": partial(say.percent, digits=1, sign=True),
            "ends": say.interval,
            "fits_note": fits_note,
            "words": words,
            "curve_title": curve_title,
            "setting": setting,
        },
        p=found,
        headline=headline(found),
        memory_line=memory_line(found),
        stage_memory_line=stage_memory_line(found),
        varying=[] if found.search is None else varying(found.search.choices),
        best=[search.choices[0] for search in found.searches if search.choices],
        varying_best=varying([search.choices[0] for search in found.searches if search.choices]),
        confidence_lines=confidence_lines(found),
        comparisons=comparison_line(found.comparisons) if found.comparisons is not None else "",
        run_lines=[] if found.run is None else run_lines(found.run),
        looks=LOOKS,
        longest=max(part.us for part in found.parts),
        changes=(changes := [change(each, found) for each in found.sensitivities]),
        most=max(map(abs, changes), default=0.0) or 1.0,
        figures=figures,
        stages=len({bar.stage for bar in found.timeline}),
    )


def words(name: str) -> str:
    """Return the name of a part, a flag or a field as people write it: `weak_nodes` as nodes."""
    return name.removeprefix("weak_").replace("_", " ")


def curve_title(curve: Curve) -> str:
    """Return what a curve's values change: of a flag its sentence, of a field its name."""
    return f"Over {curve.name}" if "." in curve.name else curve.means.removesuffix(".")


def timeline_figure(bars: Sequence[Bar]) -> Figure:
    """Return a figure with a row for each stage, the first on top, and a bar for each task of a micro-batch."""
    stages = sorted({bar.stage for bar in bars})
    drawn = {kind: [bar for bar in bars if bar.kind == kind] for kind in KINDS}
    drawn = {kind: of for kind, of in drawn.items() if of}
    marks = [
        Marks(
            kind="bars",
            look=look,
            x=[round(bar.start_us / 1e3, 4) for bar in of],
            ends=[round(bar.end_us / 1e3, 4) for bar in of],
            y=[bar.stage for bar in of],
            texts=[f"micro-batch {bar.micro}, part {bar.part}" for bar in of],
        )
        for look, of in enumerate(drawn.values())
    ]
    x = Axis(label="ms", low=0.0, high=max(bar.end_us for bar in bars) / 1e3)
    ticks = [(stage, str(stage)) for stage in stages]
    y = Axis(label="stage", low=stages[0] - 0.5, high=stages[-1] + 0.5, down=True, grid=False, ticks=ticks)
    return Figure(
        looks=[Look(name=name, colour=colour) for name, colour in (KINDS[kind] for kind in drawn)],
        panels=[Panel(title="", x=x, y=y, marks=marks)],
        columns=1,
        height=64 + STAGE_PX * len(stages),
        shared=True,
    )


def curves_figure(curve: Curve) -> Figure:
    """Return a figure with one panel each for step time, MFU and the exposed share, over the curve's values."""
    points = [point for point in curve.points if point.step_us is not None]
    names = [clean(point.label, 40) for point in points]
    beside = max(0.3, 0.06 * (len(points) - 1))  # room for half a name at both ends
    ticks = [(place, clean(name, TICK)) for place, name in enumerate(names)]
    x = Axis(label=clean(words(curve.name), 40), low=-beside, high=len(points) - 1 + beside, ticks=ticks)
    unit, us = ("s", 1e6) if max(point.high_us or point.step_us or 0.0 for point in points) >= LONG_US else ("ms", 1e3)
    step = f"step, {unit}"
    shown: tuple[tuple[str, str, list[float | None]], ...] = (
        (step, "--overlapped", [(point.step_us or 0.0) / us for point in points]),
        ("MFU", "--compute", [point.mfu for point in points]),
        ("exposed", "--transfer", [(point.exposed_comm_us or 0.0) / (point.step_us or 1.0) for point in points]),
    )
    panels = []
    for look, (name, _, found) in enumerate(shown):
        values = {place: value for place, value in enumerate(found) if value is not None}
        percent = name != step
        band = [] if percent else _band(points, look, us)
        highest = max([*values.values(), *(end for marks in band for end in marks.ends)], default=0.0)
        y = Axis(label="", low=0.0, high=1.08 * highest or 1.0, percent=percent)
        line = Marks(kind="line", look=look, x=list(values), y=list(values.values()))
        texts = [f"{names[place]}: {f'{value:.1%}' if percent else f'{value:.1f}'}" for place, value in values.items()]
        points_on_it = replace(line, kind="points", texts=texts)
        panels.append(Panel(title=name, x=x, y=y, marks=[*band, line, points_on_it]))
    looks = [Look(name=name, colour=colour) for name, colour, _ in shown]
    return Figure(looks=looks, panels=panels, columns=len(shown), height=CURVE_PX, shared=False)


def _band(points: Sequence[PlanOutcome], look: int, us: float) -> list[Marks]:
    """Return the band of the steps' intervals from the first to the last point; none where one lacks it."""
    ends = [(point.low_us, point.high_us) for point in points]
    low = [low / us for low, _ in ends if low is not None]
    high = [high / us for _, high in ends if high is not None]
    if not len(low) == len(high) == len(points):
        return []
    return [Marks(kind="band", look=look, x=list(range(len(points))), y=low, ends=high)]
