"""One call on a GPU, which may come again: what it takes is found out once, and what is left is done each time.

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

from typing import TYPE_CHECKING, Any

from counterpoint.collectives.announce import Notice
from counterpoint.collectives.board import Board
from counterpoint.collectives.cuda_channel import LANDING, CudaChannel
from counterpoint.collectives.cuda_prepared import Prepared
from counterpoint.collectives.cuda_watch import STEPS
from counterpoint.collectives.cuda_work import CudaWork
from counterpoint.collectives.transport import Job
from counterpoint.errors import Misconfigured

if TYPE_CHECKING:
    from counterpoint.collectives.cuda_transport import CudaTransport

__all__ = ["CudaCall"]


class CudaCall:
    """A job on its channel. Calls of one channel run one after the other, on whatever streams they are made.

    Args:
        transport: that it belongs to.
        channel: of the job.
        job: the call.

    Raises:
        Misconfigured: it cannot be done.
    """

    def __init__(self, transport: CudaTransport, channel: CudaChannel, job: Job) -> None:
        self._transport, self._channel, self._job = transport, channel, job
        self._known = None if job.row else channel.needed(job.program(()))
        if job.line < transport.memory.world_size and job.output_bytes and job.at is None:
            raise Misconfigured(f"{job.text}: on a GPU a rank receives into a tensor of empty() only; give it one")
        own = job.at if job.at is not None or not job.output_bytes else LANDING
        self._notice = Notice(job.text, job.channel, job.line, own, STEPS)
        self._meets = self._known is None or self._known.meets or job.meet
        self._prepared: dict[bool, Prepared] = {}  # with the handshake, and without
        self._epoch = transport.epoch
        self._noted = (-1, 0)  # what the order of streams has been told: in which epoch of it, on which stream

    def start(self, number: int, keep: tuple[Any, ...]) -> CudaWork | None:
        """Queues the call on the current stream, or with `async_op` behind it on the channel's own.

        Args:
            number: of the call on its line.
            keep: tensors that have to live until it has ended, with `async_op`: otherwise the current stream is behind.

        Raises:
            Misconfigured: it cannot be done, or another rank has made another call.
            PeerTimeout: a rank that has to be met does not come; or an earlier call failed, and how.
        """
        transport = self._transport
        transport.check()
        transport.early.collect()
        current = transport.gpu.current_stream()
        capture = transport.gpu.capture_of(transport.moments.handle(current))
        if not capture:
            return self._queue(number, keep, current, 0)
        if self._job.early is not None:
            raise Misconfigured(
                f"{self._notice.doing(number)} in a capture into a tensor of empty(early_release=True): a graph would "
                "give its memory back at every replay; use empty() there"
            )
        with transport.gpu.relaxed():
            return self._queue(number, keep, current, capture)

    def _queue(self, number: int, keep: tuple[Any, ...], current: int, capture: int) -> CudaWork | None:
        """Shows the call, then compares it, and only then issues it."""
        try:
            record = self._channel.announcer.announce(self._notice, number, self._job.row)
            self._channel.announcer.compare(self._notice, number)
            return self._issue(number, keep, record, self._ready(number, capture), current, capture)
        except BaseException as error:
            failure = self._transport.fail(error)
            if failure is error:
                raise
            raise failure from error

    def _ready(self, number: int, capture: int) -> Prepared:
        """Its driver calls: those of the last time, if nothing has changed that they depend on."""
        if self._epoch != self._transport.epoch:  # staging or landing may have been replaced
            self._prepared.clear()
            self._epoch = self._transport.epoch
        job = self._job
        handshake = job.early is None or job.early.handshake
        prepared = self._prepared.get(handshake)
        if prepared is None or prepared.left or self._meets:
            needs, met = self._channel.agreed(job, self._notice, number, self._known, capture)
            prepared = self._prepared[handshake] = self._channel.prepared(job, needs, met, handshake)
        return prepared

    def _issue(
        self, number: int, keep: tuple[Any, ...], record: Board, prepared: Prepared, current: int, capture: int
    ) -> CudaWork | None:
        """Queues it after the last call of the channel, and notes what it uses."""
        job, channel, moments = self._job, self._channel, self._transport.moments
        stream = channel.stream if job.async_op else current
        last, begin = channel.last.get(capture), None
        if stream != current:
            begin = moments.record(current, capture)  # of the call, too: its own stream runs nothing but calls
            moments.wait(stream, begin)
        if last is not None and last.stream != stream:
            moments.wait(stream, last)
        if job.early is not None:
            job.early.block.ready = False
        begin = begin or moments.record(stream, capture)
        prepared.start(stream, moments, capture)
        end = channel.last[capture] = prepared.last = moments.record(stream, capture)
        self._note(stream, capture)
        if not job.async_op:
            keep = ()
        work = CudaWork(self._transport, self._notice, number, record, prepared.calls, begin, end, keep)
        if capture:
            record.step, self._transport.watch.captured = STEPS, True
        else:
            channel.under_way.append(work)
        return work if job.async_op else None

    def _note(self, stream: int, capture: int) -> None:
        """Tells the order of streams which memory is used; once, as long as none has been taken back."""
        order = self._transport.order
        told = order.epoch, stream
        if told == self._noted and not capture:
            return
        for at in (self._job.at, *self._job.input_at):
            if at is not None:
                order.used(at, stream, capture)
        if not capture:
            self._noted = told
