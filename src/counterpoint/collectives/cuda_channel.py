"""One channel of a communicator on a GPU: its stream and memory, and from a program to driver calls at addresses."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from counterpoint.collectives.announce import Announcer, Notice
from counterpoint.collectives.calls import output_bytes
from counterpoint.collectives.cuda import BindReduction, Executor
from counterpoint.collectives.cuda_moments import Moment
from counterpoint.collectives.cuda_prepared import Prepared, Shelf
from counterpoint.collectives.cuda_work import CudaWork
from counterpoint.collectives.lower import Addresses, CopyAsync, DriverCall, ReduceLaunch, lower
from counterpoint.collectives.plan import plan
from counterpoint.collectives.program import COPY, Batch, Copy, Program, Wait
from counterpoint.collectives.symmetric import Location, Room
from counterpoint.collectives.transport import Job
from counterpoint.errors import Misconfigured

if TYPE_CHECKING:
    from counterpoint.collectives.cuda_transport import CudaTransport

__all__ = ["LANDING", "PLACED", "CudaChannel", "Needs"]

PLACED = ("all_gather", "all_to_all", "broadcast", "scatter", "all_reduce")
"""Operations whose outputs peers write into, and which have equal outputs on all ranks."""
LANDING = Location(-2, 0)  # of an output that peers cannot write: it is copied from the channel's landing
_MOST_NEEDS = 4096  # programs whose needs are remembered


@dataclass(frozen=True, slots=True)
class Needs:
    """What a program needs before it can be lowered: the same on all ranks, but for the last two."""

    program: Program
    staging_bytes: int
    landing_bytes: int
    meets: bool  # to learn where outputs are
    receives: bool  # peers write into this rank's output
    writes: bool  # this rank writes into theirs


class CudaChannel:
    """Calls of one channel, one after the other, on whatever streams they are made.

    Args:
        transport: that it belongs to.
        index: its number.
    """

    def __init__(self, transport: CudaTransport, index: int) -> None:
        self.transport, self.index = transport, index
        self.executor = Executor(driver=transport.gpu.driver)
        self.stream = int(self.executor.stream())  # of calls with async_op=True
        self.announcer = Announcer(transport.patience, index)
        self.staging, self.landing = (
            Room(partial(transport.grow, f"{what} of channel {index}")) for what in ("staging", "landing")
        )
        self.shelf = Shelf(transport.moments)
        self.last: dict[int, Moment] = {}  # end of the latest call, of each capture under way, and (0) of none
        self.under_way: deque[CudaWork] = deque()
        self._needs: dict[int, Needs] = {}

    def needed(self, program: Program) -> Needs:
        """Worked out once for each program."""
        found = self._needs.get(id(program))
        if found is None:
            if len(self._needs) >= _MOST_NEEDS:
                self._needs.clear()
            found = self._needs[id(program)] = _needs_of(program)
        return found

    def agreed(
        self, job: Job, notice: Notice, number: int, known: Needs | None, capture: int
    ) -> tuple[Needs, dict[int, Location]]:
        """Meets the other ranks if something can only be known or made together; what they say about their outputs."""
        own = Location(notice.region, notice.offset)
        grows = known is not None and not self.staging.fits(known.staging_bytes)
        lands = known is not None and own == LANDING and known.program.call.operation in PLACED
        grows |= known is not None and lands and not self.landing.fits(known.landing_bytes)
        if known is not None and not (grows or known.meets or job.meet):
            return known, {}
        records = self.announcer.met(notice, number)
        where = {peer: Location(record.output_region, record.output_offset) for peer, record in records.items()}
        rows = [list(records[rank].row) if rank in records else list(job.row) for rank in range(self._world_size)]
        needs = known if known is not None else self.needed(job.program(rows))
        told = needs.meets or bool(job.row)
        lands |= told and LANDING in (own, *where.values())
        for room, num_bytes in (
            (self.staging, needs.staging_bytes),
            (self.landing, needs.landing_bytes if lands else 0),
        ):
            if capture and not room.fits(num_bytes):
                raise Misconfigured(
                    f"{notice.doing(number)} needs {num_bytes} bytes more of symmetric memory, which cannot be made in "
                    "a capture; make the same call once before it"
                )
            room.make(num_bytes)
        return needs, where if told else {}

    @property
    def _world_size(self) -> int:
        return self.transport.memory.world_size

    def prepared(self, job: Job, needs: Needs, met: dict[int, Location], handshake: bool) -> Prepared:
        """The driver calls of the job, made now or before."""
        early = None if job.early is None else (job.early.block.number, handshake)
        rooms = self.staging.region, self.landing.region
        key = (id(needs.program), job.input, job.output, early, job.reduction, rooms, *met.items())
        return self.shelf.get(key, lambda: self._prepare(job, needs, met, handshake))

    def _prepare(self, job: Job, needs: Needs, met: Mapping[int, Location], handshake: bool) -> Prepared:
        """Addresses instead of roles, and the copy out of the landing."""
        addresses = self._addresses(job, needs, met)
        steps = needs.program.cycle(early_release=not handshake)
        calls: tuple[DriverCall, ...] = lower(needs.program, addresses, steps)
        own = addresses.output[needs.program.rank]
        if own != job.output:
            calls += (CopyAsync(job.output, own, job.output_bytes, COPY, local=True),)
        return Prepared(needs.program, calls, self.executor, self._reducing(job), graphs=self.transport.graphs)

    def _reducing(self, job: Job) -> BindReduction | None:
        if job.reduction is None:
            return None
        gpu, reduction = self.transport.gpu, replace(job.reduction, num_sms=self.transport.sum_sms)

        def bind_reduction(call: ReduceLaunch, stream: int) -> Any:
            return gpu.bind_reduction(call, stream, reduction)

        return bind_reduction

    def _addresses(self, job: Job, needs: Needs, met: Mapping[int, Location]) -> Addresses:
        """Where this rank has everything mapped; nothing for outputs that it does not write to."""
        memory, call = self.transport.memory, needs.program.call
        ranks, landing = range(memory.world_size), Location(self.landing.region, 0)

        def output_of(rank: int) -> int:
            if rank == memory.rank and not (job.at is None and needs.receives):
                return job.output
            own = LANDING if job.at is None else job.at
            at = met.get(rank, Location(-1, 0)) if met and rank != memory.rank else own
            num_bytes = output_bytes(call, rank)
            if at.region == -1 or not num_bytes:
                return 0
            return memory.address(rank, landing if at == LANDING else at, num_bytes)

        def everywhere(at: Location, num_bytes: int) -> tuple[int, ...]:
            return tuple(memory.address(rank, at, num_bytes) for rank in ranks)

        words = self.transport.words
        block = None if job.early is None else job.early.block
        staged = needs.staging_bytes
        return Addresses(
            input=job.input,
            output=tuple(output_of(rank) if needs.writes or rank == memory.rank else 0 for rank in ranks),
            staging=everywhere(Location(self.staging.region, 0), staged) if staged else (),
            output_flags=everywhere(words.of_channel(self.index) if block is None else words.of_block(block.number), 4),
            staging_flags=everywhere(words.of_staging(self.index), 4),
        )

    def close(self) -> None:
        """Only when everything has run."""
        self.shelf.close()
        self.executor.close()


def _needs_of(program: Program) -> Needs:
    call, ranks = program.call, range(program.world_size)
    staging = max(plan(call, rank, program.tuning).staging_bytes for rank in ranks) if call.reduces else 0
    operations = [op for step in program.cycle() if isinstance(step, Batch) for op in step.operations]
    arrives = any(isinstance(op, Wait) and (op.flag.buffer, op.flag.kind) == ("output", "arrived") for op in operations)
    writes = any(isinstance(step, Copy) and step.target.buffer == "output" for step in program.steps)
    return Needs(
        program=program,
        staging_bytes=staging,
        landing_bytes=max(output_bytes(call, rank) for rank in ranks),
        meets=call.operation in ("gather", "send_recv"),
        receives=arrives,
        writes=writes,
    )
