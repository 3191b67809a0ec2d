"""`counterpoint.toml`: what is written is read as the same, and everything else is refused by name."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from counterpoint.errors import Misconfigured
from counterpoint.records.tuning import LEAVE
from counterpoint.tuned.file import MAX_BYTES, parse_tuned, read_tuned, tuned_digest, tuned_toml
from tests.support.example_tuned import example_tuned


def test_what_is_written_is_read_as_the_same(tmp_path: Path) -> None:
    tuning = example_tuned()
    path = tmp_path / "counterpoint.toml"
    path.write_text(tuned_toml(tuning))
    assert read_tuned(path) == tuning


texts = st.text(max_size=40)
micros = st.floats(0, 1e9)


@example(text="\x7f", us=0.0, calls=1)  # a control character that JSON leaves as it is
@given(text=texts, us=micros, calls=st.integers(1, 1 << 30))
def test_any_text_and_number_comes_back(text: str, us: float, calls: int) -> None:
    first = example_tuned().pair[0]
    changed = msgspec.structs.replace(first, where=(text,), why=text, us=us, calls=calls)
    tuning = msgspec.structs.replace(example_tuned(), pair=(changed,), notes=(text,))
    assert parse_tuned(tuned_toml(tuning)) == tuning


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('mechanism = "zero_sm"', 'mechanisms = "zero_sm"', "mechanism"),
        ("ranks = 2", "ranks = 1", ">= 2"),
        ("schema = ", "schema = 1 # ", "this version reads 'counterpoint.tuning/1'"),
        ("[made]", "[made", "line"),
        ("us = ", "us = -", ">= 0"),
        ("seconds = ", "seconds = nan # ", ">= 0"),
        ("seconds = ", f"seconds = {'9' * 5000} # ", "a number has thousands of digits"),
        ('"zero_sm"', '"zero_sm+foo=bar"', "allowed knobs are priority="),
        ('"zero_sm"', '"zero_sm+chunk_bytes=-5"', "allowed knobs are priority="),
        ('"zero_sm"', f'"zero_sm+gemm_sms={"9" * 20}"', r"gemm_sms=N\|fit, .*with numbers of up to 9 digits"),
        ('"zero_sm"', '"zero_sm+windows=1"', "allowed knobs are"),
        ('"all_gather"', '"all_gathers"', "operation 'all_gathers': allowed are all_gather, reduce_scatter"),
        ('mechanism = "zero_sm"', 'mechanism = "zero_sm"\ndtype = "bf16"', "dtype 'bf16': allowed are bfloat16"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, before: str, after: str, said: str) -> None:
    path = tmp_path / "counterpoint.toml"
    path.write_text(tuned_toml(example_tuned()).replace(before, after, 1))
    with pytest.raises(Misconfigured, match=said):
        read_tuned(path)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "counterpoint.toml"
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(Misconfigured, match="larger than"):
        read_tuned(path)


def test_another_choice_has_another_digest() -> None:
    tuning = example_tuned()
    left = msgspec.structs.replace(tuning.pair[0], mechanism=LEAVE)
    other = msgspec.structs.replace(tuning, pair=(left, *tuning.pair[1:]))
    assert tuned_digest(other) != tuned_digest(tuning) == tuned_digest(example_tuned())


def test_a_tuning_of_cpus_is_read_again() -> None:
    """TOML has no null: a machine without a GPU, a driver or NCCL leaves these out."""
    example = example_tuned()
    made = msgspec.structs.replace(example.made, device="cpu", gpu=None, driver=None, nccl=None, commit=None)
    on_cpus = msgspec.structs.replace(example, made=made)
    assert parse_tuned(tuned_toml(on_cpus)) == on_cpus
