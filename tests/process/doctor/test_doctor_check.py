"""`counterpoint doctor --check` as a command: its exit codes, its JSON, and what does not go with it."""

from pathlib import Path

import msgspec
import pytest

from counterpoint.records.doctor import Effect
from tests.support.command import COUNTERPOINT, ROOT, Ended, counterpoint, program
from tests.support.kineto_trace import copy, event, header, kernel, training, write, write_job

STOCK = ROOT / "samples" / "fsdp-2-ranks"


def check(*arguments: str | Path) -> Ended:
    return counterpoint("doctor", "--check", *arguments, folder=ROOT)


def by_copies(folder: Path, ranks: int = 2) -> Path:
    """Traces of ranks of which copy engines moved everything."""
    for rank in range(ranks):
        at = 1000.0
        events = [
            kernel("nvjet_tst_128x256_NTT", at, 600.0),
            copy("Memcpy PtoP (Device -> Device)", at, 300.0, stream=30, size=1 << 20),
            kernel("combine", at + 300, 20.0, stream=31),
        ]
        write(folder / f"rank{rank}.json", events, header(rank=rank, world_size=ranks))
    return folder


def test_copies_on_every_rank_are_exit_code_0(tmp_path: Path) -> None:
    done = program([*COUNTERPOINT, "doctor", "--check", by_copies(tmp_path)])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("✓ took effect on ranks 0-1: 2 copies between GPUs, 0.60 of 0.60 ms")


def test_a_real_job_by_nccl_is_exit_code_1() -> None:
    done = check(STOCK)
    assert done.returncode == 1
    assert done.stdout.startswith("✗ had no effect on ranks 0-1: no copy between GPUs, ")
    assert "NCCL reduce_scatter" in done.stdout


def test_one_rank_without_effect_is_exit_code_1(tmp_path: Path) -> None:
    by_copies(tmp_path)
    write(tmp_path / "rank1.json", training(2, rank=1), header(rank=1))
    done = check(tmp_path)
    assert (done.returncode, done.stdout[:26]) == (1, "✗ had no effect on rank 1:")


def test_several_paths_are_one_job(tmp_path: Path) -> None:
    by_copies(tmp_path)
    assert check(tmp_path / "rank0.json", "--check", tmp_path / "rank1.json", "-q").returncode == 0


def test_json_is_the_record_that_the_contract_names(tmp_path: Path) -> None:
    done = check(STOCK, "--json", "-")
    found = msgspec.json.decode(done.stdout, type=Effect)
    assert (found.schema, found.knobs[0].on_ranks, done.returncode) == ("counterpoint.effect/1", (0, 1), 1)
    quiet = check(STOCK, "--json", tmp_path / "effect.json", "--quiet")
    assert (quiet.stdout, quiet.returncode) == ("", 1)
    assert msgspec.json.decode((tmp_path / "effect.json").read_bytes(), type=Effect) == found


def test_a_trace_of_a_cpu_is_wrong_use(tmp_path: Path) -> None:
    events = [event("cpu_op", "aten::mm", 1000.0, 50.0), event("user_annotation", "gloo:all_reduce", 1060.0, 20.0)]
    done = check(write(tmp_path / "rank0.json", events, header(devices=())))
    assert (done.returncode, done.stdout) == (2, "")
    assert "can only be seen on GPUs" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("no-such-folder",), "no such file or folder"),
        (("",), "give a trace file, or a folder"),
        (("README.md",), "neither a Kineto JSON trace"),
        (("pyproject.toml",), "a tuning alone; give traces of two steps"),
        (("samples/fsdp-2-ranks", "--strict"), "only --json and --quiet go with it"),
        (("samples/fsdp-2-ranks", "--no-bandwidth"), "only --json and --quiet go with it"),
        (("samples/fsdp-2-ranks", "--device-checks"), "only --json and --quiet go with it"),
        (("samples/fsdp-2-ranks", "--timeout", "5"), "only --json and --quiet go with it"),
        (("samples/fsdp-2-ranks", "--json", "no/such/folder/x.json"), "no folder"),
    ],
)
def test_wrong_use_is_exit_code_2(arguments: tuple[str, ...], said: str) -> None:
    done = check(*arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr


def test_two_traces_of_one_rank_are_refused(tmp_path: Path) -> None:
    write_job(tmp_path, 1)
    done = check(tmp_path / "rank0.json", "--check", by_copies(tmp_path / "again", 1))
    assert (done.returncode, "rank 0 again" in done.stderr) == (2, True)
