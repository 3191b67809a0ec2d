"""Packed spans: what the page will draw is what the lanes held, within a tick."""

import base64
import math
from typing import Any

import numpy as np
import pytest

from counterpoint.records.diagnosis import Diagnosis, TimelineLane
from counterpoint.rendering import diagnosis_html
from counterpoint.rendering.diagnosis_html import pack_timeline
from tests.support import example_diagnosis as example


def lane(
    rank: int = 0, *, start: tuple[float, ...], duration: tuple[float, ...], name: str = "compute"
) -> TimelineLane:
    labels = tuple(f"k{at:g}" for at in start)
    return TimelineLane(rank=rank, name=name, start_us=start, duration_us=duration, labels=labels)


def unpacked(data: dict[str, Any], index: int) -> tuple[list[float], list[float], list[str]]:
    columns = [np.frombuffer(base64.b64decode(text), "<u4") for text in data["lanes"][index]["spans"]]
    start, end = (data["origin"] + data["tick"] * column for column in columns[:2])
    return start.tolist(), end.tolist(), [data["labels"][i] for i in columns[2]]


def test_spans_come_back_within_two_ticks(empty: Diagnosis) -> None:
    data = pack_timeline(empty, [lane(start=(-5.0, 100.25, 9e6), duration=(1.0, 0.5, 1e6))]).data
    start, end, _ = unpacked(data, 0)
    assert start + end == pytest.approx([-5.0, 100.25, 9e6, -4.0, 100.75, 1e7], abs=2 * 1e7 / 2**32)


def test_spans_are_sorted_and_keep_their_labels(empty: Diagnosis) -> None:
    start, _, labels = unpacked(pack_timeline(empty, [lane(start=(7.0, 3.0), duration=(1.0, 1.0))]).data, 0)
    assert labels == ["k3", "k7"]
    assert start == sorted(start)


def test_spans_without_finite_times_are_left_out(empty: Diagnosis) -> None:
    packed = pack_timeline(empty, [lane(start=(math.nan, 1.0, 2.0, 3.0), duration=(1.0, math.inf, -1.0, 1.0))])
    assert unpacked(packed.data, 0)[2] == ["k3"]


def test_lane_without_spans_packs(empty: Diagnosis) -> None:
    assert pack_timeline(empty, [lane(start=(), duration=())]).drawn[0].spans == 0


def test_cap_keeps_the_longest_spans_and_says_so(empty: Diagnosis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis_html, "MAX_SPANS", 2)
    packed = pack_timeline(empty, [lane(start=(0.0, 10.0, 20.0), duration=(3.0, 1.0, 2.0))])
    assert unpacked(packed.data, 0)[2] == ["k0", "k20"]
    assert packed.notes == ("2 of 3 spans are drawn: the longest.",)


def test_cap_on_ranks_keeps_the_straggler(training: Diagnosis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis_html, "MAX_RANKS", 2)
    packed = pack_timeline(training, example.lanes(100))
    assert packed.data["ranks"] == [example.LATE, 7]
    assert packed.notes[0].startswith("2 of 8 ranks")


def test_table_counts_what_the_caps_left_out_of_the_picture(empty: Diagnosis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis_html, "MAX_SPANS", 1)
    (drawn,) = pack_timeline(empty, [lane(start=(0.0, 10.0), duration=(3.0, 1.0))]).drawn
    assert (drawn.spans, drawn.total_us, drawn.longest_us) == (2, 4.0, 3.0)


def test_picture_begins_with_the_first_step_even_if_no_span_does(training: Diagnosis) -> None:
    data = pack_timeline(training, [lane(start=(50_000.0,), duration=(1.0,))]).data
    assert data["origin"] == 0.0
    assert data["origin"] + data["tick"] * (2**32 - 1) == pytest.approx(3 * 90_600.0)
