"""Whatever the bytes: a timeline or a BadTrace. Whatever the events: every one is counted and where it was."""

import gzip
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from counterpoint.diagnosis.reading.digest import digest
from counterpoint.errors import BadTrace
from counterpoint.trace import chunks
from counterpoint.trace.timeline import Timeline
from tests.support import kineto_trace as kt


def fixed(examples: int) -> settings:
    slow = [HealthCheck.too_slow]
    return settings(max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=slow)


SEEDS = [
    kt.text([*kt.training(steps=1), kt.copy("Memcpy PtoP (Device -> Device)", 1.0, 1.0)], layout=layout)
    for layout in kt.LAYOUTS
] + [kt.text(kt.spelt_as_in_2020(kt.training(steps=1)))]
TOKENS = [
    b"{", b"}", b"[", b"]", b",", b'"', b"\\", b":", b"null", b"-1", b"1e308", b"1e999", b"9223372036854775808", b"[]",
    b"{}", b'"traceEvents":[', b"\xff", b"\x00", b"NaN", b"}, {", b"\\ud800", b"0.1", b'"7"', b"true",
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "BLOCK_BYTES", 300)
        yield


def read(content: bytes) -> Timeline:
    with tempfile.TemporaryDirectory() as folder:
        return kt.read(kt.write_bytes(Path(folder) / "rank0.json", content))


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A small valid trace with a few bytes or tokens replaced, inserted, deleted, repeated or exchanged."""
    content = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 4))):
        at, length = draw(st.integers(0, len(content))), draw(st.integers(0, 30))
        piece = draw(st.one_of(st.sampled_from(TOKENS), st.binary(max_size=4)))
        other = draw(st.integers(0, len(content)))
        match draw(st.sampled_from(["replace", "insert", "delete", "repeat", "exchange"])):
            case "replace":
                content[at : at + len(piece)] = piece
            case "insert":
                content[at:at] = piece
            case "delete":
                del content[at : at + length]
            case "repeat":
                content[other:other] = content[at : at + length]
            case "exchange":
                content[at : at + length], content[other : other + length] = (
                    content[other : other + length], content[at : at + length],
                )  # fmt: skip
    return bytes(content)


def survives(content: bytes) -> None:
    """Read and digested, or refused; if read, its times are sound."""
    try:
        timeline = read(content)
    except BadTrace:
        return
    for table in (timeline.gpu, timeline.host):
        assert np.isfinite(table.start).all()
        assert (table.end >= table.start).all()
    digest(timeline)


@fixed(1500)
@given(damaged())
def test_damaged_traces(content: bytes) -> None:
    survives(content)


@fixed(200)
@given(damaged(), st.data())
def test_damaged_compressed_traces(content: bytes, data: st.DataObject) -> None:
    packed = bytearray(gzip.compress(content, mtime=0))
    for _ in range(data.draw(st.integers(0, 2))):
        packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    survives(bytes(packed))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
KEYS = [
    "External id", "correlation", "device", "stream", "grid", "block", "Input Dims", "Collective name", "Seq",
    "Comms Id", "Process Group Ranks", "dtype", "Rank", "bytes", "wait_on_stream", "Group size",
]  # fmt: skip


@fixed(400)
@given(
    st.dictionaries(st.sampled_from(["ph", "cat", "name", "pid", "tid", "ts", "dur", "args", "id"]), json_values),
    st.dictionaries(st.sampled_from(KEYS), json_values, max_size=3),
    st.dictionaries(st.sampled_from(["rank", "world_size", "backend"]), json_values),
)
def test_events_of_any_json(changed: dict[str, Any], args: dict[str, Any], info: dict[str, Any]) -> None:
    """Any JSON value in any place that is looked at."""
    kernel = kt.kernel("k", 1.0, 2.0, more=args) | changed
    survives(json.dumps({"distributedInfo": info, "traceEvents": [*kt.training(steps=1), kernel]}).encode())


names = st.text(max_size=20) | st.sampled_from(["}, {", '"', "\\", "]}", '"traceEvents":[', "a\nb"])
times = st.integers(0, 10**9).map(lambda quarter_us: quarter_us / 4)
events = st.lists(
    st.builds(kt.kernel, names, times, times, stream=st.integers(0, 100), correlation=st.none() | st.integers(0, 50))
    | st.builds(kt.op, names, times, times, external=st.integers(0, 50), dims=st.lists(st.lists(st.integers(0, 9))))
    | st.builds(kt.runtime, names, times, times, correlation=st.integers(0, 50)),
    min_size=1,
    max_size=30,
)


@fixed(300)
@given(events, st.sampled_from(kt.LAYOUTS), st.booleans())
def test_every_event_is_where_it_was(made: list[kt.Event], layout: str, events_first: bool) -> None:
    """Names, starts and durations of generated events come back, in every layout; nothing is lost or made up."""
    timeline = read(kt.text(made, layout=layout, events_first=events_first))
    first = min(e["ts"] for e in made)
    wanted = sorted((e["cat"] == "kernel", e["ts"] - first, e["dur"], e["name"]) for e in made)
    gpu, host = timeline.gpu, timeline.host
    columns = [(False, host.start, host.end, host.name)]
    if any(is_gpu for is_gpu, *_ in wanted):  # else operations of the host stand in for those of a GPU
        columns.append((True, gpu.start, gpu.end, gpu.name))
    found = sorted(
        (is_gpu, start, end - start, timeline.names[name])
        for is_gpu, starts, ends, numbers in columns
        for start, end, name in zip(starts.tolist(), ends.tolist(), numbers.tolist(), strict=True)
    )
    assert found == wanted
