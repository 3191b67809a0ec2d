"""Write a prediction as one HTML page: parts of the step, pipeline timeline, scaling curves, sensitivity bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from counterpoint.records.prediction import Bar, Curve, PlanOutcome, Prediction
from counterpoint.rendering import formatting as say
from counterpoint.rendering.figures import Axis, Figure, Look, Marks, Panel
from counterpoint.rendering.plan_tables import (
    confidence_lines,
    headline,
    memory_line,
    stage_memory_line,
    tables,
    words,
)
from counterpoint.rendering.safe_html import Page, clean, write_page
from counterpoint.rendering.table import Column, Table, row

KINDS = {"F": ("forward", "--compute"), "B": ("backward", "--overlapped"), "W": ("weight gradients", "--memcpy")}
STAGE_PX = 22
CURVE_PX = 260
TICK = 10  # characters of a name below an axis
LONG_US = 1e8  # from here on seconds, whose numbers fit beside an axis


def write_plan_page(path: Path, found: Prediction) -> None:
    """Write a prediction as a page, or raise OSError; `path` appears complete or not at all."""
    figures = {
        curve.name: curves_figure(curve)
        for curve in found.curves
        if any(point.step_us is not None for point in curve.points)
    }
    if found.timeline:
        figures["timeline"] = timeline_figure(found.timeline)
    asked = "".join(f" · {name} = {value}" for name, value in found.asked.items())
    page = Page(
        title="what the job would take",
        kind="prediction",
        scope=f"{found.model} · {found.gpus:,} × {found.gpu}{asked}",
        headline=headline(found),
        figures=_figures(found),
        lines=[f"{said}." for said in (memory_line(found), stage_memory_line(found), *confidence_lines(found)) if said],
        tables=[*tables(found, figures), _memory(found), _communication(found)],
    )
    write_page(path, page)


def _figures(found: Prediction) -> list[tuple[str, str, str]]:
    made = [("a step", say.tenth_milliseconds(found.step_us), "ms")]
    if found.interval is not None:
        ends = say.interval(found.interval.low_us, found.interval.high_us)
        made.append((f"{say.percent(found.interval.level)} of such steps, ms", ends, ""))
    if found.mfu is not None:
        made.append(("MFU", say.tenth_percent(found.mfu), ""))
    made += [
        ("exposed communication", say.percent(found.exposed_comm_us / found.step_us), ""),
        ("communication / compute", f"{found.comm_to_compute:.2f}", ""),
    ]
    if found.memory_available_gib is not None:
        made.append((f"memory, of {found.memory_available_gib:.0f} GiB", f"{sum(found.memory.values()):.1f}", "GiB"))
    return made


def _memory(found: Prediction) -> Table:
    rows = [row(name, gib) for name, gib in found.memory.items()]
    return Table(title="Memory", unit="GiB", columns=(Column("of"), Column("GiB", say.ratio)), rows=rows)


def _communication(found: Prediction) -> Table:
    return Table(
        title="Communication alone",
        unit="ms",
        columns=(
            Column("of", of=lambda part: words(part.name)),
            Column("ms", say.tenth_milliseconds, lambda part: part.us),
            Column("", of=lambda part: part.means),
        ),
        rows=found.comm,
    )


def timeline_figure(bars: Sequence[Bar]) -> Figure:
    """Return the pipeline's timeline: a row for each stage, the first on top, and a bar for each task."""
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
    """Return a figure with one panel each for step time, MFU and exposed share, over the curve's values."""
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
    """Return the band between the ends of all points' intervals; empty if a point has no interval."""
    ends = [(point.low_us, point.high_us) for point in points]
    low = [low / us for low, _ in ends if low is not None]
    high = [high / us for _, high in ends if high is not None]
    if not len(low) == len(high) == len(points):
        return []
    return [Marks(kind="band", look=look, x=list(range(len(points))), y=low, ends=high)]
