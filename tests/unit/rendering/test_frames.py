"""Data frames: schemas that do not depend on the rows, nested columns that polars can use."""

import msgspec
import polars as pl
import pytest

from counterpoint.diagnosis.frames import frames
from counterpoint.errors import Unsupported
from counterpoint.records.diagnosis import Collective, Diagnosis

KEYS = ["steps", "per_rank", "collectives", "stragglers", "kernels", "findings", "what_if", "operators"]


def test_keys(training: Diagnosis) -> None:
    assert list(frames(training)) == KEYS


@pytest.mark.parametrize("key", KEYS)
def test_schema_is_the_same_when_empty(training: Diagnosis, empty: Diagnosis, key: str) -> None:
    assert frames(training)[key].schema == frames(empty)[key].schema


@pytest.mark.parametrize("key", KEYS)
def test_no_column_is_of_an_unknown_type(empty: Diagnosis, key: str) -> None:
    assert not {pl.Null(), pl.Object()} & set(frames(empty)[key].dtypes)


def test_columns_of_a_frame_are_the_fields_of_the_record(training: Diagnosis) -> None:
    fields = {field.name for field in msgspec.structs.fields(Collective)}
    assert set(frames(training)["collectives"].columns) == fields


def test_a_rank_leads_its_row(training: Diagnosis) -> None:
    assert frames(training)["per_rank"].columns[0] == "rank"


def test_wait_explodes_to_one_row_per_rank_in_order_of_rank(training: Diagnosis) -> None:
    waits = dict(sorted(training.collectives[0].wait_us.items(), reverse=True))
    first = msgspec.structs.replace(training.collectives[0], wait_us=waits)
    table = frames(msgspec.structs.replace(training, collectives=(first,)))["collectives"]
    rows = table.select("wait_us").explode("wait_us").unnest("wait_us")
    assert rows.to_dict(as_series=False) == {"rank": list(range(8)), "us": [waits[str(rank)] for rank in range(8)]}


def test_what_is_not_known_is_null(training: Diagnosis) -> None:
    assert frames(training)["findings"]["rank"].to_list() == [5, None, None]


def test_grid_is_an_array_of_three(training: Diagnosis) -> None:
    assert frames(training)["kernels"].schema["grid"] == pl.Array(pl.Int64, 3)


def test_frames_without_polars_say_what_to_install(empty: Diagnosis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.diagnosis.frames.find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"pip install 'counterpoint\[frames\]'"):
        frames(empty)
