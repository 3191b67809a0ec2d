"""Gates for CI: what an expression means, what it allows, and what it holds against a baseline."""

from __future__ import annotations

import msgspec
import pytest

from counterpoint.diagnosis.api import diagnose_digests
from counterpoint.diagnosis.gate import check_gate, parse_gate
from counterpoint.errors import Misconfigured
from counterpoint.records.diagnosis import Diagnosis
from tests.support.job_builder import comm, job, op, rank


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    """One step of 200 µs on two ranks: 100 of compute, 100 of exposed communication."""
    one = rank(op("matmul", 0, 100, launch=0.0), comm("all_reduce", 100, 200))
    return diagnose_digests(list(job(one, one).digests), ["rank0.json", "rank1.json"]).diagnosis


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ("exposed_comm<60%", True),
        ("exposed_comm<40%", False),
        ("exposed_comm <= 0.1 ms", True),
        ("exposed_comm<99us", False),
        ("step>=0.2ms", True),
        ("step<0.0001s", False),
        ("hidden>=50%", False),
        ("hidden<=0", True),
        ("comm_to_compute<=1.0", True),
        ("stragglers<1", True),
        ("mfu>1%", False),  # not known: a gate that cannot be checked does not pass
    ],
)
def test_bound(diagnosis: Diagnosis, text: str, passed: bool) -> None:
    """Times are of a step, % of the step, of ratios of 1."""
    assert check_gate(parse_gate(text), diagnosis, None, 0.05).passed is passed


@pytest.mark.parametrize(
    "text", ["", "exposed<8%", "exposed_comm=8%", "exposed_comm<8", "step<8%", "hidden<8ms", "exposed_comm<-8%", "a<b"]
)
def test_expression_that_means_nothing(text: str) -> None:
    """Misconfigured, with the forms that are allowed."""
    with pytest.raises(Misconfigured):
        parse_gate(text)


def with_exposed(d: Diagnosis, us: float) -> Diagnosis:
    return msgspec.structs.replace(d, totals=msgspec.structs.replace(d.totals, exposed_comm_us=us))


@pytest.mark.parametrize(("before_us", "passed"), [(100.0, True), (97.0, True), (90.0, False), (120.0, True)])
def test_baseline(diagnosis: Diagnosis, before_us: float, passed: bool) -> None:
    """100 µs exposed may trail an earlier result by 5 %, whatever the bound."""
    gate = parse_gate("exposed_comm<60%")
    assert check_gate(gate, diagnosis, with_exposed(diagnosis, before_us), 0.05).passed is passed


def test_more_hidden_is_not_worse(diagnosis: Diagnosis) -> None:
    """For hidden and MFU, more is better."""
    before = msgspec.structs.replace(diagnosis, totals=msgspec.structs.replace(diagnosis.totals, hidden=0.5))
    gate = parse_gate("hidden>=0")
    results = [check_gate(gate, *pair, 0.05).passed for pair in ((diagnosis, before), (before, diagnosis))]
    assert results == [False, True]
