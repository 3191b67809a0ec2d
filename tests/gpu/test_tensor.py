"""torch.ops.counterpoint on all GPUs of this machine (2 to 8): what only GPUs can show."""

import pytest

from tests.support.gpu_ranks import Seen, of

pytestmark = pytest.mark.gpu(2)

RUN = {"timeout_s": 240}


def test_random_shapes_are_right(seen: Seen) -> None:
    for rank in seen:
        assert all("cuts" in paths for paths in (*rank["random"].values(), *rank["scaled"].values()))


def test_errors_are_at_most_twice_those_of_torch(seen: Seen) -> None:
    for rank in seen:
        assert {value for name, value in rank["real"].items() if not name.endswith("paths")} == {"True"}, rank["real"]


@pytest.mark.parametrize(
    ("scenario", "what", "wanted"),
    [
        ("delayed", "wrong", "0"),
        ("captured", "equal", "[True, True, True]"),
        ("profiled", "nccl", "0"),
        pytest.param("profiled", "copies", "True", marks=pytest.mark.own_gpus("a copy within a GPU goes to no peer")),
    ],
)
def test_ranks_may_be_late_and_graphs_replay_without_nccl(seen: Seen, scenario: str, what: str, wanted: str) -> None:
    assert of(seen, scenario, what) == {wanted}
