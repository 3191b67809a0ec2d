"""What all parts of one communicator on a GPU share, and how its symmetric memory grows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from counterpoint.collectives.cuda.device import Gpu
from counterpoint.collectives.cuda.events import EventPool, StreamOrder
from counterpoint.collectives.cuda.memory import FlagLayout
from counterpoint.collectives.host.announce import Announcer
from counterpoint.collectives.host.watchdog import Failure, PeerWaiter, Watchdog
from counterpoint.collectives.memory.pool import SymmetricMemory
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.collectives.submit.submission import Programs, Submission
from counterpoint.errors import Misconfigured, Unsupported

STEPS = 2  # of a call's record on the board: announced is step 0 of them, begun 1, ended 2


class Growth:
    """Makes regions of symmetric memory, all ranks together: they meet first, so that one that does not come is named.

    They meet on a channel of the board that is for nothing else, and `announcer` is that channel's. A rank may take up
    to `max_bytes`; None: what there is.
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
        """Counts the regions: after a new one an address may mean something else."""

    def create(self, what: str, num_bytes: int) -> int:
        """Return a new region, which all ranks make together; raise if one does not come or wants something else.

        `what` is what it is for, in the same words on all ranks.

        Raises:
            Misconfigured: in a capture.
            Unsupported: more than `max_bytes`.
        """
        if self._gpu.capture_of(self._events.handle(self._gpu.current_stream())):
            raise Misconfigured(f"{what}: {num_bytes} bytes more cannot be made in a capture; make them before it")
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
        region = self._memory.create(num_bytes)
        self.epoch += 1
        self._bytes += num_bytes
        record.step = record.steps
        return region


@dataclass(frozen=True, kw_only=True)
class CudaContext:
    """Holds what the channels, the watch and the calls of one communicator share."""

    gpu: Any  # of this rank
    memory: SymmetricMemory  # symmetric memory of the group
    events: EventPool  # of the device
    order: StreamOrder  # which streams use which memory
    flags: FlagLayout  # where the words of flags lie
    watchdog: Watchdog  # of the ranks' processes and boards
    waiter: PeerWaiter  # how the host waits for them
    failure: Failure  # of this communicator
    growth: Growth  # makes regions
    programs: Programs  # of this rank
    options: CommunicatorOptions  # what was asked for
