"""The table of operators as a file: rows of kernels, harmless in a spreadsheet, refused by a sentence."""

import csv
import io
from pathlib import Path

import polars as pl
import pytest

from counterpoint.diagnosis.frames import OPERATOR_COLUMNS
from counterpoint.diagnosis.operator_file import check_name, operators_file
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.records.operators import KernelTime, OperatorTime

TWO = OperatorTime(
    operator="aten::mm", shapes="4x8, 8x2", calls=2.0, us=30.0, tflops=1.5,
    kernels=(KernelTime(name="=HYPERLINK(1)", count=2.0, us=20.0), KernelTime(name='a"b,\nc', count=1.0, us=10.0)),
)  # fmt: skip
NONE = OperatorTime(operator="aten::add", calls=1.0, us=5.0)


def rows_of_csv() -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(operators_file([TWO, NONE], ".csv").decode())))


def test_each_kernel_has_a_row_with_its_operator() -> None:
    found = rows_of_csv()
    assert [(row["operator"], row["us"], row["kernel_us"]) for row in found] == [
        ("aten::mm", "30.0", "20.0"),
        ("aten::mm", "30.0", "10.0"),
        ("aten::add", "5.0", ""),
    ]
    assert tuple(found[0]) == OPERATOR_COLUMNS


def test_a_spreadsheet_runs_nothing_from_a_trace() -> None:
    assert [row["kernel"] for row in rows_of_csv()] == ["'=HYPERLINK(1)", 'a"b,\nc', ""]


def test_parquet_has_the_same_rows(tmp_path: Path) -> None:
    path = tmp_path / "operators.parquet"
    path.write_bytes(operators_file([TWO, NONE], ".parquet"))
    table = pl.read_parquet(path)
    assert table.columns == list(OPERATOR_COLUMNS)
    assert table["kernel"].to_list() == ["=HYPERLINK(1)", 'a"b,\nc', None]
    assert table["kernel_us"].to_list() == [20.0, 10.0, None]


def test_other_files_are_refused() -> None:
    with pytest.raises(Misconfigured, match=r"operators\.xlsx: give a name that ends in \.csv or \.parquet"):
        check_name(Path("operators.xlsx"))


def test_parquet_needs_polars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.diagnosis.frames.find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"Parquet needs polars.*counterpoint\[frames\]"):
        check_name(Path("operators.parquet"))
    check_name(Path("operators.csv"))
