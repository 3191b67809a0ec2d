"""Hold unsharded parameters in slots of symmetric memory, into each of which FSDP2 gathers one module at a time.

FSDP2 gathers a module into a buffer, the shards in the order of ranks, and copies from the buffer into tensors that it
frees and allocates again. With slots, these tensors are made once, in a `ParameterSlot`, and peers write into them:
nothing is copied out, and there is no buffer. Autograd keeps views of the tensors from forward to backward, so a
module's tensors never move; but modules occupy a slot one after the other, so that only as many slots are needed as
modules are unsharded at the same time.

*Order.* An occupant leaves its slot when FSDP2 frees its parameters; what is queued then on the current stream still
reads them. The next occupant waits for that work, on the stream on which it copies its own shards in; peers write only
after they have waited likewise, since the gather has a handshake.

*Which slot.* The order of the model says which modules may share a slot (`assign_slots`). FSDP2 runs modules in an
order that is not known beforehand, but nearly always the order of the model; if it differs, a module allocates another
slot when it is first gathered. If a module later finds another occupant in its slot (since modules are gathered in
another order, or kept), it moves, unless autograd has views of its tensors: then its gather is made only when FSDP2
needs it. An occupant whose parameters are only kept for its next call leaves, and is gathered again for that call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.host.group import gather_values
from counterpoint.collectives.submit.tensors import TensorList
from counterpoint.collectives.work import Work
from counterpoint.errors import Unsupported
from counterpoint.parallel.fsdp.modules import (
    GatheredParameter,
    ShardedModule,
    gathered_parameters,
    install_parameters,
    is_done,
    restore_parameters,
    shards,
    skip_shard_cast,
)
from counterpoint.parallel.group import CHANNELS, RankGroup

(_CHANNEL,) = CHANNELS["gather"]
NO_TENSORS = TensorList((), key=())
_ALIGNMENT = 512  # bytes that a parameter's address is a multiple of, as in torch's allocator


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Says how long a module's unsharded parameters are in use: from which module to which, in the model's order."""

    num_bytes: int  # size of its unsharded parameters
    span: tuple[int, int]  # first and last module that computes while this one is unsharded


def assign_slots(modules: Sequence[Lifetime], *, ahead: int) -> list[int]:
    """Return the slot number of each module; modules that are unsharded at the same time get different slots.

    Of the possible slots, the one that has to grow least is chosen. Modules are in the order of the model; `ahead`
    of them are gathered before they compute.
    """
    chosen: list[int] = []
    for module in modules:
        taken, sizes = set[int](), dict[int, int]()
        for slot, other in zip(chosen, modules, strict=False):
            sizes[slot] = max(other.num_bytes, sizes.get(slot, 0))
            if other.span[1] >= module.span[0] - ahead:
                taken.add(slot)
        free = [(max(0, module.num_bytes - size), size, slot) for slot, size in sizes.items() if slot not in taken]
        chosen.append(min(free)[2] if free else len(sizes))
    return chosen


def lifetimes(modules: Sequence[ShardedModule], sizes: Sequence[int]) -> list[Lifetime]:
    """Return how long each module is unsharded: until its last inner module, or to the end if kept after forward.

    All parameter groups of one module are unsharded together.
    """
    order: dict[object, int] = {}
    for one in modules:
        order.setdefault(one.module, len(order))
    last = len(order) - 1
    ends = {one.module: max(order.get(part, 0) for part in one.parts) for one in modules}
    return [
        Lifetime(size, (order[one.module], last if one.kept else ends[one.module]))
        for one, size in zip(modules, sizes, strict=True)
    ]


class ParameterSlot:
    """Holds symmetric memory, a uint8 tensor, for the unsharded parameters of one module at a time."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.occupant: ModuleParameters | None = None
        self.freed: Any = None  # event behind the last occupant's last use


class ParameterSlots:
    """Allocates the slots for one set of ranks, as a user of their communicator, and assigns one to each module.

    `modules` share the slots, and are in the order of the model; `ahead` of them are gathered ahead of the one that
    computes.
    """

    def __init__(self, group: RankGroup, user: object, modules: Sequence[ShardedModule], *, ahead: int) -> None:
        groups = Counter(module.module for module in modules)
        self.group, self._user, self._ahead = group, user, ahead * max(groups.values(), default=1)
        needed = [sum(_aligned(one.num_bytes) for one in gathered_parameters(module)) for module in modules]
        assigned = assign_slots(lifetimes(modules, needed), ahead=ahead)
        self._assigned = dict(zip(modules, assigned, strict=True))
        self._sizes: dict[int, int] = {}
        for number, num_bytes in zip(assigned, needed, strict=True):
            self._sizes[number] = max(num_bytes, self._sizes.get(number, 0))
        self._made: dict[int, ParameterSlot] = {}
        self._by_age: list[ParameterSlot] = []  # all slots, the one that was freed longest ago first

    def free_slot(self, module: ShardedModule, num_bytes: int) -> ParameterSlot:
        """Return a free slot, but none of the `ahead` slots freed last, whose modules may still be computing.

        This is the module's assigned slot if that is free, else another slot or a new one.
        """
        number = self._assigned[module]
        if number not in self._made:  # made late: the module may have another dtype now than when slots were assigned
            self._made[number] = self._new(max(self._sizes[number], num_bytes))
            return self._made[number]
        lately = self._by_age[len(self._by_age) - self._ahead :]
        for slot in (self._made[number], *self._by_age):
            if slot.occupant is None and slot not in lately and slot.memory.nbytes >= num_bytes:
                return slot
        return self._new(num_bytes)

    def note_freed(self, slot: ParameterSlot) -> None:
        """Record that the module that occupied this slot has just left."""
        self._by_age.remove(slot)
        self._by_age.append(slot)

    def _new(self, num_bytes: int) -> ParameterSlot:
        slot = ParameterSlot(self.group.communicator.empty(num_bytes, dtype=torch.uint8))
        self.group.hold(self._user, slot.memory)
        self._by_age.insert(0, slot)
        return slot


class ModuleParameters:
    """Holds the unsharded parameters of one module: their slot, and the tensors in it."""

    def __init__(self, module: ShardedModule, slots: ParameterSlots) -> None:
        self._module, self._slots, self._group = module, slots, slots.group
        self.ranks = slots.group.world_size
        self._device = torch.get_device_module(module.device)
        self.layout: tuple[GatheredParameter, ...] = ()
        self.slot: ParameterSlot | None = None
        self._whole = self._own = NO_TENSORS  # FSDP2's unsharded parameters, and this rank's parts of them
        self._references = 0  # references to their storages while autograd has no views
        self._reading = False  # whether FSDP2 uses the parameters now
        self.is_allocated = False  # whether FSDP2 believes that their storages are allocated
        self._is_late = False  # whether the latest gather has to wait until the slot is free
        self._work: Work | None = None  # work of the latest gather
        # events are reused: what waits for an earlier record was queued before the next record
        self._sent, self._freed = self._device.Event(), self._device.Event()  # behind a gather without a work, a use

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all unsharded parameters of the module."""
        return sum(one.num_bytes for one in self.layout)

    def copy_in(self) -> None:
        """Copy this rank's shards into the slot on the current stream, in the dtype in which they are gathered.

        If another module is in the slot and this one cannot move, the copy is made in `read`.
        """
        slot = self.slot
        if slot is not None and slot.occupant is not None and slot.occupant is not self:
            self._is_late = self._is_viewed()
            if self._is_late:
                return
            slot = None
        self._is_late = False
        if slot is None:
            slot = self._allocate()
        if slot.occupant is self:
            self._wait_for_gather()
        elif slot.freed is not None:
            self._device.current_stream().wait_event(slot.freed)
        slot.occupant = self
        torch._foreach_copy_(self._own.tensors, shards(self._module))

    def gather(self, *, async_op: bool) -> Work | None:
        """Gather all ranks' shards into the slot, on the current stream or asynchronously behind that stream's work."""
        if self._is_late:
            return None
        communicator: Communicator = self._group.communicator
        work = communicator.all_gather_coalesced(self._whole, self._own, channel=_CHANNEL, async_op=async_op)
        self._work = work
        if work is None:
            self._sent.record()
        return work

    def read(self) -> None:
        """Let FSDP2 read the parameters on the current stream; call this after that stream waited for the gather.

        Unsupported is raised if another module is in use in the same slot.
        """
        if self._is_late or self.slot is None or self.slot.occupant is not self:
            self._evict_and_copy_in()
            self.gather(async_op=False)
        self._reading = True

    def free(self) -> None:
        """Leave the slot: FSDP2 will not use the parameters once the work queued on the current stream has run."""
        if self._reading and self.slot is not None:
            self._reading = self.is_allocated = False
            self._freed.record()
            self.slot.freed, self.slot.occupant = self._freed, None
            self._slots.note_freed(self.slot)

    def restore(self) -> None:
        """Let FSDP2 allocate its own parameter tensors again; call this between two steps."""
        self.free()
        skip_shard_cast(self._module, False)
        if self.slot is not None:
            restore_parameters(self._module)
            if self.slot.occupant is self:
                self.slot.occupant = None
        self.slot, self._whole, self._own = None, NO_TENSORS, NO_TENSORS

    def _evict_and_copy_in(self) -> None:
        other = None if self.slot is None else self.slot.occupant
        if self.slot is not None and other is not None and other is not self:
            if other._reading and is_done(other._module):
                other._module.module.reshard()  # it was kept for its next call, and is gathered again before that
            if other._reading:
                raise Unsupported(
                    f"{self._module.name} and {other._module.name} are in use at the same time, and were not when "
                    "their parameters were given one slot; use OverlapOptions(direct=False), with which FSDP2 copies "
                    "them; or, if an exception ended a pass before, call reset_iter_state() of what overlap() "
                    "returned, on all ranks, and begin the step anew"
                )
            other._wait_for_gather()  # that gather was made in vain, or too early
            self.slot.occupant = None
        self.copy_in()

    def _wait_for_gather(self) -> None:
        if self._work is not None:
            self._work.wait()
        else:
            self._device.current_stream().wait_event(self._sent)  # if the event was never recorded, this does not wait

    def _allocate(self) -> ParameterSlot:
        """Make the module's parameter tensors in a free slot, and let FSDP2 use them from now on."""
        self.layout, start = gathered_parameters(self._module), 0
        slot = self._slots.free_slot(self._module, sum(_aligned(one.num_bytes) for one in self.layout))
        rank, whole, own = self._group.rank, list[Tensor](), list[Tensor]()
        with torch.inference_mode(False), torch.no_grad():
            for one in self.layout:
                part, share = slot.memory[start : start + one.num_bytes], one.num_bytes // self.ranks
                whole.append(_whole_parameter(part, one, self))
                own.append(part[rank * share : (rank + 1) * share].view(one.dtype))
                start += _aligned(one.num_bytes)
            install_parameters(self._module, whole)
        # these tensors never move, so the same lists find the prepared call again
        self._whole, self._own = TensorList(whole, key=object()), TensorList(own, key=object())
        skip_shard_cast(self._module)
        self.slot, self._references = slot, self._storage_references()
        return slot

    def _is_viewed(self) -> bool:
        """Return whether autograd holds views of the tensors on any rank; all ranks call this, so that they agree."""
        return any(gather_values(self._module.groups[0], self._storage_references() > self._references))

    def _storage_references(self) -> int:
        tensors = self._whole.tensors
        return sum(torch._C._storage_Use_Count(Tensor.untyped_storage(one)._cdata) for one in tensors)


class _WholeParameter(Tensor):
    """Represents a flat unsharded parameter whose storage stays allocated even when FSDP2 frees it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _storage: _PermanentStorage

    def untyped_storage(self) -> Any:
        return self._storage


class _PermanentStorage:
    """Represents a storage that is never freed; FSDP2's resize to 0 says that the parameters are no longer in use."""

    __slots__ = ("_num_bytes", "_parameters")

    def __init__(self, num_bytes: int, parameters: ModuleParameters) -> None:
        self._num_bytes, self._parameters = num_bytes, parameters

    def size(self) -> int:
        return self._num_bytes if self._parameters.is_allocated else 0

    def resize_(self, num_bytes: int) -> None:
        self._parameters.is_allocated = num_bytes > 0
        if num_bytes == 0:
            self._parameters.free()


def _whole_parameter(part: Tensor, parameter: GatheredParameter, parameters: ModuleParameters) -> Tensor:
    """Return `part` as a tensor with a storage of its own, as FSDP2 expects of a parameter."""
    alone: Tensor = from_dlpack(part.view(parameter.dtype))
    whole = alone.as_subclass(_WholeParameter)
    whole._storage = _PermanentStorage(parameter.num_bytes, parameters)
    return whole


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
