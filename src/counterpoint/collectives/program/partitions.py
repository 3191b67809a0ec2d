"""Cut a program into partitions, so that its caller can supply the input and take the output piece by piece.

MPI calls such communication partitioned. A matmul whose rows come from peers takes the blocks that have arrived, while
others are under way; one whose product is scattered gives away each block as soon as it is computed.

All programs of `exchange` can be cut: they push chunk by chunk, each with a signal of its own (`arrivals="each"`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from counterpoint.collectives.program.steps import Batch, Program, Signal, Step, Wait
from counterpoint.errors import Misconfigured


@dataclass(frozen=True, slots=True)
class BlockPartition:
    """Names a chunk of the block that a rank sends to `peer` or receives from `peer`."""

    peer: int
    chunk: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Partitions:
    """Holds the steps of a program by partition, in the order in which partitions leave and arrive.

    Args:
        begin: steps before the first push: `release` without early release, and the waits until peers are ready.
        sent: partitions of the input.
        sends: steps that push each of them; they may run when the caller has written the partition.
        received: partitions of the output.
        receives: the wait for each of them, after which the caller may read it.
    """

    begin: tuple[Step, ...]
    sent: tuple[BlockPartition, ...]
    sends: tuple[tuple[Step, ...], ...]
    received: tuple[BlockPartition, ...]
    receives: tuple[tuple[Step, ...], ...]

    @property
    def steps(self) -> tuple[Step, ...]:
        """Return all steps, in an order in which one lane could run them without a deadlock."""
        return (
            *self.begin,
            *(step for steps in self.sends for step in steps),
            *(step for steps in self.receives for step in steps),
        )


@lru_cache(maxsize=1024)
def partitions(program: Program, *, early_release: bool = False) -> Partitions:
    """Return the partitions of a program; with `early_release` the steps begin without the handshake.

    Raises:
        Misconfigured: the program does something between or after its pushes, as reductions and relays do.
    """
    begin = () if early_release else program.release
    sent: list[BlockPartition] = []
    sends: list[tuple[Step, ...]] = []
    group: list[Step] = []
    for step in program.steps:
        group.append(step)
        signals = _arrivals_signalled(step)
        if len(signals) > 1 or (signals and not isinstance(step, Batch)):
            raise Misconfigured(
                f"{program.call.operation} signals several chunks at once: plan it with arrivals='each'"
            )
        if signals:
            sent.append(signals[0])
            sends.append(tuple(group))
            group = []
        elif not sent and isinstance(step, Batch):
            begin += (step,)
            group = []
    if group:
        raise Misconfigured(f"{program.call.operation} has steps after its last push: it cannot be cut into partitions")
    waits = [one for step in program.finish if isinstance(step, Batch) for one in step.operations]
    return Partitions(
        begin=begin,
        sent=tuple(sent),
        sends=tuple(sends),
        received=tuple(BlockPartition(one.flag.peer, one.flag.chunk) for one in waits if isinstance(one, Wait)),
        receives=tuple((Batch((one,)),) for one in waits),
    )


def _arrivals_signalled(step: Step) -> list[BlockPartition]:
    if not isinstance(step, Batch):
        return []
    signals = (one for one in step.operations if isinstance(one, Signal) and one.flag.kind == "arrived")
    return [BlockPartition(signal.peer, signal.flag.chunk) for signal in signals]
