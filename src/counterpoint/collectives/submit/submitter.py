"""Start calls: make or look up the call's submission, number the call, and give both to the transport.

Submissions are cached under operation, options, channel and `tensor_key` of the tensors. They also depend on where
symmetric memory lies: when a region is added, `Transport.epoch` changes and cached submissions are made again, since an
address of plain memory may now lie in a region. State that changes from call to call is not cached but read at the
start: whether an early-release block is ready, which stream is current, whether it is in a graph capture.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, cast

from counterpoint.collectives.submit.request import BuildSubmission, RankContext
from counterpoint.collectives.submit.submission import Submission, Transport
from counterpoint.collectives.submit.tensors import copied, sendable, tensor_key, tensors_of
from counterpoint.collectives.work import Work
from counterpoint.errors import Misconfigured

_MOST_KNOWN = 1024  # submissions that are cached


class Submitter:
    """Starts the calls of one communicator in the order in which they are made."""

    def __init__(self, transport: Transport, *, rank: int, world_size: int, channels: int, debug: bool) -> None:
        self._transport = transport
        self._ranks = RankContext(
            rank=rank, world_size=world_size, device=transport.device, transport=transport, debug=debug
        )
        self._channels = channels
        self._known: dict[Hashable, Submission] = {}
        self._latest: dict[tuple[int, int], int] = {}  # number of the latest call, by channel and line
        self._lock = threading.Lock()  # the order of numbers is the order of the queue

    def submit(
        self, build: BuildSubmission, output: Any, input: Any, channel: int, async_op: bool, *options: Any
    ) -> Work | None:
        """Return the started call's `Work` (`PartitionedWork` if in partitions); without `async_op` wait for the call.

        The call, which the function `build` of `request.py` describes, is numbered and queued. An error is raised if
        its tensors or options do not fit, or the communicator has failed.
        """
        sent = input
        try:
            key: Hashable = (build, channel, async_op, options, tensor_key(output), tensor_key(input))
            submission = self._known.get(key)
        except Exception:  # a list is no key, a sparse tensor has no address: `_new` raises with the reason
            key, submission = None, None
        if submission is None or submission.epoch != self._transport.epoch:
            submission, sent = self._new(build, output, input, channel, async_op, options)
            if key is not None and sent is input and not submission.row:
                self._remember(key, submission)
        line = submission.channel, submission.line
        with self._lock:
            number = self._latest.get(line, 0) + 1
            work = cast("Work | None", self._transport.start(submission, number, (sent, output)))
            self._latest[line] = number
        if work is None or async_op:
            return work
        work.wait()
        return None

    def _new(
        self, build: BuildSubmission, output: Any, input: Any, channel: int, async_op: bool, options: tuple[Any, ...]
    ) -> tuple[Submission, Any]:
        """Return a new submission and the tensor to send: the input, or a contiguous copy without overlap."""
        if not 0 <= channel < self._channels:
            most = self._channels
            raise Misconfigured(f"channel={channel}: allowed are 0 to {most - 1}, by channels={most}")
        sent = sendable(input)
        submission = build(self._ranks, output, sent, *options)
        if submission.overlaps:
            sent = copied(sent)
            submission = build(self._ranks, output, sent, *options)
        if sent is not input:
            if submission.partitioned != "no":
                raise Misconfigured(f"input of strides {input.stride()}: give a contiguous one, as it is not copied")
            self._note_use(input)
        if submission.message is None:
            submission = replace(submission, channel=channel)
        submission = replace(submission, async_op=async_op)
        self._transport.accept(submission)
        return submission, sent

    def _remember(self, key: Hashable, submission: Submission) -> None:
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[key] = submission

    def _note_use(self, tensor: Any) -> None:
        """If the tensor lies in symmetric memory, record that the current stream reads it, for a copy."""
        for one in tensors_of(tensor):
            if one.is_cuda and one.numel():
                first = one[(0,) * one.dim()]  # the first element, contiguous whatever the strides
                if self._transport.locate(first) is not None:
                    self._transport.record_stream(first, None)
