"""What is advised fits what was seen."""

from __future__ import annotations

import pytest

from counterpoint.diagnosis.accounts import activity, rank_accounts, totals, waits
from counterpoint.diagnosis.findings import _exposed
from counterpoint.trace.timeline import Kind
from tests.support.job_builder import Op, comm, job, op, rank


def advice(*, copies: bool) -> str:
    """For a step of 100 µs of compute and as much communication after it, by copy engines or by NCCL."""
    alone: Op = comm("all_gather", 100, 190)
    if copies:
        alone = Op(name="Memcpy PtoP (Device -> Device)", start=100, end=190, kind=Kind.COMM, stream=24, bytes=1 << 20)
    j = job(rank(op("matmul", 0, 100, launch=0.0), alone))
    busy = [activity(j, 0)]
    w = waits(j, busy)
    (finding,) = _exposed(j, totals(rank_accounts(j, busy, w)), w, {}, 190.0)
    return finding.advice


@pytest.mark.parametrize(("copies", "said"), [(True, "It takes no SM already"), (False, "Collectives that take no SM")])
def test_copy_engines_are_not_advised_where_they_are_used(copies: bool, said: str) -> None:
    """What copies leave exposed begins too late; what NCCL does may have waited for SMs."""
    assert said in advice(copies=copies)
