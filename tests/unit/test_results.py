"""The measurements in results/: each says where it is from, none is large, and rows kept apart are found again."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from provenance import LONGEST_BYTES, read_result, write_json, write_result

RESULTS = Path(__file__).resolve().parents[2] / "results"
NAMES = sorted(path.name for path in RESULTS.glob("*.json"))


def written(folder: Path, rows: list[float]) -> Path:
    path = folder / "mine.json"
    facts = {"command": ["python", "mine.py"], "date": "2026-11-22", "commit": "0123456789abcdef"}
    record: dict[str, Any] = {"provenance": facts, "rows": rows}
    write_result(path, record, ["n"], [[str(len(rows))]])
    return path


@pytest.mark.parametrize("name", NAMES)
def test_a_result_says_where_it_is_from(name: str) -> None:
    """GPU, driver and torch may be null: of what ran without them."""
    record = json.loads((RESULTS / name).read_bytes())
    facts = record.get("provenance") or record["environment"]
    assert {"gpu", "driver", "torch", "commit", "date", "command"} <= facts.keys()
    assert all(facts[name] for name in ("commit", "date", "command"))


def test_no_result_is_large() -> None:
    """2 MB in all, and no JSON of more than 40 kB that is not compressed."""
    assert sum(path.stat().st_size for path in RESULTS.iterdir()) < 2_000_000
    assert max(path.stat().st_size for path in RESULTS.glob("*.json")) <= LONGEST_BYTES


def test_every_file_of_rows_has_its_summary() -> None:
    """A summary names the file of its rows, and no such file is left over."""
    named = {json.loads((RESULTS / name).read_bytes()).get("whole") for name in NAMES} - {None}
    assert named == {path.name for path in RESULTS.glob("*.json.gz")}


def test_a_short_result_is_one_file(tmp_path: Path) -> None:
    path = written(tmp_path, [1.0, 2.0])
    assert json.loads(read_result(path))["rows"] == [1.0, 2.0]
    assert not path.with_name("mine.json.gz").exists()


def test_a_long_result_keeps_its_rows_apart(tmp_path: Path) -> None:
    rows = [n / 7 for n in range(5000)]
    path = written(tmp_path, rows)
    assert json.loads(path.read_bytes())["rows"] == "5000 in the whole"
    assert json.loads(read_result(path))["rows"] == json.loads(read_result(path.with_name("mine.json.gz")))["rows"]
    assert json.loads(gzip.decompress((tmp_path / "mine.json.gz").read_bytes()))["rows"] == rows


def test_a_result_that_became_short_leaves_no_old_rows(tmp_path: Path) -> None:
    written(tmp_path, [n / 7 for n in range(5000)])
    assert json.loads(read_result(written(tmp_path, [3.0])))["rows"] == [3.0]
    assert not (tmp_path / "mine.json.gz").exists()


def test_a_long_measurement_is_written_as_the_kept_one(tmp_path: Path) -> None:
    """The rows of results/pairs-4xh200.json, written again, give the same summary with the means of each mechanism."""
    kept = RESULTS / "pairs-4xh200.json"
    write_json(tmp_path / kept.name, json.loads(read_result(kept)))
    assert json.loads((tmp_path / kept.name).read_bytes()) == json.loads(kept.read_bytes())
