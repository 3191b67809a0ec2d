"""One channel of a communicator on a GPU: from a call to driver calls on a stream.

*Where peers write.* A peer's output is taken to lie where the own one lies: pools give the same places on all ranks
that make and drop their tensors in the same order. That is not trusted but compared, since the place is part of what a
call is announced as (`Transport.place`): a rank announces its call, then looks at the calls of the others
(announce.py), and only then queues anything. So of two ranks that mean different places the one that announces last
raises before it has queued its call, and none of its bytes and signals go out. The other one could not know yet and has
queued its call, but writes nothing at a wrong place: the checker proves that no program writes into an output before
its owner has begun the call and said so by a signal (`ready`, or in an all_reduce the arrival of slices), and this
owner never does. The watchdog ends its wait; by then both have failed, and all buffers of the communicator are rubbish,
since a stream that is let go does what it was told. With an early release that signal was made before; then the block
is compared, and a rank that means another one may find its block overwritten before it is told.

gather, send_recv, and all_to_all with split sizes have outputs of different sizes, or on some ranks only: there the
ranks meet on the host first, and read from each other's boards where outputs are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from counterpoint.collectives.announce import Announcer
from counterpoint.collectives.board import Board
from counterpoint.collectives.calls import output_bytes
from counterpoint.collectives.cuda import BindReduction, Executor
from counterpoint.collectives.cuda_moments import Moment
from counterpoint.collectives.cuda_prepared import Prepared, Shelf
from counterpoint.collectives.cuda_watch import STEPS, UnderWay
from counterpoint.collectives.cuda_work import CudaWork
from counterpoint.collectives.lower import Addresses, CopyAsync, DriverCall, ReduceLaunch, lower
from counterpoint.collectives.plan import plan
from counterpoint.collectives.program import COPY, Batch, Copy, Program, Wait
from counterpoint.collectives.symmetric import Location, Room
from counterpoint.collectives.transport import Job
from counterpoint.errors import Misconfigured

if TYPE_CHECKING:
    from counterpoint.collectives.cuda_transport import CudaTransport

__all__ = ["LANDING", "PLACED", "CudaChannel"]

PLACED = ("all_gather", "all_to_all", "broadcast", "scatter", "all_reduce")
"""Operations whose outputs peers write into, and which have equal outputs on all ranks."""
LANDING = Location(-2, 0)  # of an output that peers cannot write: it is copied from the channel's landing
_MOST_NEEDS = 4096  # programs whose needs are remembered


@dataclass(frozen=True, slots=True)
class _Needs:
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
        self._needs: dict[int, _Needs] = {}
        self._last: dict[int, Moment] = {}  # of each capture under way, and (0) of none

    def submit(self, job: Job) -> CudaWork:
        """Queues the call on the current stream, or behind it on the channel's own.

        Raises:
            Misconfigured: it cannot be done, or another rank has made another call.
            PeerTimeout: a rank that has to be met does not come.
        """
        transport = self.transport
        current = transport.gpu.current_stream()
        capture = transport.gpu.capture_of(transport.moments.handle(current))
        if not capture:
            return self._queue(job, current, 0)
        with transport.gpu.relaxed():
            return self._queue(job, current, capture)

    def _queue(self, job: Job, current: int, capture: int) -> CudaWork:
        known = None if job.row else self._needed(job.program(()))
        self._refuse(job, known, capture)
        try:
            own = job.at if job.at is not None or not job.output_bytes else LANDING
            record = self.announcer.announce(job.doing, job.row, own)
            record.steps = STEPS
            self.announcer.compare(job.doing)
            needs, met = self._agreed(job, known, own, capture)
            prepared = self._prepared(job, needs, met)
            return self._start(job, prepared, record, current, capture)
        except BaseException as error:
            failure = self.transport.fail(error)
            if failure is error:
                raise
            raise failure from error

    def _refuse(self, job: Job, needs: _Needs | None, capture: int) -> None:
        """Raises Misconfigured for what cannot be done, as long as nobody knows of it."""
        if capture and job.early is not None:
            raise Misconfigured(
                f"{job.doing} in a capture into a tensor of empty(early_release=True): a graph would give its memory "
                "back at every replay; use empty() there"
            )
        operation = "all_to_all" if needs is None else needs.program.call.operation
        if operation == "send_recv" and job.output_bytes and job.at is None:
            raise Misconfigured(f"{job.doing}: on a GPU a rank receives into a tensor of empty() only; give it one")

    def _needed(self, program: Program) -> _Needs:
        """Worked out once for each program."""
        found = self._needs.get(id(program))
        if found is None:
            if len(self._needs) >= _MOST_NEEDS:
                self._needs.clear()
            found = self._needs[id(program)] = _needs_of(program)
        return found

    def _agreed(
        self, job: Job, known: _Needs | None, own: Location | None, capture: int
    ) -> tuple[_Needs, dict[int, Location]]:
        """Meets the other ranks if something can only be known or made together; what they say about their outputs."""
        doing = job.doing
        grows = known is not None and not self.staging.fits(known.staging_bytes)
        lands = known is not None and own == LANDING and known.program.call.operation in PLACED
        grows |= known is not None and lands and not self.landing.fits(known.landing_bytes)
        if known is not None and not (grows or known.meets or job.meet):
            return known, {}
        records = self.announcer.met(doing)
        where = {peer: Location(record.output_region, record.output_offset) for peer, record in records.items()}
        rows = [list(records[rank].row) if rank in records else list(job.row) for rank in range(self._world_size)]
        needs = known if known is not None else self._needed(job.program(rows))
        told = needs.meets or bool(job.row)
        lands |= told and LANDING in (own, *where.values())
        for room, num_bytes in (
            (self.staging, needs.staging_bytes),
            (self.landing, needs.landing_bytes if lands else 0),
        ):
            if capture and not room.fits(num_bytes):
                raise Misconfigured(
                    f"{doing} needs {num_bytes} bytes more of symmetric memory, which cannot be made in a capture; "
                    "make the same call once before it"
                )
            room.make(num_bytes)
        return needs, where if told else {}

    @property
    def _world_size(self) -> int:
        return self.transport.memory.world_size

    def _prepared(self, job: Job, needs: _Needs, met: dict[int, Location]) -> Prepared:
        early = None if job.early is None else (job.early.block.number, job.early.handshake)
        rooms = self.staging.region, self.landing.region
        key = (id(needs.program), job.input, job.output, early, job.reduction, rooms, *met.items())
        return self.shelf.get(key, lambda: self._prepare(job, needs, met))

    def _prepare(self, job: Job, needs: _Needs, met: Mapping[int, Location]) -> Prepared:
        """Addresses instead of roles, and the copy out of the landing."""
        addresses = self._addresses(job, needs, met)
        early = job.early is not None and not job.early.handshake
        calls: tuple[DriverCall, ...] = lower(needs.program, addresses, needs.program.cycle(early_release=early))
        own = addresses.output[needs.program.rank]
        if own != job.output:
            calls += (CopyAsync(job.output, own, job.output_bytes, COPY, local=True),)
        return Prepared(needs.program, calls, self.executor, self._reducing(job), graphs=self.transport.graphs)

    def _reducing(self, job: Job) -> BindReduction | None:
        gpu, reduction = self.transport.gpu, job.reduction
        if reduction is None:
            return None

        def bind_reduction(call: ReduceLaunch, stream: int) -> Any:
            return gpu.bind_reduction(call, stream, reduction)

        return bind_reduction

    def _addresses(self, job: Job, needs: _Needs, met: Mapping[int, Location]) -> Addresses:
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

    def _start(self, job: Job, prepared: Prepared, record: Board, current: int, capture: int) -> CudaWork:
        """Queues it after the last call of the channel, and notes what it uses."""
        transport, moments = self.transport, self.transport.moments
        stream = self.stream if job.async_op else current
        if stream != current:
            moments.wait(stream, moments.record(current, capture))
        last = self._last.get(capture)
        if last is not None and last.stream != stream:
            moments.wait(stream, last)
        if job.early is not None:
            job.early.block.ready = False
        begin = moments.record(stream, capture)
        prepared.start(stream, moments, capture)
        end = self._last[capture] = prepared.last = moments.record(stream, capture)
        for at in (job.at, job.input_at):
            if at is not None:
                transport.order.used(at, stream, capture)
        work = CudaWork(job.doing, transport, end, job.keep if job.async_op else ())
        if capture:
            record.step, transport.watch.captured = STEPS, True
        else:
            transport.watch.add(
                UnderWay(doing=job.doing, record=record, begin=begin, end=end, calls=prepared.calls, work=work)
            )
        return work

    def close(self) -> None:
        """Only when everything has run."""
        self.shelf.close()
        self.executor.close()


def _needs_of(program: Program) -> _Needs:
    call, ranks = program.call, range(program.world_size)
    staging = max(plan(call, rank, program.tuning).staging_bytes for rank in ranks) if call.reduces else 0
    operations = [op for step in program.cycle() if isinstance(step, Batch) for op in step.operations]
    arrives = any(isinstance(op, Wait) and (op.flag.buffer, op.flag.kind) == ("output", "arrived") for op in operations)
    writes = any(isinstance(step, Copy) and step.target.buffer == "output" for step in program.steps)
    return _Needs(
        program=program,
        staging_bytes=staging,
        landing_bytes=max(output_bytes(call, rank) for rank in ranks),
        meets=call.operation in ("gather", "send_recv"),
        receives=arrives,
        writes=writes,
    )
