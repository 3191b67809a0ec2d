"""A call of this rank as data, and what carries it out on one kind of device.

A `Submission` is the call in words that all ranks compare, its program, and where its tensors are. There are two
`Transport`s: threads over shared memory (`cpu/transport.py`), and copy engines over symmetric memory
(`cuda/transport.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from counterpoint.collectives.host.watchdog import CurrentCall
from counterpoint.collectives.memory.early_release import EarlyPool, EarlyUse
from counterpoint.collectives.memory.pool import Location, Pool
from counterpoint.collectives.program.calls import Buffer, Call, Own
from counterpoint.collectives.program.coalesced import TensorAddresses, TensorLayout, place_on_tensors
from counterpoint.collectives.program.operations import all_to_all, plan
from counterpoint.collectives.program.reductions import Reduction
from counterpoint.collectives.program.steps import Program, Tuning
from counterpoint.collectives.work import Work
from counterpoint.errors import Misconfigured

NOWHERE = Location(-1, 0)
Rows: TypeAlias = Sequence[Sequence[int]]
"""Bytes for each rank, of each rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnevenSplits:
    """The sizes of an all_to_all as one rank knows them; the ranks tell each other theirs before it begins."""

    rank: int  # this one
    row: tuple[int, ...]  # bytes that it sends to each rank
    column: tuple[int, ...]  # bytes that it expects from each rank
    own: Own  # what is done with its block for itself

    def call(self, rows: Rows) -> Call:
        """Return what all ranks do, given everyone's row; raise if the others send something else than expected."""
        sent = tuple(row[self.rank] for row in rows)
        if sent != self.column:
            raise Misconfigured(
                f"all_to_all: ranks send {sent} bytes to rank {self.rank}, which expects {self.column}; "
                "make output_split_sizes what the others send"
            )
        return all_to_all(rows, own=self.own)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Submission:
    """Describes a call of this rank, but for its number: a call that comes again is the same submission."""

    text: str  # what has to be equal on all ranks, in words
    channel: int  # that runs it
    line: int  # of the board, on which it is counted
    call: Call | UnevenSplits | None = None  # of uneven splits it follows from everyone's row
    program: Program | None = None  # of this rank; None if only everyone's row tells it, or if torch takes the call
    by_torch: bool = False  # the process group of `fallback` takes it
    meets: bool = False  # all ranks compare it before it begins
    async_op: bool = False  # the caller does not wait for it
    reduction: Reduction | None = None  # of calls that reduce
    layout: TensorLayout = ()  # where the tensors of a call lie in its buffers, if there are several
    local: tuple[tuple[Buffer, TensorAddresses], ...] = ()  # where tensors really lie that no peer writes
    input: int = 0  # address; 0 if there is none
    input_at: tuple[Location, ...] = ()  # where what is read lies in symmetric memory, if not within the output
    output: int = 0  # address; 0 if there is none
    output_bytes: int = 0  # size of the output
    at: Location | None = None  # where the output lies in symmetric memory; None if it does not
    shown_at: Location = NOWHERE  # where peers may write the output, as it is shown to them
    early: EarlyUse | None = None  # how the output is released, if that is done early
    overlaps: bool = False  # the input shares bytes with the output, and not in place: a copy of it is to be sent
    epoch: int = 0  # of the transport when this was made; after a new region an address may mean something else
    words: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", self.text.encode()[:159])

    @property
    def row(self) -> tuple[int, ...]:
        """The bytes for each rank, if only this rank knows them."""
        return self.call.row if isinstance(self.call, UnevenSplits) else ()

    def current(self, number: int) -> CurrentCall:
        """Return this as the `number`-th call of its line."""
        return CurrentCall(text=self.text, channel=self.channel, line=self.line, number=number)


_MOST_PROGRAMS = 1024


class Tuner(Protocol):
    """Chooses how calls are done on one kind of device."""

    def tuning(self, call: Call, *, early_release: bool) -> Tuning:
        """Return how to do it here; a function of the call alone, so that all ranks do the same."""


class Programs:
    """Plans the programs of one rank, each of them once; the tuner chooses how calls are done."""

    def __init__(self, rank: int, tuner: Tuner) -> None:
        self._rank, self._tuner = rank, tuner
        self._known: dict[tuple[Call, bool, TensorLayout], Program] = {}

    def get(self, call: Call, early_release: bool = False, layout: TensorLayout = ()) -> Program:
        """Return this rank's program for a call; `layout` says where its tensors lie, if there are several."""
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
        """Look at a new submission before it is started for the first time; raise if it cannot be done here."""

    def start(self, submission: Submission, number: int, keep: tuple[Any, ...]) -> Work | None:
        """Queue a call behind the others of its channel and return at once; None if there is nothing to wait for.

        `submission` has the epoch of this transport, `number` counts the call on its line, and the tensors of `keep`
        live until it has ended. `PeerTimeout` or `Misconfigured` is raised if an earlier call failed, or this one
        cannot be done.
        """

    def check(self) -> None:
        """Raise what ended this communicator, if something did."""

    def record_stream(self, tensor: Any, stream: Any) -> None:
        """Note that what is queued on `stream` until `tensor` dies has to end before its memory is used again."""

    def close(self) -> None:
        """End everything."""
