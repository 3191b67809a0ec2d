"""`counterpoint doctor --check counterpoint.toml --check TRACES` as a command: exit codes, JSON, no-ops."""

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from counterpoint.records.doctor import Effect
from counterpoint.records.tuning import LEAVE, TunedPair
from counterpoint.tuned.file import tuned_toml
from tests.process.doctor.test_doctor_check import STOCK, by_copies, check
from tests.support.example_tuned import example_tuned, tuned_pair

GATHER, SCATTER = 436_224_000 // 2, 872_448_000 // 2  # bytes per rank of a layer in STOCK


def file_of(folder: Path, *pairs: TunedPair) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "counterpoint.toml"
    path.write_text(tuned_toml(replace(example_tuned(), pair=pairs)))
    return path


def test_what_was_left_took_effect_in_a_real_job(tmp_path: Path) -> None:
    """NCCL makes the calls of a job that nothing changed."""
    done = check(file_of(tmp_path, tuned_pair(LEAVE, bytes_per_rank=GATHER)), "--check", STOCK)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("✓ 1 of 1 choices took effect")
    assert "✓ leave 16 calls by NCCL of 24 CTAs\n" in done.stdout


def test_knobs_that_did_nothing_are_exit_code_1(tmp_path: Path) -> None:
    pairs = (
        tuned_pair("zero_sm+gemm_sms=124", operation="reduce_scatter", bytes_per_rank=SCATTER),
        tuned_pair("nccl+max_ctas=8+cga_cluster=2", bytes_per_rank=GATHER),
    )
    done = check(file_of(tmp_path, *pairs), "--check", STOCK, "--json", "-")
    found = msgspec.json.decode(done.stdout, type=Effect)
    assert (done.returncode, found.schema, found.took_effect) == (1, "counterpoint.effect/1", False)
    assert [(knob.pair, knob.knob, knob.state) for knob in found.knobs] == [
        (1, "zero_sm", "no_effect"), (1, "gemm_sms=124", "no_effect"),
        (2, "nccl", "took_effect"), (2, "max_ctas=8", "no_effect"), (2, "cga_cluster=2", "not_seen"),
    ]  # fmt: skip


def test_copies_prove_a_choice(tmp_path: Path) -> None:
    traces, tuning = by_copies(tmp_path / "traces"), file_of(tmp_path, tuned_pair("zero_sm"))
    assert check(traces, "--check", tuning, "--quiet").returncode == 0


def test_a_tuning_of_another_gpu_proves_nothing(tmp_path: Path) -> None:
    other = replace(example_tuned(), made=replace(example_tuned().made, gpu="NVIDIA B200"))
    (tmp_path / "other.toml").write_text(tuned_toml(other))
    done = check(tmp_path / "other.toml", "--check", STOCK)
    assert (done.returncode, "made with gpu NVIDIA B200, here is NVIDIA H200" in done.stdout) == (1, True)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--check", "no-such.toml"), "2 tunings"),
        (("--check", "no-such-folder"), "no such file or folder"),
        ((), "a tuning alone"),
    ],
)
def test_wrong_use_of_a_tuning_is_exit_code_2(tmp_path: Path, more: tuple[str, ...], said: str) -> None:
    done = check(file_of(tmp_path, tuned_pair("zero_sm")), *more)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr


def test_a_toml_file_that_is_no_tuning_is_refused() -> None:
    done = check("pyproject.toml", "--check", STOCK)
    assert (done.returncode, "pyproject.toml is no tuning" in done.stderr) == (2, True)
