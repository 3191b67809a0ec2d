"""Tokens to their experts and back between processes: every row, sum and derivative is right, however they go."""

import signal
from typing import Any

import pytest

from tests.dist import expert_programs as programs
from tests.support.ranks import Ranks, finding, run_once

ALL = ("torch", "gather", "slabs")
MECHANISMS = pytest.mark.parametrize("name", ALL)


@pytest.mark.parametrize("seed", range(10, 20))
def test_random_routings_of_four_ranks(four_ranks: Ranks, seed: int) -> None:
    """Experts and ranks without tokens, one expert for all, the same expert twice, float32 and bfloat16."""
    four_ranks.run(programs.random_routings, seed, 10, 20, ALL)


@pytest.mark.parametrize("gpu", [False, True], ids=["CPUs", "software GPUs"])
def test_random_routings_of_three_ranks(three_ranks: Ranks, gpu: bool) -> None:
    three_ranks.run(programs.random_routings, 2, 3, 10, ALL, gpu)


@MECHANISMS
@pytest.mark.parametrize("count", [2, 3])
def test_several_under_way(two_ranks: Ranks, name: str, count: int) -> None:
    two_ranks.run(programs.in_halves, name, count)


test_what_ranks_find = finding({
    "several under way on software GPUs": (3, programs.in_halves, ("gather", 3, True), None),
    "flags of a graph in one queue are at rest after each replay": (2, programs.replayed, (), [0, 0, 0]),
    "compiled functions leave dispatches out": (2, programs.compiled, (), [(True, True)] * 2),
})  # fmt: skip


@MECHANISMS
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation(two_ranks: Ranks, name: str, reentrant: bool) -> None:
    two_ranks.run(programs.checkpointed, name, reentrant)


def test_float8_on_the_way(three_ranks: Ranks) -> None:
    """Tokens are rounded once, with a scale for each, and padded as float8 matmuls want them."""
    for first, *others in zip(*(three_ranks.run(programs.narrow, name) for name in ALL), strict=True):
        assert all((first - other).abs().max() <= 0.02 * first.abs().max() for other in others)


def test_what_has_no_room_is_dropped(two_ranks: Ranks) -> None:
    found = two_ranks.run(programs.dropped, ("torch", "gather"))
    for by_torch, by_gather in found:
        assert by_torch[:2] == by_gather[:2]
        assert by_torch[2] == pytest.approx(by_gather[2], rel=1e-5)
    assert [rank[0][:2] for rank in found] == [(0, 0), (12, 36)]


def test_what_has_no_room_raises(two_ranks: Ranks) -> None:
    """On all ranks at once, and once: torch's counts tell before rows leave, the others at the next call."""
    for name, rows in (("torch", 18), ("gather", 18), ("slabs", 9)):
        said = f"Misconfigured: no room for {rows} rows of a rank's experts with capacity_factor=0.5: give a larger one"
        for now, again, end in two_ranks.run(programs.too_many, name):
            assert now.startswith(said if name == "torch" else "nothing")
            assert again.startswith(said)
            assert end == "nothing"


@pytest.mark.parametrize("name", ["gather", "slabs"])
@pytest.mark.parametrize("then", ["dispatch", "check", "close"])
def test_what_had_no_room_is_told_whatever_came_after(two_ranks: Ranks, name: str, then: str) -> None:
    said = two_ranks.run(programs.first_of_two_has_no_room, name, then)
    assert all(text.startswith("Misconfigured: no room for") for text in said), said


@MECHANISMS
@pytest.mark.parametrize("calls_before", [0, 2])
def test_more_tokens_than_agreed_on_raise_on_all_ranks(two_ranks: Ranks, name: str, calls_before: int) -> None:
    said = two_ranks.run(programs.more_tokens, name, calls_before)
    assert all("rank 1 dispatches 7 tokens at once, more than max_tokens=6" in text for text in said), said


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"mechanism": "gather"}, {"mechanism": "torch"}),
        ({"capacity_factor": 1.5}, {"capacity_factor": 2.0}),
        ({"overflow": "drop"}, {"overflow": "raise"}),
        ({"equal_tokens": False}, {"equal_tokens": True}),
    ],
)
def test_options_that_differ_are_named_on_all_ranks(two_ranks: Ranks, first: Any, second: Any) -> None:
    """Before anything is sent, and those alone."""
    said = two_ranks.run(programs.unequal, [first, second])
    assert (
        said == [f"Misconfigured: the ranks do not match: {first} on rank 0, {second} on rank 1; give all the same"] * 2
    )


@MECHANISMS
def test_an_id_of_no_expert_is_none_however_large(two_ranks: Ranks, name: str) -> None:
    assert two_ranks.run(programs.ids_of_no_expert, name) == [[[1.0, 0.0]] * 8] * 2


@MECHANISMS
def test_one_rank(two_ranks: Ranks, name: str) -> None:
    two_ranks.run(programs.one_rank, name)


@pytest.mark.parametrize("half", ["start", "finish"])
@pytest.mark.parametrize("name", ["gather", "slabs", "auto"])
def test_a_rank_that_dies_is_named(name: str, half: str) -> None:
    *said, code = run_once(3, programs.killed, name, half)
    assert code == -signal.SIGKILL
    assert all(text.startswith("PeerTimeout") and "rank 2" in text for text in said), said


def test_without_shared_memory_torch_moves_tokens(two_ranks: Ranks) -> None:
    assert "torch  1      ranks on two hosts" in two_ranks.run(programs.no_shared_memory)[0]


def test_odd_tokens_are_left_to_torch(two_ranks: Ranks) -> None:
    found = two_ranks.run(programs.odd_tokens)[0]
    assert "torch  1      tokens of 20 bytes, which is no multiple of 16" in found


def test_auto_goes_by_predictions(two_ranks: Ranks) -> None:
    """Large calls are gathered, small ones left to torch; on CPUs by the figures of a GPU."""
    large = two_ranks.run(programs.chosen, 4096, 2048, 2000.0)
    assert all(said.startswith("gather gather is the simplest") for said in large), large
    small = two_ranks.run(programs.chosen, 4, 128, 0.0)
    assert all(said.startswith("torch 4 tokens are too few") for said in small), small


def test_the_report_is_a_table(two_ranks: Ranks) -> None:
    found = two_ranks.run(programs.reported)[0]
    assert "dispatch   below 1 MiB  gather  1      asked for gather" in found
    assert "combine    below 1 MiB  gather  1      asked for gather" in found


@MECHANISMS
def test_a_backward_pass_after_the_end_says_so(two_ranks: Ranks, name: str) -> None:
    """But for torch's calls, which go on."""
    said = "nothing" if name == "torch" else "Misconfigured: this communicator was closed; make a new one"
    assert two_ranks.run(programs.after_close, name) == [said] * 2


def test_wrong_calls_raise(two_ranks: Ranks) -> None:
    found = two_ranks.run(programs.misused)[0]
    said = (
        "give [tokens, 16]", "ids (5, 2): give (6, 2)",
        "give int32 or int64", "ids on meta",
        "x of torch.int32: give one of torch.bfloat16", "call it once, after start_dispatch",
        "one for each row that was dispatched",
        "of torch.float32", "call it once, after finish_dispatch", "allowed are auto, torch",
        "allowed are raise, drop", "give a number above 0", "give a number above 0",
        "allowed are None, torch.float8_e4m3fn", "give 1 or more",
        "give 0 µs or more", "channels=3: it has no effect here", "mailbox_bytes=4096: it has no",
        "parts=0: give 1 or more", "ExpertOptions(parts=...) for a Dispatcher, where it has no effect",
        "top_k=3 of 2 experts: give at most as many",
        "3 experts on 2 ranks: give a multiple", "top_k=0: give 1 or more",
    )  # fmt: skip
    assert [words in text for words, text in zip(said, found, strict=True)] == [True] * len(said), found
