"""Two runs of a job: what grew, by how much a step, and what cannot be compared."""

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from counterpoint.diagnosis.comparison import compare, is_diagnosis, read_diagnosis
from counterpoint.errors import BadTrace
from counterpoint.records.diagnosis import Comparison, Diagnosis, Idle, IdleCause
from counterpoint.rendering.comparison_terminal import render_comparison
from tests.support import example_diagnosis as example

changed = msgspec.structs.replace


def idle(**us: float) -> Idle:
    causes = tuple(
        IdleCause(category=name, us=t, count=1.0, longest_us=t, operations=(), functions=()) for name, t in us.items()
    )
    whole = sum(us.values())
    return Idle(
        idle_us=whole, explained_us=whole, causes=causes, launches=None, launch_interval_us=None, kernel_us=None
    )


def before() -> Diagnosis:
    return changed(example.training(), idle=idle(launch=2000.0, copy=900.0))


def slower(d: Diagnosis, part: str, by_us: float) -> Diagnosis:
    """The same run with so many µs more of one part of the account in each step."""
    steps = len(d.steps)
    total: dict[str, Any] = {
        name: getattr(d.totals, name) + by_us * steps for name in ("duration_us", part) if name is not None
    }
    return changed(d, totals=changed(d.totals, **total))


def test_a_run_beside_itself_has_not_changed() -> None:
    same = compare(before(), before())
    assert same.step.change_us == 0
    assert not [c for c in (*same.parts, *same.findings, *same.idle, *same.exposed, *same.late) if c.change_us]
    assert not same.kernels
    assert "about as long as before" in same.verdict


def test_parts_add_up_to_the_step() -> None:
    found = compare(slower(before(), "idle_us", 7000.0), before())
    assert found.step.change_us == pytest.approx(7000.0)
    assert sum(part.change_us for part in found.parts) == pytest.approx(7000.0)
    assert found.parts[0].name == "idle"
    assert found.parts[0].change_us == pytest.approx(7000.0)
    assert "What grew most: idle (+7.00 ms a step)" in found.verdict


def test_a_run_that_is_faster_says_what_shrank() -> None:
    found = compare(before(), slower(before(), "compute_us", 20_000.0))
    assert "20.0 ms less than before" in found.verdict
    assert "What shrank most: compute (-20.00 ms a step)" in found.verdict


def test_a_late_rank_that_is_new_is_named() -> None:
    now, old = slower(before(), "exposed_comm_us", 9000.0), changed(before(), stragglers=(), findings=())
    finding = changed(now.findings[0], kind="straggler", rank=5, title="Rank 5 makes the others wait", cost_us=9000.0)
    found = compare(changed(now, findings=(finding,)), old)
    assert found.verdict.endswith("What is new: rank 5 makes the others wait (+9.00 ms a step).")
    (row,) = (c for c in found.findings if c.kind == "straggler")
    assert (row.before_us, row.now_us, row.rank) == (None, 9000.0, 5)
    assert [c.before_us for c in found.late] == [None] * len(found.late) != []


def test_one_finding_grew_and_another_is_gone() -> None:
    first, second = before().findings[:2]
    now = changed(before(), findings=(changed(first, cost_us=first.cost_us + 1500.0),))
    old = changed(before(), findings=(first, second))
    rows = {c.kind: c for c in compare(now, old).findings}
    assert rows[first.kind].change_us == pytest.approx(1500.0)
    assert rows[second.kind].now_us is None


def test_idle_by_cause_and_exposed_by_operation() -> None:
    now = changed(before(), idle=idle(launch=2000.0, copy=5900.0))
    doubled = tuple(changed(c, exposed_us=2 * c.exposed_us) for c in now.collectives)
    account = changed(now.totals, exposed_comm_us=2 * now.totals.exposed_comm_us)
    found = compare(changed(now, collectives=doubled, totals=account), before())
    assert (found.idle[0].name, found.idle[0].change_us) == ("copy", 5000.0)
    assert found.exposed[0].change_us > 0
    assert sum(c.now_us or 0 for c in found.exposed) <= account.exposed_comm_us / len(now.steps) + 1e-6


def test_kernels_that_became_slower_are_named_with_what_that_costs_a_step() -> None:
    kernel = changed(
        before().kernels[0], alone_us=100.0, alone_count=240, overlapped_us=None, overlapped_count=0, slowdown=None
    )
    old = changed(before(), kernels=(kernel,))
    now = changed(before(), kernels=(changed(kernel, alone_us=150.0),))
    (found,) = compare(now, old).kernels
    times = 240 / len(now.ranks) / len(now.steps)
    assert found.name == kernel.name
    assert found.slowdown == pytest.approx(1.5)
    assert found.change_us == pytest.approx(50.0 * times)
    assert not compare(old, now).kernels


def test_what_cannot_be_compared_is_noted_and_what_is_unknown_is_null() -> None:
    found = compare(before(), changed(before(), gpu="NVIDIA B200", idle=None))
    assert any("GPU: NVIDIA B200 before" in note for note in found.notes)
    assert found.idle == ()


def test_it_goes_through_json_and_ends_with_the_verdict_on_a_terminal() -> None:
    found = compare(slower(before(), "idle_us", 7000.0), before())
    assert msgspec.json.decode(msgspec.json.encode(found), type=Comparison) == found
    assert found.schema == "counterpoint.comparison/1"
    console = Console(file=io.StringIO(), width=80)
    render_comparison(found, console)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[-1] == found.verdict


@pytest.mark.parametrize("indent", [0, 1])
def test_a_file_of_a_diagnosis_is_told_from_a_trace(tmp_path: Path, indent: int) -> None:
    text = msgspec.json.encode(before())
    path = tmp_path / "old.json"
    path.write_bytes(msgspec.json.format(text, indent=indent))
    assert is_diagnosis(path)
    assert read_diagnosis(path) == before()
    path.write_text('{"schemaVersion": 1, "traceEvents": []}')
    assert not is_diagnosis(path)
    with pytest.raises(BadTrace, match="not a diagnosis"):
        read_diagnosis(path)
