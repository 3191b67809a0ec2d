"""A search over all divisions of a job: nothing slower than what was given, and everything counted."""

from __future__ import annotations

import tomllib

from counterpoint.plan.answer import answer
from counterpoint.plan.job.job import parse_job
from counterpoint.plan.search import search

TABLES = tomllib.loads("""
model = { name = "llama3-8b" }
training = { sequence = 4096, global_batch = 64 }
parallel = { dp = 4, tp = 2, pp = 2, zero = 1 }
cluster = { gpu = "H100", network = "h100-ndr-400" }
""")


def test_a_search_finds_nothing_slower_than_what_was_given() -> None:
    """The given division is among those that are tried."""
    job = parse_job(TABLES)
    found = search(job, best=3)
    assert found.choices[0].step_us <= answer(parse_job(TABLES)).step_us * (1 + 1e-9)
    assert [each.step_us for each in found.choices] == sorted(each.step_us for each in found.choices)
    assert all(each.memory_gib <= job.cluster.gpu.memory_gib for each in found.choices)


def test_a_search_counts_what_it_leaves_out() -> None:
    """All that was considered is one of three."""
    found = search(parse_job(TABLES), best=3)
    assert found.considered == found.priced + found.too_large + found.impossible
    assert found.impossible > 0
