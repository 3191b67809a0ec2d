"""Whatever stands in a job's file or behind a flag: a finite prediction, or one line that says what is allowed."""

from __future__ import annotations

import copy
import math
import tomllib
from collections.abc import Iterator
from datetime import date
from typing import Any

import msgspec
import pytest

from counterpoint.errors import Misconfigured
from counterpoint.plan.answer import answer
from counterpoint.plan.job.cluster import ClusterGpu, Level
from counterpoint.plan.job.fields import CheckedRecord
from counterpoint.plan.job.job import Ranks, parse_job
from counterpoint.plan.job.model import Experts, LatentAttention, Model
from counterpoint.plan.job.parallel import Compression, Parallel, Training
from counterpoint.plan.job.run import Run

TABLES = tomllib.loads("""
model = { layers = 4, hidden = 256, heads = 4, vocab = 1000, experts = { count = 4, per_token = 2, width = 512 } }
training = { sequence = 128, global_batch = 8 }
parallel = { dp = 2, tp = 2, pp = 2 }
cluster.gpu = { name = "mine", tflops = { bf16 = 100.0 }, sms = 50, memory_gib = 16, memory_gb_per_s = 900 }
cluster.levels = [
    { name = "pcie", kind = "pcie", size = 4, gb_per_s = 25, latency_us = 2 },
    { name = "net", kind = "network", size = 8, gb_per_s = 25, latency_us = 2 },
]
compression = { method = "topk" }
ranks = { slow = 1.5 }
run = { steps = 100, gpu_mtbf_hours = 1e5 }
""")
MLA = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
PLACES: dict[type[CheckedRecord], tuple[str | int, ...]] = {
    Model: ("model",),
    Experts: ("model", "experts"),
    LatentAttention: ("model", "mla"),
    Training: ("training",),
    Parallel: ("parallel",),
    ClusterGpu: ("cluster", "gpu"),
    Level: ("cluster", "levels", 1),
    Compression: ("compression",),
    Ranks: ("ranks",),
    Run: ("run",),
}
NUMBERS: list[Any] = [math.nan, math.inf, -math.inf, -1, -0.5, 0, 1, 3, 0.5, 2**31, 2**63, 1 << 20000, 1e300, 5e-324]
OTHERS: list[Any] = [True, "", "x", "\x1b[2J", "x" * 100_000, [], [[1]], {}, {"x": {"y": 1}}, date(2020, 1, 1)]


def fields() -> Iterator[tuple[type[CheckedRecord], str]]:
    for record in PLACES:
        for name in record.__struct_fields__:
            yield record, name


def with_value(record: type[CheckedRecord], name: str, value: object) -> dict[str, Any]:
    tables: Any = copy.deepcopy(TABLES)
    if record is LatentAttention:
        tables["model"]["mla"] = MLA.copy()
    place = tables
    for key in PLACES[record]:
        place = place[key]
    place[name] = value
    return dict(tables)


def is_finite(found: object) -> bool:
    """Whether every number of a prediction is finite and none is negative."""
    if isinstance(found, dict | list):
        return all(map(is_finite, found.values() if isinstance(found, dict) else found))
    return not isinstance(found, int | float) or 0 <= found < math.inf


def test_every_record_of_a_job_is_looked_at() -> None:
    """None is left out, also later ones."""
    assert set(PLACES) == set(CheckedRecord.__subclasses__())


@pytest.mark.parametrize(("record", "name"), list(fields()), ids=lambda each: getattr(each, "__name__", each))
def test_a_field_is_finite_or_refused(record: type[CheckedRecord], name: str) -> None:
    """Numbers of all kinds, and what is no number: a prediction without nan, or a line with the field's name."""
    for value in NUMBERS + OTHERS:
        try:
            found = answer(parse_job(with_value(record, name, value)))
        except Misconfigured as error:
            line = str(error)
            assert line.isprintable()
            assert len(line) < 600
            assert name in line, (value, line)
        else:
            assert is_finite(msgspec.to_builtins(found)), value
            assert found.step_us > 0
