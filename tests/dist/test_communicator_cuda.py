"""The communicator of GPUs between real processes, on software GPUs: threads for streams, shared memory for theirs."""

import pytest

from tests.dist import communicator_cuda_programs as programs
from tests.support.ranks import SOON_S, Ranks, finding, run_once


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_collectives_on_two_ranks(two_ranks: Ranks, seed: int) -> None:
    """Every bit is right: any operation, dtype, size, alignment, channel, stream and memory, early or not, delayed."""
    assert two_ranks.run(programs.random_collectives, seed, 300, 1 << 16) == [300] * 2


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_random_collectives_on_three_ranks(three_ranks: Ranks, seed: int) -> None:
    assert three_ranks.run(programs.random_collectives, seed, 200, 1 << 16) == [200] * 3


@pytest.mark.parametrize("world_size", [1, 4])
def test_random_collectives_on_more_and_fewer_ranks(world_size: int) -> None:
    assert run_once(world_size, programs.random_collectives, 6, 80, 1 << 14) == [80] * world_size


@pytest.mark.parametrize("seed", [7, 8, 9])
def test_random_collectives_on_one_hardware_queue(three_ranks: Ranks, seed: int) -> None:
    """Two communicators, all of whose streams run as issued: calls in one order on all ranks come to their end."""
    assert three_ranks.run(programs.on_one_queue, seed, 200, 1 << 14) == [200] * 3


@pytest.mark.parametrize("two_streams", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_memory_is_used_again_in_stream_order(three_ranks: Ranks, early: bool, two_streams: bool) -> None:
    """Tensors die while kernels and peers still use them: no kernel ever sees the data of another step."""
    assert [wrong for wrong, *_ in three_ranks.run(programs.steps_in_stream_order, early, two_streams, 200)] == [0] * 3


@pytest.mark.parametrize("early", [False, True])
def test_nothing_grows_with_the_number_of_steps(two_ranks: Ranks, early: bool) -> None:
    """1,000 steps take the regions that 200 did, and no more events than can be under way between two looks."""
    few, many = (two_ranks.run(programs.steps_in_stream_order, early, False, steps)[0] for steps in (200, 1000))
    assert (many[1], many[2] < 5 * 200) == (few[1], True), (few, many)


def test_what_comes_again_is_replayed(two_ranks: Ranks) -> None:
    assert [replayed for *_, replayed in two_ranks.run(programs.steps_in_stream_order, False, False, 20)] == [True] * 2


def test_what_a_graph_cannot_hold_is_refused(two_ranks: Ranks) -> None:
    """An early release is told so, not a new region; the communicator works on, with other blocks than a graph has."""
    for early, grows, good, after in two_ranks.run(programs.refused_in_a_capture):
        assert ("use empty() there" in early, grows, good) == (True, "", ""), early
        assert after == "[0.0, 1.0] in block 1"


test_what_ranks_find = finding({
    "captures that have ended are forgotten": (2, programs.captured_again, (4,), [[*[False] * 4, True]] * 2),
    "a call behind a long kernel is nobodys fault": (2, programs.a_long_kernel, (0.4, 1.0), ""),
    "a call behind another has not begun": (2, programs.one_behind_the_other, (1.2, 0.8), ""),
    "no elements need no memory": (2, programs.nothing, (), ((0, 5), "cpu", 0)),
    "nothing is left running": (2, programs.left_behind, (), []),
    "what was prepared goes when there is too much of it": (2, programs.cache_of_two, (45,), (45, 2, 0, 2)),
    "what was prepared in captures goes too": (2, programs.cache_of_two_in_captures, (4,), (20, 0)),
    "threads without a context make every call": (2, programs.every_verb_in_a_new_thread, (), {}),
    "a gather may be in place on one rank only": (4, programs.in_place_on_one, (), [0.0, 1.0, 2.0, 3.0]),
    "calls can be captured": (2, programs.captured, (), [[0.5 + k, 4 * (100 * (0.5 + k))] for k in (1, 2, 3)]),
    "sums run on all SMs": (2, programs.sums_on, (None,), ({None}, 3.0)),
    "sums run on the SMs that they were given": (2, programs.sums_on, (8,), ({8}, 3.0)),
})  # fmt: skip


def test_a_tensor_that_dies_in_a_capture_gives_its_memory_back(two_ranks: Ranks) -> None:
    """When the capture has ended, to other tensors: the graph does not use it."""
    assert [after - before for before, after in two_ranks.run(programs.died_in_a_capture)] == [1 << 20] * 2


def test_calls_that_cannot_be_made_are_refused(two_ranks: Ranks) -> None:
    parts = ("use empty() for this one", "use empty() for this one", "tensor of empty() only", "not from empty()")
    for *told, after in two_ranks.run(programs.refused):
        assert [part in text for part, text in zip(parts, told, strict=True)] == [True] * 4, told
        assert after == "[0.0, 1.0]"


@pytest.mark.parametrize("late", [0, 1])
def test_places_that_do_not_match_are_told_before_a_byte_is_written(two_ranks: Ranks, late: int) -> None:
    told = two_ranks.run(programs.other_places, late)
    assert [copies for _, copies, _ in told] == [0] * 2
    assert all(text and seconds < SOON_S for text, _, seconds in told), told
    assert any("into region" in text and "make and drop buffers in the same order" in text for text, _, _ in told), told


def test_a_rank_that_stays_away_is_named(three_ranks: Ranks) -> None:
    told = three_ranks.run(programs.one_stays_away)
    assert [ranks for _, ranks in (told[0], told[2])] == [(1,)] * 2, told
    assert "waiting for rank 1 (has not come" in told[0][0]


def test_a_rank_that_does_not_make_memory_is_named(two_ranks: Ranks) -> None:
    """Memory is made together; who waits for another in vain is told so."""
    (text, ranks), _ = two_ranks.run(programs.growth_alone)
    assert ("growing empty()" in text, ranks) == (True, (1,)), text


def test_memory_can_be_reserved(two_ranks: Ranks) -> None:
    for before, after, told in two_ranks.run(programs.reserved):
        assert (before, after, "before_step on a GPU" in told) == (2, 2, True)


def test_an_abort_does_not_wait_for_a_peer(two_ranks: Ranks) -> None:
    """Calls under way fail, the stream goes on, and to close it after that does nothing."""
    told, again = two_ranks.run(programs.ended_without_peers, "abort")[0]
    assert (told, again) == ("Misconfigured: this communicator was closed; make a new one", "")


def test_a_communicator_that_is_dropped_does_not_wait_for_a_peer(two_ranks: Ranks) -> None:
    told, _ = two_ranks.run(programs.ended_without_peers, "drop")[0]
    assert told == "Misconfigured: this communicator was closed; make a new one"


@pytest.mark.parametrize(("share", "said"), [([None, None], ""), ([True, True], ""), ([True, None], "'share_gpu': ")])
def test_ranks_agree_on_sharing_a_gpu(two_ranks: Ranks, share: list[bool | None], said: str) -> None:
    for text in two_ranks.run(programs.sharing_a_gpu, share):
        assert (text.startswith("Misconfigured: the ranks do not match"), said in text) == (bool(said), True), text
