"""Fill in what an all_to_all pushes when it is issued: sizes that a GPU works out are known late, all else before.

The program is that of an all_to_all of even blocks: who waits for whom does not depend on sizes. `filled_in` replaces
the copy to each peer by one of the rows that a `PushedBlock` names, or by none.

*Proof.* Between the owner's `ready` and the sender's `arrived` nobody else touches the owner's output, and the input
stays as it is until the pushes have ended. So the signals and waits that order the copies of whole blocks order copies
of any rows, as long as the targets of different senders share no bytes: that is the caller's promise. Where blocks lie
as in an all_to_all with split sizes, the checker proves the filled-in programs as that call
(`tests/proof/collectives/test_late_sizes.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from counterpoint.collectives.program.calls import Call, Span
from counterpoint.collectives.program.operations import all_to_all
from counterpoint.collectives.program.steps import Batch, Copy, Program, Step, Tuning, Wait
from counterpoint.errors import Misconfigured

LATE_SIZES = Tuning(arrivals="each")
"""Tunes these programs: one push and one arrival for each peer."""
FIELDS = 3  # of a `PushedBlock`, as numbers in a table


@dataclass(frozen=True, slots=True)
class PushedBlock:
    """Names rows that a rank pushes to one other; rows lie one after the other in both tensors."""

    source: int  # first row in this rank's input
    target: int  # first row in the peer's output
    rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LateSizes:
    """Says where a call finds the blocks that it pushes, and what they may be."""

    table: int  # address of FIELDS numbers of 64 bits for each rank, in the order of `PushedBlock`
    row_bytes: int
    input_rows: int
    output_rows: int

    def blocks(self, numbers: Sequence[int]) -> tuple[PushedBlock, ...]:
        """Return the blocks for all ranks, given the numbers of the table.

        Raises:
            Misconfigured: rows are not within the tensors.
        """
        found = [PushedBlock(*numbers[start : start + FIELDS]) for start in range(0, len(numbers), FIELDS)]
        for rank, block in enumerate(found):
            fits = (
                min(block.source, block.target, block.rows) >= 0
                and block.source + block.rows <= self.input_rows
                and block.target + block.rows <= self.output_rows
            )
            if not fits:
                raise Misconfigured(
                    f"{block.rows} rows from row {block.source} of {self.input_rows} to row {block.target} of "
                    f"{self.output_rows} of rank {rank}: give rows that are within both tensors"
                )
        return tuple(found)


def late_sizes_call(world_size: int, output_bytes: int) -> Call:
    """Return the call whose program is filled in: an all_to_all of even blocks, whose own ones stay in the input."""
    share = max(1, output_bytes // world_size)
    return all_to_all(((share,) * world_size,) * world_size, own="consumer")


def filled_in(program: Program, blocks: Sequence[PushedBlock], row_bytes: int) -> Program:
    """Return a program that pushes to each rank the block of `blocks` for it, and nothing where that has no rows."""
    steps: list[Step] = []
    for step in program.steps:
        if not isinstance(step, Copy):
            steps.append(step)
            continue
        block = blocks[step.peer]
        if block.rows:
            size = block.rows * row_bytes
            source, target = (
                Span("input", block.source * row_bytes, size),
                Span("output", block.target * row_bytes, size),
            )
            steps.append(Copy(step.peer, source, target))
    waits = [op for step in program.finish if isinstance(step, Batch) for op in step.operations]
    unknown = Batch(tuple(Wait(op.flag) if isinstance(op, Wait) else op for op in waits))  # which rows come
    return replace(program, steps=tuple(steps), finish=(unknown,))
