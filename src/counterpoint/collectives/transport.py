"""What carries out a call on one kind of device: the communicator checks it, a `Transport` runs it.

There are two: threads over shared memory (`cpu.py`), and copy engines over symmetric memory (`cuda_transport.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from counterpoint.collectives.early import EarlyPool, EarlyUse
from counterpoint.collectives.program import Call, Program, Tuning
from counterpoint.collectives.reduce import Reduction
from counterpoint.collectives.symmetric import Location, Pool
from counterpoint.collectives.work import Work

__all__ = ["Job", "Rows", "Start", "Transport"]

Rows: TypeAlias = Sequence[Sequence[int]]
"""Bytes for each rank, of each rank; empty where the sizes follow from the call."""
Start: TypeAlias = Callable[[int, tuple[Any, ...]], Work | None]
"""Queues one call behind the others of its channel and returns at once: its number and the tensors that have to live
until it ends in, its `Work` out; None if there is nothing to wait for.

Raises:
    PeerTimeout, Misconfigured: an earlier call failed, and how; or this one cannot be done.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A call of this rank but for its number: what comes again is the same job.

    Args:
        text: what it is, in words that are equal on all ranks.
        channel: that it runs on.
        line: of the board, that it is counted on.
        program: rows of all ranks (or none) to this rank's program.
        row: bytes for each rank, if only this rank knows; then all meet first, and `program` gets everyone's.
        meet: all ranks of the call compare it before it begins.
        async_op: the caller does not wait for it.
        input: address; 0 if there is none.
        input_at: where what is read lies in symmetric memory: each tensor that does, and not within the output.
        output: address; 0 if there is none.
        output_bytes: size of the output.
        at: where the output lies in symmetric memory; None if it does not.
        early: how the output is released, if that is done early.
        reduction: of calls that reduce.
    """

    text: str
    channel: int
    line: int
    program: Callable[[Rows], Program]
    row: tuple[int, ...] = ()
    meet: bool = False
    async_op: bool = False
    input: int = 0
    input_at: tuple[Location, ...] = ()
    output: int = 0
    output_bytes: int = 0
    at: Location | None = None
    early: EarlyUse | None = None
    reduction: Reduction | None = None


class Transport(Protocol):
    """One communicator's device."""

    device: Any
    """torch.device of all tensors."""
    pool: Pool
    """Of outputs that are free when the next call says so."""
    early: EarlyPool
    """Of outputs that are free when they die."""

    def tuning(self, call: Call, *, early_release: bool) -> Tuning:
        """How to do it here; a function of the call alone, so that all ranks do the same."""

    def locate(self, tensor: Any) -> Location | None:
        """Where a contiguous tensor lies in own symmetric memory; None if it does not."""

    def place(self, call: Call | None, at: Location | None, num_bytes: int) -> str:
        """What has to be equal on all ranks about where the output of `call` lies, as words; "" if nothing has."""

    @property
    def epoch(self) -> int:
        """Counts regions: after a new one an address may mean something else."""

    def starter(self, job: Job) -> Start:
        """What starts the job, any number of times as long as `epoch` stays what it is.

        Raises:
            Misconfigured: it cannot be done here.
        """

    def check(self) -> None:
        """Raises what ended this communicator, if something did."""

    def record_stream(self, tensor: Any, stream: Any) -> None:
        """What is queued on `stream` so far and until `tensor` dies has to end before its memory is used again."""

    def close(self) -> None:
        """Ends everything."""
