"""Be a torch process group: large collectives through a `Communicator`, the others through NCCL (gloo on CPUs).

What decides is equal on all ranks (`why_torch`): operation, size, dtype and reduction of a call, options that they have
compared, and whether all have left `symmetric_memory`. Never where a tensor lies, or how: a call with an output that is
not contiguous writes a copy first. All collectives run on one channel, in the order of the program; asynchronous
all_reduces (on CPUs, all asynchronous calls), and callbacks that make collectives, in a thread (`background.py`), which
every later collective waits for.

The communicator is made at the first call that it takes; over several hosts it is that of `hosts.py`. Where the ranks
of a host cannot share memory, torch's own backends make all calls, and the report says why. Messages between two GPUs
of a host go through mailboxes (`messages.py`), whatever their size: both ends decide alike.

No call may fall through to the base class: torch's trampoline would make it with the GIL held, and deadlock with
gloo's threads, which need it to drop tensors (torch 2.11 to 2.13). So each is handed to an inner group.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
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
from counterpoint.parallel.arguments import call_options, num_bytes_of, op_and_factor, reduces
from counterpoint.parallel.backend import NAME
from counterpoint.parallel.backend.hosts import (
    crossovers_over_hosts,
    grid_of_group,
    landing_bytes,
    open_communicator,
)
from counterpoint.parallel.backend.inner import EndedGroup, InnerGroup
from counterpoint.parallel.backend.messages import MessagePair, MessagePairs
from counterpoint.parallel.backend.report import BackendReport, CallCounts
from counterpoint.parallel.backend.work import StartedWork, never_compiled, together
from counterpoint.parallel.background import PIECE_BYTES, Background, all_reduce_in_pieces
from counterpoint.parallel.tuned import FollowedTuning, TunedCall, follow_together
from counterpoint.records.tuning import Tuned

c10d: Any = _distributed_c10d  # its stubs lack half of it
_CHANNEL = 0  # of all collectives: torch's groups run theirs in order
_NEVER = 1 << 62
_SHUT_DOWN = "the group is shut down"
_BUCKET_BYTES = 1 << 22  # from this size on reductions are taken by a group with symmetric memory: see `_crossover`


@dataclass(frozen=True, kw_only=True)
class BackendOptions(CommunicatorOptions):
    """Holds options of the backend `counterpoint`, given as `pg_options`, besides those of its communicator.

    Args:
        nccl: `ProcessGroupNCCL.Options` of the inner group; None: NCCL's defaults.
        ranks_per_host: so many consecutive ranks count as a host, equal on all ranks; None: those of one machine do.
        crossover_bytes: by operation, bytes of the full array below which torch takes a call; None: as measured.
        mailbox_bytes: device memory for the messages from each rank that sends any to this one; None: NCCL sends them.
        tuned: what `counterpoint tune` chose, or its file: for calls that it has a choice for, that comes before the
            crossovers. `off`: none; None: the file that the variable COUNTERPOINT_TUNED names.

    Raises:
        Misconfigured: an option is out of range.
    """

    nccl: Any = None
    ranks_per_host: int | None = None
    crossover_bytes: Mapping[str, int] | None = None
    mailbox_bytes: int | None = 1 << 26
    tuned: Tuned | str | Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ranks_per_host is not None and self.ranks_per_host < 1:
            raise Misconfigured(f"ranks_per_host={self.ranks_per_host}: give 1 or more, or None")

    @property
    def _timeout(self) -> timedelta:
        """Return the timeout, which torch's meshes read here."""
        return timedelta(seconds=self.timeout_s)


Start: TypeAlias = Callable[[Tensor, bool], Sequence[Work | None]]
"""Starts a call that writes a contiguous tensor, asynchronously or on the current stream; returns its works."""
_DECIDED_HERE: dict[str, Any] = {"mailbox_bytes": None}  # not by the communicator


def _own_options(options: CommunicatorOptions) -> BackendOptions:
    """Return the options of a group, given those of any communicator."""
    return options if isinstance(options, BackendOptions) else BackendOptions(**options.of_communicator())


def _left_to_torch(name: str) -> Any:
    """Return a method that makes the same call of the inner group, and is not counted."""

    def call(self: CounterpointGroup, *args: Any, **keywords: Any) -> Any:
        return getattr(self.by_torch, name)(*args, **keywords)

    call.__name__, call.__doc__ = name, f"Do `ProcessGroup.{name}` by the inner group."
    return call


@never_compiled
class CounterpointGroup(dist.ProcessGroup):
    """Is a process group whose large collectives take no SM.

    Args:
        options: what torch hands to a backend: store, rank, size, timeout and ranks.
        backend_options: the `pg_options` of the call that makes the group; None: the defaults, with the timeout of
            that call.

    Raises:
        Misconfigured: `backend_options` are those of another backend.
    """

    def __init__(self, options: Any, backend_options: BackendOptions | CommunicatorOptions | None) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        if not isinstance(backend_options, CommunicatorOptions | None):
            raise Misconfigured(
                f"pg_options of type {type(backend_options).__name__}: give counterpoint.torch_backend.BackendOptions "
                "(its `nccl` holds those of NCCL), or none"
            )
        self._options = _own_options(backend_options or BackendOptions(timeout_s=options.timeout.total_seconds()))
        self.inner = InnerGroup(options, self._options.nccl)
        for device, (kind, backend) in self.inner.backends.items():  # who asks for a device's backend gets torch's own
            self._register_backend(torch.device(device), kind, backend)
        self._device_type = next(iter(self.inner.backends))  # of the tensors that the communicator takes
        self._size: int = options.group_size
        self.counts = CallCounts()
        self._communicator: AnyCommunicator | None = None
        self._hosts: Grid | None = None
        self._crossovers: dict[str, int] | None = None
        self._has_symmetric_memory = False
        self._tuning: FollowedTuning | None = None
        self.why_not = "one rank" if self._size == 1 else self.inner.why_alone
        self._background: Background | None = None
        self._coalescing = False
        self._coalesced: list[StartedWork] = []  # messages of the batch that `_start_coalescing` began
        self._pairs = MessagePairs(self.inner, self._options, self._options.ranks_per_host)
        self._running: deque[StartedWork] = deque()  # kept alive until they have ended, whoever drops them
        self._keeping = threading.Lock()  # of `_running`: callbacks make calls in the background's thread
        self._opening = threading.RLock()  # one thread opens what all use

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name of the backend."""
        return NAME

    def report(self) -> BackendReport:
        """Return which calls went which way, and why."""
        report = self.counts.report()
        return report if self._tuning is None else replace(report, tuned=str(self._tuning))

    def communicator(self, device: torch.device | None = None) -> AnyCommunicator | None:
        """Return the communicator, made at the first call, by all ranks together; None where they cannot have one.

        `device` None is the current GPU, or the CPU if there is none.
        """
        with self._opening:
            hosts = self._on_hosts()
            if self._communicator is None and hosts is not None:
                on_gpu = self._device_type == "cuda"
                current = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
                options = CommunicatorOptions(**(self._options.of_communicator() | _DECIDED_HERE))
                try:
                    self._communicator = open_communicator(self.inner, hosts, device or current, options)
                except Unsupported as error:
                    self.why_not, self._hosts = str(error), None
            return self._communicator

    def _on_hosts(self) -> Grid | None:
        """Return how the ranks lie on hosts, found at the first call, by all together; None: no communicator."""
        if self._hosts is None and self.why_not is None:
            self.inner.register()
            try:
                self._hosts = grid_of_group(self.inner.group, self._options.ranks_per_host)
            except Unsupported as error:
                self.why_not = str(error)
        return self._hosts

    def take_buckets(self) -> None:
        """Take reductions from 4 MiB on from now on, unless the options say otherwise. All ranks call it together.

        Their buckets of gradients lie where peers write them, so that they take few SMs, and run beside matmuls.
        """
        self._drain()  # calls in callbacks of earlier ones decide as before
        self._has_symmetric_memory = True

    def background(self) -> Background:
        """Return what starts buckets on the group's communicator, which is there already."""
        with self._opening:
            if self._background is None:
                assert self._communicator is not None
                self._background = Background(self._communicator)
            return self._background

    @property
    def by_torch(self) -> Any:
        """Return the inner group, for a call behind those of callbacks: so its calls have one order on all ranks."""
        if self.why_not == _SHUT_DOWN:
            return EndedGroup()  # a callback, whose call no other rank may make
        self._drain()
        return self.inner.group

    def _drain(self) -> None:
        if self._background is not None:
            self._background.drain()

    def close(self, how: Literal["close", "abort"] = "close") -> None:
        """Close the communicator, or abort it; torch's own backends are not touched."""
        background, self._background = self._background, None
        communicator, self._communicator = self._communicator, None
        self.why_not, self._hosts = _SHUT_DOWN, None
        ends = [one for one in (background, communicator) if one is not None]
        waits = how == "close" and self._device_type == "cuda"  # else the communicator fails what the thread runs
        for one in ends if waits else ends[::-1]:
            getattr(one, how)()
        self._running.clear()
        self._pairs.end(how)
        self.inner.unregister()

    def shutdown(self) -> None:
        """End the group, as `destroy_process_group` does."""
        self.close()
        self.inner.end("shutdown")

    def abort(self) -> None:
        """End the group without waiting for calls under way, and fail those that still have to be started."""
        self.close("abort")
        self.inner.end("abort")

    # calls that a communicator may take

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None) -> Any:  # type: ignore[override]
        """Reduce a tensor over all ranks, in place; as for torch, `opts` may be the reduction alone."""
        opts = call_options(c10d.AllreduceOptions, opts, "reduceOp", op, timeout)
        tensors = tensors if isinstance(tensors, list) else [tensors]
        taken = self._take("all_reduce", tensors, sum(map(num_bytes_of, tensors)), opts.reduceOp)
        if taken is None:
            return self.by_torch.allreduce(tensors, opts)
        return self._all_reduce(taken, tensors[0], opts, in_background=True)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None, *, root: Any = None) -> Any:  # type: ignore[override]
        """Send the root's tensor to all ranks; as for torch, `opts` may be the root alone."""
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
        """Gather every rank's tensor in one."""
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
        """Reduce a tensor over all ranks, a block on each."""
        opts = opts or c10d.ReduceScatterOptions()
        taken = self._take("reduce_scatter", [output], input.nbytes, opts.reduceOp)
        if taken is None:
            return self.by_torch._reduce_scatter_base(output, input, opts)
        op, factor = op_and_factor(opts.reduceOp)
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
        """Send block r to rank r; with split sizes, which other ranks do not know, torch's own backend does it."""
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

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Do `_allgather_base`, by its name since torch 2.13."""
        return self._allgather_base(output, input, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Do `_reduce_scatter_base`, by its name since torch 2.13."""
        return self._reduce_scatter_base(output, input, opts)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Any:
        """Do `alltoall_base`, by its name since torch 2.13."""
        return self.alltoall_base(output, input, output_splits, input_splits, opts)

    # messages

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Any:
        """Send a tensor to rank `dst`; through a mailbox this begins before the receive is posted."""
        return self._message("send", tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Any:
        """Receive the tensor that rank `src` sends."""
        return self._message("recv", tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        """Receive the tensor that any rank sends; NCCL cannot."""
        self._left("recv", tensors[0].nbytes, "from any rank")
        return self.inner.group.recv_anysource(tensors, tag)

    def _message(self, operation: str, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """Start a message on its line; within a batch that torch knows of, torch's own backend makes what is its."""
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
        """Return the pair that takes a message, the same on both of its ranks; None: the inner group. Count it."""
        why = self._pairs.why_torch(peer, tensor, tag)
        found = why if why is not None else self._pairs.by_mailbox(peer, tensor.device)
        if not isinstance(found, str):
            self.counts.add(operation, tensor.nbytes, "zero_sm", "through a mailbox")
            return found
        self._left(operation, tensor.nbytes, found)
        if self._coalescing or tensor.device.type != self._pairs.device_type:
            return None
        return self._pairs.by_torch(peer, tensor.device)

    # several calls at once; functional collectives, and DTensor with them, make even one call in this way

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce each tensor over all ranks, in place."""
        opts = opts or c10d.AllreduceCoalescedOptions()
        if not self._takes_all("all_reduce", tensors, tensors, opts.reduceOp):
            return self.by_torch.allreduce_coalesced(tensors, opts)
        by_size = sorted(range(len(tensors)), key=lambda number: tensors[number].numel())
        once = {tensors[number].data_ptr(): number for number in by_size}  # of several at one place the largest
        works = []
        for tensor in [one if once[one.data_ptr()] == number else one.clone() for number, one in enumerate(tensors)]:
            taken = self._take("all_reduce", [tensor], tensor.nbytes, opts.reduceOp)
            assert taken is not None  # `_takes_all`
            works.append(self._all_reduce(taken, tensor, opts))
        return together(works)

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Gather every rank's tensor in one, for each pair of an output and an input."""
        opts = opts or c10d.AllgatherOptions()
        if not self._takes_all("all_gather", outputs, outputs):
            return self.by_torch.allgather_into_tensor_coalesced(outputs, inputs, opts)
        return together([self._allgather_base(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Reduce each input over all ranks, a block on each."""
        opts = opts or c10d.ReduceScatterOptions()
        if not self._takes_all("reduce_scatter", outputs, inputs, opts.reduceOp):
            return self.by_torch.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        return together([self._reduce_scatter_base(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Do `allgather_into_tensor_coalesced`, by its name since torch 2.13."""
        return self.allgather_into_tensor_coalesced(outputs, inputs, opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Do `reduce_scatter_tensor_coalesced`, by its name since torch 2.13."""
        return self.reduce_scatter_tensor_coalesced(outputs, inputs, opts)

    # calls that it leaves to torch

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a rank waits for another, in the communicators, too; over hosts: of the ranks of this one."""
        self._options = replace(self._options, timeout_s=timeout.total_seconds())
        if self._communicator is not None:
            self._communicator.set_timeout(timeout.total_seconds())
        self._pairs.set_timeout(timeout.total_seconds())
        self.inner.group.set_timeout(timeout)

    def barrier(self, *args: Any, **keywords: Any) -> Any:
        """Wait for all ranks, and as in torch's own backends for all earlier calls."""
        self._drain()
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
        """Begin a batch of calls, which go to torch except messages: `_end_coalescing` returns one work for all."""
        self._coalescing = True
        self.by_torch._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        """End the batch that `_start_coalescing` began, and return its work."""
        self._coalescing = False
        by_torch, messages = self.inner.group._end_coalescing(device), self._coalesced
        self._coalesced = []
        if not messages:
            return by_torch
        works: list[Work] = [work for message in messages for work in message.works]
        if by_torch is not None:
            works.append(TorchWork("coalesced calls", [by_torch]))
        return StartedWork(works, [tensor for message in messages for tensor in message.result()])

    # what decides

    def _take(
        self, operation: str, outputs: Sequence[Tensor], num_bytes: int, op: Any = None
    ) -> AnyCommunicator | None:
        """Return the communicator if it takes this call; None if torch makes it. Count the call."""
        why = self._why_torch(operation, outputs, num_bytes, op)
        if why is not None:
            self._left(operation, num_bytes, why)
            return None
        communicator = self._communicator
        assert communicator is not None
        place = "in place" if communicator.is_symmetric(outputs[0]) else "copied from its landing"
        place += "" if outputs[0].is_contiguous() else ", not contiguous"
        choice = self._choice(operation, num_bytes)
        place += "" if choice is None else f", {choice.why}"
        over_hosts = isinstance(communicator, HierarchicalCommunicator)
        self.counts.add(operation, num_bytes, "hosts" if over_hosts else "zero_sm", place)
        return communicator

    def _left(self, operation: str, num_bytes: int, why: str) -> None:
        """Count a call that torch makes."""
        self.counts.add(operation, num_bytes, "torch", why)

    def _takes_all(self, operation: str, outputs: list[Tensor], full: list[Tensor], op: Any = None) -> bool:
        """Return whether the communicator takes all of these calls, whose whole arrays are `full`; if not, count."""
        whys = [
            self._why_torch(operation, [one], num_bytes_of(its), op) for one, its in zip(outputs, full, strict=True)
        ]
        if not any(whys):
            return True
        for its, why in zip(full, whys, strict=True):
            self._left(operation, num_bytes_of(its), why or "coalesced with a call that torch makes")
        return False

    def _why_torch(self, operation: str, outputs: Sequence[Tensor], num_bytes: int, op: Any) -> str | None:
        why = self.why_not or self._why_not_these(outputs)
        if why is not None:
            return why
        device, dtype = outputs[0].device, outputs[0].dtype
        with self._opening:
            if self._crossovers is None:
                self._crossovers = self._measured(device)
        why = self.why_not or self.why_torch(operation, num_bytes, dtype, op)
        if why is not None:
            return why
        if self._coalescing:
            return "coalesced"
        return None if self.communicator(device) is not None else self.why_not

    def why_torch(self, operation: str, num_bytes: int, dtype: torch.dtype, op: Any = None) -> str | None:
        """Return why torch makes the calls of a kind; None: a communicator takes them.

        The answer is the same on all ranks, which have to pass the same.

        Args:
            operation: as communicators name it.
            num_bytes: size of the full array.
            dtype: of the tensors.
            op: torch's reduction; None: there is none.
        """
        choice = self._choice(operation, num_bytes)
        if choice is not None and choice.stays:
            return choice.why
        if choice is None and num_bytes < self._crossover(operation):
            return "below the crossover"
        if op is not None and not reduces(op, dtype):
            return "a reduction that only torch has"
        may_land = self._device_type != "cuda" or self._has_symmetric_memory
        if not may_land and self._hosts is not None and landing_bytes(self._hosts, operation, num_bytes) > PIECE_BYTES:
            return f"more than {PIECE_BYTES >> 20} MiB without symmetric_memory"
        return None

    def _why_not_these(self, outputs: Sequence[Tensor]) -> str | None:
        """Return why no communicator takes these tensors, in whichever call."""
        if len(outputs) != 1:
            return "several tensors" if outputs else "no tensor"
        if outputs[0].device.type != self._device_type:
            return f"tensors on {outputs[0].device.type}"
        return "sparse" if outputs[0].layout is not torch.strided else None

    def _choice(self, operation: str, num_bytes: int) -> TunedCall | None:
        """Return what the tuning chose for a call; None: nothing."""
        if self._tuning is None:
            return None
        return self._tuning.find(operation, ranks=self._size, num_bytes=num_bytes)

    def _crossover(self, operation: str) -> int:
        """Return the size from which the communicator takes a call: as given, else as measured alone.

        A group with symmetric memory has buckets of gradients there, which are reduced beside matmuls: their own time
        matters less than the SMs that NCCL would take from those. So their size decides, where none is given.
        """
        measured = (self._crossovers or {}).get(operation, 0)
        given = operation in (self._options.crossover_bytes or {})
        may_be_bucket = self._has_symmetric_memory and operation in ("all_reduce", "reduce_scatter") and not given
        return min(measured, _BUCKET_BYTES) if may_be_bucket else measured

    def _measured(self, device: torch.device) -> dict[str, int]:
        """Return by operation the size from which the communicator takes a call, at least a byte. All ranks call it.

        They read the tuning here, too, and compare the options that decide which way a call goes.
        An operation that was not measured beside NCCL is left to it, unless its size is given. Nothing is returned if
        there can be no communicator.
        """
        hosts = self._on_hosts()
        if hosts is None:
            return {}
        groups = [self.inner.group]
        self._tuning = follow_together(self._options.tuned, groups, device_type=self._device_type)
        profile = device_profile(self.inner.group, device, self._options.profile)
        given = dict(self._options.crossover_bytes or {})
        decide = {"crossover_bytes": given, "profile": profile.digest, "mailbox_bytes": self._options.mailbox_bytes}
        check_agreement(self.inner.group, decide)
        found = crossovers_over_hosts(crossovers(profile, given), given, hosts)
        return {name: max(size, 1) if size or name in given else _NEVER for name, size in found.items()}

    def _all_reduce(
        self, taken: AnyCommunicator, tensor: Tensor, opts: Any, *, in_background: bool = False
    ) -> StartedWork:
        """Start an all_reduce by the communicator that takes it."""
        op, factor = op_and_factor(opts.reduceOp)
        return self._started(
            opts,
            tensor,
            lambda target, async_op: all_reduce_in_pieces(
                taken, target.view(-1), op, factor, _CHANNEL, async_op=async_op
            ),
            in_background=in_background,
        )

    def _started(self, opts: Any, output: Tensor, start: Start, *, in_background: bool = False) -> StartedWork:
        """Start a call, on the current stream unless it is asynchronous, and keep its work until it has ended."""
        # which thread starts it does not change its place in the order of calls, so it may depend on the layout here;
        # on a CPU it runs the callbacks of all of them, whose calls have their place, too
        if opts.asyncOp and (in_background or self._device_type == "cpu" or not output.is_contiguous()):
            call = self.background().start(lambda _channel: _write(output, start), _CHANNEL, [output])
            return self._kept(StartedWork([call], [output], call.future))
        self._drain()
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
    """Run a call on the current stream: on its output, or if that is not contiguous on a copy that is copied back."""
    target = output.contiguous()
    start(target, False)
    if target is not output:
        output.copy_(target)


def report(group: Any = None) -> BackendReport:
    """Return which calls of a group went which way, and why.

    Args:
        group: a group of backend `counterpoint`; None: the default one.

    Raises:
        Misconfigured: the group is of another backend.
    """
    return group_of_backend(group).report()


def torch_group(group: Any) -> Any:
    """Return the group of torch's own backend: the inner one of a group of this backend, else the group itself."""
    if not isinstance(group, CounterpointGroup):
        return group
    group.inner.register()
    return group.inner.group


def group_of_backend(group: Any = None) -> CounterpointGroup:
    """Return `group` (None: the default one); raise `Misconfigured` if it is another backend's or not this rank's."""
    group = group if group is not None else dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise Misconfigured("this rank is not in the group; ask one of its ranks")
    if not isinstance(group, CounterpointGroup):
        raise Misconfigured(
            f"a group of backend {dist.get_backend(group)}: make it with backend={NAME!r} after importing "
            "counterpoint.torch_backend"
        )
    return group
