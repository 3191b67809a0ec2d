"""Dumps of NCCL's flight recorder, hostile ones too."""

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest

from counterpoint.errors import BadTrace
from counterpoint.trace.flight_recorder import find_dumps, read_dump
from tests.support import kineto_trace
from tests.support.flight_dump import call, dump, write

GROUPS = {"0": ("default_pg", range(2))}


class Command:
    """What a hostile pickle runs when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/owned",)


def path_of(folder: Path, content: bytes, name: str = "nccl_trace_rank_0") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_pickles_are_read(tmp_path: Path, protocol: int) -> None:
    found = read_dump(path_of(tmp_path, pickle.dumps(dump([call(1), call(2, state="started")], GROUPS), protocol)))
    assert [(e.seq, e.state, e.frame) for e in found.entries] == [
        (1, "completed", "train (train.py:31)"), (2, "started", "train (train.py:31)"),
    ]  # fmt: skip
    assert found.groups == {"0": ("default_pg", (0, 1))}


KNOT: list[Any] = []
KNOT.append(KNOT)  # such a list is no size
NO_DUMPS: dict[str, tuple[bytes, str]] = {
    **{f"code, protocol {n}": (pickle.dumps({"entries": [], "version": Command()}, n), "refused") for n in (2, 4)},
    "a global": (b"\x80\x02cos\nsystem\n.", "instruction"),
    "a text of protocol 0": (b"\x80\x02Vx\n.", "instruction"),
    "a byte array of a TiB": (b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".", "instruction"),
    "an integer of a GiB": (b"\x80\x02\x8b" + struct.pack("<i", 1 << 30) + b".", "instruction"),
    "a persistent id": (b"\x80\x02}Q.", "instruction"),
    "an extension": (b"\x80\x02}\x82\x01.", "instruction"),
    "a list that holds itself": (
        pickle.dumps(dump([call(1) | {"input_sizes": [KNOT]}], GROUPS), 2), "not a flight-recorder dump",
    ),
    "too few values": (b"\x80\x02](.", "the pickle is damaged"),
    "a text that is cut": (b"\x80\x02}(X\xff\xff\xff\x7fabc", "the pickle is damaged"),
    "an item of a list": (b"\x80\x02]]s.", "the pickle is damaged"),
    "a number": (b"\x80\x02K\x01.", "it holds a int"),
    "JSON that is cut": (b'{"entries": [', "the JSON is damaged"),
    "a number of entries": (b'{"entries": 3}', "not a flight-recorder dump"),
    "a group that is a text": (b'{"entries": [{"process_group": "x"}]}', "not a flight-recorder dump"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "said"), NO_DUMPS.values(), ids=NO_DUMPS)
def test_what_is_no_dump_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    """Code and instructions that no dump needs are not carried out; nothing but `BadTrace` is raised."""
    with pytest.raises(BadTrace, match=said):
        read_dump(path_of(tmp_path, content))


def test_a_large_memo_index_takes_no_memory(tmp_path: Path) -> None:
    """The interpreter's own reader would make a table of 2³² entries."""
    found = read_dump(path_of(tmp_path, b"\x80\x02}r\xff\xff\xff\xff."))
    assert found.entries == ()


def test_shared_lists_are_not_multiplied(tmp_path: Path) -> None:
    """Many entries that share one long list cost what they cost in the file."""
    entry = call(1) | {"input_sizes": [[7] * 100_000] * 1000}
    found = read_dump(path_of(tmp_path, pickle.dumps(dump([entry] * 1000, GROUPS), 2)))
    sizes = found.entries[0].input_sizes
    assert (len(found.entries), len(sizes), len(sizes[0])) == (1000, 256, 16)


def test_every_cut_of_a_dump_is_damage(tmp_path: Path) -> None:
    content = pickle.dumps(dump([call(1)], GROUPS), 2)
    for length in range(2, len(content) - 1, 7):
        with pytest.raises(BadTrace):
            read_dump(path_of(tmp_path, content[:length]))


@pytest.mark.parametrize(
    ("calls", "last"),
    [
        ([call(1)], {"0": (3, 2, 1)}),
        ([call(1) | {"profiling_name": "gloo:all_reduce"}], {}),
        ([call(1), call(1, "send", p2p=True)], {}),
    ],
    ids=["nccl", "gloo", "also sends"],
)
def test_the_stated_last_numbers_are_those_of_nccls_collectives(
    tmp_path: Path, calls: list[dict[str, Any]], last: dict[str, tuple[int, int, int]]
) -> None:
    """Gloo counts all its calls, and a group that sends too may state the number of such a call."""
    status = {f"last_{what}_collective": n for n, what in enumerate(("completed", "started", "enqueued"), 1)}
    content = dump(calls, GROUPS, pg_status={"0": status})
    assert read_dump(path_of(tmp_path, pickle.dumps(content, 2))).last == last


def test_a_name_without_a_rank(tmp_path: Path) -> None:
    """The rank stands in the name only."""
    with pytest.raises(BadTrace, match="does not end with a rank"):
        read_dump(path_of(tmp_path, pickle.dumps(dump([], GROUPS), 2), "dump"))


def test_traces_come_first(tmp_path: Path) -> None:
    """A folder with a Kineto trace is one of traces; files of other kinds are passed over."""
    write(tmp_path / "dumps", {0: dump([call(1)], GROUPS), 1: dump([], GROUPS)})
    (tmp_path / "dumps" / "notes.txt").write_text("entries of the log")
    assert [p.name for p in find_dumps([str(tmp_path)])] == ["nccl_trace_rank_0", "nccl_trace_rank_1"]
    kineto_trace.write(tmp_path / "rank0.json", [kineto_trace.kernel("gemm", 0.0, 1.0)])
    assert find_dumps([str(tmp_path)]) == []
