"""Compute and draw what each step from plain NCCL to copy engines brings; docs/write_tables.py writes both.

A step's figure is its mean `ideal_fraction` in percent, over the pairs of one run. Two runs on 4 × H200 are kept apart,
since their pairs differ: one measured every mechanism, the other divided the SMs between the GEMM and NCCL.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
PICTURE = Path(__file__).resolve().parent / "images" / "ladder.svg"
CONCCL = (21, 42, 72)  # percent on MI300X: by default, scheduled and partitioned, with copy engines (arXiv 2412.14335)
COLLECTIVES = {  # colour on a light and on a dark page, centre in the legend
    "all_gather": ("#0072b2", "#56b4e9", 22),
    "all_to_all": ("#00805e", "#2fc79a", 122),
    "reduce_scatter": ("#c34a00", "#f0934d", 222),
    "all_reduce": ("#8e3f93", "#d9a0e3", 348),
}
STEPS = (
    ("NCCL", "nccl", "together"),
    ("NCCL, high priority", "nccl+priority=high", "together"),
    ("NCCL, 100 µs before the GEMM", "nccl", "comm_first"),
    ("NCCL, zero-CTA policy", "nccl_zero_cta", "together"),
    ("counterpoint, zero_sm", "zero_sm", "together"),
    ("counterpoint, zero_sm+gemm_sms=fit", "zero_sm+gemm_sms=fit", "together"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Holds the mean percent of the ideal speed-up by collective; a collective without rows is left out."""

    name: str
    percents: dict[str, float]


def _read(name: str) -> Any:
    content = (RESULTS / name).read_bytes()
    return json.loads(gzip.decompress(content) if name.endswith(".gz") else content)


def _step(name: str, found: Sequence[tuple[str, float]]) -> Step:
    """Return the means of (collective, ideal_fraction), in percent."""
    grouped = {one: [fraction for collective, fraction in found if collective == one] for one in COLLECTIVES}
    return Step(name=name, percents={one: 100 * fmean(fractions) for one, fractions in grouped.items() if fractions})


def measured_steps() -> list[Step]:
    """Return the steps of suite `pairs`: 16 pairs for each collective."""
    rows = _read("pairs-4xh200.json.gz")["rows"]
    return [
        _step(
            name,
            [
                (row["collective"], row["ideal_fraction"])
                for row in rows
                if (row["mechanism"], row["order"]) == (mechanism, order)
            ],
        )
        for name, mechanism, order in STEPS
    ]


def divided_steps() -> list[Step]:
    """Return NCCL, the division of SMs that the rule picks, and the best of 11, on the 16 pairs held out of the fit."""
    picked = {(pair["scenario"], pair["size_bytes"]): pair["picked"] for pair in _read("budget-rule.json")["pairs"]}
    pairs: dict[tuple[str, int], dict[str, Any]] = {}
    for row in _read("budget-pairs-4xh200.json.gz")["rows"]:
        pair = row["scenario"], row["size_bytes"]
        if row["order"] == "together" and pair in picked:
            pairs.setdefault(pair, {})[row["mechanism"]] = row
    plain, chosen, best = [], [], []
    for pair, rows in pairs.items():
        collective = rows["nccl"]["collective"]
        plain.append((collective, rows["nccl"]["ideal_fraction"]))
        chosen.append((collective, rows[picked[pair]]["ideal_fraction"]))
        best.append((collective, max(row["ideal_fraction"] for row in rows.values())))
    steps = {"NCCL": plain, "NCCL, SMs divided by the rule": chosen, "NCCL, best of 11 divisions": best}
    return [_step(name, found) for name, found in steps.items()]


def cells(steps: Sequence[Step]) -> list[list[str]]:
    """Return a table's rows: the step and its whole percents; a dash where there are no rows."""
    return [
        [step.name, *(whole(step.percents[one]) if one in step.percents else "–" for one in COLLECTIVES)]
        for step in steps
    ]


def whole(percent: float) -> str:
    """Return a percent without decimals; the sign is a minus, not a hyphen."""
    return f"{percent:.0f}".replace("-", "−")


WIDTH, LEFT, SCALE, LOWEST, ROW = 440, 16, 3.36, -20, 47  # pixels, pixels, pixels for a percent, percent, pixels
TOP = 76  # of the first panel


def _x(percent: float) -> float:
    return LEFT + SCALE * (percent - LOWEST)


def picture() -> str:
    """Return the SVG: two panels, a stalk for each collective and step, and ConCCL's figures as dashed lines."""
    panels = [
        ("16 pairs for each collective", measured_steps()),
        ("16 other pairs, no all_to_all, zero_sm not measured", divided_steps()),
    ]
    drawn: list[str] = []
    top = TOP
    for title, steps in panels:
        drawn.extend(_panel(title, steps, top))
        top += 24 + ROW * len(steps) + 30
    return "\n".join([*_head(top), *drawn, "</svg>"]) + "\n"


def _head(height: int) -> Iterator[str]:
    """Yield the styles for light and dark pages, the background and the legend."""
    colours = {"ground": ("#fff", "#15191e"), "ink": ("#24292f", "#e3e7eb"), "grid": ("#d5d9dd", "#3b424a")}
    colours |= {one: (light, dark) for one, (light, dark, _) in COLLECTIVES.items()}
    light, dark = (
        "".join(f".{name}{{fill:{pair[side]};stroke:{pair[side]}}}" for name, pair in colours.items())
        for side in (0, 1)
    )
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    yield f"<style>text{{font:12px sans-serif;stroke:none!important}}{light}"
    yield f"@media(prefers-color-scheme:dark){{{dark}}}</style>"
    yield f'<rect width="{WIDTH}" height="{height}" class="ground"/>'
    yield _text(LEFT, 18, "% of the ideal speed-up, mean over pairs, 4 × H200")
    yield f'<path d="M{LEFT} 36h20" class="ink" stroke-dasharray="4 3"/>'
    default, partitioned, copied = CONCCL
    words = f"ConCCL, MI300X: default {default}, partitioned {partitioned}, copy engines {copied}"
    yield _text(LEFT + 26, 40, words)
    for one, (_, _, x) in COLLECTIVES.items():
        yield f'<circle cx="{x}" cy="58" r="4" class="{one}"/>' + _text(x + 9, 62, one)


def _panel(title: str, steps: Sequence[Step], top: int) -> Iterator[str]:
    """Yield a panel: its grid and ConCCL's lines, then for each step the name, the range and the stalks."""
    yield _text(LEFT, top + 14, title, weight="bold")
    top += 24
    high = ROW * len(steps)
    for percent in range(0, 101, 20):
        yield f'<path d="M{_x(percent):.1f} {top}v{high}" class="grid"/>'
        yield _text(_x(percent), top + high + 14, str(percent), anchor="middle")
    for percent in CONCCL:
        yield f'<path d="M{_x(percent):.1f} {top}v{high}" class="ink" stroke-dasharray="4 3"/>'
    for index, step in enumerate(steps):
        y = top + ROW * index
        low, most = (whole(choose(step.percents.values())) for choose in (min, max))
        yield f'<rect x="0" y="{y}" width="{WIDTH}" height="17" class="ground"/>'
        yield _text(LEFT, y + 13, step.name) + _text(WIDTH - LEFT, y + 13, f"{low} to {most}", anchor="end")
        for line, one in enumerate(COLLECTIVES):
            if one in step.percents:
                end, middle = _x(step.percents[one]), y + 21 + 7 * line
                yield f'<path d="M{_x(0):.1f} {middle}H{end:.1f}" class="{one}" stroke-width="2"/>'
                yield f'<circle cx="{end:.1f}" cy="{middle}" r="3" class="{one}"/>'


def _text(x: float, y: float, words: str, *, anchor: str = "start", weight: str = "normal") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="font-weight:{weight}"'
    return f'<text {place} class="ink">{escape(words)}</text>'
