"""The communicator on all GPUs of this machine (2 to 8): every claim that only GPUs can show."""

from pathlib import Path

import pytest

from tests.support.gpu_ranks import Seen, of, scenario_results

pytestmark = pytest.mark.gpu(2)

RUN = {"timeout_s": 200, "arguments": ["live"]}


def test_random_collectives_are_right(seen: Seen) -> None:
    """Bit-equal to NCCL, sums to plain torch: any operation, dtype, size, memory, stream, async, captured or not."""
    assert of(seen, "random", "mismatch") == {"none"}
    assert int(seen[0]["random"]["count"]) >= 50


@pytest.mark.parametrize("steps", ["steps", "early steps"])
def test_memory_is_used_again_in_stream_order(seen: Seen, steps: str) -> None:
    """And a thousand steps take no more of it than a hundred."""
    assert of(seen, steps, "wrong") == {"0"}
    assert of(seen, steps, "regions") | of(seen, steps, "memory") == {"same"}


def test_calls_can_be_captured(seen: Seen) -> None:
    assert of(seen, "captured", "seen") == {"equal"}


def test_every_verb_works_in_a_thread_without_a_context(seen: Seen) -> None:
    assert of(seen, "new threads", "told") == {""}


def test_ranks_that_have_met_others_meet(seen: Seen) -> None:
    """One rank has made a communicator of a group of its own before."""
    assert of(seen, "meets others first", "right") == {"True"}


@pytest.mark.parametrize("master", ["0", "1"])
def test_a_killed_rank_ends_the_others(tmp_path: Path, master: str) -> None:
    worker = Path(__file__).with_name("communicator_worker.py")
    told = scenario_results(worker, tmp_path, "kill", timeout_s=200, environment={"MASTER": master}, killed=1)
    assert {(each["killed"]["told"], each["killed"]["soon"]) for each in told} == {("PeerTimeout (1,)", "True")}
