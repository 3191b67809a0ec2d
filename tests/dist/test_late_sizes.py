"""An all_to_all whose sizes a GPU works out, between processes: what arrives, in which order, and what is refused."""

from __future__ import annotations

import signal

import pytest

from tests.dist import late_sizes_programs as programs
from tests.support.mortal_ranks import run_once
from tests.support.ranks import Ranks

DEVICES = pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])


def test_random_sizes(three_ranks: Ranks) -> None:
    """Forty calls beside others, some of which send nothing, or as much as there is room for."""
    assert three_ranks.run(programs.pushed, 1, 40) == [[]] * 3


@pytest.mark.parametrize("seed", [1, 2])
def test_streams_wait_before_anything_is_pushed(three_ranks: Ranks, seed: int) -> None:
    """On software GPUs the host is far ahead of the kernels that write tables and rows."""
    assert three_ranks.run(programs.pushed_in_stream_order, seed, 40) == [[]] * 3


def test_a_capture_is_refused(two_ranks: Ranks) -> None:
    """The error names what a graph can hold."""
    for said in two_ranks.run(programs.captured):
        assert "in a graph capture" in said
        assert "all_gather" in said


@DEVICES
def test_calls_that_do_not_fit_raise(two_ranks: Ranks, on_gpu: bool) -> None:
    """Each says what to give."""
    words = (
        "give it a new one",
        "has to be a tensor of empty(early_release=True)",
        "give one of torch's",
        "rows of the same shape",
        "give contiguous int64 numbers",
        "give contiguous int64 numbers",
    )
    for found in two_ranks.run(programs.refused, on_gpu):
        assert [word in text for word, text in zip(words, found, strict=True)] == [True] * len(words), found


@DEVICES
def test_rows_beyond_the_input_end_the_call(two_ranks: Ranks, on_gpu: bool) -> None:
    """The table is checked when it is there, before anything is copied."""
    assert all("within both tensors" in said for said in two_ranks.run(programs.beyond, on_gpu))


@DEVICES
def test_a_killed_rank_is_named(on_gpu: bool) -> None:
    """Its peer's streams are released, and it may close."""
    said, killed = run_once(2, programs.killed, on_gpu)
    assert killed == -signal.SIGKILL
    assert "rank 1 is dead" in said
