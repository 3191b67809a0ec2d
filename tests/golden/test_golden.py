"""What the library decides is what it decided when the record was made; `record.py` says how to make it again."""

from __future__ import annotations

import pytest

from tests.golden import record

SHOWN = 40  # differences


@pytest.mark.parametrize(
    "group", [pytest.param(group, marks=pytest.mark.xdist_group(group)) for group in record.GROUPS]
)
def test_every_row_is_as_recorded(group: str) -> None:
    changed = record.changes(group, record.read(group), record.compute(group))
    if changed:
        more = [f"... and {len(changed) - SHOWN} more"] if len(changed) > SHOWN else []
        head = f"{len(changed)} values differ from the record; if they must, run python -m tests.golden.record"
        pytest.fail("\n".join([head, *changed[:SHOWN], *more]), pytrace=False)
