"""Describe the figures of a page: panels of lines, points, bars or bands with axes; page/figures.js draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Symbol = Literal["circle", "cross", "triangle"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """Describes an axis before any zoom; without `ticks` the browser chooses them."""

    label: str
    low: float
    high: float
    log: bool = False
    down: bool = False  # the smallest value on top
    percent: bool = False
    grid: bool = True
    ticks: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """Holds the name, colour and dashes that several marks share; each look has one entry in the legend."""

    name: str
    colour: str  # of page.css, such as --compute
    dash: Sequence[int] = ()  # pixels on, off, on, ...; empty: solid


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """Holds marks of one look: a line, points, bars from `x` to `ends`, or a band from `y` to `ends`."""

    kind: Literal["line", "points", "bars", "band"]
    look: int  # place in the looks of the figure
    x: Sequence[float]
    y: Sequence[float]
    ends: Sequence[float] = ()  # of bars and of a band
    texts: Sequence[str] = ()  # what the pointer shows of points and bars
    symbols: Sequence[Symbol] = ()  # of points; empty: circles


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """Holds one plot area with its axes and marks."""

    title: str
    x: Axis
    y: Axis
    marks: Sequence[Marks]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """Describes panels, `columns` in each row; if `shared`, all panels have one legend and zoom together."""

    looks: Sequence[Look]
    panels: Sequence[Panel]
    columns: int
    height: int  # of a panel, pixels
    shared: bool
