"""What holds for every job, on 250 random ones."""

import pytest

from tests.support.plan_invariants import INVARIANTS
from tests.support.random_jobs import random_job


@pytest.mark.parametrize("seed", range(250))
def test_a_random_job(seed: int) -> None:
    """Each invariant of the table; those that break are named together."""
    job, broken = random_job(seed), {}
    for name, check in INVARIANTS.items():
        try:
            check(job)
        except AssertionError as error:
            broken[name] = str(error)
    assert broken == {}


def test_the_table_has_what_was_asked_for() -> None:
    """At least 25 of them, so that nobody drops one in silence."""
    assert len(INVARIANTS) >= 35
