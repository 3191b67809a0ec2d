"""The Chrome trace: lanes as threads, findings as marks, counters worked out by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.diagnosis.api import diagnose
from counterpoint.diagnosis.reading.digest import Engine
from counterpoint.records.diagnosis import Diagnosis, TimelineLane
from counterpoint.rendering.diagnosis_perfetto import JOB, MOST_BESIDE, write_perfetto
from tests.support import example_diagnosis as example


def events(path: Path, diagnosis: Diagnosis, lanes: list[TimelineLane]) -> list[dict[str, Any]]:
    write_perfetto(path / "trace.json", diagnosis, lanes)
    found = json.loads((path / "trace.json").read_bytes())["traceEvents"]
    assert isinstance(found, list)
    return found


def span(rank: int, name: str, start: float, duration: float) -> TimelineLane:
    return TimelineLane(rank=rank, name=name, start_us=(start,), duration_us=(duration,), labels=("k",))


def findings(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The slices of findings, in the order of the diagnosis."""
    slices = [e for e in found if e["ph"] == "X" and e.get("cat") == "finding"]
    return sorted(slices, key=lambda e: int(e["name"].split(".")[0]))


def broken(found: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of complete events of one thread that overlap and do not nest, which the trace-event format forbids."""
    threads: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for e in found:
        if e["ph"] == "X":
            threads.setdefault((e["pid"], e["tid"]), []).append(e)
    pairs = []
    for slices in threads.values():
        around: list[dict[str, Any]] = []
        for e in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
            while around and ns(around[-1])[1] <= ns(e)[0]:
                around.pop()
            if around and ns(e)[1] > ns(around[-1])[1]:
                pairs.append((around[-1], e))
            around.append(e)
    return pairs


def ns(e: dict[str, Any]) -> tuple[int, int]:
    return round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)


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


def test_findings_are_slices_of_the_job_with_evidence_and_advice(tmp_path: Path, training: Diagnosis) -> None:
    """One without a range spans all steps, and one of a rank is an instant of its process, too."""
    whole = events(tmp_path, training, [])
    found = findings(whole)
    said = [(e["pid"], e["args"]["evidence"], e["args"]["advice"]) for e in found]
    assert said == [(JOB, f.evidence, f.advice) for f in training.findings]
    assert (found[2]["ts"], found[2]["dur"]) == (0.0, 3 * 90_600.0)
    assert next((e["pid"], e["s"], e["ts"]) for e in whole if e["ph"] == "i") == (5, "p", 37_000.0)


BESIDE = [span(0, "compute", 2.0, 3.0), span(0, "communication", 0.0, 10.0)]
WAITS = [span(0, "wait", 0.0, 4.0), span(1, "wait", 1.0, 3.0)]
ROW = [span(0, "communication", 0.0, 4.0), span(0, "communication", 4.0, 4.0)]  # one ends as the next begins


@pytest.mark.parametrize(
    ("lanes", "name", "pid", "counted"),
    [
        (BESIDE, "exposed communication", 0, [(0.0, 1), (2.0, 0), (5.0, 1), (10.0, 0)]),
        (BESIDE, "compute and communication at once", 0, [(0.0, 1), (2.0, 2), (5.0, 1), (10.0, 0)]),
        (WAITS, "ranks in wait", JOB, [(0.0, 1), (1.0, 2), (4.0, 1), (4.0, 0)]),
        (ROW, "exposed communication", 0, [(0.0, 1), (8.0, 0)]),
    ],
)
def test_counters(
    tmp_path: Path, empty: Diagnosis, lanes: list[TimelineLane], name: str, pid: int, counted: list[tuple[float, int]]
) -> None:
    """Of a rank: what no compute covers, and both at once; of the job: ranks in wait."""
    assert counter(events(tmp_path, empty, lanes), name, pid) == counted


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


SAMPLES = Path(__file__).parents[3] / "samples"


@pytest.mark.parametrize("name", sorted(p.name for p in SAMPLES.iterdir() if p.is_dir()))
def test_slices_of_a_thread_nest(name: str, tmp_path: Path) -> None:
    """On real recordings: no slice cuts into another on its thread, and none is lost or changed."""
    result = diagnose(SAMPLES / name, engine=Engine(workers=1))
    found = events(tmp_path, result.diagnosis, list(result.stream_lanes))
    assert broken(found) == []
    written = sum(e["ph"] == "X" and e["pid"] != JOB for e in found)
    assert written == sum(len(lane.start_us) for lane in result.stream_lanes)
    assert not [e for e in found if e["ph"] == "X" and e["dur"] < 0]


def test_every_stream_is_a_thread(tmp_path: Path) -> None:
    """Computation, waiting and transfer of one stream share it; streams do not."""
    result = diagnose(SAMPLES / "fsdp-host-stall", engine=Engine(workers=1))
    found = events(tmp_path, result.diagnosis, list(result.stream_lanes))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in found if e["name"] == "thread_name"}
    for lane in result.stream_lanes:
        where = {names[e["pid"], e["tid"]] for e in found if e["ph"] == "X" and e["cat"] == lane.name
                 and e["pid"] == lane.rank}  # fmt: skip
        assert (lane.stream or lane.name) in {text.split(" (")[0] for text in where}
    kinds = {(e["tid"], e["cat"]) for e in found if e["ph"] == "X" and e["pid"] == 0}
    shared = {tid for tid, cat in kinds if cat == "wait"} & {tid for tid, cat in kinds if cat == "communication"}
    assert shared


def test_what_cuts_into_a_slice_goes_beside_it(tmp_path: Path, empty: Diagnosis) -> None:
    """0-10 and 5-15 overlap, 2-4 lies inside the first, 15-20 follows the second."""
    spans = {"start_us": (0.0, 2.0, 5.0, 15.0), "duration_us": (10.0, 2.0, 10.0, 5.0), "labels": ("a", "b", "c", "d")}
    lane = TimelineLane(rank=0, name="compute", stream="stream 7", **spans)  # type: ignore[arg-type]
    found = events(tmp_path, empty, [lane])
    names = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name" and e["pid"] == 0}
    placed = {e["name"]: names[e["tid"]] for e in found if e["ph"] == "X"}
    assert placed == {"a": "stream 7", "b": "stream 7", "c": "stream 7 (overlapping 1)", "d": "stream 7"}


TIMES = st.floats(0, 1000, allow_nan=False)


@given(spans=st.lists(st.tuples(TIMES, TIMES), max_size=40), streams=st.integers(1, 3))
def test_any_slices_nest(
    spans: list[tuple[float, float]], streams: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever a lane holds; up to 32 at once are all kept."""
    lanes = [
        TimelineLane(rank=0, name="compute", stream=f"stream {n % streams}", start_us=(start,), duration_us=(took,),
                     labels=("k",))
        for n, (start, took) in enumerate(spans)
    ]  # fmt: skip
    found = events(tmp_path_factory.getbasetemp(), example.empty(), lanes)
    assert broken(found) == []
    kept = sum(e["ph"] == "X" for e in found)
    assert kept == len(spans) if len(spans) <= MOST_BESIDE else kept >= MOST_BESIDE
