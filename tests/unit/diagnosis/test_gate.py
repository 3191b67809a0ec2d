"""Gates for CI: what an expression means, what it allows, and what it holds against an earlier run."""

import msgspec
import pytest

from counterpoint.diagnosis.comparison import check_gate, parse_gate
from counterpoint.errors import Misconfigured
from counterpoint.records.diagnosis import Diagnosis
from tests.support.job_builder import comm, diagnosed, op, rank


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    """One step of 200 µs on two ranks: 100 of compute, 100 of exposed communication."""
    one = rank(op("matmul", 0, 100, launch=0.0), comm("all_reduce", 100, 200))
    return diagnosed(one, one)


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
    assert check_gate(parse_gate(text), diagnosis).passed is passed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "exposed<8%",
        "exposed_comm=8%",
        "exposed_comm<8",
        "step<8%",
        "hidden<8ms",
        "exposed_comm<-8%",
        "a<b",
        "step<against+5",
        "hidden<against+1ms",
        "step<against*2",
        "against<5%",
        "step<5%+against",
    ],
)
def test_expression_that_means_nothing(text: str) -> None:
    with pytest.raises(Misconfigured):
        parse_gate(text)


@pytest.mark.parametrize(
    ("text", "before_us", "passed"),
    [
        ("exposed_comm<=against", 100.0, True),
        ("exposed_comm<against", 100.0, False),
        ("exposed_comm<against+5%", 97.0, True),
        ("exposed_comm<against+5%", 90.0, False),
        ("exposed_comm<against-5%", 106.0, True),
        ("exposed_comm<against-5%", 103.0, False),
        ("exposed_comm <= against + 0.01 ms", 91.0, True),
        ("exposed_comm <= against + 0.01 ms", 89.0, False),
        ("hidden>=against", 100.0, True),
        ("mfu>=against", 100.0, False),  # not known
    ],
)
def test_bound_against_an_earlier_run(diagnosis: Diagnosis, text: str, before_us: float, passed: bool) -> None:
    """100 µs are exposed now; `%` is of the earlier value."""
    earlier = msgspec.structs.replace(
        diagnosis, totals=msgspec.structs.replace(diagnosis.totals, exposed_comm_us=before_us)
    )
    found = check_gate(parse_gate(text), diagnosis, earlier)
    assert found.passed is passed, found.reason


def test_what_an_earlier_run_does_not_know_does_not_pass(diagnosis: Diagnosis) -> None:
    earlier = msgspec.structs.replace(diagnosis, totals=msgspec.structs.replace(diagnosis.totals, hidden=None))
    found = check_gate(parse_gate("hidden>=against"), diagnosis, earlier)
    assert (found.passed, found.reason) == (False, "hidden is not known from the earlier run")
