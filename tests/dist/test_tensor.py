"""`torch.ops.counterpoint` between processes: every piece is right, wherever it is cut, and so are derivatives."""

import signal

import pytest

from tests.dist import tensor_programs as programs
from tests.support.ranks import Ranks, finding, run_once

OPERATIONS = pytest.mark.parametrize("name", ["gathered", "scattered", "all_reduced"])


@OPERATIONS
def test_random_calls_of_three_ranks(three_ranks: Ranks, name: str) -> None:
    """Some with a bias of each rank, which is added before the sum."""
    assert "cuts" in three_ranks.run(getattr(programs, name), 1, 30)[0]


@OPERATIONS
def test_random_calls_of_two_ranks(two_ranks: Ranks, name: str) -> None:
    assert "cuts" in two_ranks.run(getattr(programs, name), 2, 30)[0]


@OPERATIONS
def test_random_calls_on_software_gpus(three_ranks: Ranks, name: str) -> None:
    """The same in the order of streams, with early releases, driver calls made once, and threads that come late."""
    assert "cuts" in three_ranks.run(getattr(programs, name), 3, 30, True)[0]


@pytest.mark.needs("torch-2.13")
def test_float8(two_ranks: Ranks) -> None:
    assert set(two_ranks.run(programs.scaled, 4)[0]) <= {"cuts", "serial"}


@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_a_rank_that_dies_is_named(name: str) -> None:
    *said, code = run_once(3, programs.killed, name)
    assert code == -signal.SIGKILL
    assert all(text.startswith("PeerTimeout") and "rank 2" in text for text in said), said


def test_calls_that_do_not_fit_raise(two_ranks: Ranks) -> None:
    found = two_ranks.run(programs.shapes_that_do_not_fit)[0]
    said = ("give 0 to 0", "give a matrix [k, n]", "give a multiple", "allowed are 'sum' and 'avg'",
            "no process group 'nobody'", "dimension -2 of a tensor of shape (3, 8): give 0 to 0")  # fmt: skip
    assert [words in text for words, text in zip(said, found, strict=True)] == [True] * 6, found


@pytest.mark.parametrize(
    ("operands", "words"), [("row", "give rows of two dimensions or more"), ("integers", "give floating-point numbers")]
)
def test_operands_that_do_not_fit_are_refused_by_all_operations(two_ranks: Ranks, operands: str, words: str) -> None:
    found = two_ranks.run(programs.operands_that_do_not_fit, operands)[0]
    assert [text.startswith("Misconfigured: ") and words in text for text in found] == [True] * 3, found


def test_options_that_differ_are_named_on_all_ranks(two_ranks: Ranks) -> None:
    for text in two_ranks.run(programs.options_that_differ):
        assert text.startswith("Misconfigured: the ranks do not match: {'mechanism': 'torch'")


test_what_ranks_find = finding({
    "a group ends when torch destroys it": (2, programs.ended_with_its_group, (), (True, False)),
    "plans that are kept are bounded": (2, programs.bounded, (), (2, 5)),
    "no batch": (2, programs.empty, ((0, 4, 16),), [(0, 8, 8), (0, 2, 8), (0, 4, 8), (0, 4, 16)]),
    "no rows": (2, programs.empty, ((2, 0, 16),), [(2, 0, 8), (2, 0, 8), (2, 0, 8), (2, 0, 16)]),
})  # fmt: skip


def test_small_and_odd_calls_are_left_to_torch(two_ranks: Ranks) -> None:
    found = two_ranks.run(programs.left_to_torch)[0]
    assert [path for _, path, _ in found] == ["torch"] * 3
    assert [
        words in why for words, (_, _, why) in zip(("simplest", "no multiple of 16", "float64"), found, strict=True)
    ] == [True] * 3


def test_the_report_is_a_table(two_ranks: Ranks) -> None:
    assert "all_gather_matmul  below 1 MiB" in two_ranks.run(programs.reported)[0]
