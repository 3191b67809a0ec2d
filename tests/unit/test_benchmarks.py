"""The benchmarks' own machinery: made-up traces that hold together, and a run in small."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tensor_clock
from synthetic_job import Job, write_traces

Capture = pytest.CaptureFixture[str]
JOB = Job(world_size=2, steps=2, micro_batches=1, layers=2)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """The events of both ranks."""
    folder = tmp_path_factory.mktemp("job")
    write_traces(JOB, folder, range(2))
    return [json.loads((folder / f"rank{rank}.json").read_text())["traceEvents"] for rank in range(2)]


def kernels(events: list[dict[str, Any]], name: str = "") -> list[dict[str, Any]]:
    return [event for event in events if event.get("cat") == "kernel" and event["name"].startswith(name)]


def test_the_number_of_events_is_what_was_announced(tmp_path: Path) -> None:
    """`write_traces` returns how many events the file holds."""
    announced = write_traces(JOB, tmp_path, [1])
    assert announced == {1: len(json.loads((tmp_path / "rank1.json").read_text())["traceEvents"])}


def test_the_same_job_is_the_same_bytes(tmp_path: Path) -> None:
    """Two runs of the generator write equal files."""
    for name in ("a", "b"):
        write_traces(JOB, tmp_path / name, [0])
    assert (tmp_path / "a" / "rank0.json").read_bytes() == (tmp_path / "b" / "rank0.json").read_bytes()


def test_kernels_of_a_stream_do_not_overlap(ranks: list[list[dict[str, Any]]]) -> None:
    """A stream runs one kernel after another."""
    by_stream: dict[int, list[tuple[float, float]]] = {}
    for kernel in kernels(ranks[0]):
        by_stream.setdefault(kernel["tid"], []).append((kernel["ts"], kernel["ts"] + kernel["dur"]))
    late = [
        (one, other)
        for spans in map(sorted, by_stream.values())
        for one, other in pairwise(spans)
        if one[1] > other[0] + 0.002  # two roundings of the file's 0.001 µs
    ]
    assert late == []


def test_a_collective_ends_on_both_ranks_together(ranks: list[list[dict[str, Any]]]) -> None:
    """Joined by `Seq`, the ends of one collective differ by at most the 3 µs that the job's clockwork allows."""
    ends = [{k["args"]["Seq"]: k["ts"] + k["dur"] for k in kernels(events, "nccl")} for events in ranks]
    assert max(abs(ends[0][seq] - ends[1][seq]) for seq in ends[0].keys() | ends[1].keys()) <= 3.002


def test_every_kernel_was_launched(ranks: list[list[dict[str, Any]]]) -> None:
    """The correlation of each kernel is that of a call that began before it."""
    calls = {
        event["args"]["correlation"]: event["ts"]
        for event in ranks[0]
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    assert all(calls[kernel["args"]["correlation"]] < kernel["ts"] for kernel in kernels(ranks[0]))


def test_the_clock_estimates_the_layers_of_a_model(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Without a measurement: 70B on 8 ranks, of which gate, up and down can hide."""
    monkeypatch.setattr(sys, "argv", ["tensor_clock.py", "--estimate", "--rows", "8192", "--ranks", "8"])
    tensor_clock.main()
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if "70B" in line]
    hides = {line[1].strip(): line[7].strip() for line in lines}
    assert hides == {"70B qkv": "", "70B gate, up": "yes", "70B o": "", "70B down": "yes"}
