"""Run collectives over several hosts: a `Communicator` inside each host, a torch process group between them.

    mesh = init_device_mesh("cuda", (hosts, 8), mesh_dim_names=("hosts", "local"))
    communicator = HierarchicalCommunicator.of_mesh(mesh)
    communicator.all_gather(shards, shards[rank])

It runs the phases of `phases.py`. Rules that hold for every operation:

- All ranks make the same calls in the same order. Calls run one after the other. Rank = host * local ranks + index.
- Nothing else may use the process group between hosts while a call runs, and a call fails if the group does: a rank
  waits for one of another host until that rank's process ends, or for the group's timeout. Differences between hosts
  (operation, size) are not detected.
- Reductions round once inside a host and once between hosts; sums inside are in rank order, sums between hosts in the
  order of the group's library, or in a reduce_scatter in host order. All ranks get the same bits.
- A communicator that has failed once raises that error in every later call; the ranks of its host get an error, too.
- On a GPU a call runs on the current stream, with `async_op=True` on a stream of its own after the work queued on the
  current one; `Work.wait` makes the current stream wait. The phases run on the streams of the two groups.

**Not run on GPUs, nor on more than one host, yet**: proved and simulated, and run on CPUs as groups of one host.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from counterpoint.collectives.communicator import Communicator, EvenCollectives
from counterpoint.collectives.host.group import gather_values, membership, start_by_torch
from counterpoint.collectives.multihost.phases import Grid, Phase, best_slice_bytes, phases, scratch_bytes
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.collectives.program.calls import Call
from counterpoint.collectives.program.reductions import Reduction
from counterpoint.collectives.submit import request
from counterpoint.collectives.submit.tensors import copied, cut, flat_bytes, sendable
from counterpoint.collectives.work import HostWork, Work
from counterpoint.errors import CounterpointError, Misconfigured, PeerTimeout


class HierarchicalCommunicator(EvenCollectives):
    """Runs collectives among all ranks of several hosts; all ranks make it together.

    An all_gather sends input.nbytes to each other host, and input.nbytes per host to each other rank of this host. A
    reduce_scatter needs a buffer of twice output.nbytes for each other host, an all_to_all one for all data to other
    hosts. avg multiplies each value by 1 / n before the sum.

    Args:
        inside: communicator of the ranks of this host, which nothing else may use from now on; closed with this one.
        between: torch process group of the ranks that have the same rank in their host's communicator.
        slice_bytes: all_reduce and broadcast work on slices of about this size, so that inside and between run at the
            same time; None: what is about best for the size of the call (`best_slice_bytes`).

    Raises:
        Misconfigured: the groups are no grid, this process is not in them, or `slice_bytes` is not positive.
    """

    channels = 1
    """Says that calls run one after the other: the `channel` of a method has to be 0."""

    def __init__(self, inside: Communicator, between: Any, *, slice_bytes: int | None = None) -> None:
        if slice_bytes is not None and slice_bytes < 1:
            raise Misconfigured(f"slice_bytes={slice_bytes}: give a positive number")
        self.inside, self.slice_bytes, self._group = inside, slice_bytes, between
        host, hosts = membership(between)
        _check_grid(inside, between, host, hosts)
        self.grid = Grid(hosts=hosts, local=inside.world_size)
        self.rank, self.world_size = host * self.grid.local + inside.rank, self.grid.world_size
        self.device = inside.device
        self._ranks = request.GroupRank(rank=self.rank, world_size=self.world_size, device=self.device)
        self._failed: BaseException | None = None
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._under_way: set[HostWork] = set()  # on CPUs
        self._stream: Any = None  # on GPUs, of calls with async_op=True
        if self.device.type == "cpu":
            threading.Thread(target=_serve, args=(self._queue,), name="hierarchical", daemon=True).start()
            weakref.finalize(self, self._queue.put, None)  # None ends the thread

    @classmethod
    def of_mesh(
        cls, mesh: Any, *, timeout_s: float = 600.0, slice_bytes: int | None = None
    ) -> HierarchicalCommunicator:
        """Return this rank's communicator for a torch DeviceMesh of two axes: hosts, then ranks of a host.

        A rank waits `timeout_s` seconds for another rank of its host before it fails; `slice_bytes` is as in the class.

        Raises:
            Misconfigured: the mesh does not have two axes.
        """
        if mesh.ndim != 2:
            raise Misconfigured(f"a mesh of {mesh.ndim} axes: give one of two, hosts and ranks of a host")
        return cls(
            Communicator(mesh.get_group(1), options=CommunicatorOptions(timeout_s=timeout_s)),
            mesh.get_group(0),
            slice_bytes=slice_bytes,
        )

    def close(self) -> None:
        """Close this communicator and this host's `Communicator`, as `Communicator.close` does; tensors stay valid.

        On CPUs calls under way fail at once; transfers that they have begun between hosts end when a peer's group does.
        """
        self._end(self.inside.close)

    def abort(self) -> None:
        """End this communicator and this host's `Communicator` without waiting for calls under way, which fail."""
        self._end(self.inside.abort)

    def _end(self, end_inside: Callable[[], None]) -> None:
        self._failed = self._failed or CounterpointError("this communicator is closed: make a new one")
        self._queue.put(None)
        end_inside()
        for work in list(self._under_way):
            work.end(self._failed)

    def check(self) -> None:
        """Raise the error that ended this communicator or this host's `Communicator`, if there was one."""
        if self._failed is not None:
            raise self._failed
        self.inside.check()

    def set_timeout(self, timeout_s: float) -> None:
        """Set how many seconds this rank waits for another rank of its host before it gives up, from now on."""
        self.inside.set_timeout(timeout_s)

    def is_symmetric(self, tensor: Any) -> bool:
        """Return whether a contiguous tensor lies in symmetric memory that all ranks of this host can write."""
        return self.inside.is_symmetric(tensor)

    def empty(self, *shape: int, dtype: Any = None) -> Any:
        """Return an uninitialised tensor in the symmetric memory of this host, as `Communicator.empty` does."""
        return self.inside.empty(*shape, dtype=dtype)

    def memory_pool(self) -> AbstractContextManager[None]:
        """Return the `memory_pool` of this host's `Communicator`: a context that the host's ranks enter together."""
        return self.inside.memory_pool()

    def _submit(
        self, build: request.BuildSubmission, output: Any, input: Any, channel: int, async_op: bool, *options: Any
    ) -> Work | None:
        """Check and start a call: on CPUs in this communicator's thread, one by one, on GPUs on the current stream."""
        if channel != 0:
            raise Misconfigured(f"channel={channel}: over several hosts there is one, 0")
        sent = sendable(input)
        asked = build(self._ranks, output, sent, *options)
        if asked.overlaps:
            sent = copied(sent)
        if self._failed is not None:
            raise self._failed
        if not isinstance(asked.call, Call):
            raise Misconfigured(f"{asked.text} over several hosts: leave the sizes out, and send blocks of one size")
        slice_bytes = self.slice_bytes or best_slice_bytes(asked.call.output_bytes(0))
        found = phases(asked.call, self.grid, self.rank, slice_bytes=slice_bytes)
        run = partial(self._carry_out, asked.text, _PhaseRun(self, found, output, sent, asked.reduction))
        if self.device.type == "cpu":
            return self._in_thread(asked.text, run, async_op)
        if async_op:
            return self._in_stream(asked.text, run, keep=(output, input, sent))
        run()
        if self._failed is not None:
            raise self._failed
        return None

    def _in_thread(self, text: str, run: Callable[[], BaseException | None], async_op: bool) -> Work | None:
        """Queue a call for this object's thread; return the call's `Work` with `async_op`, else wait for the call."""
        work = HostWork(text)
        self._under_way.add(work)

        def serve() -> None:
            work.end(run())
            self._under_way.discard(work)

        self._queue.put(serve)
        if async_op:
            return work
        work.wait()
        return None

    def _in_stream(self, text: str, run: Callable[[], BaseException | None], *, keep: tuple[Any, ...]) -> StreamWork:
        """Queue a call on the stream of asynchronous calls, after the work on the current stream."""
        import torch

        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device, priority=-1)
        captured = torch.cuda.is_current_stream_capturing()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            error = run()
            if error is not None:
                raise error
            ended = torch.cuda.Event()
            ended.record(self._stream)
        return StreamWork(self, text, ended, captured, keep)

    def _carry_out(self, text: str, run: Callable[[], None]) -> BaseException | None:
        """Run a call unless an earlier one failed; return the error that ended this communicator, or None."""
        try:
            if self._failed is None:
                run()
        except CounterpointError as error:
            self._failed = self._failed or error
        except Exception as error:  # of the library between hosts, in its own words
            self._failed = self._failed or CounterpointError(
                f"{text} failed between hosts: {error}; a rank of another host may be gone: see what its host says"
            )
        if self._failed is not None:
            self._release_peers()
        return self._failed

    def _release_peers(self) -> None:
        """End this host's communicator, so that ranks of the host that wait for this rank get an error."""
        self.inside.abort()


AnyCommunicator: TypeAlias = Communicator | HierarchicalCommunicator


@dataclass
class StreamWork:
    """Represents a call over several hosts on a stream of a GPU; keeps its tensors alive until `wait`. See `Work`."""

    communicator: HierarchicalCommunicator
    text: str
    ended: Any  # torch.cuda.Event
    captured: bool  # the call is in a CUDA graph
    keep: tuple[Any, ...]

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return True after making the current stream, and with `timeout_s` also the host, wait for the call.

        Raises:
            PeerTimeout: `timeout_s` has passed.
            CounterpointError: the communicator has failed.
        """
        import torch

        self.communicator.check()
        if timeout_s is not None and not self.captured:
            deadline = time.monotonic() + timeout_s
            while not self.ended.query():
                if time.monotonic() > deadline:
                    raise PeerTimeout(f"{self.text} has not ended within {timeout_s:g} s; wait again, or longer")
                time.sleep(_PAUSE_S)
            self.communicator.check()
        torch.cuda.current_stream(self.communicator.device).wait_event(self.ended)
        self.keep = ()  # this stream now waits for the end, so later users of the memory on it do, too
        return True

    def is_completed(self) -> bool:
        """Return whether the call has ended, with or without an error; always False if it was captured in a graph."""
        return not self.captured and bool(self.ended.query())

    def exception(self) -> BaseException | None:
        """Return the error that ended the communicator; None if there is none."""
        try:
            self.communicator.check()
        except CounterpointError as error:
            return error
        return None


@dataclass
class _PhaseRun:
    """Runs the phases of one call on the call's tensors."""

    communicator: HierarchicalCommunicator
    phases: tuple[Phase, ...]
    output: Any
    input: Any
    reduction: Reduction | None

    def __call__(self) -> None:
        """Start each phase when the phases that it depends on have ended; return when every phase has ended."""
        import torch

        dtype = torch.uint8 if self.reduction is None else self.output.dtype
        num_bytes = scratch_bytes(self.phases)
        kept = self.communicator.empty(num_bytes, dtype=torch.uint8) if num_bytes else None
        named = {"input": self.input, "output": self.output, "scratch": kept}
        nothing = torch.empty(0, dtype=dtype, device=self.communicator.device)
        self.buffers = {name: nothing if one is None else flat_bytes(one, dtype) for name, one in named.items()}
        started: list[list[Any]] = []
        for phase in self.phases:
            for number in phase.after:
                _wait(started[number])
            started.append(self.start(phase))
        for works in started:
            _wait(works)

    def start(self, phase: Phase) -> list[Any]:
        """Start a phase and return its `Work` objects; the phase has ended when all of them have."""
        if phase.level == "here":
            self.add_up(phase)
            return []
        output, input = (cut(self.buffers[span.buffer], span) for span in (phase.output, phase.input))
        if phase.level == "inside":
            return [self.start_inside(phase.call, output, input)]
        group = self.communicator._group
        if group is None:  # torch would take its default group
            raise CounterpointError("the communicator was closed while a call was under way")
        op = "sum" if self.reduction is None or self.reduction.op in _SUMS else self.reduction.op
        return start_by_torch(phase.call, output, input, group=group, op=op)

    def start_inside(self, call: Call, output: Any, input: Any) -> Work | None:
        """Start a call inside this host, by the host's `Communicator`, and return the call's `Work`."""
        communicator, (op, factor) = self.communicator.inside, self.op_inside()
        own = call.input_span(communicator.rank)
        if own.buffer == "output":
            input = cut(output, own)
        root = call.root or 0
        return communicator.call(call.operation, output, input, root=root, op=op, factor=factor, async_op=True)

    def add_up(self, phase: Phase) -> None:
        """Combine the hosts' partial results in host order; bfloat16 and float16 in float32, rounded once."""
        import torch

        assert self.reduction is not None
        combine = {"max": torch.maximum, "min": torch.minimum}.get(self.reduction.op, torch.add)
        with torch.inference_mode():
            first, *parts = (cut(self.buffers[span.buffer], span) for span in phase.summands())
            total = first.float() if len(parts) > 1 and first.dtype in (torch.bfloat16, torch.float16) else first
            for part in parts[:-1]:
                total = combine(total, part)
            combine(total, parts[-1], out=cut(self.buffers["output"], phase.output))

    def op_inside(self) -> tuple[str, float]:
        """Return the op and factor of reductions inside a host, which also scale for the reductions between hosts."""
        if self.reduction is None:
            return "sum", 1.0
        if self.reduction.op == "avg" and self.communicator.grid.hosts > 1:
            return "premul_sum", 1.0 / self.communicator.world_size
        return self.reduction.op, self.reduction.factor


_SUMS = ("sum", "avg", "premul_sum")
_PAUSE_S = 1e-4


def _wait(works: list[Any]) -> None:
    """Wait for each work once, and remove it: a gloo receive that is waited for again waits for a second message."""
    while works:
        work = works.pop(0)
        if work is not None:
            work.wait()


def _serve(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # it keeps the communicator alive


def _check_grid(inside: Communicator, between: Any, host: int, hosts: int) -> None:
    """Raise unless the groups form a grid: `inside` has one host index, and `between` has one local rank."""
    import torch

    rails = gather_values(between, (inside.rank, inside.world_size))
    homes = inside.empty(inside.world_size, 2, dtype=torch.int64)
    homes[inside.rank] = torch.tensor([host, hosts])
    inside.all_gather(homes, homes[inside.rank])
    found = [tuple(row) for row in homes.tolist()]
    if len(set(rails)) > 1 or len(set(found)) > 1:
        raise Misconfigured(
            f"rank {inside.rank} of {inside.world_size} on host {host} of {hosts}: its host's ranks are (host, hosts) "
            f"{found}, its rail's (rank, ranks) {rails}; give groups that make a grid, as the axes of a mesh do"
        )
