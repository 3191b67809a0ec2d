"""`counterpoint measure` around the measuring: what goes to which file and stream. No rank is started."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from counterpoint.cli import app
from counterpoint.errors import CounterpointError, Misconfigured
from counterpoint.measurement import api
from counterpoint.records.measurement import Measurement
from tests.support import example_measurement as measured


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path, result: Measurement | None = None) -> Result:
    def measure(suite: str, **options: Any) -> Measurement:
        return result or measured.usual()

    monkeypatch.setattr(api, "measure", measure)
    return CliRunner().invoke(app, ["measure", "quick", *map(str, arguments)], catch_exceptions=False)


def test_json_to_standard_output_is_json_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert msgspec.json.decode(run(monkeypatch, "--json", "-").stdout, type=Measurement) == measured.usual()


def test_quiet_leaves_the_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = run(monkeypatch, "--quiet").stdout.splitlines()
    assert [json.loads(line)["schema"] for line in lines] == ["counterpoint.measurement-summary/1"]


def test_out_holds_everything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, "--out", tmp_path / "x.json")
    assert msgspec.json.decode((tmp_path / "x.json").read_bytes(), type=Measurement) == measured.usual()


def test_the_table_lies_beside_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, "--out", tmp_path / "x.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.json", "x.md"]


def test_a_full_disk_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("counterpoint.commands.terminal.replacing", full)
    with pytest.raises(CounterpointError, match=r"x.json.*No space left"):
        run(monkeypatch, "--out", tmp_path / "x.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--out", "folder"), "cannot write folder: it is a folder"),
        (("--out", ""), "it is a folder"),
        (("--out", "/"), "it is a folder"),
        (("--html", "folder"), "it is a folder"),
        (("--html", "-"), "cannot write -: only --json prints; name a file"),
        (("--out", "taken.json"), "cannot write taken.md: it is a folder"),
        (("--out", "x.json", "--html", "x.json"), "is where --out puts its results"),
        (("--out", "x.json", "--html", "folder/../x.md"), "is where --out puts its results or their table"),
    ],
)
def test_files_that_could_not_be_written_are_refused_before_measuring(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("folder", "taken.md"):
        Path(name).mkdir()
    with pytest.raises(Misconfigured, match=said):
        run(monkeypatch, *arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "taken.md"]


def test_results_that_cannot_be_printed_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:

    def full(*arguments: object) -> None:
        raise CounterpointError("cannot write to standard output: No space left on device")

    monkeypatch.setattr("counterpoint.rendering.measurement_tables.render", full)
    with pytest.raises(CounterpointError, match=r"No space left on device; the results are in .*x.json"):
        run(monkeypatch, "--out", tmp_path / "x.json")


def test_a_narrow_terminal_loses_no_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert "nccl+max_ctas=8" in run(monkeypatch).stdout.partition("{")[0]


CONTRACT = {
    "": "schema suite environment rounds dropped_rounds rows unavailable blocks",
    "environment": "device gpu world_size driver torch nccl counterpoint commit command date variables",
    "rows": "scenario workload collective size_bytes ratio mechanism order compute_alone comm_alone best_comm_alone_us "
    "best_mechanism serial together compute_together comm_together head_start_us hidden ideal_fraction compute_kept "
    "comm_kept pair_class usage evidence marked device",
}


@pytest.mark.parametrize(("of", "keys"), CONTRACT.items())
def test_json_holds_the_keys_of_the_contract(monkeypatch: pytest.MonkeyPatch, of: str, keys: str) -> None:
    """docs/reference/measurement.md names them; they may be added to, never renamed."""
    found = json.loads(run(monkeypatch, "--json", "-").stdout)
    part = found[of] if of else found
    assert set(keys.split()) <= set(part[0] if isinstance(part, list) else part)
