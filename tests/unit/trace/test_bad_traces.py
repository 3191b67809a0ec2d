"""Damaged, hostile and absurd traces: each a BadTrace that names the file and the byte, never another exception."""

import gzip
import json
import sqlite3
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.diagnosis.api import diagnose
from counterpoint.errors import BadTrace
from counterpoint.trace import chunks
from counterpoint.trace.source import Limits
from tests.support import kineto_trace as kt
from tests.support.kineto_trace import SMALL, bomb, plain, read


def shortly(value: object) -> str:
    """Name a row by its texts, and not by the content of its file."""
    return value if isinstance(value, str) else "content"


def spoilt(content: bytes, tmp_path: Path, name: str = "rank0.json", limits: Limits | None = None) -> BadTrace:
    """The error that a file with this content makes."""
    with pytest.raises(BadTrace) as caught:
        read(kt.write_bytes(tmp_path / name, content), limits)
    assert caught.value.path == str(tmp_path / name)
    return caught.value


def test_a_cut_is_reported_where_it_is(tmp_path: Path) -> None:
    """The offset is that of the last byte, counted in the decompressed text."""
    whole = kt.text(SMALL)
    error = spoilt(whole[:-30], tmp_path, "rank0.json")
    assert (error.offset, "truncated" in error.reason) == (len(whole) - 30, True)
    assert str(error).endswith(f" (at byte {len(whole) - 30})")


def test_the_cap_can_be_raised(tmp_path: Path) -> None:
    path = bomb(
        tmp_path / "t.json.gz", (b'{"traceEvents": [{"ph":"X","cat":"kernel","ts":1}', b" " * (1 << 20), b"]}"), 4
    )
    with pytest.raises(BadTrace, match="--max-trace-gb"):
        read(path, Limits(trace_bytes=32 << 20))
    assert read(path, Limits(trace_bytes=256 << 20)).events == 1


NOT_TRACES = {
    "empty": b"",
    "text": b"step 1 took 3 ms\n",
    "png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    "number": b"17",
    "other JSON": b'{"steps": [1, 2]}',
    "other array": b'[{"steps": 1}]',
    "events of another kind": b'{"traceEvents": 5}',
    "no events": b'{"traceEvents": []}',
    "no closing": b'{"traceEvents": [',
    "null": b"null",
    "UTF-16": b"\xff\xfe{\0}\0",
    "only the word": b'"traceEvents"',
    "nested": b'{"a": {"traceEvents": [{"ph": "X"}]}}',
    "gzip of nothing": gzip.compress(b""),
    "two in one": kt.text(SMALL) * 2,
    "events twice": kt.text(SMALL)[:-1] + b', "traceEvents": [{"ph": "X"}]}',
    "array and more": kt.text(SMALL, layout="array") + b"}",
    "wrong bracket": b'{"traceEvents": [{"ph": "X"}}, "a": 1}',
    "words between": b'{"traceEvents": [{"ph": "M"} nonsense]}',
    "numbers between": b'{"traceEvents": [{"ph": "M"}, 5]}',
    "deep nesting in the header": b'{"schemaVersion":'
    + b"[" * 100_000
    + b"]" * 100_000
    + b',"traceEvents":[{"ph":"X"}]}',
    "many false starts": b'{"a":{' + b'"traceEvents":[],' * 200_000 + b'"b":1}}',  # in no quadratic time
    "sqlite": b"SQLite format 3\0" + bytes(100),
}


@pytest.mark.parametrize("content", NOT_TRACES.values(), ids=NOT_TRACES.keys())
def test_not_a_trace(content: bytes, tmp_path: Path) -> None:
    """Whatever else a file may hold is refused by name."""
    path = kt.write_bytes(tmp_path / "t.json", content)
    with pytest.raises(BadTrace) as caught:
        diagnose(path)
    assert caught.value.path == str(path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.nsys-rep", b"NVTXR\0\1\2", "nsys export --type sqlite"),
        # a timed event without a time is not taken to be at 0
        ("t.json", b'{"traceEvents":[{"ph":"X","cat":"kernel","name":"a","ts":5,"dur":1},{"ph":"X","cat":"kernel"}]}',
         "impossible time"),
        # a wrong checksum
        ("t.json", gzip.compress(kt.text(SMALL))[:-8] + struct.pack("<II", 0, len(kt.text(SMALL))), "damaged"),
        *[("t.json", kt.text(SMALL).replace(b"aten::mm", name), "malformed")  # half a surrogate pair, unknown escapes
          for name in (rb"\ud800", rb"\udc00x", rb"\x41", b"a\nb", b"\x00", rb"\u12")],
    ],
    ids=shortly,
)  # fmt: skip
def test_why_it_is_refused(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    assert said in spoilt(content, tmp_path, name).reason


TIMES = '-1 -0.001 NaN Infinity -Infinity null "soon" 1e308 1e16 9.3e15 "nan" true [1] 1e999 "inf" {}'


@pytest.mark.parametrize("time", TIMES.split())
@pytest.mark.parametrize("key", ["ts", "dur"])
def test_impossible_times(key: str, time: str, tmp_path: Path) -> None:
    """Negative, not finite, not a number or beyond 63 bits of ns: refused at the event that has it."""
    good = b'{"ph":"X","cat":"kernel","name":"a","ts":1,"dur":1},'
    other = "dur" if key == "ts" else "ts"
    bad = f'{{"ph":"X","cat":"kernel","name":"b","{key}":{time},"{other}":1}}'.encode()
    content = b'{"traceEvents":[' + good * 3 + bad + b"]}"
    if (key, time) == ("dur", "null"):
        assert read(kt.write_bytes(tmp_path / "t.json", content)).events == 4  # an instant, as some versions write it
        return
    start = content.index(bad)
    offset = spoilt(content, tmp_path).offset
    assert offset is not None
    assert start <= offset <= start + len(bad)


@pytest.mark.parametrize("block", [16, 100, 1 << 20])
def test_the_offset_counts_from_the_start_of_the_file(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [*kt.training(), kt.kernel("bad", -5.0, 1.0), *kt.training()]
    content = kt.text(events, layout="pretty")
    monkeypatch.setattr(chunks, "BLOCK_BYTES", block)
    offset = spoilt(content, tmp_path).offset
    assert offset is not None
    assert json.loads(content[offset : content.index(b"}\n    }", offset) + 7])["name"] == "bad"


ABSURD = {
    "a string for a number": {"stream": "seven"},
    "a float for a count": {"correlation": 1.5},
    "2**63": {"correlation": 2**63},
    "2**31 registers": {"registers per thread": 2**31},
    "a list for a stream": {"stream": [7]},
    "true": {"device": True},
    "2**40 devices": {"device": 2**40},
    "an object for a name": {"Collective name": {}},
    "text for bytes": {"bytes": "1 MB"},
}


@pytest.mark.parametrize("args", ABSURD.values(), ids=ABSURD.keys())
def test_absurd_args(args: dict[str, Any], tmp_path: Path) -> None:
    """An argument of the wrong type counts as absent, and is counted in a note; all else of the event is read."""
    (key,) = args
    bad = kt.kernel("bad", 1.0, 1.0, correlation=5, more=args)
    timeline = read(kt.write(tmp_path / "odd.json", [*SMALL, bad]))
    del bad["args"][key]
    without = read(kt.write(tmp_path / "without.json", [*SMALL, bad]))
    assert plain(timeline, "notes") == plain(without, "notes")
    assert (len(timeline.notes), f"{key} (1)" in timeline.notes[0], without.notes) == (1, True, ())


@pytest.mark.parametrize("args", [[], "none", 5, [{}]])
def test_args_that_are_no_object(args: Any, tmp_path: Path) -> None:
    timeline = read(kt.write(tmp_path / "t.json", [SMALL[0] | {"args": args}]))
    assert (len(timeline.gpu), "args (1)" in timeline.notes[0]) == (1, True)


@pytest.mark.parametrize(("value", "stream"), [("0x0", 0), ("0x1F", 31), (" 0x2 ", 2), (3.0, 3), ("4", 4), ("5.0", 5)])
def test_args_that_obviously_mean_a_number(value: Any, stream: int, tmp_path: Path) -> None:
    """ROCm 6.2 writes the default stream as "0x0"; other events have their own arguments as before."""
    odd = kt.kernel("odd", 5.0, 1.0, more={"stream": value})
    timeline = read(kt.write(tmp_path / "t.json", [kt.kernel("a", 1.0, 1.0, stream=9), odd]))
    assert (timeline.gpu.stream.tolist(), timeline.notes) == ([9, stream], ())


def test_the_diagnosis_says_which_rank_has_odd_args(tmp_path: Path) -> None:
    events = [*kt.training(), *(kt.kernel("k", 9000.0 + n, 1.0, more={"bytes": "many"}) for n in range(3))]
    notes = diagnose(kt.write(tmp_path / "rank0.json", events)).diagnosis.notes
    assert [n for n in notes if n.startswith("rank 0: 3 arguments")]


@pytest.mark.parametrize("block", [64, 1 << 20])
def test_damage_beside_odd_args_is_still_found(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time that is no number is refused at its event, whatever the arguments before it are."""
    monkeypatch.setattr(chunks, "BLOCK_BYTES", block)
    odd = kt.kernel("odd", 1.0, 1.0, more={"stream": []})
    content = kt.text([odd, *SMALL, odd, kt.kernel("bad", 1.0, 1.0) | {"dur": "long"}, odd])
    start = content.index(b'"name":"bad"') - 40
    offset = spoilt(content, tmp_path).offset
    assert offset is not None
    assert start <= offset <= content.index(b'"long"')


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
KEYS = ["stream", "correlation", "device", "grid", "block", "bytes", "External id", "Collective name", "Seq", "dtype",
        "Input Dims", "Process Group Ranks", "registers per thread", "other"]  # fmt: skip


@given(args=ANY_JSON | st.dictionaries(st.sampled_from(KEYS), ANY_JSON, max_size=6))
def test_any_args_leave_the_times(args: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever stands in an event's args, its name and times are read."""
    path = tmp_path_factory.getbasetemp() / "fuzzed.json"
    content = json.dumps({"traceEvents": [SMALL[0], SMALL[0] | {"name": "odd", "args": args}]}, ensure_ascii=True)
    timeline = read(kt.write_bytes(path, content.encode()))
    assert sorted(timeline.names[n] for n in timeline.gpu.name) == ["a", "odd"]


@pytest.mark.parametrize("args", [None, {}, {"stream": "7"}, {"correlation": None}, {"Seq": "12"}, {"bytes": -1}])
def test_args_that_are_odd_but_clear(args: Any, tmp_path: Path) -> None:
    """A number in quotes is one; what is missing is unknown."""
    assert read(kt.write(tmp_path / "t.json", [SMALL[0] | {"args": args}])).events == 1


@pytest.mark.parametrize("number", [2**63, -(2**63), 10**30, 1.5, "3", None, [], {}, True])
@pytest.mark.parametrize("key", ["rank", "world_size", "backend", "nccl_version"])
def test_absurd_distributed_info(key: str, number: Any, tmp_path: Path) -> None:
    head = kt.header()
    head["distributedInfo"][key] = number
    content = json.dumps(head | {"traceEvents": SMALL}).encode()
    assert diagnose(kt.write_bytes(tmp_path / "rank0.json", content)).diagnosis.ranks == (0,)


@pytest.mark.parametrize("info", [None, [], "x", 5, [{"rank": 1}]])
def test_distributed_info_that_is_no_object(info: Any, tmp_path: Path) -> None:
    path = kt.write(tmp_path / "rank4.json", SMALL, kt.header(rank=None) | {"distributedInfo": info})
    assert read(path).rank == 4


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
    content = kt.text([*SMALL, kt.kernel("xyz", 1.0, 1.0)]).replace(b"xyz", b"x\xffz")
    error = spoilt(content, tmp_path)
    assert (error.offset, "UTF-8" in error.reason) == (content.index(b"\xff"), True)


def test_control_characters_in_names_are_escaped_in_messages(tmp_path: Path) -> None:
    """An escape sequence in a file cannot reach the terminal through an error."""
    content = kt.text([SMALL[0] | {"ts": "\x1b[31m"}])
    assert "\x1b" not in str(spoilt(content, tmp_path))


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
@pytest.mark.parametrize("key", [b'"pid"', b'"skipped"', b'"args"'])
@pytest.mark.parametrize("tail", [b"", b"]" * 100_000 + b"}]}"], ids=["open", "closed"])
def test_deep_nesting(key: bytes, opening: bytes, tail: bytes, tmp_path: Path) -> None:
    """100 000 levels are refused, wherever they are, without touching the stack's end."""
    content = kt.text(SMALL)[:-2] + b',{"ph":"X","ts":1,' + key + b":" + opening * 100_000 + tail
    assert spoilt(content, tmp_path).offset is not None


def test_duplicate_keys(tmp_path: Path) -> None:
    """The last one holds, as in every JSON reader."""
    content = kt.text(SMALL).replace(b'"name":"a"', b'"name":"z","name":"a"')
    assert "a" in read(kt.write_bytes(tmp_path / "t.json", content)).names


def stored(content: bytes) -> bytes:
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + b"\x01" + struct.pack("<HH", len(content), len(content) ^ 0xFFFF) + content


def test_garbage_behind_the_compressed_trace(tmp_path: Path) -> None:
    content = kt.text(SMALL)
    whole = stored(content) + struct.pack("<II", zlib.crc32(content), len(content))
    assert read(kt.write_bytes(tmp_path / "good.json", whole)).events == 2
    assert "damaged" in spoilt(whole + b"garbage", tmp_path).reason


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("again.json", kt.text(kt.training(rank=1), kt.header(rank=1)), "rank 1 again"),
        ("rank2.json", kt.text(kt.training(rank=2), kt.header(rank=2)), "rank 2 in a job of 2"),
        ("rank1.json", kt.text(kt.training(rank=1), kt.header(rank=1, world_size=4)), "world_size"),
        ("rank1.json", kt.text(kt.training(rank=1), kt.header(rank=1, base_ns=2 * 10**18)), "recorded"),  # years apart
        ("rank1.json", kt.text(SMALL)[:-9], "truncated"),  # a damaged rank is not left out
    ],
    ids=shortly,
)
def test_ranks_that_do_not_belong_together(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    kt.write_bytes(kt.write_job(tmp_path) / name, content)
    with pytest.raises(BadTrace, match=said) as caught:
        diagnose(tmp_path)
    assert caught.value.path is not None


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    (kt.write_job(tmp_path, ranks=4) / "rank2.json").unlink()
    found = diagnose(tmp_path).diagnosis
    assert (
        found.ranks,
        found.missing_ranks,
        any("no trace of rank 2 (of 4 ranks)" in note for note in found.notes),
    ) == ((0, 1, 3), (2,), True)


@pytest.mark.parametrize(
    ("process", "said"),
    [
        ("Ascend Hardware", "2 events of process 'Ascend Hardware': what this device ran cannot be read"),
        ("/device:GPU:0", "2 events of process '/device:GPU:0'"),
        ("renderer", "no events of PyTorch: their categories (cat) are missing (2 of 'renderer')"),
    ],
)
def test_other_devices_and_programs_are_refused_by_name(process: str, said: str, tmp_path: Path) -> None:
    """Their events have no category: as none of them counted, an NPU's work would be read as idle time of a CPU."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 8, "args": {"name": process}}]
    events += [{"ph": "X", "name": "matmul", "pid": 8, "tid": 3, "ts": at, "dur": 5} for at in (1.0, 9.0)]
    assert said in spoilt(json.dumps({"traceEvents": events}).encode(), tmp_path).reason


def test_a_compressed_export_says_to_decompress_it(tmp_path: Path) -> None:
    assert "decompress it" in spoilt(NOT_TRACES["sqlite"], tmp_path, "a.sqlite.gz").reason


def test_events_of_the_profiler_before_kineto_are_told_by_process(tmp_path: Path) -> None:
    """torch.autograd.profiler wrote no categories: operations of the host and of the GPU are two processes."""
    sides = {"CPU functions": "aten::mm", "CUDA functions": "sgemm"}
    events = [{"ph": "X", "name": name, "pid": pid, "tid": 0, "ts": 1, "dur": 5} for pid, name in sides.items()]
    timeline = read(kt.write_bytes(tmp_path / "t.json", json.dumps(events).encode()))
    assert (len(timeline.host), len(timeline.gpu)) == (1, 1)


def test_a_long_name_of_a_process_is_cut(tmp_path: Path) -> None:
    events = [{"ph": "X", "name": "a", "pid": "x" * 5000, "tid": 3, "ts": 1, "dur": 5}]
    assert len(spoilt(json.dumps(events).encode(), tmp_path).reason) < 250


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("out_results.json", b'{"rocprofiler-sdk-tool": [{"metadata": {"pid": 1}}]}', "JSON of rocprofv3"),
        ("out_kernel_trace.csv", b'"Kind","Agent_Id","Queue_Id","Kernel_Name"\n', "CSV of rocprofv3"),
        ("out_results.pftrace", b"\n\x10\x08\x01\x9a\x07", "a Perfetto trace"),
        ("host.xplane.pb", b"\n\x0b/host:CPU", "a profile of XLA"),
        ("et.json", b'{"schema": "1.1.1-chakra.0.0.4", "nodes": [{"id": 1}]}', "an execution trace, without times"),
        ("snapshot.pickle", b"\x80\x04\x95\x10", "a pickle"),
    ],
    ids=shortly,
)
def test_files_of_other_tools_are_named(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    reason = spoilt(content, tmp_path, name).reason
    assert reason.startswith(said)
    assert "record with torch.profiler" in reason


def test_a_database_of_rocprofv3_is_named(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    with sqlite3.connect(path) as made:
        made.execute("CREATE TABLE rocpd_kernel_dispatch_1 (id INTEGER, start INTEGER)")
    with pytest.raises(BadTrace, match="a database of rocprofv3"):
        diagnose(path)


@pytest.mark.parametrize(
    ("category", "host", "said"),
    [
        ("hpu_op", True, "1 event of category 'hpu_op' without a stream: what this device ran cannot be read"),
        ("privateuse1_kernel", True, "1 event of category 'privateuse1_kernel' without a stream"),
        ("FEE", False, "no events of PyTorch: their categories are FEE (1), as in traces of other programs"),
    ],
)
def test_events_of_unknown_categories_are_no_cpu_job(category: str, host: bool, said: str, tmp_path: Path) -> None:
    """What a device ran is not passed over beside host operations, nor another program's trace called empty."""
    events = [kt.op("aten::mm", 0.0, 9.0)] * host + [kt.event(category, "matmul", 1.0, 5.0, pid=3)]
    assert spoilt(kt.text(events), tmp_path).reason.startswith(said)


def test_other_unknown_categories_are_noted(tmp_path: Path) -> None:
    events = [kt.op("aten::mm", 0.0, 9.0), kt.event("my_tool", "span", 1.0, 5.0)]
    assert read(kt.write(tmp_path / "rank0.json", events)).notes == (
        "events of unknown categories are left out: my_tool (1)",
    )


def test_operations_without_a_duration_are_noted(tmp_path: Path) -> None:
    events = [kt.kernel("gemm", 1.0 * i, 0.0) for i in range(3)]
    assert read(kt.write(tmp_path / "rank0.json", events)).notes == (
        "3 of 3 operations have no duration: their work is unknown",
    )


def test_ranks_with_other_devices_and_further_steps_are_noted(tmp_path: Path) -> None:
    for rank, (gpu, steps) in enumerate([("NVIDIA H200", 4), ("NVIDIA A100-SXM4-80GB", 2)]):
        head = kt.header(rank=rank, devices=[kt.H200 | {"name": gpu}])
        kt.write(tmp_path / f"rank{rank}.json", kt.training(steps=steps, rank=rank), head)
    d = diagnose(tmp_path).diagnosis
    assert len(d.steps) == 2
    assert "1 rank with further steps, which other ranks lack: only common steps count" in d.notes
    assert "the ranks differ in their devices: NVIDIA H200: rank 0; NVIDIA A100-SXM4-80GB: rank 1" in d.notes
