"""From a request to its start: its job, its number, and the way it takes. What comes again is looked up, not made anew.

*What a call depends on.* Operation, options, channel, and of its tensors what `arguments.face` says: all that is in the
key. And where symmetric memory lies, which changes when there is more of it (`Transport.epoch`): an address of plain
memory may be one of a region then. What changes from call to call is asked by what starts it: how an early block rests,
which stream is current, whether that is in a capture.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from counterpoint.collectives.arguments import Several, face, sendable
from counterpoint.collectives.early import EarlyUse
from counterpoint.collectives.fallback import Fallback
from counterpoint.collectives.plan import plan, plan_all
from counterpoint.collectives.program import Call, Program, Tuning
from counterpoint.collectives.request import Ask, Here, Request
from counterpoint.collectives.spread import Layout, spread
from counterpoint.collectives.symmetric import Location
from counterpoint.collectives.transport import Job, Rows, Transport
from counterpoint.collectives.work import Work
from counterpoint.errors import Misconfigured

__all__ = ["Submitter"]

_MOST_KNOWN = 1024  # calls that are remembered


@dataclass(slots=True)
class _Line:
    """Calls with the same peers on the same channel."""

    number: int = 0  # of the latest


@dataclass(frozen=True, slots=True)
class _Known:
    """A call that may come again; without a line it goes to the process group of `fallback`."""

    start: Callable[..., Work | None]
    line: _Line | None
    epoch: int


class Submitter:
    """The calls of one communicator, in their order.

    Args:
        transport: carries them out.
        fallback: takes small ones.
        here: where they are made.
        channels: that a call can be on.
        debug: all ranks compare every call before it begins.
    """

    def __init__(self, transport: Transport, fallback: Fallback, here: Here, *, channels: int, debug: bool) -> None:
        self._transport, self._fallback, self._here = transport, fallback, here
        self.channels, self.debug = channels, debug
        self._program = lru_cache(maxsize=1024)(partial(_planned, transport.tuning, here.rank))
        self._known: dict[Any, _Known] = {}
        self._lines: dict[tuple[int, int], _Line] = {}
        self._lock = threading.Lock()  # the order of numbers is the order of the queue

    def start(self, ask: Ask, output: Any, input: Any, channel: int, async_op: bool, *options: Any) -> Work | None:
        """Numbers the call and queues it.

        Args:
            ask: operation, as of `request.py`.
            output: its tensor, or None.
            input: likewise.
            channel: which runs it.
            async_op: return its `Work` at once.
            options: of the operation.
        """
        try:
            seen = face(output)
            key = (ask, channel, async_op, *options, *seen, *(seen if input is output else face(input)))
            known, sent = self._known.get(key), input
        except Exception:  # a list is no key, a sparse tensor has no address: what is wrong with them is told below
            key, known = None, None
        if known is None or known.epoch != self._transport.epoch:
            epoch = self._transport.epoch
            request = ask(self._here, output, input, *options)
            sent = None if input is None else sendable(input)
            known = self._made(request, output, sent, channel, async_op, epoch)
            if key is not None and sent is input and not request.row:
                self._remember(key, known)
        if known.line is None:
            return self._start_by_torch(known.start, output, sent)
        with self._lock:
            work = known.start(known.line.number + 1, (sent, output))
            known.line.number += 1
        if work is None or async_op:
            return work
        work.wait()
        return None

    def _made(self, request: Request, output: Any, sent: Any, channel: int, async_op: bool, epoch: int) -> _Known:
        """What starts it, on one of the two ways; `sent`: the input, or a copy of it."""
        if not 0 <= channel < self.channels:
            most = self.channels
            raise Misconfigured(f"channel={channel}: allowed are 0 to {most - 1}, by channels={most}")
        call, reduction = request.call, request.reduction
        if isinstance(call, Call) and not request.layout and self._fallback.takes(call, reduction):
            return _Known(partial(self._fallback.start, call, async_op=async_op, reduction=reduction), None, epoch)
        job = self._job(request, output, sent, channel, async_op)
        line = self._lines.setdefault((channel, job.line), _Line())
        return _Known(self._transport.starter(job), line, epoch)

    def _job(self, request: Request, output: Any, sent: Any, channel: int, async_op: bool) -> Job:
        """Where its tensors are, and what is to be done with them."""
        transport, call = self._transport, request.call
        known = call if isinstance(call, Call) else None
        at = None if output is None else transport.locate(output)
        early = self._early(known, request.text, at)
        output_bytes = 0 if output is None else output.nbytes
        in_place = sent is not None and output is not None and 0 <= sent.data_ptr() - output.data_ptr() < output_bytes
        place = transport.place(known, at, output_bytes) if early is None else str(early)
        return Job(
            text=request.text + place,
            channel=channel,
            line=self._here.world_size if request.line is None else request.line,
            program=self._programs(call, early is not None, request.layout),
            row=request.row,
            meet=self.debug or bool(request.row),
            async_op=async_op,
            input=0 if sent is None else sent.data_ptr(),
            input_at=() if sent is None or in_place else _located(transport, sent),
            output=0 if output is None else output.data_ptr(),
            output_bytes=output_bytes,
            at=at,
            early=early,
            reduction=request.reduction,
        )

    def _remember(self, key: Any, known: _Known) -> None:
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[key] = known

    def _programs(self, call: Call | Callable[[Rows], Call], early: bool, layout: Layout) -> Callable[[Rows], Program]:
        return lambda rows: self._program(call if isinstance(call, Call) else call(rows), early, layout)

    def _early(self, call: Call | None, text: str, at: Location | None) -> EarlyUse | None:
        """How the output is released, if early. A call that is not known yet is an all_to_all with split sizes.

        Raises:
            Misconfigured: this call cannot have such an output.
        """
        early = self._transport.early.use(at)
        if early is not None and call is not None and not _all_push_to_all(call, self._program(call, True).tuning):
            raise Misconfigured(
                f"{text} into a tensor of empty(early_release=True): allowed are calls in which every rank sends to "
                "every other, all_gather and all_to_all; use empty() for this one"
            )
        return early

    def _start_by_torch(self, start: Callable[..., Work | None], output: Any, input: Any) -> Work | None:
        """The call by the process group of `fallback`, on the current stream or joined to it by `wait`."""
        self._transport.check()
        for tensor in (output, input):
            if tensor is not None and tensor.is_cuda and self._transport.locate(tensor) is not None:
                self._transport.record_stream(tensor, None)
        return start(output, input)


def _located(transport: Transport, sent: Any) -> tuple[Location, ...]:
    tensors = sent.tensors if isinstance(sent, Several) else (sent,)
    return tuple(at for at in map(transport.locate, tensors) if at is not None)


@lru_cache(maxsize=1024)
def _all_push_to_all(call: Call, tuning: Tuning) -> bool:
    return all(len(program.pushers) == call.world_size - 1 for program in plan_all(call, tuning))


def _planned(
    tuning: Callable[..., Tuning],
    rank: int,
    call: Call,
    early_release: bool,
    layout: Layout = (),
) -> Program:
    program = plan(call, rank, tuning(call, early_release=early_release))
    return spread(program, layout) if layout else program
