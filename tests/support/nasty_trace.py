"""A trace whose names and args hold everything that could be taken for the border of an event."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from counterpoint.trace.timeline import Timeline
from tests.support import kineto_trace as kt

NASTY = [
    "}, {", '"}, {"', "\\", '\\"}, {\\"', "]}", '"traceEvents": [', "µs 通信 😀", "<b>&amp;</b>", "tab\tnew\nline\x00",
    "",
]  # fmt: skip


def plain(timeline: Timeline, *without: str) -> Any:
    """All of a timeline that can be compared: numbers into its tables replaced by what they stand for."""
    tables = {"name": timeline.names, "shape": timeline.shapes, "collective": timeline.collectives}
    whole = dataclasses.asdict(timeline)
    for key in ("path", "names", "shapes", "collectives", *without):
        whole.pop(key)
    for kind in ("gpu", "host"):
        for name, column in whole[kind].items():
            if column is None:
                continue
            values = np.nan_to_num(column, nan=-7.0).tolist()
            whole[kind][name] = [tables[name][v] if v >= 0 else None for v in values] if name in tables else values
    return whole


def awkward() -> list[kt.Event]:
    """Events whose names and args hold everything that could be taken for the border of an event."""
    made = kt.training()
    for row, name in enumerate(NASTY):
        made.append(kt.op(name, 3000.0 + row, 0.5, external=100 + row))
        made.append(
            kt.annotation(name, 3100.0 + row, 0.5) | {"args": {"list": [{"a": name}, {"b": [{}, {}]}], "c": {}}}
        )
        made.append({"ph": "i", "name": name, "ts": 3000.0, "s": "g"})
    return made
