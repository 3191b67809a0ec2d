"""`pairs.toml`: what a user writes becomes pairs, and what cannot be measured is refused with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterpoint.errors import Misconfigured
from counterpoint.records.tuning import StepPair
from counterpoint.tuned.file import tuned_toml
from counterpoint.tuning.pairs import read_pairs
from tests.support.example_tuned import example_tuned

GATHER = {"operation": "all_gather", "compute": "gemm 8192x8192x8192", "bytes_per_rank": 1024, "ranks": 2}


def written(folder: Path, **fields: object) -> Path:
    path = folder / "pairs.toml"
    values = {name: value for name, value in (GATHER | fields).items() if value is not None}
    path.write_text("[[pair]]\n" + "".join(f"{name} = {value!r}\n" for name, value in values.items()))
    return path


def test_a_pair_is_read_with_its_defaults(tmp_path: Path) -> None:
    assert read_pairs(written(tmp_path, calls=12)) == (
        StepPair(operation="all_gather", compute="gemm 8192x8192x8192", bytes_per_rank=1024, ranks=2, calls=12),
    )


def test_a_matmul_and_an_exchange_are_read(tmp_path: Path) -> None:
    path = tmp_path / "pairs.toml"
    path.write_text(
        '[[pair]]\noperation = "all_gather_matmul"\ncompute = "gemm 8192x7168x4096"\nbytes_per_rank = 33554432\n'
        'ranks = 2\n[[pair]]\noperation = "exchange"\ncompute = "1024x512x64x4 4096 zipf"\n'
        "bytes_per_rank = 33554432\nranks = 2\n"
    )
    assert [pair.operation for pair in read_pairs(path)] == ["all_gather_matmul", "exchange"]


@pytest.mark.parametrize("page", ["reference/tune.md", "how-to/tune-a-job.md"])
def test_the_examples_of_the_pages_are_read(tmp_path: Path, page: str) -> None:
    text = (Path(__file__).parents[3] / "docs" / page).read_text()
    path = tmp_path / "pairs.toml"
    path.write_text(text.partition("```toml\n")[2].partition("```")[0])
    assert len(read_pairs(path)) >= 2


BAD: dict[str, tuple[dict[str, object], str]] = {
    "operation": ({"operation": "all_gossip"}, "pair 1: there is no operation 'all_gossip'; choose from: all_gather"),
    "compute": ({"compute": "gemm 8x8"}, "pair 1: there is no workload 'gemm 8x8'; write one of: gemm MxNxK"),
    "dtype": ({"dtype": "int7"}, "dtype 'int7'; choose from: bfloat16"),
    "compute_dtype": ({"compute_dtype": "int7"}, "compute_dtype 'int7'; choose from: bfloat16"),
    "two dtypes of one matmul": (
        {"operation": "all_gather_matmul", "compute": "gemm 8x64x8", "dtype": "float32", "compute_dtype": "bfloat16"},
        "what is communicated is a factor or product of dtype 'float32'; leave it out",
    ),
    "no bytes": ({"bytes_per_rank": 0}, "all_gather of 0 bytes"),
    "bytes below 0": ({"bytes_per_rank": -1}, r"Expected `int` >= 0.*pair\[0\].bytes_per_rank"),
    "one rank": ({"ranks": 1}, r"Expected `int` >= 2"),
    "missing": ({"ranks": None}, "missing required field `ranks`"),
    "unknown": ({"rank": 2}, "unknown field `rank`"),
    "order": ({"first": "maybe"}, "Invalid enum value 'maybe'"),
    "order of a dependent one": (
        {"operation": "exchange", "compute": "tiny 8 zipf", "first": "together"},
        "one side waits for the other; leave it out",
    ),
    "bytes of a matmul": (
        {"operation": "all_gather_matmul", "compute": "gemm 8x8x8"},
        "moves 64 bytes per rank, not 1024; correct one of them",
    ),
    "bytes of an exchange": (
        {"operation": "exchange", "compute": "tiny 8 zipf"},
        "moves 2048 bytes per rank, not 1024",
    ),
    "a matmul's name": ({"operation": "all_gather_matmul", "compute": "8x8x8"}, "write its matmul as gemm MxNxK"),
    "a GEMM without end": ({"compute": "gemm 99999999x99999999x8"}, "need 20,000,003 GB on a rank; 275 GB are allowed"),
    "bytes without end": ({"bytes_per_rank": 1 << 50}, "need 2,251,800 GB on a rank"),
    "rows without end": (
        {"operation": "all_gather_matmul", "compute": f"gemm {1 << 47}x8x8", "bytes_per_rank": 1 << 50},
        "GB on a rank; 275 GB are allowed",
    ),
    "rows": ({"operation": "all_gather_matmul", "compute": "gemm 9x8x8"}, "2 ranks cannot share 9 rows"),
    "experts": ({"operation": "exchange", "compute": "8x8x3x1 8 zipf"}, "2 ranks cannot share 3 experts"),
    "an exchange's name": ({"operation": "exchange", "compute": "gemm 8x8x8"}, "there is no exchange"),
}


@pytest.mark.parametrize(("fields", "text"), BAD.values(), ids=BAD)
def test_a_pair_that_cannot_be_measured_is_refused(tmp_path: Path, fields: dict[str, object], text: str) -> None:
    with pytest.raises(Misconfigured, match=text):
        read_pairs(written(tmp_path, **fields))


@pytest.mark.parametrize(
    "text", ["", "pair = 3", "[[pair", "[[pairs]]\noperation = 'x'", "pair = []", "x = " + "9" * 5000]
)
def test_a_file_without_pairs_says_what_to_give(tmp_path: Path, text: str) -> None:
    path = tmp_path / "pairs.toml"
    path.write_text(text)
    with pytest.raises(Misconfigured, match=r"holds no pairs: .*; give tables \[\[pair\]\]"):
        read_pairs(path)


def test_a_tuning_is_told_from_pairs(tmp_path: Path) -> None:
    path = tmp_path / "counterpoint.toml"
    path.write_text(tuned_toml(example_tuned()))
    with pytest.raises(Misconfigured, match=r"is what tune has chosen; give the pairs .* or --to FORM"):
        read_pairs(path)
