"""Draw the study of occupancy shaping: total time against shared memory per block, as one SVG that needs nothing.

python benchmarks/occupancy_plot.py results/occupancy-study.json docs/images/occupancy.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from html import escape
from math import log
from pathlib import Path
from typing import Any

from provenance import read_result

WIDTH, HEIGHT, LEFT, TOP = 400, 250, 46, 34  # of one panel, and where its axes begin
STYLES = {  # (priority, order): colour, dashes, words
    (False, "together"): ("#b8860b", "", "priority 0, together"),
    (True, "together"): ("#0b6e99", "", "high priority, together"),
    (False, "compute_first"): ("#b8860b", "5 4", "priority 0, GEMM first"),
    (True, "compute_first"): ("#0b6e99", "5 4", "high priority, GEMM first"),
}


def main() -> None:
    """Read the rows, pick the panels, write the picture."""
    rows = json.loads(read_result(Path(sys.argv[1])))["rows"]
    panels = [
        (f"{collective} 512 MiB beside 8192³, tile 64×64×{depth}", found)
        for collective in ("all_reduce", "all_to_all")
        for depth in (32, 64)
        if (found := [row for row in rows if chosen(row, collective, depth)])
    ]
    Path(sys.argv[2]).write_text("\n".join(picture(panels)) + "\n")


def chosen(row: dict[str, Any], collective: str, depth: int) -> bool:
    return bool(
        row["workload"] == f"gemm 8192x8192x8192 tile 64x64x{depth}"
        and (row["collective"], row["mebibytes"], row["nccl_threads"]) == (collective, 512, 512)
    )


def picture(panels: list[tuple[str, list[dict[str, Any]]]]) -> Iterator[str]:
    """Panels in two columns, the legend below them."""
    height = HEIGHT * -(-len(panels) // 2) + 46
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {height}" font-family="sans-serif">'
    yield f'<rect width="{2 * WIDTH}" height="{height}" fill="white"/>'
    for index, (title, rows) in enumerate(panels):
        yield f'<g transform="translate({index % 2 * WIDTH} {index // 2 * HEIGHT})">'
        yield from panel(title, rows)
        yield "</g>"
    for index, (colour, dashes, words) in enumerate([*STYLES.values(), ("#999", "2 3", "GEMM alone")]):
        x, y = 16 + index % 3 * 265, height - 30 + index // 3 * 18
        yield f'<path d="M{x} {y}h34" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>'
        yield text(x + 40, y + 4, words)
    yield "</svg>"


def panel(title: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    """Total time in ms over KiB of shared memory per block; the numbers of blocks per SM stand on the axis."""
    serial = (rows[0]["compute_alone_us"] + rows[0]["comm_alone_us"]) / 1e3
    top_ms = serial * 1.4  # one block per SM is off the panel: it loses, and would hide the rest
    least, most = (choose(log(row["smem_bytes"]) for row in rows) for choose in (min, max))
    wide, high = WIDTH - LEFT - 14, HEIGHT - TOP - 44

    def at(row: dict[str, Any], key: str) -> tuple[float, float]:
        right = 0.06 + 0.88 * (log(row["smem_bytes"]) - least) / (most - least)
        return LEFT + right * wide, TOP + high - row[key] / 1e3 / top_ms * high

    yield text(LEFT, 20, title, size=13)
    for tick in ticks(top_ms):
        y = TOP + high - tick / top_ms * high
        yield f'<path d="M{LEFT} {y:.1f}h{wide}" stroke="#ddd"/>' + text(LEFT - 6, y + 4, f"{tick:g}", anchor="end")
    yield text(12, TOP - 4, "ms")
    y = TOP + high - serial / top_ms * high
    yield f'<path d="M{LEFT} {y:.1f}h{wide}" stroke="#c33" stroke-dasharray="1 3"/>'
    yield text(LEFT + 4, y - 5, "one after the other, unshaped", size=10, colour="#c33")
    for row in {row["blocks"]: row for row in rows}.values():
        x, _ = at(row, "total_us")
        yield text(x, TOP + high + 14, str(row["blocks"]), anchor="middle")
        yield text(x, TOP + high + 27, f"{row['smem_bytes'] / 1024:.0f}", anchor="middle", size=9, colour="#777")
    yield text(LEFT, TOP + high + 40, "blocks per SM, and below it KiB of shared memory per block (log scale)", size=10)
    yield f'<clipPath id="panel"><rect x="{LEFT}" y="{TOP}" width="{wide}" height="{high}"/></clipPath>'
    yield '<g clip-path="url(#panel)">'
    for (priority, order), (colour, dashes, _) in STYLES.items():
        found = [row for row in rows if (row["priority"], row["order"]) == (priority, order)]
        yield line([at(row, "total_us") for row in found], colour, dashes)
    yield line([at(row, "compute_alone_shaped_us") for row in rows if row["order"] == "together"], "#999", "2 3")
    yield "</g>"


def line(points: list[tuple[float, float]], colour: str, dashes: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in sorted(points))
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>{dots}'
    )


def ticks(top: float) -> list[float]:
    step = next(each for each in (0.5, 1, 2, 5, 10, 20, 50) if top / each <= 7)
    return [index * step for index in range(int(top / step) + 1)]


def text(x: float, y: float, words: str, *, size: int = 11, anchor: str = "start", colour: str = "#333") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"'
    return f"<text {place}>{escape(words)}</text>"


if __name__ == "__main__":
    main()
