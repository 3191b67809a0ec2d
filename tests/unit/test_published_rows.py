"""The reader of published rows: a file that is wrong is refused, with its name and the row."""

from pathlib import Path

import pytest
from plan_published import PUBLISHED, MemoryRow, Row, read_source

from counterpoint.errors import Misconfigured

TEXT = """
source = "a page"
url = "https://example.org"
date = "2024"
vendor = "somebody"
notes = []
measured = "seconds"
columns = ["name", "parallel.dp", "measured"]
rows = [["one", 8, 1.5], ["two", 16, 0.75]]
[job.model]
layers = 4
hidden = 1024
heads = 8
vocab = 1000
[job.training]
sequence = 2048
global_batch = 32
[job.cluster]
gpu = "A100"
network = "a100-hdr-200"
"""


def read(folder: Path, *changes: tuple[str, str]) -> tuple[Row, ...] | tuple[MemoryRow, ...]:
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / "made-up.toml"
    path.write_text(text)
    return read_source(path)


def test_rows_are_jobs(tmp_path: Path) -> None:
    """A row's columns override the tables that all rows share; ranks decide on the number of GPUs."""
    found = read(tmp_path, ("[job.training]", "[job.parallel]\ndp = 1\nzero = 3\n[job.training]"))
    assert [(row.group, row.name, row.job.parallel.dp, row.job.parallel.zero) for row in found] == [
        ("made-up", "one", 8, 3),
        ("made-up", "two", 16, 3),
    ]
    assert [row.job.cluster.num_gpus for row in found] == [8, 16]
    assert [(row.published, row.unit) for row in found if isinstance(row, Row)] == [(1.5, "s"), (0.75, "s")]


def test_rows_of_memory(tmp_path: Path) -> None:
    """A file of `fits` says of jobs whether memory was enough."""
    found = read(tmp_path, ('"seconds"', '"fits"'), ("1.5", "true"), ("0.75", "false"))
    assert [row.fitted for row in found if isinstance(row, MemoryRow)] == [True, False]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("vendor", "vender", "made-up.toml.vender is not known"),
        ('vendor = "somebody"\n', "", "made-up.toml.vendor is missing: give a string"),
        ('"seconds"', '"hours"', "made-up.toml: measured = 'hours': give one of seconds, ms"),
        ('"parallel.dp"', '"dp"', "made-up.toml: column 'dp': give TABLE.FIELD"),
        ('"parallel.dp"', '"parallell.dp"', "made-up.toml: column 'parallell.dp': give TABLE.FIELD"),
        ('"parallel.dp"', '"parallel.dpp"', r"made-up.toml, row 1 \(one\): parallel.dpp is not known"),
        ('"name", "parallel.dp"', '"parallel.dp", "name"', "made-up.toml: columns: give"),
        ('"two", 16', '"two"', r"made-up.toml, row 2: 2 values in 3 columns"),
        ('"two", 16', "2, 16", r"made-up.toml, row 2: the name is 2"),
        ('"two", 16', '"two", 12', r"made-up.toml, row 2 \(two\): .*global_batch = 32"),
        ('"two"', '"one"', "made-up.toml: 'one' is the name of two rows"),
        ("0.75", '"0.75"', r"made-up.toml, row 2 \(two\): measured = '0.75': give a number above 0"),
        ("0.75", "nan", r"made-up.toml, row 2 \(two\): measured = nan: give a number above 0"),
        ("0.75", "true", r"made-up.toml, row 2 \(two\): measured = True: give a number above 0"),
        ('"seconds"', '"fits"', r"made-up.toml, row 1 \(one\): measured = 1.5: give true"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    with pytest.raises(Misconfigured, match=says):
        read(tmp_path, (old, new))


@pytest.mark.parametrize("path", sorted(PUBLISHED.glob("*.toml")), ids=lambda path: path.stem)
def test_every_source_can_be_read(path: Path) -> None:
    assert len(read_source(path)) > 0
