"""What had no room on a GPU is told to the host, eager calls and replays of graphs alike, and once."""

import pytest
import torch

from counterpoint.errors import Misconfigured
from counterpoint.parallel.expert.overflow import RoomCheck
from counterpoint.parallel.options import ExpertOptions

pytestmark = pytest.mark.gpu(1)


@pytest.fixture
def overflow() -> RoomCheck:
    return RoomCheck(torch.device("cuda"), 2, ExpertOptions(overflow="raise", capacity_factor=1.0))


def choices(*counts: int) -> torch.Tensor:
    return torch.tensor(counts, dtype=torch.int32, device="cuda")


def test_a_call_with_room_hides_no_other(overflow: RoomCheck) -> None:
    """The most of any rank is told."""
    overflow.note(choices(0, 5))
    overflow.note(choices(0, 0))
    with pytest.raises(Misconfigured, match="no room for 5 rows"):
        overflow.check()


def test_it_is_told_once(overflow: RoomCheck) -> None:
    """What comes later is another matter."""
    overflow.note(choices(3, 0))
    with pytest.raises(Misconfigured):
        overflow.check()
    overflow.check_all()


def replay(overflow: RoomCheck) -> None:
    lacking = choices(0, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        overflow.note(lacking)
    lacking.fill_(7)
    graph.replay()


def test_a_replay_is_told_when_asked(overflow: RoomCheck) -> None:
    """`check()` and `close()` of a dispatcher ask so."""
    replay(overflow)
    with pytest.raises(Misconfigured, match="no room for 7 rows"):
        overflow.check_all()


def test_a_replay_is_told_after_the_next_eager_call(overflow: RoomCheck) -> None:
    """Not before, as some hosts would know of it and others not."""
    replay(overflow)
    overflow.check()
    overflow.note(choices(0, 0))
    with pytest.raises(Misconfigured, match="no room for 7 rows"):
        overflow.check()
