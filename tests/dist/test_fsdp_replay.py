"""A step does again only what can have changed since the last one."""

import sys
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest

import counterpoint
from counterpoint.collectives.submit import request
from counterpoint.collectives.submit.submission import Submission
from counterpoint.measurement.session import Session
from counterpoint.parallel.overlap import overlap
from tests.dist.fsdp_places_programs import ALL, losses_and_gradients, model
from tests.dist.fsdp_software_gpu_programs import on_software_gpu
from tests.support.ranks import Ranks

PACKAGE = Path(counterpoint.__file__).parent
ENDS = {"Graph.launch", "Bound.__call__", "Lane.put"}
"""Where a call leaves the thread of the caller: for the driver, or for the thread of a lane."""


def made_anew(session: Session, steps: int) -> list[tuple[int, int]]:
    """Return, for each step of one model, how many gathers were described and how many scatters were planned anew."""
    described, planned = list[str](), list[object]()
    of_scatter, made_whole = request._coalesced_scatter, Submission.__post_init__

    def note_submission(self: Submission) -> None:
        described.append(self.text)
        made_whole(self)

    def note_plan(*arguments: Any) -> Any:
        planned.append(arguments)
        return of_scatter(*arguments)

    made, seen = model(), list[tuple[int, int]]()
    with (
        patch.object(Submission, "__post_init__", note_submission),
        patch.object(request, "_coalesced_scatter", note_plan),
        overlap(made),
    ):
        for _ in range(steps):
            described.clear()
            planned.clear()
            losses_and_gradients(made, session, [ALL], _as_it_is)
            seen.append((sum(text.startswith("all_gather") for text in described), len(planned)))
    return seen


def files_passed(session: Session, gpu: bool) -> list[list[str]]:
    """Return the files on the way of a gather from FSDP2's hook to the driver, or to the lane on a CPU.

    The way of the first gather of a layer comes first, then that of one that comes again.
    """
    made, first = model(), list[list[str]]()
    with on_software_gpu() if gpu else nullcontext():
        handle = overlap(made)
        for step in range(4):
            paths = _Paths()
            sys.setprofile(paths.note)
            try:
                losses_and_gradients(made, session, [ALL], _as_it_is)
            finally:
                sys.setprofile(None)
            if step in (0, 3):
                first.append(paths.found[0])
        handle.restore()
    return first


class _Paths:
    """Notes, at every end of a gather's way, the files of all frames from the hook to there."""

    def __init__(self) -> None:
        self.found: list[list[str]] = []

    def note(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or frame.f_code.co_qualname not in ENDS:
            return
        files, caller = list[str](), frame
        while caller is not None and caller.f_code.co_qualname != "GatherHook.__call__":
            files.append(caller.f_code.co_filename)
            caller = caller.f_back  # type: ignore[assignment]
        if caller is not None:
            files.append(caller.f_code.co_filename)
            own = [Path(file) for file in reversed(files) if Path(file).is_relative_to(PACKAGE)]
            self.found.append(list(dict.fromkeys(file.relative_to(PACKAGE).as_posix() for file in own)))


def _as_it_is(made: Any, step: int) -> None:
    pass


FROM_THE_HOOK = [
    "parallel/fsdp/hooks.py",
    "parallel/fsdp/slots.py",
    "collectives/communicator.py",
    "collectives/submit/submitter.py",
]


def test_a_step_describes_no_gather_and_plans_no_scatter_again(two_ranks: Ranks) -> None:
    """Once memory has stopped to grow, which it does in the first step, and wherever gradients lie in each step."""
    for first, _, *later in two_ranks.run(made_anew, 5):
        assert min(first) > 0
        assert later == [(0, 0)] * 3


@pytest.mark.parametrize(
    ("gpu", "rest"),
    [
        (True, ["cuda/transport.py", "cuda/queues.py", "cuda/call.py", "cuda/driver.py"]),
        (False, ["cpu/transport.py", "cpu/call.py"]),
    ],
    ids=["gpu", "cpu"],
)
def test_a_gather_passes_few_files(two_ranks: Ranks, gpu: bool, rest: list[str]) -> None:
    for first, again in two_ranks.run(files_passed, gpu):
        assert first == again == [*FROM_THE_HOOK, *(f"collectives/{name}" for name in rest)]
