"""Define what all parts of one GPU communicator share, and how its symmetric memory grows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from counterpoint.collectives.cuda.device import Gpu, in_context
from counterpoint.collectives.cuda.events import EventPool, StreamOrder
from counterpoint.collectives.cuda.memory import FlagLayout
from counterpoint.collectives.host.announce import Announcer
from counterpoint.collectives.host.watchdog import Failure, PeerWaiter, Watchdog
from counterpoint.collectives.memory.pool import SymmetricMemory
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.collectives.submit.submission import Programs, Submission
from counterpoint.errors import Unsupported

STEPS = 2  # steps of a GPU call in the status: 0 announced, 1 begun, 2 ended


class Growth:
    """Makes regions of symmetric memory together with all ranks, which meet first so that errors name a missing rank.

    They meet on `channel` of the status, which serves nothing else and whose calls `announcer` announces. A rank may
    take up to `max_bytes`; None: no limit.
    """

    def __init__(
        self,
        gpu: Gpu,
        memory: SymmetricMemory,
        events: EventPool,
        announcer: Announcer,
        *,
        channel: int,
        max_bytes: int | None,
    ) -> None:
        self._gpu, self._memory, self._events = gpu, memory, events
        self._announcer, self._channel = announcer, channel
        self._max_bytes, self._bytes, self._count = max_bytes, 0, 0
        self.epoch = 0
        """Counts the regions made: after a new one an address may mean something else."""

    @in_context
    def create(self, what: str, num_bytes: int, make: Callable[[], int] | None = None) -> int:
        """Return a new region, which all ranks make together; raise if a rank is missing or asks for a different one.

        `what` says what the region is for, in the same words on all ranks; `make` makes it (None: `memory.create`). In
        a graph capture it is made beside the capture, and is no part of the graph.

        Raises:
            Unsupported: this rank would have more than `max_bytes`.
        """
        if self._max_bytes is not None and self._bytes + num_bytes > self._max_bytes:
            raise Unsupported(
                f"{what}: {num_bytes} bytes of symmetric memory, with {self._bytes} in use; allowed are "
                f"{self._max_bytes}: drop tensors that are no longer used, or give a larger max_bytes"
            )
        self._count += 1
        text = f"growing {what} by {num_bytes} bytes"
        submission = Submission(text=text, channel=self._channel, line=self._memory.world_size)
        record = self._announcer.announce(submission, self._count)
        self._announcer.met(submission, self._count)
        captured = self._gpu.capture_of(self._events.handle(self._gpu.current_stream()))
        with self._gpu.beside_capture() if captured else nullcontext():
            region = self._memory.create(num_bytes) if make is None else make()
        self.epoch += 1
        self._bytes += num_bytes
        record.step = record.steps
        return region


@dataclass(frozen=True, kw_only=True)
class CudaContext:
    """Holds the objects that the channels, the watch and the calls of one communicator share."""

    gpu: Any  # this rank's `Gpu`, or a stand-in
    memory: SymmetricMemory  # symmetric memory of the group
    events: EventPool  # events of the device
    order: StreamOrder  # records which streams use which memory
    flags: FlagLayout  # says where the flag words lie
    watchdog: Watchdog  # looks at the ranks' processes and statuses
    waiter: PeerWaiter  # lets the host wait for peers
    failure: Failure  # holds the error that ended this communicator
    growth: Growth  # makes regions of symmetric memory
    programs: Programs  # plans this rank's programs
    options: CommunicatorOptions  # options of the communicator
