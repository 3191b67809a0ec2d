"""Whatever way a trace is spelt and cut into blocks, it reads as the same timeline."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from counterpoint.trace import chunks
from tests.support import kineto_trace as kt
from tests.support.kineto_trace import awkward, plain, read


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return plain(read(kt.write(tmp_path_factory.mktemp("reference") / "t.json", awkward())))


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
@pytest.mark.parametrize("events_first", [False, True], ids=["header first", "events first"])
@pytest.mark.parametrize("layout", [name for name in kt.LAYOUTS if name != "array"])
def test_layouts_read_alike(layout: str, events_first: bool, suffix: str, tmp_path: Path, reference: Any) -> None:
    """White space, the place of the header and compression change nothing."""
    path = kt.write(tmp_path / f"t{suffix}", awkward(), layout=layout, events_first=events_first)
    assert plain(read(path)) == reference


def test_the_bare_array_reads_alike(tmp_path: Path, reference: Any) -> None:
    """Without an object around the events only what the header states is unknown."""
    stated = ("rank", "rank_known", "world_size", "job", "device", "origin_ns")
    found = plain(read(kt.write(tmp_path / "t.json", awkward(), layout="array")), *stated)
    assert found == {key: value for key, value in reference.items() if key not in stated}


@pytest.mark.parametrize("block", [1, 7, 64, 257, 1000])
@pytest.mark.parametrize("layout", ["compact", "pretty", "kineto"])
def test_blocks_may_end_anywhere(
    layout: str, block: int, tmp_path: Path, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kt.write(tmp_path / "t.json", awkward()[:: 4 if block == 1 else 1], layout=layout)
    expected = reference if block > 1 else plain(read(path))
    monkeypatch.setattr(chunks, "BLOCK_BYTES", block)
    assert plain(read(path)) == expected


def test_a_byte_order_mark_is_passed_over(tmp_path: Path, reference: Any) -> None:
    """Some editors put one before the first brace."""
    path = kt.write_bytes(tmp_path / "t.json", b"\xef\xbb\xbf" + kt.text(awkward()))
    assert plain(read(path)) == reference


def test_spellings_of_2020_read_alike(tmp_path: Path) -> None:
    """Old categories, `external id` and a stream in the tid mean what today's mean."""
    new = plain(read(kt.write(tmp_path / "new.json", kt.training())))
    old = plain(read(kt.write(tmp_path / "old.json", kt.spelt_as_in_2020(kt.training()))))
    for whole in (new, old):
        whole.pop("events")  # the instants are gone
    assert old == new


def test_a_rank_without_distributed_info_takes_its_collectives_word(tmp_path: Path) -> None:
    """`Rank` of record_param_comms on the default group comes before the name of the file."""
    path = kt.write(tmp_path / "rank9.json", kt.training(rank=1), kt.header(rank=None))
    assert (read(path).rank, read(path).rank_known) == (1, True)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank3.json", 3), ("trace_rank-12.json", 12), ("host_r4.json", 4), ("rank_7/trace.json", 7),
        ("graph_rank_0.1773709742341309550.pt.trace.json", 0), ("bs_32_rank0.json.gz", 0), ("r3.json", 3),
        ("trace_5.json", None), ("17.json.gz", None), ("bs_64.json", None), ("step_10.json", None),
        ("run-2024.json", None), ("2024-05-01.json", None), ("trace_20240501.json.gz", None), ("nranks8.json", None),
        ("host_4242.1690000000000.pt.trace.json", None), ("local_rank_3.json", None), ("8ranks/trace.json", None),
        ("resnet_r50_v2.json", None), ("frank3.json", None),
        ("node-a_4242.rank_1.pt.trace.json", 1), ("trace.json", None),
    ],
)  # fmt: skip
def test_the_last_resort_is_the_name_of_the_file(name: str, rank: int | None, tmp_path: Path) -> None:
    """A number that a name states as a rank is one; no number, no rank."""
    timeline = read(kt.write(tmp_path / name, [kt.kernel("k", 1.0, 1.0)], kt.header(rank=None)))
    assert (timeline.rank if timeline.rank_known else None) == rank


def test_whole_microseconds_since_1970_stay_exact(tmp_path: Path) -> None:
    """Traces of 2020 to 2022 count whole µs; nothing is lost and nothing is re-read."""
    at = 1_600_000_000_000_000
    timeline = read(kt.write(tmp_path / "t.json", [kt.kernel("a", at, 3), kt.kernel("b", at + 7, 2)]))
    assert timeline.gpu.start.tolist() == [0.0, 7.0]


def test_nanoseconds_since_1970_stay_exact(tmp_path: Path) -> None:
    """Fractions of µs at 1.7e15 are finer than a float64 there; differences keep every ns of the file."""
    at = [Decimal("1727372817374871.846"), Decimal("1727372817374871.847"), Decimal("1727372817374873.001")]
    timeline = read(kt.write(tmp_path / "t.json", [kt.kernel("a", t, 1) for t in at]))
    assert timeline.gpu.start == pytest.approx([0.0, 0.001, 1.155], abs=1e-6)


def test_the_origin_is_the_first_event_in_ns(tmp_path: Path) -> None:
    timeline = read(kt.write(tmp_path / "t.json", [kt.kernel("a", 4363791319635.25, 1)], kt.header(base_ns=10**18)))
    assert timeline.origin_ns == 10**18 + 4363791319635250


def test_events_are_counted_with_and_without_time(tmp_path: Path) -> None:
    assert read(kt.write(tmp_path / "t.json", kt.training())).events == len(kt.training())
