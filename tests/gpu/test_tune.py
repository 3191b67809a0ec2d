"""`counterpoint tune pairs.toml` on two GPUs: every kind of pair is measured within the budget, and decided."""

import sys
from pathlib import Path

import pytest

from counterpoint.records.tuning import LEAVE, Tuned
from counterpoint.tuned.file import read_tuned
from tests.support.command import program

pytestmark = [pytest.mark.gpu(2), pytest.mark.own_gpus("it measures times")]

BUDGET_S = 120
PAIRS = """
[[pair]]
operation = "all_gather"
compute = "gemm 8192x8192x8192"
bytes_per_rank = 134217728
ranks = 2
first = "compute_first"

[[pair]]
operation = "reduce_scatter"
compute = "llama-8b layer 4096"
bytes_per_rank = 134217728
ranks = 2

[[pair]]
operation = "all_reduce"
compute = "gemm 2048x2048x2048"
bytes_per_rank = 16384
ranks = 2

[[pair]]
operation = "all_gather_matmul"
compute = "gemm 8192x7168x8192"
bytes_per_rank = 67108864
ranks = 2

[[pair]]
operation = "exchange"
compute = "mixtral-8x7b 4096 zipf"
bytes_per_rank = 67108864
ranks = 2
"""


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """What is chosen on this machine, tuned once."""
    folder: Path = tmp_path_factory.mktemp("tune")
    (folder / "pairs.toml").write_text(PAIRS)
    command = [sys.executable, "-m", "counterpoint", "tune", "pairs.toml", "--budget", str(BUDGET_S)]
    done = program(command, folder=folder, timeout_s=400)
    assert done.returncode == 0, done.stderr
    return read_tuned(folder / "counterpoint.toml")


def test_every_pair_is_measured_within_the_budget(tuned: Tuned) -> None:
    """By stock and at least one other mechanism; the last pair may end a little later."""
    assert all(len(pair.tried) > 1 for pair in tuned.pair)
    assert tuned.seconds < 1.25 * BUDGET_S


def test_a_gather_that_a_gemm_holds_back_gets_copy_engines(tuned: Tuned) -> None:
    """A persistent GEMM has all SMs: NCCL waits for its end, copies do not (docs/results/pairs.md)."""
    found = tuned.pair[0]
    assert found.mechanism == "zero_sm"
    assert found.us < 0.9 * found.stock_us


def test_no_choice_is_marked_nor_slower_than_stock(tuned: Tuned) -> None:
    for pair in tuned.pair:
        marked = {each.mechanism for each in pair.tried if each.marked is not None}
        assert pair.mechanism not in marked
        assert pair.mechanism == LEAVE or pair.us < pair.stock_us
