"""Run DDP's gradient buckets through a `Communicator`: by one line, or as a communication hook.

    model = DistributedDataParallel(model, bucket_cap_mb=100)
    overlapped = counterpoint.overlap(model)

DDP keeps its process group for all else. `print(overlapped)` says what was done; `overlapped.restore()` takes it back.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.multihost.hierarchical import AnyCommunicator
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.parallel.backend.group import CounterpointGroup, torch_group
from counterpoint.parallel.background import PIECE_BYTES, Background, all_reduce_in_pieces, pieces
from counterpoint.parallel.tuned import FollowedTuning, follow_together
from counterpoint.records import Record
from counterpoint.records.tuning import Tuned

Future: TypeAlias = "torch.futures.Future[Tensor]"

_BLOCK = 256  # elements that share a scale in float8
_LARGEST = 448.0  # of float8_e4m3fn
_TRIES = 8  # forward passes after which buckets that DDP has not rebuilt stay where they are


@dataclass(frozen=True, kw_only=True)
class DdpOptions(CommunicatorOptions):
    """Holds options of DDP's hook, besides those of its communicator.

    Args:
        wire_dtype: what gradients are sent as: torch.bfloat16, or torch.float8_e4m3fn with a scale for every 256
            elements, of which the averages come back as bfloat16; None: as they are. Sums are always in float32 at
            least.

    Raises:
        Misconfigured: another dtype.
    """

    wire_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.wire_dtype not in (None, torch.bfloat16, torch.float8_e4m3fn):
            raise Misconfigured(f"wire_dtype={self.wire_dtype}: give torch.bfloat16, torch.float8_e4m3fn or None")
        super().__post_init__()


class DdpReport(Record, frozen=True, kw_only=True):
    """Reports what the hook of one DDP model has done so far.

    Args:
        ranks: number of ranks.
        wire_dtype: torch's name of what gradients are sent as; empty: as they are.
        in_place: buckets that peers wrote in place, or that went through a buffer of the wire's dtype.
        copied: buckets that were copied from a landing.
        num_bytes: bytes of all these buckets.
        by_torch: buckets that torch reduced, after `restore`.
        left: buckets that torch reduced, as the tuning chose.
        choices: what the tuning chose for buckets so far, and why.
        tuned: which file is followed, and how many of its choices so far; empty: none is named.
    """

    ranks: int
    wire_dtype: str
    in_place: int
    copied: int
    num_bytes: int
    by_torch: int
    left: int = 0
    choices: tuple[str, ...] = ()
    tuned: str = ""

    def __str__(self) -> str:
        wire = f", sent as {self.wire_dtype}" if self.wire_dtype else ""
        text = (
            f"DDP over {self.ranks} ranks: {self.in_place} buckets in place, {self.copied} copied from a landing, "
            f"{self.num_bytes / 1e6:,.1f} MB{wire}"
        )
        text += f"; {self.left} by torch, as tuned" if self.left else ""
        text += f"; {self.by_torch} by torch since restore()" if self.by_torch else ""
        return "\n".join([text, *self.choices, *([f"tuned: {self.tuned}"] if self.tuned else [])])


class HookState:
    """Holds what `hook` needs for one model: `model.register_comm_hook(HookState(), counterpoint.ddp.hook)`.

    All ranks make it together.

    Args:
        group: the model's process group; None: the default one. One of backend `counterpoint` lends its communicator.
        options: None: the defaults.
        tuning: chooses which buckets are left to torch, unless `wire_dtype` is given; None: none is.
        device: of the gradients; None: a GPU if the group has a backend for GPUs.

    Raises:
        Unsupported: the ranks cannot share memory, or there is one alone.
        Misconfigured: options are given for a group of backend `counterpoint`, which has its own, but `wire_dtype`.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        options: DdpOptions | None = None,
        tuning: FollowedTuning | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.group: Any = dist.group.WORLD if group is None else group
        self._wire = None if options is None else options.wire_dtype
        lender = self.group if isinstance(self.group, CounterpointGroup) else None
        self._is_lent = lender is not None
        if dist.get_world_size(self.group) < 2:
            raise Unsupported("DDP of one rank: there is nothing to reduce")
        if lender is not None:
            if options not in (None, DdpOptions(wire_dtype=self._wire)):
                raise Misconfigured("options for a group of backend counterpoint: give them as its pg_options")
            communicator: AnyCommunicator | None = lender.communicator(device)
            if communicator is None:
                raise Unsupported(f"DDP's group: {lender.why_not}")
        else:
            options = options or DdpOptions()
            chunk_bytes = options.chunk_bytes or 2 * PIECE_BYTES  # in one: what runs beside matmuls need not be early
            options = replace(options, chunk_bytes=chunk_bytes)
            communicator = Communicator(self.group, options=options, device=device)
        self.communicator: AnyCommunicator = communicator
        self._background = lender.background() if lender is not None else Background(communicator)
        self._in_place = self._copied = self._num_bytes = self._by_torch = self._left = 0
        self._tuning, self._choices = tuning, dict[str, None]()
        self._is_on = True

    def report(self) -> DdpReport:
        """Return what the hook has done so far."""
        return DdpReport(
            ranks=self.communicator.world_size,
            wire_dtype="" if self._wire is None else str(self._wire).removeprefix("torch."),
            in_place=self._in_place,
            copied=self._copied,
            num_bytes=self._num_bytes,
            by_torch=self._by_torch,
            left=self._left,
            choices=tuple(self._choices),
            tuned="" if self._tuning is None else str(self._tuning),
        )

    def close(self) -> None:
        """Let torch reduce later buckets, and close the communicator unless it is a group's. All ranks call it."""
        if self._is_on and not self._is_lent:
            self._background.close()
            self.communicator.close()
        self._is_on = False

    def average(self, bucket: Tensor, number: int) -> Future:
        """Replace a flat bucket by its average over all ranks, behind the current stream; return a future of it."""
        if not self._is_on:
            self._by_torch += 1
            return _averaged_by_torch(bucket, self.group)
        if self._is_left(bucket):
            self._left += 1
            return _averaged_by_torch(bucket, torch_group(self.group))
        values = torch.view_as_real(bucket).view(-1) if bucket.is_complex() else bucket
        wire = self._wire if self._wire is not None and values.dtype.itemsize > self._wire.itemsize else None
        if wire is not None or self.communicator.is_symmetric(values):
            self._in_place += 1
        else:
            self._copied += 1
        self._num_bytes += bucket.nbytes
        run = {None: self._average, torch.bfloat16: self._average_as_bfloat16}.get(wire, self._average_as_float8)
        # By its number a bucket keeps its channel, whose prepared calls are then repeated; not by where it lies, since
        # under torch's `Join` a rank without inputs has buckets of zeros in plain memory.
        channel = number % self.communicator.channels
        future: Future = self._background.start(partial(run, values), channel, bucket).future
        return future

    def _average(self, values: Tensor, channel: int) -> None:
        all_reduce_in_pieces(self.communicator, values, "avg", 1.0, channel)

    def _average_as_bfloat16(self, values: Tensor, channel: int) -> None:
        for piece in pieces(values):
            self._average_piece_as_bfloat16(piece, channel)

    def _average_piece_as_bfloat16(self, values: Tensor, channel: int) -> None:
        wire = self.communicator.empty(values.numel(), dtype=torch.bfloat16)
        wire.copy_(values)
        self.communicator.all_reduce(wire, "avg", channel=channel)
        values.copy_(wire)

    def _average_as_float8(self, values: Tensor, channel: int) -> None:
        for piece in pieces(values):
            self._average_piece_as_float8(piece, channel)

    def _average_piece_as_float8(self, values: Tensor, channel: int) -> None:
        """Exchange quantised blocks, add them up in float32, and gather the averages as bfloat16."""
        communicator, ranks = self.communicator, self.communicator.world_size
        blocks = -(-values.numel() // (ranks * _BLOCK))  # of each rank
        padded = torch.zeros(ranks, blocks, _BLOCK, dtype=torch.float32, device=values.device)
        padded.view(-1)[: values.numel()].copy_(values)
        scales = padded.abs().amax(dim=2, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / _LARGEST
        sent = communicator.empty(ranks, blocks, _BLOCK + 4, dtype=torch.uint8)
        sent[:, :, :_BLOCK] = (padded / scales).to(torch.float8_e4m3fn).view(torch.uint8)
        sent[:, :, _BLOCK:] = scales.view(torch.uint8)
        received = communicator.empty(ranks, blocks, _BLOCK + 4, dtype=torch.uint8)
        communicator.all_to_all(received, sent, channel=channel)
        scales = received[:, :, _BLOCK:].contiguous().view(torch.float32)
        whole = communicator.empty(ranks, blocks * _BLOCK, dtype=torch.bfloat16)
        mine = whole[communicator.rank]
        parts = received[:, :, :_BLOCK].contiguous().view(torch.float8_e4m3fn).float() * scales
        mine.copy_((parts.sum(dim=0) / ranks).view(-1))
        communicator.all_gather(whole, mine, channel=channel)
        values.copy_(whole.view(-1)[: values.numel()])

    def _is_left(self, bucket: Tensor) -> bool:
        """Return whether the tuning leaves such a bucket to torch."""
        if self._tuning is None or self._wire is not None:
            return False
        dtype = str(bucket.dtype).removeprefix("torch.")
        ranks = self.communicator.world_size
        choice = self._tuning.find("all_reduce", ranks=ranks, num_bytes=bucket.nbytes, dtype=dtype)
        if choice is None:
            return False
        self._choices[f"all_reduce of {bucket.nbytes / 1e6:,.1f} MB: {choice.why}"] = None
        return choice.stays


def _averaged_by_torch(bucket: Tensor, group: Any) -> Future:
    bucket.div_(dist.get_world_size(group))
    work: Any = dist.all_reduce(bucket, group=group, async_op=True)
    chained: Future = work.get_future().then(lambda done: done.value()[0])
    return chained


def hook(state: HookState, bucket: GradBucket) -> Future:
    """Average a bucket of gradients over all ranks: a communication hook of DDP.

    It replaces DDP's all_reduce by a reduce_scatter and an all_gather of copy engines. Sums are in float32 at least,
    in the order of ranks, and rounded once.

    Args:
        state: state of the model.
        bucket: flat gradients of this rank, which are replaced.

    Returns:
        A future of the bucket, in stream order on a GPU.
    """
    return state.average(bucket.buffer(), bucket.index())


hook.__annotations__ |= {"bucket": GradBucket, "return": torch.futures.Future[Tensor]}  # DDP compares them, not text


class SymmetricBuckets:
    """Lets a DDP model make its buckets in symmetric memory when it makes them anew, before its second or third step.

    DDP makes them anew in the order in which gradients became ready, unless it has unused parameters. All ranks make
    this together.

    Args:
        model: the model.
        communicator: maps the memory to all ranks; on a CPU this does nothing.
    """

    def __init__(self, model: DistributedDataParallel, communicator: AnyCommunicator) -> None:
        self._model, self._communicator = model, communicator
        self._inside = ExitStack()
        self._tries = _TRIES
        self._pre_hooks: list[Any] = []
        if communicator.device.type == "cuda" and not model.find_unused_parameters:
            enter, leave = torch.compiler.disable(self._enter), torch.compiler.disable(self._leave)
            self._pre_hooks = [
                model.register_forward_pre_hook(enter, prepend=True),
                model.module.register_forward_pre_hook(leave, prepend=True),
            ]

    def remove(self) -> None:
        """Leave later buckets in plain memory."""
        while self._pre_hooks:
            self._pre_hooks.pop().remove()

    def _enter(self, *_: object) -> None:
        self._inside.enter_context(self._communicator.memory_pool())

    def _leave(self, *_: object) -> None:
        self._inside.close()
        self._tries -= 1
        if self._tries == 0 or self._model._get_ddp_logging_data().get("has_rebuilt_buckets"):
            self.remove()


class OverlappedDdp:
    """Reports what was replaced in a DDP model, and gives buckets back to torch: by `restore`, or at the end of `with`.

    Args:
        model: no backward pass was run yet, and it has no hook.
        options: None: the defaults.
        tuned: as in `overlap`.

    Raises:
        Unsupported: the ranks cannot share memory, or there is one alone.
        Misconfigured: the model has a hook, or has run a backward pass; a tuning that cannot be read or is not the same
            on all ranks.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        options: DdpOptions | None = None,
        tuned: Tuned | str | Path | None = None,
    ) -> None:
        group, device = model.process_group, next(model.parameters()).device
        tuning = follow_together(tuned, [group], device_type=device.type)
        state = HookState(group, options=options, tuning=tuning, device=device)
        try:
            model.register_comm_hook(state, hook)
        except (RuntimeError, ValueError) as error:
            state.close()
            raise Misconfigured(
                f"DDP takes no hook now: {error}; call overlap right after DistributedDataParallel"
            ) from error
        self._state = state
        self._buckets = SymmetricBuckets(model, state.communicator)
        self._limit = ExitStack()
        if tuning is not None:
            tuning.limit_gemms(self._limit, device.type)

    def __enter__(self) -> OverlappedDdp:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def __str__(self) -> str:
        return str(self.report())

    def report(self) -> DdpReport:
        """Return what the hook has done so far."""
        return self._state.report()

    def check(self) -> None:
        """Raise the error that ended communication, if there was one; it names the ranks."""
        self._state.communicator.check()

    def restore(self) -> None:
        """Let torch reduce all later buckets, and close the communicator. All ranks call it, between two steps.

        DDP keeps the hook for good, which from then on only calls torch.
        """
        self._limit.close()
        self._buckets.remove()
        self._state.close()
