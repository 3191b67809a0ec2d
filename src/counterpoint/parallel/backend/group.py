"""Implement a torch process group: large collectives run by a `Communicator`, others by NCCL (gloo on CPUs).

The route of a call (`_route`) depends only on what is equal on all ranks: operation, size, dtype and reduction of the
call, options that the ranks have compared, and whether all ranks have left `symmetric_memory`. It never depends on
where or how a tensor is stored: a call with an output that is not contiguous writes a copy first. All collectives run
on one channel, in the order of the program. Asynchronous all_reduces (on CPUs, all asynchronous calls), and callbacks
that make collectives, run in a thread (`background.py`), for which every later collective waits.

The communicator is opened at the first call that it takes; `hosts.py` has it for several hosts. If the ranks
of a host cannot share memory, torch's own backends make all calls, and the report says why. Messages between two GPUs
of a host go through mailboxes (`messages.py`), whatever their size, so that both ranks choose alike.

No call may reach the base class: torch's trampoline would make it while it holds the GIL, and deadlock with gloo's
threads, which need the GIL to drop tensors (torch 2.11 to 2.13). So calls that are not ours are handed to an inner
group.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d

from counterpoint.collectives.connect import device_profile
from counterpoint.collectives.host.group import check_agreement
from counterpoint.collectives.multihost.hierarchical import AnyCommunicator, HierarchicalCommunicator
from counterpoint.collectives.multihost.phases import Grid
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.collectives.program.operations import crossovers
from counterpoint.collectives.work import TorchWork, Work
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.parallel.backend import NAME
from counterpoint.parallel.backend.hosts import (
    crossovers_over_hosts,
    grid_of_group,
    landing_bytes,
    open_communicator,
)
from counterpoint.parallel.backend.inner import EndedGroup, InnerGroup
from counterpoint.parallel.backend.messages import MessagePair, MessagePairs
from counterpoint.parallel.background import PIECE_BYTES, all_reduce_in_pieces
from counterpoint.parallel.follow_tuning import follow_together
from counterpoint.parallel.group import CHANNELS, RankGroup, Route
from counterpoint.parallel.options import BackendOptions
from counterpoint.parallel.report import CallCounts, Report
from counterpoint.parallel.torch_calls import (
    StartedWork,
    call_options,
    never_compiled,
    num_bytes_of,
    op_and_factor,
    reduces,
    together,
)

c10d: Any = _distributed_c10d  # the type stubs lack half of its names
(_CHANNEL,) = CHANNELS["calls"]
_NEVER = 1 << 62
_BUCKET_BYTES = 1 << 22  # a group with symmetric memory takes reductions from this size on: see `_crossover`
Start: TypeAlias = Callable[[Tensor, bool], Sequence[Work | None]]
"""Starts a call that writes a contiguous tensor, asynchronously or on the current stream; returns the call's works."""


def _left_to_torch(name: str) -> Any:
    """Return a method that calls the inner group's method `name`, without counting the call in the report."""

    def call(self: CounterpointGroup, *args: Any, **keywords: Any) -> Any:
        return getattr(self.by_torch, name)(*args, **keywords)

    call.__name__, call.__doc__ = name, f"Do `ProcessGroup.{name}` by the inner group."
    return call


@never_compiled
class CounterpointGroup(dist.ProcessGroup):
    """Is a process group that runs large collectives without SMs.

    Args:
        options: what torch hands to a backend: store, rank, size, timeout and ranks.
        backend_options: the `pg_options` of the call that makes the group; None: the defaults, with the timeout of
            that call.

    Raises:
        Misconfigured: `backend_options` is not a `BackendOptions`.
    """

    def __init__(self, options: Any, backend_options: BackendOptions | None) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        if not isinstance(backend_options, BackendOptions | None):
            raise Misconfigured(
                f"pg_options of type {type(backend_options).__name__}: give counterpoint.torch_backend.BackendOptions "
                "(its `nccl` holds those of NCCL), or none"
            )
        self._options = backend_options or BackendOptions()
        self.inner = InnerGroup(options, self._options.nccl)
        for device, (kind, backend) in self.inner.backends.items():  # torch's own backend is found by device
            self._register_backend(torch.device(device), kind, backend)
        self._device_type = next(iter(self.inner.backends))  # device of the tensors that the communicator takes
        self.rank_group = RankGroup(
            self.inner.group, self.inner.ranks, options=self._options.communicator, opened=self._opened
        )
        self.rank_group.why_not = self.rank_group.why_not or self.inner.why_alone or ""
        self.rank_group.join(self, timeout_s=options.timeout.total_seconds())
        self.counts = CallCounts()
        self._hosts: Grid | None = None
        self._crossovers: dict[str, int] | None = None  # None until all ranks have agreed on their options
        self._has_symmetric_memory = False
        self._coalescing = False
        self._coalesced: list[StartedWork] = []  # messages of the batch that `_start_coalescing` began
        self._pairs = MessagePairs(self.inner, self._options, timeout_s=self.rank_group.options.timeout_s)
        self._running: deque[StartedWork] = deque()  # kept alive until they have ended, whoever drops them
        self._keeping = threading.Lock()  # guards `_running`, since callbacks make calls in the background thread
        self._agreeing = threading.Lock()  # held by the one thread that compares options

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the backend's name, `counterpoint`."""
        return NAME

    def report(self) -> Report:
        """Return a report: how many calls the communicator and torch ran, and why."""
        return Report(calls=self.counts.rows(), tuned=str(self.rank_group.tuning or ""))

    def _opened(self, group: Any, device: torch.device | None, options: CommunicatorOptions) -> AnyCommunicator:
        """Return a new communicator of this group, over one host or several."""
        if device is None:
            on_gpu = self._device_type == "cuda"
            device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        return open_communicator(self.inner, self._on_hosts(), device, options)

    def _on_hosts(self) -> Grid:
        """Return the grid of hosts and local ranks, or raise `Unsupported`. All ranks make the first call together."""
        if self._hosts is None:
            self.inner.register()
            self._hosts = grid_of_group(self.inner.group, self._options.ranks_per_host)
        return self._hosts

    def take_buckets(self) -> None:
        """Let the communicator reduce arrays from 4 MiB on, unless `crossover_bytes` sets sizes. All ranks call this.

        Buckets of gradients then lie in symmetric memory, so that their reductions take few SMs and overlap with
        matmuls.
        """
        self.rank_group.drain()  # earlier calls, made in callbacks, keep their routes
        self._has_symmetric_memory = True
        self.rank_group.decide_anew()

    @property
    def by_torch(self) -> Any:
        """Return torch's inner group after all pending callbacks' calls, to keep one call order on all ranks."""
        if self.rank_group.has_ended:
            return EndedGroup()  # for a late callback, whose call other ranks may never make
        self.rank_group.drain()
        return self.inner.group

    def close(self, how: Literal["close", "abort"] = "close") -> None:
        """Close the communicator, or abort it; leave torch's own backends as they are."""
        self.rank_group.end(how, "the group is shut down")
        self._running.clear()
        self._pairs.end(how)
        self.inner.unregister()

    def shutdown(self) -> None:
        """End the group, as `destroy_process_group` does."""
        self.close()
        self.inner.end("shutdown")

    def abort(self) -> None:
        """End the group without waiting for calls under way; calls that have not started fail."""
        self.close("abort")
        self.inner.end("abort")

    # calls that a communicator may take

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None) -> Any:  # type: ignore[override]
        """Reduce a tensor over all ranks, in place; as in torch, `opts` may be just the reduction operator."""
        opts = call_options(c10d.AllreduceOptions, opts, "reduceOp", op, timeout)
        tensors = tensors if isinstance(tensors, list) else [tensors]
        op, factor = op_and_factor(opts.reduceOp)
        taken = self._take("all_reduce", tensors, sum(map(num_bytes_of, tensors)), op)
        if taken is None:
            return self.by_torch.allreduce(tensors, opts)
        return self._all_reduce(taken, tensors[0], opts, op, factor, in_background=True)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None, *, root: Any = None) -> Any:  # type: ignore[override]
        """Send the root's tensor to all ranks; as in torch, `opts` may be just the root rank."""
        opts = call_options(c10d.BroadcastOptions, opts, "rootRank", root, timeout)
        tensors = tensors if isinstance(tensors, list) else [tensors]
        taken = self._take("broadcast", tensors, sum(map(num_bytes_of, tensors)))
        if taken is None:
            return self.by_torch.broadcast(tensors, opts)
        root = opts.rootRank
        return self._started(
            opts,
            tensors[0],
            lambda target, async_op: [taken.broadcast(target, root, channel=_CHANNEL, async_op=async_op)],
        )

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Gather every rank's tensor into the one tensor `output`."""
        opts = opts or c10d.AllgatherOptions()
        taken = self._take("all_gather", [output], output.nbytes)
        if taken is None:
            return self.by_torch._allgather_base(output, input, opts)
        return self._started(
            opts,
            output,
            lambda target, async_op: [taken.all_gather(target, input, channel=_CHANNEL, async_op=async_op)],
        )

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Reduce a tensor over all ranks; each rank gets one block of the result."""
        opts = opts or c10d.ReduceScatterOptions()
        op, factor = op_and_factor(opts.reduceOp)
        taken = self._take("reduce_scatter", [output], input.nbytes, op)
        if taken is None:
            return self.by_torch._reduce_scatter_base(output, input, opts)
        return self._started(
            opts,
            output,
            lambda target, async_op: [
                taken.reduce_scatter(target, input, op, factor=factor, channel=_CHANNEL, async_op=async_op)
            ],
        )

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Any:
        """Send block r of `input` to rank r; calls with split sizes, which other ranks do not know, go to torch."""
        opts = opts or c10d.AllToAllOptions()
        if output_splits or input_splits:
            self._left("all_to_all", input.nbytes, "split sizes")
            taken = None
        else:
            taken = self._take("all_to_all", [output], output.nbytes)
        if taken is None:
            return self.by_torch.alltoall_base(output, input, output_splits, input_splits, opts)
        return self._started(
            opts,
            output,
            lambda target, async_op: [taken.all_to_all(target, input, channel=_CHANNEL, async_op=async_op)],
        )

    # the names of these methods since torch 2.13
    all_gather_single: Any = _allgather_base
    reduce_scatter_single: Any = _reduce_scatter_base
    all_to_all_single: Any = alltoall_base

    # messages

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Any:
        """Send a tensor to rank `dst`; through a mailbox the transfer begins before `dst` posts its receive."""
        return self._message("send", tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Any:
        """Receive the tensor that rank `src` sends."""
        return self._message("recv", tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        """Receive a tensor from any rank, by torch's own backend: gloo can, NCCL cannot."""
        self._left("recv", tensors[0].nbytes, "from any rank")
        return self.inner.group.recv_anysource(tensors, tag)

    def _message(self, operation: str, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """Start a send or receive through the `MessagePair` with `peer`, or by torch's inner group if there is none."""
        by_inner = getattr(self.inner.group, operation)  # raises once the group has ended
        pair = self._pair(operation, tensors[0], peer, tag)
        if pair is None:
            return by_inner(tensors, peer, tag)
        work = getattr(pair, operation)(tensors[0])
        if isinstance(work, c10d.Work):
            return work
        started = self._kept(StartedWork([] if work is None else [work], tensors))
        if self._coalescing:
            self._coalesced.append(started)
        return started

    def _pair(self, operation: str, tensor: Tensor, peer: int, tag: int) -> MessagePair | None:
        """Count a message, and return the `MessagePair` that carries it; None if torch's inner group carries it."""
        why = self._pairs.why_torch(peer, tensor, tag)
        found = why if why is not None else self._pairs.by_mailbox(peer, tensor.device)
        if not isinstance(found, str):
            self.counts.add(operation, tensor.nbytes, "zero_sm", "through a mailbox")
            return found
        self._left(operation, tensor.nbytes, found)
        if self._coalescing or tensor.device.type != self._pairs.device_type:
            return None
        return self._pairs.by_torch(peer, tensor.device)

    # several calls at once; functional collectives and DTensor make even a single call in this way

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce each tensor over all ranks, in place."""
        opts = opts or c10d.AllreduceCoalescedOptions()
        op, factor = op_and_factor(opts.reduceOp)
        if not self._takes_all("all_reduce", tensors, tensors, op):
            return self.by_torch.allreduce_coalesced(tensors, opts)
        by_size = sorted(range(len(tensors)), key=lambda number: tensors[number].numel())
        once = {tensors[number].data_ptr(): number for number in by_size}  # of several at one address, the largest
        works = []
        for tensor in [one if once[one.data_ptr()] == number else one.clone() for number, one in enumerate(tensors)]:
            taken = self._take("all_reduce", [tensor], tensor.nbytes, op)
            assert taken is not None  # `_takes_all` has asked for all of them
            works.append(self._all_reduce(taken, tensor, opts, op, factor))
        return together(works)

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """All-gather each tensor of `inputs` into the tensor of `outputs` at the same index."""
        opts = opts or c10d.AllgatherOptions()
        if not self._takes_all("all_gather", outputs, outputs):
            return self.by_torch.allgather_into_tensor_coalesced(outputs, inputs, opts)
        return together([self._allgather_base(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Reduce each input over all ranks; each rank gets one block of each result."""
        opts = opts or c10d.ReduceScatterOptions()
        if not self._takes_all("reduce_scatter", outputs, inputs, op_and_factor(opts.reduceOp)[0]):
            return self.by_torch.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        return together([self._reduce_scatter_base(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    # the names of these methods since torch 2.13
    all_gather_single_coalesced: Any = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced: Any = reduce_scatter_tensor_coalesced

    # calls that always go to torch

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a rank waits for another; over several hosts, communicators apply it inside this host only."""
        self.rank_group.set_timeout(timeout.total_seconds())
        self._pairs.set_timeout(timeout.total_seconds())
        self.inner.group.set_timeout(timeout)

    def barrier(self, *args: Any, **keywords: Any) -> Any:
        """Wait until all ranks have called this and, as in torch's own backends, all earlier calls have ended."""
        self.rank_group.drain()
        with self._keeping:
            earlier = [work for work in self._running if work.is_started()]
        for work in earlier:
            work.wait()
        return self.by_torch.barrier(*args, **keywords)

    allgather = _left_to_torch("allgather")
    allgather_coalesced = _left_to_torch("allgather_coalesced")
    alltoall = _left_to_torch("alltoall")
    gather = _left_to_torch("gather")
    monitored_barrier = _left_to_torch("monitored_barrier")
    reduce = _left_to_torch("reduce")
    reduce_scatter = _left_to_torch("reduce_scatter")
    scatter = _left_to_torch("scatter")
    split_group = _left_to_torch("split_group")
    merge_remote_group = _left_to_torch("merge_remote_group")
    get_group_store = _left_to_torch("get_group_store")
    _set_sequence_number_for_group = _left_to_torch("_set_sequence_number_for_group")
    _get_sequence_number_for_group = _left_to_torch("_get_sequence_number_for_group")
    _enable_collectives_timing = _left_to_torch("_enable_collectives_timing")

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin a batch of calls; torch runs all but messages, and `_end_coalescing` returns one work for the batch."""
        self._coalescing = True
        self.by_torch._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        """End the batch that `_start_coalescing` began, and return one work for its calls."""
        self._coalescing = False
        by_torch, messages = self.inner.group._end_coalescing(device), self._coalesced
        self._coalesced = []
        if not messages:
            return by_torch
        works: list[Work] = [work for message in messages for work in message.works]
        if by_torch is not None:
            works.append(TorchWork("coalesced calls", [by_torch]))
        return StartedWork(works, [tensor for message in messages for tensor in message.result()])

    # which route a call takes

    def _take(self, operation: str, outputs: Sequence[Tensor], num_bytes: int, op: str = "") -> AnyCommunicator | None:
        """Return the communicator if it runs this call, None if torch does; count the call in the report."""
        route = self._route(operation, outputs, num_bytes, op)
        if route.path == "torch":
            self._left(operation, num_bytes, route.why)
            return None
        communicator: AnyCommunicator = self.rank_group.communicator
        place = "in place" if communicator.is_symmetric(outputs[0]) else "copied from its landing"
        place += "" if outputs[0].is_contiguous() else ", not contiguous"
        over_hosts = isinstance(communicator, HierarchicalCommunicator)
        why = f"{place}, {route.why}" if route.why else place
        self.counts.add(operation, num_bytes, "hosts" if over_hosts else "zero_sm", why)
        return communicator

    def _left(self, operation: str, num_bytes: int, why: str) -> None:
        """Count a call that torch runs, with the reason, for the report."""
        self.counts.add(operation, num_bytes, "torch", why)

    def _takes_all(self, operation: str, outputs: list[Tensor], full: list[Tensor], op: str = "") -> bool:
        """Return whether the communicator runs all calls of a batch; if not, count all calls as run by torch."""
        whys = [
            self._route(operation, [one], num_bytes_of(its), op).torch_why
            for one, its in zip(outputs, full, strict=True)
        ]
        if not any(whys):
            return True
        for its, why in zip(full, whys, strict=True):
            self._left(operation, num_bytes_of(its), why or "coalesced with a call that torch makes")
        return False

    def _route(self, operation: str, outputs: Sequence[Tensor], num_bytes: int, op: str) -> Route:
        """Return a call's `Route`, equal on all ranks: torch or the communicator, which is opened if needed."""
        ranks = self.rank_group
        why = ranks.why_not or self._why_not_these(outputs)
        if not why and self._crossovers is None:
            self._agree(outputs[0].device)
            why = ranks.why_not
        if why:
            return Route("torch", why)
        route = ranks.route(operation, num_bytes, outputs[0].dtype, op, why_torch=self._why_left)
        if route.path == "torch":
            return route
        if self._coalescing:
            return Route("torch", "coalesced")
        if not ranks.is_open:
            try:
                ranks.open(outputs[0].device)
            except Unsupported as error:
                return Route("torch", str(error))
        return route

    def _why_left(self, operation: str, num_bytes: int, dtype: torch.dtype, op: str, chosen: bool) -> str:
        """Return why torch runs calls of this kind, from arguments that are equal on all ranks; "" if it does not."""
        if not chosen and num_bytes < self._crossover(operation):
            return "below the crossover"
        if op and not reduces(op, dtype):
            return "a reduction that only torch has"
        may_land = self._device_type != "cuda" or self._has_symmetric_memory
        if not may_land and landing_bytes(self._on_hosts(), operation, num_bytes) > PIECE_BYTES:
            return f"more than {PIECE_BYTES >> 20} MiB without symmetric_memory"
        return ""

    def _why_not_these(self, outputs: Sequence[Tensor]) -> str:
        """Return why no communicator can run any call with these outputs; "" if one can."""
        if len(outputs) != 1:
            return "several tensors" if outputs else "no tensor"
        if outputs[0].device.type != self._device_type:
            return f"tensors on {outputs[0].device.type}"
        return "sparse" if outputs[0].layout is not torch.strided else ""

    def _crossover(self, operation: str) -> int:
        """Return the fewest bytes for which the communicator runs a call, from options or measurements against NCCL.

        In a group with symmetric memory, calls of the size of gradient buckets run beside matmuls: their own time
        matters less than the SMs that NCCL would take from those matmuls. So such a group takes reductions from a
        bucket's size on, if no size is given.
        """
        measured = (self._crossovers or {}).get(operation, 0)
        given = operation in (self._options.crossover_bytes or {})
        may_be_bucket = self._has_symmetric_memory and operation in ("all_reduce", "reduce_scatter") and not given
        return min(measured, _BUCKET_BYTES) if may_be_bucket else measured

    def _agree(self, device: torch.device) -> None:
        """Read the tuning and the least sizes for the communicator; check that options are equal on all ranks.

        All ranks call this together. An operation that was not measured against NCCL is left to NCCL, unless its size
        is given; otherwise the communicator runs calls of at least the crossover, and at least one byte.
        """
        with self._agreeing:
            if self._crossovers is not None:
                return
            try:
                hosts = self._on_hosts()
            except Unsupported as error:
                self.rank_group.why_not, self._crossovers = str(error), {}
                return
            group, given = self.inner.group, dict(self._options.crossover_bytes or {})
            self.rank_group.follow(follow_together(self._options.tuned, [group], device_type=self._device_type))
            profile = device_profile(group, device, self.rank_group.options.profile)
            decide = {"crossover_bytes": given, "profile": profile.digest, "mailbox_bytes": self._options.mailbox_bytes}
            check_agreement(group, decide)
            found = crossovers_over_hosts(crossovers(profile, given), given, hosts)
            self._crossovers = {name: max(size, 1) if size or name in given else _NEVER for name, size in found.items()}

    def _all_reduce(
        self,
        taken: AnyCommunicator,
        tensor: Tensor,
        opts: Any,
        op: str,
        factor: float,
        *,
        in_background: bool = False,
    ) -> StartedWork:
        """Start an all_reduce by the communicator `taken`, and return its work."""
        return self._started(
            opts,
            tensor,
            lambda target, async_op: all_reduce_in_pieces(
                taken, target.view(-1), op, factor, _CHANNEL, async_op=async_op
            ),
            in_background=in_background,
        )

    def _started(self, opts: Any, output: Tensor, start: Start, *, in_background: bool = False) -> StartedWork:
        """Start a call, on the current stream if it is synchronous, and keep its work alive until the call ends."""
        # a call's order does not depend on the thread that starts it, so the choice may depend on the layout here;
        # on a CPU the thread runs the callbacks of all calls, and their calls have to be in order, too
        if opts.asyncOp and (in_background or self._device_type == "cpu" or not output.is_contiguous()):
            call = self.rank_group.background().start(lambda _channel: _write(output, start), _CHANNEL, [output])
            return self._kept(StartedWork([call], [output], call.future))
        self.rank_group.drain()
        if opts.asyncOp:
            return self._kept(StartedWork([work for work in start(output, True) if work is not None], [output]))
        _write(output, start)
        return StartedWork([], [output])

    def _kept(self, started: StartedWork) -> StartedWork:
        with self._keeping:
            running = self._running
            while running and (running[0].was_waited_for or running[0].is_completed()):
                running.popleft()
            if started.works:
                running.append(started)
        return started


def _write(output: Tensor, start: Start) -> None:
    """Run a call on the current stream; fill an `output` that is not contiguous through a contiguous copy."""
    target = output.contiguous()
    start(target, False)
    if target is not output:
        output.copy_(target)


def report(group: Any = None) -> Report:
    """Return a report of a group's calls: how many ran on each path (`torch`, `zero_sm`, `hosts`), and why.

    Args:
        group: a group of backend `counterpoint`; None: the default one.

    Raises:
        Misconfigured: the group is of another backend.
    """
    return group_of_backend(group).report()


def group_of_backend(group: Any = None) -> CounterpointGroup:
    """Return `group`, or the default one; raise `Misconfigured` if it is not of this backend or lacks this rank."""
    group = group if group is not None else dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise Misconfigured("this rank is not in the group; ask one of its ranks")
    if not isinstance(group, CounterpointGroup):
        raise Misconfigured(
            f"a group of backend {dist.get_backend(group)}: make it with backend={NAME!r} after importing "
            "counterpoint.torch_backend"
        )
    return group
