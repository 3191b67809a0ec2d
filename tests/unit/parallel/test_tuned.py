"""What is said of a tuning that is followed, and which of its knobs are applied."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import pytest

from counterpoint.controls.gemm_sms import GemmSmLimit
from counterpoint.parallel.follow_tuning import FollowedTuning, TunedCall
from counterpoint.tuned.choices import Choices
from tests.support.example_tuned import example_tuned

GATHER = example_tuned().pair[0]


def followed(*mechanisms: str) -> FollowedTuning:
    """A tuning with a gather for each mechanism, of a MiB for the first, of four times as much for each next."""
    pairs = tuple(
        msgspec.structs.replace(GATHER, mechanism=name, bytes_per_rank=4**number << 20)
        for number, name in enumerate(mechanisms)
    )
    tuning = msgspec.structs.replace(example_tuned(), pair=pairs)
    return FollowedTuning(Choices(tuning, tuning.made), "counterpoint.toml")


def call(tuning: FollowedTuning, number: int = 0) -> TunedCall:
    found = tuning.find("all_gather", ranks=2, num_bytes=2 * 4**number << 20)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("mechanism", "stays", "left_out"),
    [
        ("zero_sm", False, ""),
        ("leave", True, ""),
        ("nccl", True, ""),
        (
            "nccl+max_ctas=8",
            True,
            "; max_ctas=8 not applied: set NCCL_MAX_CTAS=8 before the groups are made "
            "(counterpoint tune counterpoint.toml --to env)",
        ),
        (
            "nccl+priority=high",
            True,
            "; priority=high not applied: set TORCH_NCCL_HIGH_PRIORITY=1 before the groups are made "
            "(counterpoint tune counterpoint.toml --to env)",
        ),
        ("nccl+windows", True, "; windows not applied: give it to process groups when they are made"),
        (
            "zero_sm+gemm_sms=124",
            False,
            "; gemm_sms=124 not applied: it is applied by counterpoint.overlap(model, tuned=...), to all matmuls",
        ),
    ],
)
def test_a_knob_that_comes_too_late_is_named(mechanism: str, stays: bool, left_out: str) -> None:
    found = call(followed(mechanism))
    assert found.stays == stays
    assert found.why == f"{mechanism} by counterpoint.toml: {GATHER.why}{left_out}"


def test_a_variable_that_is_set_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing is left to do; another value does not count."""
    monkeypatch.setenv("NCCL_MAX_CTAS", "8")
    assert "not applied" not in call(followed("nccl+max_ctas=8")).why
    assert "not applied" in call(followed("nccl+max_ctas=16")).why


class Limits:
    """Stands for GEMMs: which limit they have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now: int | None = None

        @contextmanager
        def limit(control: GemmSmLimit) -> Iterator[None]:
            self.now = control.num_sms
            yield
            self.now = None

        monkeypatch.setattr(GemmSmLimit, "limit", limit)
        monkeypatch.setattr(GemmSmLimit, "available", lambda control: None)


def test_one_limit_of_sms_is_applied_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """All choices that name a limit name the same."""
    limits, tuning = Limits(monkeypatch), followed("zero_sm+gemm_sms=124", "nccl+gemm_sms=124", "zero_sm")
    with ExitStack() as undo:
        tuning.limit_gemms(undo, "cuda")
        assert limits.now == 124
        assert "not applied" not in call(tuning).why
        assert str(tuning) == "counterpoint.toml: 1 of 3 choices followed; matmuls have 124 SMs"
    assert limits.now is None


@pytest.mark.parametrize(
    ("mechanisms", "device", "said"),
    [
        (
            ("zero_sm+gemm_sms=124", "zero_sm+gemm_sms=116"),
            "cuda",
            "one limit holds for all matmuls, and the choices name 116, 124",
        ),
        (("zero_sm+gemm_sms=fit",), "cuda", "one limit holds for all matmuls, and the choices name fit"),
        (("zero_sm+gemm_sms=124",), "cpu", "a CPU has no SMs"),
    ],
)
def test_other_limits_of_sms_are_told(
    monkeypatch: pytest.MonkeyPatch, mechanisms: tuple[str, ...], device: str, said: str
) -> None:
    limits, tuning = Limits(monkeypatch), followed(*mechanisms)
    with ExitStack() as undo:
        tuning.limit_gemms(undo, device)
        assert limits.now is None
        assert call(tuning).why.endswith(f" not applied: {said}")


def test_how_many_choices_are_followed_is_told() -> None:
    tuning = followed("zero_sm", "leave")
    assert str(tuning) == "counterpoint.toml: changes nothing: no call so far has one of its 2 choices"
    call(tuning, 1)
    call(tuning, 1)
    assert str(tuning) == "counterpoint.toml: 1 of 2 choices followed"
    call(tuning, 0)
    assert str(tuning) == "counterpoint.toml: 2 of 2 choices followed"


def test_text_of_a_file_cannot_write_to_the_terminal() -> None:
    pair: Any = msgspec.structs.replace(GATHER, why="\x1b[2J fast")
    tuning = msgspec.structs.replace(example_tuned(), pair=(pair,))
    found = FollowedTuning(Choices(tuning, tuning.made), "a\x1bb.toml").find(
        "all_gather", ranks=2, num_bytes=2 * pair.bytes_per_rank
    )
    assert found is not None
    assert found.why.isprintable()
