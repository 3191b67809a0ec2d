"""Define a rank's call as data (`Submission`), and the interface of the code that runs calls (`Transport`).

A `Submission` holds a text that all ranks compare, the rank's program, and where its tensors are. There are two
`Transport`s: threads over shared memory (`cpu/transport.py`), and copy engines over symmetric memory
(`cuda/transport.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from counterpoint.collectives.host.watchdog import CurrentCall, Failure, Watchdog
from counterpoint.collectives.memory import EarlyPool, EarlyUse, Location, Pool
from counterpoint.collectives.program.calls import Buffer, Call, Own
from counterpoint.collectives.program.coalesced import TensorAddresses, TensorLayout, place_on_tensors
from counterpoint.collectives.program.messages import Message
from counterpoint.collectives.program.operations import all_to_all, plan
from counterpoint.collectives.program.reductions import Reduction
from counterpoint.collectives.program.steps import Program, Tuning
from counterpoint.collectives.work import PartitionedWork, Work
from counterpoint.errors import Misconfigured

NOWHERE = Location(-1, 0)
Rows: TypeAlias = Sequence[Sequence[int]]
"""Holds `rows[s][t]`, the bytes that rank s sends to rank t."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnevenSplits:
    """Holds one rank's split sizes of an all_to_all, which the ranks exchange before the call begins."""

    rank: int  # this rank
    row: tuple[int, ...]  # bytes that it sends to each rank
    column: tuple[int, ...]  # bytes that it expects from each rank
    own: Own  # how its own block is handled, as in `Call`

    def call(self, rows: Rows) -> Call:
        """Return the call from all ranks' rows of sizes; raise if the sizes sent to this rank are not its `column`."""
        sent = tuple(row[self.rank] for row in rows)
        if sent != self.column:
            raise Misconfigured(
                f"all_to_all: ranks send {sent} bytes to rank {self.rank}, which expects {self.column}; "
                "make output_split_sizes what the others send"
            )
        return all_to_all(rows, own=self.own)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Submission:
    """Describes a call of this rank without the call's number, so that repeated calls share one submission."""

    text: str  # the call in words, which have to be equal on all ranks
    channel: int  # channel that runs it
    line: int  # line of the status that counts it: a peer's rank, or world_size for calls of all ranks
    call: Call | UnevenSplits | None = None  # with uneven splits, the `Call` is made once all ranks' rows are known
    program: Program | None = None  # this rank's program; None with uneven splits, or for a message
    message: Message | None = None  # message through a mailbox; `channel` is then the channel that counts its line
    meets: bool = False  # all ranks announce and compare the call before any rank begins it
    async_op: bool = False  # the caller does not wait for the call
    partitioned: Literal["no", "output", "both"] = "no"  # the caller takes output, or also supplies input, by pieces
    reduction: Reduction | None = None  # how values are combined, if the call reduces
    layout: TensorLayout = ()  # where the tensors of a call lie in its buffers, if there are several
    local: tuple[tuple[Buffer, TensorAddresses], ...] = ()  # addresses of several tensors, of buffers no peer writes
    input: int = 0  # address; 0 if there is none
    input_at: tuple[Location, ...] = ()  # where the input lies in symmetric memory, if not within the output
    output: int = 0  # address; 0 if there is none
    output_bytes: int = 0  # size of the output
    at: Location | None = None  # where the output lies in symmetric memory; None if it does not
    shown_at: Location = NOWHERE  # where peers may write the output, as this rank's status shows it
    early: EarlyUse | None = None  # the output's early-release block, if it has one
    overlaps: bool = False  # the input shares bytes with the output and is not in place, so that a copy must be sent
    epoch: int = 0  # `Transport.epoch` when this was made; after a new region an address may mean something else
    words: bytes = field(init=False)  # `text` as a status shows it: the first 159 bytes
    row: tuple[int, ...] = field(init=False)  # bytes sent to each rank, if peers do not know these yet; else ()
    prepared: dict[bool, Any] = field(init=False)  # the transport's driver calls, by whether they have a handshake

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", self.text.encode()[:159])
        object.__setattr__(self, "row", self.call.row if isinstance(self.call, UnevenSplits) else ())
        object.__setattr__(self, "prepared", {})

    def current(self, number: int) -> CurrentCall:
        """Return a `CurrentCall` that names this call and its number, for errors and the watchdog."""
        return CurrentCall(text=self.text, channel=self.channel, line=self.line, number=number)


def unfinished(current: CurrentCall) -> Misconfigured:
    """Return the error for a call behind `current`, a call in partitions of its channel that must be finished first."""
    return Misconfigured(
        f"a call behind {current}, which is under way in partitions: finish it first, or take another channel"
    )


_MOST_PROGRAMS = 1024


class Programs:
    """Plans and caches the programs of one rank; `choose_tuning(call, early_release=...)` must agree on all ranks."""

    def __init__(self, rank: int, choose_tuning: Callable[..., Tuning]) -> None:
        self._rank, self._choose_tuning = rank, choose_tuning
        self._known: dict[tuple[Call, bool, TensorLayout, Tuning | None], Program] = {}

    def get(
        self, call: Call, early_release: bool = False, layout: TensorLayout = (), tuning: Tuning | None = None
    ) -> Program:
        """Return this rank's program for a call; for several tensors `layout` says where each lies in the buffers.

        `tuning` None is what `choose_tuning` returns.
        """
        key = call, early_release, layout, tuning
        program = self._known.get(key)
        if program is None:
            if len(self._known) >= _MOST_PROGRAMS:
                self._known.clear()
            program = plan(call, self._rank, tuning or self._choose_tuning(call, early_release=early_release))
            program = self._known[key] = place_on_tensors(program, layout) if layout else program
        return program


class Transport(Protocol):
    """Runs the calls of one communicator on its device."""

    device: Any
    """Holds the torch.device of all tensors."""
    pool: Pool
    """Makes the tensors of `empty`: peers may write one after this rank has said so in a call."""
    early: EarlyPool
    """Makes the tensors of `empty(early_release=True)`: peers are told as soon as one dies."""
    programs: Programs
    """Plans the programs of this rank."""
    watchdog: Watchdog
    """Says how long a rank waits for another, and which has died."""
    failure: Failure
    """Holds the error that ended the communicator."""
    names: tuple[int, ...]
    """Holds the numbers by which errors call the ranks."""
    mailbox_channel: int | None
    """Holds the first of two channels of the status that count messages, by direction; None: there is no mailbox."""

    @property
    def epoch(self) -> int:
        """Return how many regions were made so far; a new one may cover addresses that were plain memory before."""

    def locate(self, tensor: Any) -> Location | None:
        """Return the `Location` of a contiguous tensor in this rank's symmetric memory; None if it lies elsewhere."""

    def place(self, call: Call | None, at: Location | None, num_bytes: int) -> str:
        """Return text that names the output's place if that must be the same on all ranks; "" if it may differ."""

    def shown_at(self, at: Location | None, num_bytes: int) -> Location:
        """Return where peers may write an output; the rank publishes this in its status when it announces the call."""

    def read_at(self, input: Any) -> tuple[Location, ...]:
        """Return where an input's tensors lie in symmetric memory: none may be reused before the call ends."""

    def accept(self, submission: Submission) -> None:
        """Raise if this device cannot run a new submission; called before the submission's first start."""

    def start(self, submission: Submission, number: int, keep: tuple[Any, ...]) -> Work | PartitionedWork | None:
        """Queue a call behind its channel's other calls; return its work at once, or None if the host need not wait.

        The work of a call in partitions is a `PartitionedWork`.

        `submission` was made in this transport's current epoch, `number` counts the call on its line, and the tensors
        of `keep` live until it has ended. `PeerTimeout` or `Misconfigured` is raised if an earlier call failed, or this
        one cannot run.
        """

    def check(self) -> None:
        """Raise the error that ended this communicator, if there was one."""

    def record_stream(self, tensor: Any, stream: Any) -> None:
        """Record that `stream` uses `tensor`, so that work queued on `stream` delays reuse of the tensor's memory."""

    def memory_pool(self) -> AbstractContextManager[None]:
        """Put tensors made by this thread in the `with` block into symmetric memory; `Unsupported` on CPUs."""

    def close(self) -> None:
        """End the calls under way (GPU: wait for them; CPU: fail them), then free streams, threads and memory."""

    def abort(self) -> None:
        """Fail the calls under way, without waiting for peers, then free unused memory. Any thread may call it."""
