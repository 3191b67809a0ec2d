"""Run the all_reduces of DDP's gradient buckets by a `Communicator`, through `overlap` or a communication hook.

    model = DistributedDataParallel(model, bucket_cap_mb=100)
    overlapped = counterpoint.overlap(model)

DDP keeps its process group for all else. `print(overlapped)` says what was done; `overlapped.restore()` takes it back.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from counterpoint.collectives.multihost.hierarchical import AnyCommunicator, HierarchicalCommunicator
from counterpoint.collectives.submit.tensors import dtype_name
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.parallel.background import PIECE_BYTES, all_reduce_in_pieces, pieces
from counterpoint.parallel.follow_tuning import FollowedTuning, follow_together
from counterpoint.parallel.group import CHANNELS, rank_group, torch_group
from counterpoint.parallel.options import DdpOptions
from counterpoint.parallel.report import CallCounts, ModuleRow, Report
from counterpoint.records.tuning import Tuned

Future: TypeAlias = "torch.futures.Future[Tensor]"

_BLOCK = 256  # elements that share a scale in float8
_LARGEST = 448.0  # the largest number of float8_e4m3fn
_TRIES = 8  # forward passes to wait for DDP to rebuild its buckets; after these they stay where they are


class HookState:
    """Holds the state of `hook` for one model: `model.register_comm_hook(HookState(), counterpoint.ddp.hook)`.

    All ranks make it together.

    Args:
        group: the model's process group; None: the default one. One of backend `counterpoint` lends its communicator.
        options: None: the defaults.
        tuning: chooses which buckets are left to torch, unless `wire_dtype` is given; None: none is.
        device: device of the gradients; None: a GPU if the group has a backend for GPUs.

    Raises:
        Unsupported: the ranks cannot share memory, or there is one alone.
        Misconfigured: the communicator of these ranks has other options.
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
        options = options or DdpOptions()
        self._wire = options.wire_dtype
        if dist.get_world_size(self.group) < 2:
            raise Unsupported("DDP of one rank: there is nothing to reduce")
        self.ranks = rank_group(self.group)
        # a bucket in one chunk: beside matmuls an early first chunk gains nothing
        self.ranks.join(self, options.communicator, chunk_bytes=2 * PIECE_BYTES)
        try:
            self.communicator = self.ranks.open(device)
        except BaseException:
            self.ranks.leave(self)
            raise
        self._background = self.ranks.background()
        self._counts = CallCounts()
        self._num_bytes = 0
        self._tuning, self._choices = tuning, dict[str, None]()
        self._is_on = True

    def report(self) -> Report:
        """Return a report of the buckets that the hook has reduced so far, and how."""
        wire = f"sent as {dtype_name(self._wire)}" if self._wire is not None else ""
        row = ModuleRow(
            name="(model)",
            kind="ddp",
            ranks=self.ranks.ranks,
            runs=f"{self._num_bytes / 1e6:,.1f} MB of buckets {wire}".rstrip(),
            torch_why="" if self._is_on else "restore() was called",
            choice="; ".join(self._choices),
        )
        return Report(modules=(row,), calls=self._counts.rows(), tuned=str(self._tuning or ""))

    def close(self) -> None:
        """Let torch reduce later buckets, and close the communicator unless it has other users. All ranks call this."""
        self._is_on = False
        self.ranks.leave(self)

    def average(self, bucket: Tensor, number: int) -> Future:
        """Average a flat bucket over all ranks in place, behind the current stream; return a future of the bucket."""
        if not self._is_on:
            self._counts.add("all_reduce", bucket.nbytes, "torch", "restore() was called")
            return _averaged_by_torch(bucket, self.group)
        left_why = self._left_why(bucket)
        if left_why:
            self._counts.add("all_reduce", bucket.nbytes, "torch", left_why)
            return _averaged_by_torch(bucket, torch_group(self.group))
        values = torch.view_as_real(bucket).view(-1) if bucket.is_complex() else bucket
        is_narrowed = self._wire is not None and values.dtype.itemsize > self._wire.itemsize
        in_place = is_narrowed or self.communicator.is_symmetric(values)
        over_hosts = isinstance(self.communicator, HierarchicalCommunicator)
        why = "in place" if in_place else "copied from its landing"
        self._counts.add("all_reduce", bucket.nbytes, "hosts" if over_hosts else "zero_sm", why)
        self._num_bytes += bucket.nbytes
        run = self._average_narrowed if is_narrowed else self._average
        # A bucket's channel follows from its number, so that prepared calls are repeated, not from its address, since
        # under torch's `Join` a rank without inputs has buckets of zeros in plain memory.
        channels = CHANNELS["buckets" if self.communicator.channels > 1 else "calls"]
        channel = channels[number % len(channels)]
        future: Future = self._background.start(partial(run, values), channel, bucket).future
        return future

    def _average(self, values: Tensor, channel: int) -> None:
        all_reduce_in_pieces(self.communicator, values, "avg", 1.0, channel)

    def _average_narrowed(self, values: Tensor, channel: int) -> None:
        average = self._average_as_bfloat16 if self._wire == torch.bfloat16 else self._average_as_float8
        for piece in pieces(values):
            average(piece, channel)

    def _average_as_bfloat16(self, values: Tensor, channel: int) -> None:
        wire = self.communicator.empty(values.numel(), dtype=torch.bfloat16)
        wire.copy_(values)
        self.communicator.all_reduce(wire, "avg", channel=channel)
        values.copy_(wire)

    def _average_as_float8(self, values: Tensor, channel: int) -> None:
        """Average `values` over ranks in place: exchange float8 blocks, sum in float32, gather bfloat16 averages."""
        communicator, ranks = self.communicator, self.communicator.world_size
        blocks = -(-values.numel() // (ranks * _BLOCK))  # for each rank
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

    def _left_why(self, bucket: Tensor) -> str:
        """Return why the tuning leaves a bucket of this size to torch; "" if it does not."""
        if self._tuning is None or self._wire is not None:
            return ""
        dtype = dtype_name(bucket.dtype)
        choice = self._tuning.find("all_reduce", ranks=self.ranks.world_size, num_bytes=bucket.nbytes, dtype=dtype)
        if choice is None:
            return ""
        self._choices[f"all_reduce of {bucket.nbytes / 1e6:,.1f} MB: {choice.why}"] = None
        return choice.why if choice.stays else ""


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


hook.__annotations__ |= {"bucket": GradBucket, "return": torch.futures.Future[Tensor]}  # DDP compares types, not text


class SymmetricBuckets:
    """Puts a DDP model's buckets in symmetric memory when DDP rebuilds them, before the second or third step.

    DDP rebuilds its buckets in the order in which gradients became ready, unless it has unused parameters. All ranks
    construct this together.

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
        """Let DDP make later buckets in plain memory."""
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
    """Reports the replaced collectives of a DDP model; `restore`, or the end of a `with` block, restores torch's.

    Args:
        model: a model without a hook, before its first backward pass.
        options: None: the defaults.
        tuned: tuning, as for `overlap`.

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

    def report(self) -> Report:
        """Return a report of the buckets that the hook has reduced so far, and how."""
        return self._state.report()

    def check(self) -> None:
        """Raise the error that ended communication, if any; its text names the failed ranks."""
        self._state.communicator.check()

    def restore(self) -> None:
        """Let torch reduce all later buckets, and close the communicator. All ranks call this between two steps.

        DDP cannot remove the hook, which from then on only calls torch.
        """
        self._limit.close()
        self._buckets.remove()
        self._state.close()
