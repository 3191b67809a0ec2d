"""Messages through mailboxes on all GPUs of this machine (2 to 8): every claim that only GPUs can show."""

from pathlib import Path

import pytest

from tests.support.gpu_ranks import Seen, of, scenario_results

pytestmark = pytest.mark.gpu(2)

QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # orders of chance on all lines at once
RUN = {"timeout_s": 280, "arguments": ["live"], "environment": QUEUES}


@pytest.mark.parametrize("scenario", ["blocking", "alike", "steps", "by torch", "to itself", "random"])
def test_every_message_is_right(seen: Seen, scenario: str) -> None:
    """4 B to 128 MiB: both send first, all receive first, in stream order, each rank in an order of its own."""
    assert of(seen, scenario, "wrong") == {"0"}


def test_messages_of_any_size_go_through_mailboxes(seen: Seen) -> None:
    assert of(seen, "random", "ways") == {"[('zero_sm', 'through a mailbox')]"}
    assert sum(int(rank["random"]["count"]) for rank in seen) >= 100


@pytest.mark.own_gpus("a copy within a GPU may be a kernel")
def test_nothing_on_the_sender_uses_an_sm(seen: Seen) -> None:
    """Its GPU ran copies to the peer and no kernel: 1 of each small message, 8 of 128 MiB in pieces of 16."""
    assert (seen[0]["profile"]["others"], int(seen[0]["profile"]["count"])) == ("[]", 11)


def test_messages_can_be_captured(seen: Seen) -> None:
    assert of(seen, "captured", "seen") == {"equal"}


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    told = scenario_results(Path(__file__).with_name("messages_worker.py"), tmp_path, "kill", timeout_s=200, killed=1)
    assert (told[0]["killed"]["told"], told[0]["killed"]["soon"]) == ("PeerTimeout (1,)", "True")
