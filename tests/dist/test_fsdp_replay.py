"""A step does again only what can have changed since the last one."""

from __future__ import annotations

import pytest

from tests.dist import fsdp_replay_programs as programs
from tests.support.ranks import Ranks

FROM_THE_HOOK = [
    "parallel/fsdp/hooks.py",
    "parallel/fsdp/slots.py",
    "collectives/communicator.py",
    "collectives/submit/submitter.py",
]


def test_a_step_describes_no_gather_and_plans_no_scatter_again(two_ranks: Ranks) -> None:
    """Once memory has stopped to grow, which it does in the first step, and wherever gradients lie in each step."""
    for first, _, *later in two_ranks.run(programs.made_anew, 5):
        assert min(first) > 0
        assert later == [(0, 0)] * 3


@pytest.mark.parametrize(
    ("gpu", "rest"),
    [
        (True, ["cuda/transport.py", "cuda/queues.py", "cuda/call.py", "cuda/driver.py"]),
        (False, ["cpu/transport.py", "cpu/channel.py"]),
    ],
    ids=["gpu", "cpu"],
)
def test_a_gather_passes_few_files(two_ranks: Ranks, gpu: bool, rest: list[str]) -> None:
    """From FSDP2's hook to the driver, or to the lane: the same ones at first and again."""
    for first, again in two_ranks.run(programs.files_passed, gpu):
        assert first == again == [*FROM_THE_HOOK, *(f"collectives/{name}" for name in rest)]
