"""Messages of backend `counterpoint` under torch's own calls, through mailboxes on software GPUs."""

import signal

import pytest

from tests.dist import torch_messages_programs as programs
from tests.support.ranks import SOON_S, Ranks, run_once


@pytest.mark.parametrize(
    ("first", "mailbox_bytes"),
    [("sends", programs.ROOM), ("receives", programs.ROOM), ("blocking sends", programs.ROOM), ("sends", None),
     ("receives", None)],
)  # fmt: skip
def test_a_ring_in_which_all_begin_alike(three_ranks: Ranks, first: str, mailbox_bytes: int | None) -> None:
    """The first messages of a group among them, for which pairs have to meet in a circle."""
    wanted = [[10.0 * number + (rank - 1) % 3 for number in range(4)] for rank in range(3)]
    taken = 8 if mailbox_bytes else 0
    assert three_ranks.run(programs.ring, first, 4, mailbox_bytes) == [(seen, taken) for seen in wanted]


@pytest.mark.parametrize("first", ["sends", "receives"])
def test_a_rank_sends_to_itself(two_ranks: Ranks, first: str) -> None:
    """As NCCL lets it in a batch; torch's ZBV pipelines do."""
    assert two_ranks.run(programs.to_itself, first) == [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]


def test_a_receive_from_the_rank_itself_has_its_timeout(two_ranks: Ranks) -> None:
    (said,) = set(two_ranks.run(programs.one_to_itself))
    assert (
        said.partition(": ")[2] == "a message of this rank to itself has not ended within 0.2 s; wait again, or longer"
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_unmatched_orders(four_ranks: Ranks, seed: int) -> None:
    assert sum(four_ranks.run(programs.unmatched, seed, 150)) == 300


def test_few_hardware_queues_are_told(four_ranks: Ranks) -> None:
    """Six streams that may wait leave two of eight queues to all else, and four of ten."""
    for said in four_ranks.run(programs.with_few_queues, "8"):
        assert [one.split(":")[0] for one in said] == [
            f"{lines} streams of messages may wait at once, and CUDA has 8 hardware queues" for lines in (5, 6)
        ]
    assert four_ranks.run(programs.with_few_queues, "10") == [[]] * 4


def test_ranks_without_messages_are_not_needed(three_ranks: Ranks) -> None:
    assert three_ranks.run(programs.only_two) == [[0.0] * 5, [1.0] * 5, [0.0] * 5]


def test_what_is_left_to_torch_says_why(two_ranks: Ranks) -> None:
    for operation, rows in zip(("send", "recv"), two_ranks.run(programs.left_to_torch), strict=True):
        why = ("a tag", "mailbox_bytes is None", "on another host")
        assert rows == [(operation, "torch", one) for one in why]


def test_messages_can_be_coalesced(two_ranks: Ranks) -> None:
    assert two_ranks.run(programs.coalesced) == [[1.0], [0.0]]


def test_an_abort_does_not_wait_for_messages(two_ranks: Ranks) -> None:
    """Its time-out is longer than a test may take."""
    assert two_ranks.run(programs.aborted)[0] == "Misconfigured: this communicator was closed; make a new one"


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_a_pipeline_has_the_losses_of_gloo(three_ranks: Ranks, schedule: str) -> None:
    """On an axis of a mesh, with activations of several pieces: shapes and activations by mailboxes alone."""
    found = three_ranks.run(programs.pipeline, schedule, 6)
    assert [ours == gloo for ours, gloo, _ in found] == [True] * 3
    assert all(taken >= 20 for *_, taken in found)


@pytest.mark.parametrize(
    ("after_one", "said"),
    [(True, "from rank 2 to rank 1 (call 2 on channel 2): rank 2 is dead"), (False, "rank 2 sent nothing to rank 1")],
)
def test_a_dead_peer_is_named_as_the_group_counts(after_one: bool, said: str) -> None:
    _, waiting, killed = run_once(3, programs.one_dies, after_one)
    assert killed == -signal.SIGKILL
    text, ranks, seconds = waiting
    assert (text.startswith("PeerTimeout: "), ranks, seconds < SOON_S, said in text) == (True, (2,), True, True), text


def test_groups_without_messages_cost_no_meeting(two_ranks: Ranks) -> None:
    assert max(two_ranks.run(programs.groups_made_and_destroyed, 30)) < 10
