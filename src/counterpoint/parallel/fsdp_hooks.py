"""The two hooks of FSDP2, and what torch waits for: `Communicator` calls in the form in which torch makes them.

torch calls `allocate` for the output of an all-gather, copies this rank's shards into it, gathers, and copies the
parameters out. It calls `allocate` for the input of a reduce-scatter, copies the gradients into it, calls `allocate`
for the output, and scatters. What these buffers are given for instead is in fsdp_tensors.py, where parameters lie in
fsdp_places.py. Where FSDP2's copies have to stay, the output of a gather is a real buffer in symmetric memory, in which
torch gathers in place; gradients are scattered from a real buffer, which need not be symmetric.

Streams and lifetimes on a GPU, read in torch 2.11 and 2.13 (`_fsdp_collectives.py`, `_fsdp_param_group.py`):

- A gather is allocated and this rank's shards are copied on the copy-in stream; the hook is called with the gather
  stream current, which waits for the copy-in stream; parameters are read on the compute stream, behind an event that
  FSDP2 records after the hook. They are freed there, behind what reads them, while the GPU is far behind the host.
- A buffer (with FSDP2's copies) is dropped by the host one module later in the forward pass, at once in the backward
  pass; but first FSDP2 makes the copy-in and the gather stream wait for the copy-out. So it may be used again, and its
  peers be told so, behind what is queued at that moment on **the stream that made it and the one that the call ran
  on**; that is what `Communicator.empty` promises, and nothing has to be recorded here. Of a gather in vain
  (prefetched, never used) only the call's own stream knows the end: it is dropped with no wait of the other.
- `unshard(async_op=True)`: all of it on the compute stream; FSDP2 waits for our `Work` before it reads.
- What a scatter reads, gradients or buffer, is made on the compute stream and read by the call on the scatter stream;
  FSDP2 holds what `allocate` returned until the compute stream was made to wait for the call. Output: allocated on the
  scatter stream, written by the call, cast there or reduced further (HSDP) on the all-reduce stream; without a cast the
  gradient is a view of it. So it comes from torch's own allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Work as TorchWork
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.work import Work
from counterpoint.errors import Misconfigured
from counterpoint.parallel.fsdp_places import Home
from counterpoint.parallel.fsdp_report import Traffic
from counterpoint.parallel.fsdp_tensors import Gathering, Gradients, Sent

__all__ = ["Communicators", "GatherHook", "ScatterHook", "op_and_factor"]


class Communicators:
    """One for each set of ranks: process groups of the same ranks share it.

    All ranks of a group open theirs together. Ranks that are in several groups do so in the same order, that of the
    ranks' numbers, so nobody waits for one who waits for him.

    Args:
        groups: process groups of this rank, in any order.
        make: group to communicator.
    """

    def __init__(self, groups: Sequence[Any], make: Callable[[Any], Communicator]) -> None:
        self._by_ranks: dict[tuple[int, ...], Communicator] = {}
        self._by_group: dict[Any, Communicator] = {}
        by_ranks = {_ranks(group): group for group in groups}
        try:
            for ranks in sorted(by_ranks):
                self._by_ranks[ranks] = make(by_ranks[ranks])
        except BaseException:
            self.close()
            raise

    def of(self, group: Any) -> Communicator:
        """That of the ranks of `group`.

        Raises:
            Misconfigured: there is none: FSDP2 was given other ranks since.
        """
        known = self._by_group.get(group)
        if known is None:
            known = self._by_ranks.get(_ranks(group))
            if known is None:
                raise Misconfigured(
                    f"FSDP2 communicates over ranks {list(_ranks(group))}, which it did not when overlap() was called; "
                    "call restore(), and overlap(model) anew"
                )
            self._by_group[group] = known
        return known

    def all(self) -> tuple[Communicator, ...]:
        """Each of them once."""
        return tuple(self._by_ranks.values())

    def check(self) -> None:
        """Raises what ended one of them, if something did."""
        for communicator in self._by_ranks.values():
            communicator.check()

    def close(self) -> None:
        """Ends all of them."""
        for communicator in self._by_ranks.values():
            communicator.close()


class GatherHook(AllGather):
    """torch's `AllGather` of one module.

    Args:
        communicators: of all groups of the module.
        next_group: the group of the next call, which `allocate` is not told.
        home: of the whole parameters, to which they are gathered; None: into a buffer that FSDP2 copies them out of.
        channel: on which the calls run.
        seen: called at each gather.
    """

    def __init__(
        self,
        communicators: Communicators,
        next_group: Callable[[], Any],
        *,
        home: Home | None = None,
        channel: int,
        seen: Callable[[], None],
    ) -> None:
        self._communicators, self._next_group, self._channel, self._seen = communicators, next_group, channel, seen
        self._home = home
        self._calls = 0
        self._latest: tuple[int, torch.dtype, bool] = (0, torch.float32, True)
        self._made: tuple[Communicator | None, int] = None, 0  # whose the latest output from here is, and its address

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An output in symmetric memory, on the model's device; peers learn that it is free when torch drops it. Of
        parameters that have a home, nothing."""
        if self._home is not None:
            return Gathering(self._home, self._channel, size, dtype=dtype, device=device)
        communicator = self._communicators.of(self._next_group())
        output: torch.Tensor = communicator.empty(*size, dtype=dtype, early_release=True)
        self._made = communicator, output.data_ptr()
        return output

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> TorchWork | None:
        """As `all_gather_into_tensor`, on the current stream; with `async_op` on the channel's own."""
        self._seen()
        if isinstance(output_tensor, Gathering):
            home = output_tensor.home
            work = home.gather(channel=self._channel, async_op=async_op)
            self._calls += 1
            self._latest = (sum(one.num_bytes for one in home.parameters), home.parameters[0].dtype, True)
            return None if work is None else _Awaited(work)
        communicator = self._communicators.of(group)
        work = communicator.all_gather(output_tensor, input_tensor, channel=self._channel, async_op=async_op)
        own_place = input_tensor.data_ptr() - communicator.rank * input_tensor.nbytes
        in_place = self._made == (communicator, output_tensor.data_ptr()) and own_place == output_tensor.data_ptr()
        self._calls += 1
        self._latest = (output_tensor.nbytes, output_tensor.dtype, in_place)
        return None if work is None else _Awaited(work)

    def traffic(self) -> Traffic:
        """What the calls so far were."""
        if not self._calls:
            return Traffic()
        num_bytes, dtype, in_place = self._latest
        return Traffic(
            calls=self._calls,
            num_bytes=num_bytes,
            dtype=_name(dtype),
            copied_bytes=0 if in_place else num_bytes,
            direct=self._home is not None,
        )

    def leave(self) -> None:
        """FSDP2 has memory of its own for whole parameters again. Between two steps, while they are sharded."""
        if self._home is not None:
            self._home.leave()


class ScatterHook(ReduceScatter):
    """torch's `ReduceScatter` of one module.

    Args:
        communicators: of all groups of the module.
        ranks: that share the gradients.
        direct: gradients are sent from where they are; False: from a buffer into which FSDP2 has copied them.
        channel: on which the calls run.
        seen: called at each call.
    """

    def __init__(
        self, communicators: Communicators, *, ranks: int, direct: bool, channel: int, seen: Callable[[], None]
    ) -> None:
        self._communicators, self._channel, self._seen = communicators, channel, seen
        self._ranks, self._direct = ranks, direct
        self._input = 0  # elements of the one of which the output has not been asked for yet
        self._calls = 0
        self._was_direct = False
        self._latest: tuple[int, torch.dtype, str, float] = (0, torch.float32, "", 1.0)

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Output, in plain memory of the current stream; of the input, which FSDP2 asks for first, nothing."""
        numel, whole = int(size[0]), self._input
        self._input = 0
        if not self._direct or whole == self._ranks * numel:
            return torch.empty(*size, dtype=dtype, device=device)
        self._input = numel
        return Gradients(Sent(numel, dtype=dtype, device=device, ranks=self._ranks), size)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> TorchWork | None:
        """As `reduce_scatter_tensor`, but for the sum, which is rounded once; on the current stream."""
        self._seen()
        name, factor = op_and_factor(op)
        communicator = self._communicators.of(group)
        sent = input_tensor.sent if isinstance(input_tensor, Gradients) else None
        self._was_direct = sent is not None and sent.gradients is not None
        if sent is not None and sent.gradients is not None:
            dtype, outputs = sent.gradients[0].dtype, output_tensor.split(sent.shares())
            work = communicator.reduce_scatter_coalesced(
                outputs, sent.gradients, name, factor=factor, channel=self._channel, async_op=async_op
            )
        else:
            whole, dtype = input_tensor if sent is None else sent.buffer(), input_tensor.dtype
            work = communicator.reduce_scatter(
                output_tensor, whole, name, factor=factor, channel=self._channel, async_op=async_op
            )
        self._calls += 1
        self._latest = (input_tensor.numel() * dtype.itemsize, dtype, name, factor)
        return None if work is None else _Awaited(work)

    def traffic(self) -> Traffic:
        """What the calls so far were."""
        if not self._calls:
            return Traffic()
        num_bytes, dtype, name, factor = self._latest
        op = f"{name} {factor:g}" if name == "premul_sum" else name
        return Traffic(calls=self._calls, num_bytes=num_bytes, dtype=_name(dtype), op=op, direct=self._was_direct)


def op_and_factor(op: Any) -> tuple[str, float]:
    """torch's ReduceOp as the name that `Communicator` takes, and the factor of PREMUL_SUM."""
    factor: Any = None
    if not isinstance(op, dist.ReduceOp.RedOpType):
        op, factor = op.__getstate__()  # what it is pickled as: the only way to the factor in torch 2.11
    return op.name.lower(), 1.0 if factor is None else float(factor)


class _Awaited(TorchWork):
    """A `Work` of ours that torch takes for one of its own: it waits for nothing else."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As `Work.wait`."""
        return self._work.wait(timeout.total_seconds() if timeout else None)

    def is_completed(self) -> bool:
        """As `Work.is_completed`."""
        return self._work.is_completed()


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
