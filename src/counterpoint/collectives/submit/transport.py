"""What carries out the calls of a communicator on one kind of device, and the programs that it plans for them.

There are two: threads over shared memory (`cpu/transport.py`), and copy engines over symmetric memory
(`cuda/transport.py`).
"""

from __future__ import annotations

from typing import Any, Protocol

from counterpoint.collectives.memory.early_release import EarlyPool
from counterpoint.collectives.memory.pool import Location, Pool
from counterpoint.collectives.program.build import plan
from counterpoint.collectives.program.calls import Call
from counterpoint.collectives.program.coalesced import TensorLayout, place_on_tensors
from counterpoint.collectives.program.steps import Program, Tuning
from counterpoint.collectives.submit.submission import Submission
from counterpoint.collectives.work import Work

__all__ = ["Programs", "Transport", "Tuner"]

_MOST_PROGRAMS = 1024


class Tuner(Protocol):
    """Chooses how calls are done on one kind of device."""

    def tuning(self, call: Call, *, early_release: bool) -> Tuning:
        """Return how to do it here; a function of the call alone, so that all ranks do the same."""


class Programs:
    """Plans the programs of one rank, each of them once.

    Args:
        rank: whose programs they are.
        tuner: chooses how calls are done.
    """

    def __init__(self, rank: int, tuner: Tuner) -> None:
        self._rank, self._tuner = rank, tuner
        self._known: dict[tuple[Call, bool, TensorLayout], Program] = {}

    def get(self, call: Call, early_release: bool = False, layout: TensorLayout = ()) -> Program:
        """Return this rank's program for a call.

        Args:
            call: what all ranks do.
            early_release: its output is released early.
            layout: where the tensors of the call lie, if there are several.
        """
        key = call, early_release, layout
        program = self._known.get(key)
        if program is None:
            if len(self._known) >= _MOST_PROGRAMS:
                self._known.clear()
            program = plan(call, self._rank, self._tuner.tuning(call, early_release=early_release))
            program = self._known[key] = place_on_tensors(program, layout) if layout else program
        return program


class Transport(Tuner, Protocol):
    """Carries out the calls of one communicator on its device."""

    device: Any
    """torch.device of all tensors."""
    pool: Pool
    """Of outputs that are free when the next call says so."""
    early: EarlyPool
    """Of outputs that are free when they die."""
    programs: Programs
    """Of this rank."""

    @property
    def epoch(self) -> int:
        """Counts regions: after a new one an address may mean something else."""

    def locate(self, tensor: Any) -> Location | None:
        """Return where a contiguous tensor lies in own symmetric memory; None if it does not."""

    def place(self, call: Call | None, at: Location | None, num_bytes: int) -> str:
        """Return what has to be equal on all ranks about where the output of `call` lies, as words; maybe none."""

    def shown_at(self, at: Location | None, num_bytes: int) -> Location:
        """Return where peers may write an output, as it is shown to them before the call begins."""

    def read_at(self, input: Any) -> tuple[Location, ...]:
        """Return where the tensors of an input lie in symmetric memory whose reuse has to wait for this call."""

    def accept(self, submission: Submission) -> None:
        """Look at a new submission before it is started for the first time.

        Raises:
            Misconfigured: it cannot be done here.
        """

    def start(self, submission: Submission, number: int, keep: tuple[Any, ...]) -> Work | None:
        """Queue a call behind the others of its channel and return at once.

        Args:
            submission: the call; its epoch is that of this transport.
            number: of the call on its line.
            keep: tensors that have to live until it has ended.

        Returns:
            Its work; None if there is nothing to wait for.

        Raises:
            PeerTimeout, Misconfigured: an earlier call failed, and how; or this one cannot be done.
        """

    def check(self) -> None:
        """Raise what ended this communicator, if something did."""

    def record_stream(self, tensor: Any, stream: Any) -> None:
        """Note that what is queued on `stream` until `tensor` dies has to end before its memory is used again."""

    def close(self) -> None:
        """End everything."""
