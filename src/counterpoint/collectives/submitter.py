"""From checked arguments to a job: its number, its program, what has to be equal on all ranks, and the way it takes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from counterpoint.collectives.arguments import sendable
from counterpoint.collectives.early import EarlyUse
from counterpoint.collectives.fallback import Fallback
from counterpoint.collectives.plan import plan, plan_all
from counterpoint.collectives.program import Call, Program, Tuning
from counterpoint.collectives.reduce import Reduction
from counterpoint.collectives.symmetric import Location
from counterpoint.collectives.transport import Job, Rows, Transport
from counterpoint.collectives.watchdog import Doing
from counterpoint.collectives.work import Work
from counterpoint.errors import Misconfigured

__all__ = ["Submitter"]


class Submitter:
    """The calls of one communicator, in their order.

    Args:
        transport: carries them out.
        fallback: takes small ones.
        rank: this one.
        world_size: ranks of the group.
        channels: that a call can be on.
        debug: all ranks compare every call before it begins.
    """

    def __init__(
        self, transport: Transport, fallback: Fallback, *, rank: int, world_size: int, channels: int, debug: bool
    ) -> None:
        self._transport, self._fallback = transport, fallback
        self.world_size, self.channels, self.debug = world_size, channels, debug
        self._program = lru_cache(maxsize=1024)(partial(_planned, transport.tuning, rank))
        self._numbers: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()  # the order of numbers is the order of the queue

    def start(
        self,
        text: str,
        call: Call | Callable[[Rows], Call],
        output: Any,
        input: Any,
        channel: int,
        async_op: bool,
        *,
        reduction: Reduction | None = None,
        row: tuple[int, ...] = (),
        line: int | None = None,
        at: Location | None = None,
    ) -> Work | None:
        """Numbers the call and queues it. `call`: what all ranks ask for, or how that follows from everyone's row;
        `at`: where the output lies in symmetric memory, if that is known already."""
        if not 0 <= channel < self.channels:
            raise Misconfigured(f"channel={channel}: allowed are 0 to {self.channels - 1}, by channels={self.channels}")
        known = call if isinstance(call, Call) else None
        if known is not None and self._fallback.takes(known, reduction):
            return self._start_by_torch(known, output, input, async_op, reduction)
        transport, sent = self._transport, None if input is None else sendable(input)
        at = at if at is not None or output is None else transport.locate(output)
        early = self._early(known, text, at)
        output_bytes = 0 if output is None else output.nbytes
        in_place = sent is not None and output is not None and 0 <= sent.data_ptr() - output.data_ptr() < output_bytes
        place = transport.place(known, at, output_bytes) if early is None else str(early)
        line = self.world_size if line is None else line
        with self._lock:
            number = self._numbers.get((channel, line), 0) + 1
            job = Job(
                doing=Doing(text=text + place, channel=channel, line=line, number=number),
                program=self._programs(call, early is not None),
                row=row,
                meet=self.debug or bool(row),
                async_op=async_op,
                input=0 if sent is None else sent.data_ptr(),
                input_at=None if sent is None or in_place else transport.locate(sent),
                output=0 if output is None else output.data_ptr(),
                output_bytes=output_bytes,
                at=at,
                early=early,
                reduction=reduction,
                keep=(sent, output),
            )
            work = transport.submit(job)
            self._numbers[channel, line] = number
        if async_op:
            return work
        work.wait()
        return None

    def _programs(self, call: Call | Callable[[Rows], Call], early: bool) -> Callable[[Rows], Program]:
        return lambda rows: self._program(call if isinstance(call, Call) else call(rows), early)

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

    def _start_by_torch(
        self, call: Call, output: Any, input: Any, async_op: bool, reduction: Reduction | None
    ) -> Work | None:
        """The call by the process group of `fallback`, on the current stream or joined to it by `wait`."""
        self._transport.check()
        for tensor in (output, input):
            if tensor is not None and tensor.is_cuda and self._transport.locate(tensor) is not None:
                self._transport.record_stream(tensor, None)
        return self._fallback.start(call, output, input, async_op=async_op, reduction=reduction)


@lru_cache(maxsize=1024)
def _all_push_to_all(call: Call, tuning: Tuning) -> bool:
    return all(len(program.pushers) == call.world_size - 1 for program in plan_all(call, tuning))


def _planned(tuning: Callable[..., Tuning], rank: int, call: Call, early_release: bool) -> Program:
    return plan(call, rank, tuning(call, early_release=early_release))
