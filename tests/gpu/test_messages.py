"""Messages through mailboxes on all GPUs of this machine (2 to 8): every claim that only GPUs can show.

As many processes as there are GPUs run the scenarios of messages_worker.py, once for all tests but the one in which a
rank is killed.
"""

from pathlib import Path

import pytest

from tests.support.gpu_ranks import scenario_results

pytestmark = pytest.mark.gpu(2)

WORKER = Path(__file__).with_name("messages_worker.py")
QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # orders of chance on all lines at once
Seen = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    return scenario_results(WORKER, tmp_path_factory.mktemp("messages"), "live", timeout_s=280, environment=QUEUES)


@pytest.mark.parametrize("scenario", ["blocking", "alike", "steps", "by torch", "to itself", "random"])
def test_every_message_is_right(live: list[Seen], scenario: str) -> None:
    """4 B to 128 MiB: both send first, all receive first, in stream order, each rank in an order of its own."""
    assert {rank[scenario]["wrong"] for rank in live} == {"0"}


def test_messages_of_any_size_go_through_mailboxes(live: list[Seen]) -> None:
    assert {rank["random"]["ways"] for rank in live} == {"[('zero_sm', 'through a mailbox')]"}
    assert sum(int(rank["random"]["count"]) for rank in live) >= 100


@pytest.mark.own_gpus("a copy within a GPU may be a kernel")
def test_nothing_on_the_sender_uses_an_sm(live: list[Seen]) -> None:
    """Its GPU ran copies to the peer and no kernel: 1 of each small message, 8 of 128 MiB in pieces of 16."""
    assert (live[0]["profile"]["others"], int(live[0]["profile"]["count"])) == ("[]", 11)


def test_messages_can_be_captured(live: list[Seen]) -> None:
    assert {rank["captured"]["seen"] for rank in live} == {"equal"}


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    told = scenario_results(WORKER, tmp_path, "kill", timeout_s=200, killed=1)
    assert (told[0]["killed"]["told"], told[0]["killed"]["soon"]) == ("PeerTimeout (1,)", "True")
