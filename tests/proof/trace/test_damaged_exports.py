"""Damage anywhere in an export of Nsight Systems is a BadTrace, never another exception."""

from pathlib import Path
from random import Random

import pytest

from counterpoint.errors import BadTrace
from counterpoint.trace.nsys import read_nsys
from tests.support.nsys_export import edited_export


@pytest.mark.parametrize("seed", range(150))
def test_no_damage_escapes_as_anything_but_bad_trace(tmp_path: Path, seed: int) -> None:
    data = bytearray(edited_export(tmp_path / "report.sqlite").read_bytes())
    random = Random(seed)
    for _ in range(random.choice((1, 5, 25))):
        data[random.randrange(16, len(data))] = random.randrange(256)
    (tmp_path / "report.sqlite").write_bytes(data)
    try:
        timelines = read_nsys(tmp_path / "report.sqlite")
    except BadTrace:
        return
    assert all(len(timeline.gpu) for timeline in timelines)
