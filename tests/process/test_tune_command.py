"""`counterpoint tune` as a command, with gloo on CPUs: the file, the JSON, and errors that leave nothing behind."""

import json
from pathlib import Path

import pytest

from counterpoint.records.tuning import LEAVE
from counterpoint.tuned.file import read_tuned, tuned_toml
from counterpoint.tuning.exporters import export
from tests.support.command import COUNTERPOINT, Ended, counterpoint, program
from tests.support.example_tuned import example_tuned

PAIRS = """
[[pair]]
operation = "all_gather"
compute = "gemm 64x64x64*2"
bytes_per_rank = 4096
ranks = 2
dtype = "float32"
first = "together"
calls = 12

[[pair]]
operation = "all_gather"
compute = "gemm 64x64x64*2"
bytes_per_rank = 2048
ranks = 2
dtype = "float32"
first = "together"
"""


@pytest.fixture(name="pairs")
def pairs_fixture(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.toml"
    path.write_text(PAIRS)
    return path


def tune(folder: Path, *arguments: str | Path) -> Ended:
    return counterpoint("tune", *arguments, folder=folder)


def test_pairs_become_choices(pairs: Path) -> None:
    arguments = ("--device", "cpu", "--rounds", "5", "--json", "choices.json")
    done = program([*COUNTERPOINT, "tune", pairs, *arguments], folder=pairs.parent)
    assert done.returncode == 0, done.stderr
    tuned = read_tuned(pairs.parent / "counterpoint.toml")
    assert [{each.mechanism for each in pair.tried} for pair in tuned.pair] == [{"gloo", "zero_sm"}] * 2
    assert [pair.calls for pair in tuned.pair] == [12, 1]
    assert json.loads((pairs.parent / "choices.json").read_text())["pair"][0]["stock"] == "gloo"
    assert {"wrote choices.json", "wrote counterpoint.toml"} < {*done.stdout.splitlines()}


def test_a_budget_that_is_used_up_leaves_what_was_not_measured(pairs: Path) -> None:
    """Ranks end by themselves after twelve rounds of the first pair, whose choice another one of its class follows."""
    done = tune(pairs.parent, pairs, "--device", "cpu", "--rounds", "5000", "--budget", "1", "-q")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    measured, other = read_tuned(pairs.parent / "counterpoint.toml").pair
    assert other.why == "not measured: the budget of 1 s was used up"
    assert [5 <= each.runs <= 10 for each in measured.tried] == [True] * 2


def test_a_pair_that_needs_too_much_memory_is_left(pairs: Path) -> None:
    large = PAIRS.split("[[pair]]")[1].replace("64x64x64*2", "200000x200000x1000")
    pairs.write_text(f"[[pair]]{large}{PAIRS}")
    done = tune(pairs.parent, pairs, "--device", "cpu", "--rounds", "5", "-q")
    assert done.returncode == 0, done.stderr
    left, *others = read_tuned(pairs.parent / "counterpoint.toml").pair
    assert (left.mechanism, left.tried) == (LEAVE, ())
    assert left.why.startswith("not measured: gemm 200000x200000x1000 needs 161.6 GB on each rank and ")
    assert all(pair.tried for pair in others)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["pairs.toml", "--out", "pairs.toml"], "pairs.toml is named twice"),
        (["nowhere.toml"], "nowhere.toml: No such file or directory; give tables"),
        (["pairs.toml", "--out", "nowhere/x.toml"], "cannot write nowhere/x.toml"),
        (["pairs.toml", "--device", "cpu", "--nproc", "3"], "no pair is one of 3 ranks; the pairs have 2"),
        (["pairs.toml", "--device", "cpu", "--budget", "0"], "budget 0 s"),
        (["pairs.toml", "--device", "cpu", "--rounds", "4"], "rounds 4; at least 5"),
        (["pairs.toml", "--machine"], "SOURCE with --machine: it measures all of a machine; leave SOURCE out"),
        (["pairs.toml", "--to", "env", "--rounds", "9"], "--rounds with --to"),
        (["pairs.toml", "--to", "env"], "pairs.toml is no tuning: schema = None"),
    ],
)
def test_a_wrong_use_ends_with_2_and_writes_nothing(pairs: Path, arguments: list[str], text: str) -> None:
    done = tune(pairs.parent, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr
    assert [path.name for path in pairs.parent.iterdir()] == ["pairs.toml"]


def test_a_tuning_is_written_for_others(tmp_path: Path) -> None:
    """To standard output or a file, with the page where that is asked for; the tuning stays as it is."""
    before = tuned_toml(example_tuned())
    (tmp_path / "counterpoint.toml").write_text(before)
    printed = tune(tmp_path, "counterpoint.toml", "--to", "env")
    written = tune(tmp_path, "counterpoint.toml", "--to", "env", "--out", "tuned.sh", "--html", "tuned.html")
    assert (printed.returncode, written.returncode, written.stdout) == (0, 0, "")
    assert (tmp_path / "tuned.sh").read_text() == printed.stdout == export(example_tuned(), "env")
    assert "<title>" in (tmp_path / "tuned.html").read_text()
    assert (tmp_path / "counterpoint.toml").read_text() == before
