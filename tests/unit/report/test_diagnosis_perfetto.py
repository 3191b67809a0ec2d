"""The Chrome trace: lanes as threads, findings as marks, counters worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from counterpoint.records.diagnosis import Diagnosis, TimelineLane
from counterpoint.report.diagnosis_perfetto import FINDINGS, JOB, write_perfetto


def events(path: Path, diagnosis: Diagnosis, lanes: list[TimelineLane]) -> list[dict[str, Any]]:
    write_perfetto(path / "trace.json", diagnosis, lanes)
    found = json.loads((path / "trace.json").read_bytes())["traceEvents"]
    assert isinstance(found, list)
    return found


def span(rank: int, name: str, start: float, duration: float) -> TimelineLane:
    return TimelineLane(rank=rank, name=name, start_us=(start,), duration_us=(duration,), labels=("k",))


def counter(found: list[dict[str, Any]], name: str, pid: int) -> list[tuple[float, int]]:
    chosen = [event for event in found if event["ph"] == "C" and event["name"] == name and event["pid"] == pid]
    return [(event["ts"], next(iter(event["args"].values()))) for event in chosen]


def test_every_lane_is_a_named_thread_of_its_rank(
    tmp_path: Path, training: Diagnosis, lanes: list[TimelineLane]
) -> None:
    names = {(e["pid"], e["args"]["name"]) for e in events(tmp_path, training, lanes) if e["name"] == "thread_name"}
    assert {(lane.rank, lane.name) for lane in lanes} <= names


def test_every_rank_is_a_named_process(tmp_path: Path, training: Diagnosis, lanes: list[TimelineLane]) -> None:
    found = events(tmp_path, training, lanes)
    names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert names == {**{rank: f"rank {rank}" for rank in range(8)}, JOB: "counterpoint"}


def test_every_span_is_a_slice_with_its_times(tmp_path: Path, empty: Diagnosis) -> None:
    found = events(tmp_path, empty, [span(0, "compute", 3.5, 2.25)])
    assert [(e["ts"], e["dur"], e["name"]) for e in found if e.get("cat") == "compute"] == [(3.5, 2.25, "k")]


def test_spans_without_finite_times_are_left_out(tmp_path: Path, empty: Diagnosis) -> None:
    lanes = [span(0, "compute", math.nan, 1.0), span(0, "compute", 1.0, math.inf), span(0, "compute", 1.0, -1.0)]
    assert not [e for e in events(tmp_path, empty, lanes) if e.get("cat") == "compute"]


def test_findings_are_slices_with_evidence_and_advice(tmp_path: Path, training: Diagnosis) -> None:
    found = [e for e in events(tmp_path, training, []) if e["ph"] == "X" and e["tid"] == FINDINGS and e["pid"] == JOB]
    said = [(e["args"]["evidence"], e["args"]["advice"]) for e in found]
    assert said == [(f.evidence, f.advice) for f in training.findings]


def test_finding_of_a_rank_is_an_instant_of_its_process(tmp_path: Path, training: Diagnosis) -> None:
    marks = [(e["pid"], e["s"], e["ts"]) for e in events(tmp_path, training, []) if e["ph"] == "i"]
    assert marks[0] == (5, "p", 37_000.0)


def test_finding_without_a_range_spans_all_steps(tmp_path: Path, training: Diagnosis) -> None:
    found = [e for e in events(tmp_path, training, []) if e["ph"] == "X" and e.get("cat") == "finding"]
    assert (found[2]["ts"], found[2]["dur"]) == (0.0, 3 * 90_600.0)


def test_exposed_communication_counts_what_no_compute_covers(tmp_path: Path, empty: Diagnosis) -> None:
    found = events(tmp_path, empty, [span(0, "compute", 2.0, 3.0), span(0, "communication", 0.0, 10.0)])
    assert counter(found, "exposed communication", 0) == [(0.0, 1), (2.0, 0), (5.0, 1), (10.0, 0)]


def test_concurrency_counts_compute_and_communication(tmp_path: Path, empty: Diagnosis) -> None:
    found = events(tmp_path, empty, [span(0, "compute", 2.0, 3.0), span(0, "communication", 0.0, 10.0)])
    assert counter(found, "compute and communication at once", 0) == [(0.0, 1), (2.0, 2), (5.0, 1), (10.0, 0)]


def test_ranks_in_wait_are_counted_over_the_job(tmp_path: Path, empty: Diagnosis) -> None:
    found = events(tmp_path, empty, [span(0, "wait", 0.0, 4.0), span(1, "wait", 1.0, 3.0)])
    assert dict(counter(found, "ranks in wait", JOB)) == {0.0: 1, 1.0: 2, 4.0: 0}


def test_one_event_ends_as_the_next_begins_without_a_gap(tmp_path: Path, empty: Diagnosis) -> None:
    found = events(tmp_path, empty, [span(0, "communication", 0.0, 4.0), span(0, "communication", 4.0, 4.0)])
    assert counter(found, "exposed communication", 0) == [(0.0, 1), (8.0, 0)]


@pytest.mark.parametrize("character", ["\x1b", "\u2028"])
def test_control_characters_of_a_name_are_escaped(
    tmp_path: Path, hostile: tuple[Diagnosis, list[TimelineLane]], character: str
) -> None:
    found = events(tmp_path, *hostile)
    said = "".join(str(text) for event in found for text in (event["name"], *event.get("args", {}).values()))
    assert "<script>" in said
    assert character not in said


def test_diagnosis_without_lanes_writes(tmp_path: Path, empty: Diagnosis) -> None:
    assert {event["ph"] for event in events(tmp_path, empty, [])} == {"M"}
