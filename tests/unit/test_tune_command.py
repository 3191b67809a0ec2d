"""What `counterpoint tune` says last: which files it wrote, and how the choices are used."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from counterpoint.cli import app
from counterpoint.records.tuning import Tuned
from counterpoint.tuning import api
from tests.support.example_tuned import example_tuned

LEFT = replace(example_tuned(), pair=tuple(pair for pair in example_tuned().pair if pair.is_left))
USE = (
    "use it: COUNTERPOINT_TUNED='my choices.toml' torchrun ..., "
    'or counterpoint.overlap(model, tuned="my choices.toml")'
)


@pytest.mark.parametrize(
    ("tuned", "last"),
    [
        (example_tuned(), ["wrote choices.json", "wrote my choices.toml", USE]),
        (LEFT, ["wrote choices.json", "wrote my choices.toml"]),
    ],
)
def test_the_last_line_uses_the_choices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tuned: Tuned, last: list[str]
) -> None:
    """Where there are any; nothing uses a file that leaves all pairs as they are."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "tune", lambda *arguments, **options: tuned)
    arguments = ["tune", "pairs.toml", "--out", "my choices.toml", "--json", "choices.json"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.stdout.splitlines()[-len(last) :] == last
