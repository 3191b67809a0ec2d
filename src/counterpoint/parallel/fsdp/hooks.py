"""Implement FSDP2's hooks for all-gather and reduce-scatter by calls of a `Communicator`.

torch calls `allocate` for the output of an all-gather, copies this rank's shards into it, gathers, and copies the
parameters out. It calls `allocate` for the input of a reduce-scatter, copies the gradients into it, calls `allocate`
for the output, and scatters. `placeholders.py` replaces these buffers, and `slots.py` says where parameters lie. If
FSDP2's copies have to stay, the output of a gather is a real buffer in symmetric memory, in which torch gathers in
place, and gradients are scattered from a real buffer, which need not be symmetric.

Streams and lifetimes on a GPU, read in torch 2.11 and 2.13 (`_fsdp_collectives.py`, `_fsdp_param_group.py`):

- A gather is allocated and this rank's shards are copied on the copy-in stream; the hook is called with the gather
  stream current, which waits for the copy-in stream; parameters are read on the compute stream, behind an event that
  FSDP2 records after the hook. They are freed on that stream, behind what reads them; the GPU may be far behind then.
- A buffer (with FSDP2's copies) is dropped by the host one module later in the forward pass, at once in the backward
  pass; but first FSDP2 makes the copy-in and the gather stream wait for the copy-out. So it may be used again, and its
  peers may know so, behind what is queued at that moment on **the stream that made it and the one that the call ran
  on**; `Communicator.empty` promises this, so that no event has to be recorded here. The buffer of a gather in vain
  (prefetched, never used) is dropped without these waits: only the call's own stream knows its end.
- `unshard(async_op=True)`: all steps run on the compute stream; FSDP2 waits for the hook's `Work` before it reads.
- What a scatter reads, gradients or buffer, is made on the compute stream and read by the call on the scatter stream;
  FSDP2 holds what `allocate` returned until the compute stream was made to wait for the call. Output: allocated on the
  scatter stream, written by the call, cast there or reduced further (HSDP) on the all-reduce stream; without a cast the
  gradient is a view of the output. So the output comes from torch's own allocator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Work as TorchWork
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.collectives.submit.tensors import TensorList, dtype_name
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.parallel.fsdp.modules import ShardedModule, gather_group, is_prefetching
from counterpoint.parallel.fsdp.placeholders import GatherPlaceholder, ScatterPlaceholder, ScatterSource
from counterpoint.parallel.fsdp.slots import ModuleParameters
from counterpoint.parallel.group import CHANNELS, RankGroup, rank_group, ranks_of
from counterpoint.parallel.report import Traffic
from counterpoint.parallel.torch_calls import StartedWork, op_and_factor

STAGING_BYTES = 1 << 27  # with less, a large array comes in more slices, each a round trip of some 30 µs
T = TypeVar("T")
(_GATHER,), (_SCATTER,) = CHANNELS["gather"], CHANNELS["scatter"]


class ShardGroups:
    """Holds a `RankGroup`, with an open communicator, for each set of ranks over which FSDP2 shards.

    All ranks of a group open its communicator together. Ranks in several groups open these in the order of
    the ranks' numbers, so that no two ranks wait for each other.

    Args:
        groups: process groups.
        device: device of the parameters.
        options: options of the communicators; None: see `OverlapOptions`.

    Raises:
        Unsupported: the ranks of a group cannot share memory.
        Misconfigured: other users of these ranks have given other options.
    """

    def __init__(
        self, groups: Iterable[ProcessGroup], *, device: torch.device, options: CommunicatorOptions | None
    ) -> None:
        self._by_ranks: dict[tuple[int, ...], RankGroup] = {}
        self._by_group: dict[ProcessGroup, RankGroup] = {}
        by_ranks = {ranks_of(group): group for group in groups}
        try:
            for ranks in sorted(by_ranks):
                self._by_ranks[ranks] = found = rank_group(by_ranks[ranks])
                found.join(self, options, staging_bytes=STAGING_BYTES)
                found.open_one_host(device)
        except Unsupported as error:
            self.close()
            raise Unsupported(
                f"FSDP2's group of ranks {list(ranks)}: {error} (ranks of several hosts: a mesh of two axes, "
                "replicated between hosts and sharded within)"
            ) from error
        except BaseException:
            self.close()
            raise

    def of(self, group: ProcessGroup) -> RankGroup:
        """Return the `RankGroup` of `group`; raise if `overlap` found no group of these ranks."""
        known = self._by_group.get(group)
        if known is None:
            known = self._by_ranks.get(ranks_of(group))
            if known is None:
                raise Misconfigured(
                    f"FSDP2 communicates over ranks {list(ranks_of(group))}, which it did not when overlap() was "
                    "called; call restore(), and overlap(model) anew"
                )
            self._by_group[group] = known
        return known

    def all(self) -> tuple[RankGroup, ...]:
        """Return all distinct `RankGroup`s."""
        return tuple(self._by_ranks.values())

    def check(self) -> None:
        """Raise the error that ended a communicator, if one has failed."""
        for one in self._by_ranks.values():
            one.check()

    def close(self) -> None:
        """Leave all communicators, and close those that have no other users."""
        for one in self._by_ranks.values():
            one.leave(self)


class GatherHook(AllGather):
    """Gathers the parameters of one module, in the place of torch's `AllGather`.

    Peers send shards into the unsharded `parameters`; if that is None, into a buffer out of which FSDP2 copies them.
    `prefetch` learns the order of gathers; None: FSDP2 prefetches as it does by itself.
    """

    def __init__(
        self,
        module: ShardedModule,
        groups: ShardGroups,
        *,
        parameters: ModuleParameters | None = None,
        prefetch: Prefetch | None = None,
    ) -> None:
        self._module, self._groups = module, groups
        self.parameters, self._prefetch = parameters, prefetch
        self._placeholder: GatherPlaceholder | None = None
        self._calls = 0
        self._latest: tuple[int, torch.dtype, bool] = (0, torch.float32, True)  # bytes, dtype, whether in place
        self._made: tuple[Communicator | None, int] = None, 0  # communicator and address of the latest buffer

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the output tensor of the next gather: a placeholder without memory, or symmetric memory."""
        if self.parameters is not None:
            placeholder = self._placeholder
            if placeholder is None or placeholder.shape != tuple(size) or placeholder.dtype != dtype:
                shape = [int(length) for length in size]
                placeholder = GatherPlaceholder(self.parameters, shape, dtype=dtype, device=device)
                self._placeholder = placeholder
            return placeholder
        group = gather_group(self._module)  # `allocate` is not told which group is next
        assert group is not None
        communicator: Communicator = self._groups.of(group).communicator
        output = communicator.empty(*map(int, size), dtype=dtype, early_release=True)
        self._made = communicator, output.data_ptr()
        return output

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> TorchWork | None:
        """Gather all ranks' shards, as `all_gather_into_tensor` does, into the tensor that `allocate` has returned.

        Returns:
            The work that FSDP2 waits for before it reads; None if the call is on the current stream (no `async_op`).
        """
        if self._prefetch is not None:
            self._prefetch.gathered(self._module)
        self._calls += 1
        if type(output_tensor) is GatherPlaceholder:
            work = output_tensor.parameters.gather(async_op=async_op)
            return None if work is None else StartedWork([work], [])
        communicator: Communicator = self._groups.of(group).communicator
        work = communicator.all_gather(output_tensor, input_tensor, channel=_GATHER, async_op=async_op)
        own_place = input_tensor.data_ptr() - communicator.rank * input_tensor.nbytes
        in_place = self._made == (communicator, output_tensor.data_ptr()) and own_place == output_tensor.data_ptr()
        self._latest = (output_tensor.nbytes, output_tensor.dtype, in_place)
        return None if work is None else StartedWork([work], [])

    def traffic(self) -> Traffic:
        """Return the number of gathers so far, and the bytes and dtype of the latest one."""
        num_bytes, dtype, in_place = self._latest
        direct = self.parameters is not None
        if self.parameters is not None and self.parameters.layout:
            num_bytes, dtype = self.parameters.num_bytes, self.parameters.layout[0].dtype
        copied = "in place" if in_place else f"{num_bytes / 1e6:,.1f} MB copied"
        return Traffic(
            operation="all_gather",
            calls=self._calls,
            num_bytes=num_bytes,
            dtype=dtype_name(dtype) if self._calls else "",
            how="direct" if direct else copied,
        )

    def restore(self) -> None:
        """Let FSDP2 allocate unsharded parameters again; call this between two steps, while the module is sharded."""
        if self.parameters is not None:
            self.parameters.restore()


class ScatterHook(ReduceScatter):
    """Reduces and scatters the gradients of one module over `ranks` ranks, in the place of torch's `ReduceScatter`.

    With `direct`, gradients are sent from where they are; else from a buffer into which FSDP2 has copied them.
    `prefetch` learns that the forward pass is over; None: FSDP2 prefetches as it does by itself.
    """

    def __init__(
        self,
        groups: ShardGroups,
        *,
        ranks: int,
        direct: bool,
        prefetch: Prefetch | None = None,
    ) -> None:
        self._groups, self._prefetch = groups, prefetch
        self._ranks, self._direct = ranks, direct
        self._input_numel = 0  # elements of the input whose output FSDP2 has not asked for yet; 0: none
        self._calls = 0
        self._was_direct = False
        self._latest: tuple[int, torch.dtype] = (0, torch.float32)
        self._op: Any = None  # torch's op of the latest call
        self._op_name, self._factor = "", 1.0

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a placeholder for the input, which FSDP2 asks for first, and plain memory for the output."""
        numel, input_numel = int(size[0]), self._input_numel
        self._input_numel = 0
        if not self._direct or input_numel == self._ranks * numel:
            return torch.empty(numel, dtype=dtype, device=device)
        self._input_numel = numel
        return ScatterPlaceholder(ScatterSource(numel, dtype=dtype, device=device, ranks=self._ranks), (numel,))

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> TorchWork | None:
        """Reduce and scatter, as `reduce_scatter_tensor` does, between tensors of `allocate`; round each sum once.

        Returns:
            The work that FSDP2 waits for before it reads; None if the call is on the current stream (no `async_op`).
        """
        if self._prefetch is not None:
            self._prefetch.scattered()
        if op is not self._op:
            self._op_name, self._factor = op_and_factor(op)
            self._op = op
        communicator: Communicator = self._groups.of(group).communicator
        source = input_tensor.source if type(input_tensor) is ScatterPlaceholder else None
        gradients = None if source is None else source.gradients
        self._calls, self._was_direct = self._calls + 1, gradients is not None
        if source is not None and gradients is not None:
            self._latest = source.numel, gradients.tensors[0].dtype
            work = communicator.reduce_scatter_coalesced(
                TensorList.split(output_tensor, source.shares()),
                gradients,
                self._op_name,
                factor=self._factor,
                channel=_SCATTER,
                async_op=async_op,
            )
        else:
            sent = input_tensor if source is None else source.buffer()
            self._latest = sent.numel(), sent.dtype
            work = communicator.reduce_scatter(
                output_tensor, sent, self._op_name, factor=self._factor, channel=_SCATTER, async_op=async_op
            )
        return None if work is None else StartedWork([work], [])

    def traffic(self) -> Traffic:
        """Return the number of scatters so far, and the bytes and dtype of the latest one."""
        numel, dtype = self._latest
        op = f"{self._op_name} {self._factor:g}" if self._op_name == "premul_sum" else self._op_name
        return Traffic(
            operation="reduce_scatter",
            calls=self._calls,
            num_bytes=numel * dtype.itemsize,
            dtype=dtype_name(dtype) if self._calls else "",
            op=op,
            how="direct" if self._was_direct else "in place",
        )


@dataclass(frozen=True, kw_only=True)
class PrefetchTargets:
    """Lists the modules to prefetch while `module` runs forward and backward, by place in forward order."""

    module: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]


def prefetch_targets(order: Sequence[T], depth: int, *, parts: Mapping[T, Collection[object]]) -> list[PrefetchTargets]:
    """Return for each module of `order` the next `depth` modules in the forward and in the backward pass.

    Forward passes begin in the order `order`; `parts` are the modules inside each module. A module's backward pass
    begins before those of the modules inside it, which begin in reverse order. So backward passes begin in the reverse
    of the order in which forward passes end.
    """
    ended: list[int] = []
    running: list[int] = []
    for number, module in enumerate(order):
        while running and module not in parts[order[running[-1]]]:
            ended.append(running.pop())
        running.append(number)
    backward = [*running, *reversed(ended)]
    place = {number: position for position, number in enumerate(backward)}
    count = len(order)
    return [
        PrefetchTargets(
            module=number,
            forward=tuple(range(number + 1, min(number + 1 + depth, count))),
            backward=tuple(backward[place[number] + 1 : place[number] + 1 + depth]),
        )
        for number in range(count)
    ]


class Prefetch:
    """Learns in which order modules run, then tells FSDP2 to gather `depth` modules ahead.

    FSDP2 gathers one module ahead by itself, and more if it has lists of modules. The order of registration is only a
    guess at the order of the passes. So the first forward pass runs without our prefetching, and its gathers show the
    order; when the first gradients are scattered, that pass is over, and the lists are set.

    The hooks of the modules call `gathered` and `scattered`. `Misconfigured` is raised if a module has lists already.
    """

    def __init__(self, depth: int, modules: Sequence[ShardedModule]) -> None:
        for module in modules:
            if is_prefetching(module):
                raise Misconfigured(
                    f"prefetch={depth}, and {module.name} has modules to prefetch already; leave out one of the two"
                )
        self.depth, self._expected = depth, len({module.module for module in modules})
        self._order: dict[FSDPModule, ShardedModule] = {}  # FSDP2 gathers all groups of one together
        self._is_set = False

    def gathered(self, module: ShardedModule) -> None:
        """Record that this module is being gathered, to learn the order of modules."""
        if not self._is_set:
            self._order.setdefault(module.module, module)

    def scattered(self) -> None:
        """Set FSDP2's prefetch lists at the first scatter of gradients, when the forward pass is over."""
        if self._is_set:
            return
        self._is_set = True
        order = list(self._order)
        parts = {module: set(sharded.parts[1:]) for module, sharded in self._order.items()}
        for targets in prefetch_targets(order, self.depth, parts=parts):
            module = order[targets.module]
            module.set_modules_to_forward_prefetch([order[number] for number in targets.forward])
            module.set_modules_to_backward_prefetch([order[number] for number in targets.backward])

    def undo(self) -> None:
        """Clear FSDP2's prefetch lists, so that FSDP2 prefetches by its own rule again."""
        if self._is_set:
            for module in self._order:
                module.set_modules_to_forward_prefetch([])
                module.set_modules_to_backward_prefetch([])
        self._is_set = True

    def __str__(self) -> str:
        if not self._is_set:
            return f"{self.depth} ahead from the first reduce_scatter on: until then the order is learned"
        return f"{self.depth} ahead, {len(self._order)} of {self._expected} modules, in the order in which they ran"
