"""Damage anywhere in an export of Nsight Systems is a BadTrace, never another exception."""

import sqlite3
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from counterpoint.errors import BadTrace
from counterpoint.trace.nsys import read_nsys
from tests.support.nsys_export import NsysExport

GEMM, ALL_GATHER = "nvjet_tst_128x256", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def _edit(path: Path, *statements: str) -> Path:
    export = NsysExport()
    export.kernel(GEMM, 50, 90, launch=(20, 30))
    export.range("aten::mm, op_id = 1, sizes = [[1]]", 10, 40)
    export.write(path)
    with closing(sqlite3.connect(path)) as db, db:
        for statement in statements:
            db.execute(statement)
    return path


@pytest.mark.parametrize("seed", range(150))
def test_no_damage_escapes_as_anything_but_bad_trace(tmp_path: Path, seed: int) -> None:
    data = bytearray(_edit(tmp_path / "report.sqlite").read_bytes())
    random = Random(seed)
    for _ in range(random.choice((1, 5, 25))):
        data[random.randrange(16, len(data))] = random.randrange(256)
    (tmp_path / "report.sqlite").write_bytes(data)
    try:
        timelines = read_nsys(tmp_path / "report.sqlite")
    except BadTrace:
        return
    assert all(len(timeline.gpu) for timeline in timelines)
