"""A call of this rank as data: what it is in words that all ranks compare, its program, and where its tensors are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from counterpoint.collectives.cuda.reduce import Reduction
from counterpoint.collectives.host.watchdog import CurrentCall
from counterpoint.collectives.memory.early_release import EarlyUse
from counterpoint.collectives.memory.pool import Location
from counterpoint.collectives.program.calls import Buffer, Call, Own
from counterpoint.collectives.program.coalesced import TensorAddresses, TensorLayout
from counterpoint.collectives.program.operations import all_to_all
from counterpoint.collectives.program.steps import Program
from counterpoint.errors import Misconfigured

__all__ = ["NOWHERE", "Rows", "Submission", "UnevenSplits"]

NOWHERE = Location(-1, 0)
Rows: TypeAlias = Sequence[Sequence[int]]
"""Bytes for each rank, of each rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnevenSplits:
    """The sizes of an all_to_all as one rank knows them; the ranks tell each other theirs before it begins.

    Args:
        rank: this one.
        row: bytes that it sends to each rank.
        column: bytes that it expects from each rank.
        own: what is done with its block for itself.
    """

    rank: int
    row: tuple[int, ...]
    column: tuple[int, ...]
    own: Own

    def call(self, rows: Rows) -> Call:
        """Return what all ranks do, given everyone's row.

        Raises:
            Misconfigured: the others send something else than is expected here.
        """
        sent = tuple(row[self.rank] for row in rows)
        if sent != self.column:
            raise Misconfigured(
                f"all_to_all: ranks send {sent} bytes to rank {self.rank}, which expects {self.column}; "
                "make output_split_sizes what the others send"
            )
        return all_to_all(rows, own=self.own)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Submission:
    """Describes a call of this rank, but for its number: a call that comes again is the same submission.

    Args:
        text: what has to be equal on all ranks, in words.
        channel: that runs it.
        line: of the board, on which it is counted.
        call: what all ranks do; of uneven splits that follows from everyone's row.
        program: of this rank; None if only everyone's row tells it, or if torch takes the call.
        by_torch: the process group of `fallback` takes it.
        meets: all ranks compare it before it begins.
        async_op: the caller does not wait for it.
        reduction: of calls that reduce.
        layout: where the tensors of a call lie in its buffers, if there are several.
        local: of buffers that no peer writes: where their tensors really lie.
        input: address; 0 if there is none.
        input_at: where what is read lies in symmetric memory: each tensor that does, and not within the output.
        output: address; 0 if there is none.
        output_bytes: size of the output.
        at: where the output lies in symmetric memory; None if it does not.
        shown_at: where peers may write the output, as it is shown to them.
        early: how the output is released, if that is done early.
        overlaps: the input shares bytes with the output, and not in place: what is asked is right for a copy of it.
        epoch: of the transport when this was made; after a new region an address may mean something else.
    """

    text: str
    channel: int
    line: int
    call: Call | UnevenSplits | None = None
    program: Program | None = None
    by_torch: bool = False
    meets: bool = False
    async_op: bool = False
    reduction: Reduction | None = None
    layout: TensorLayout = ()
    local: tuple[tuple[Buffer, TensorAddresses], ...] = ()
    input: int = 0
    input_at: tuple[Location, ...] = ()
    output: int = 0
    output_bytes: int = 0
    at: Location | None = None
    shown_at: Location = NOWHERE
    early: EarlyUse | None = None
    overlaps: bool = False
    epoch: int = 0
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
