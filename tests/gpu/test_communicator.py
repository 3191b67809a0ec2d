"""The communicator on all GPUs of this machine (2 to 8): every claim that only GPUs can show.

As many processes as there are GPUs run the scenarios of communicator_worker.py, once for all tests but those in which a
rank is killed.
"""

from pathlib import Path

import pytest

from tests.support.gpu_ranks import scenario_results

pytestmark = pytest.mark.gpu(2)

WORKER = Path(__file__).with_name("communicator_worker.py")
BENCHMARKS = [Path(__file__).parents[2] / "benchmarks"]
TIMEOUT_S = 200
Seen = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    folder = tmp_path_factory.mktemp("communicator")
    return scenario_results(WORKER, folder, "live", timeout_s=TIMEOUT_S, paths=BENCHMARKS)


def of(live: list[Seen], scenario: str, what: str) -> set[str]:
    return {rank[scenario][what] for rank in live}


def test_random_collectives_are_right(live: list[Seen]) -> None:
    """Bit-equal to NCCL, sums to plain torch: any operation, dtype, size, memory, stream, async, captured or not."""
    assert of(live, "random", "mismatch") == {"none"}
    assert int(live[0]["random"]["count"]) >= 50


@pytest.mark.parametrize("steps", ["steps", "early steps"])
def test_memory_is_used_again_in_stream_order(live: list[Seen], steps: str) -> None:
    assert of(live, steps, "wrong") == {"0"}


@pytest.mark.parametrize("steps", ["steps", "early steps"])
def test_a_thousand_steps_take_no_more_memory_than_a_hundred(live: list[Seen], steps: str) -> None:
    assert of(live, steps, "regions") | of(live, steps, "memory") == {"same"}


def test_calls_can_be_captured(live: list[Seen]) -> None:
    assert of(live, "captured", "seen") == {"equal"}


def test_every_verb_works_in_a_thread_without_a_context(live: list[Seen]) -> None:
    assert of(live, "new threads", "told") == {""}


def test_ranks_that_have_met_others_meet(live: list[Seen]) -> None:
    """One rank has made a communicator of a group of its own before."""
    assert of(live, "meets others first", "right") == {"True"}


@pytest.mark.parametrize("master", ["0", "1"])
def test_a_killed_rank_ends_the_others(tmp_path: Path, master: str) -> None:
    told = scenario_results(
        WORKER, tmp_path, "kill", timeout_s=TIMEOUT_S, paths=BENCHMARKS, environment={"MASTER": master}, killed=1
    )
    assert {(each["killed"]["told"], each["killed"]["soon"]) for each in told} == {("PeerTimeout (1,)", "True")}
