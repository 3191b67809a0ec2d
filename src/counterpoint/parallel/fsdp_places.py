"""Where FSDP2's whole parameters lie: in symmetric memory, each at the place to which its peers send it.

FSDP2 gathers a module into a buffer, shards in the order of ranks, and copies from there into tensors that it frees and
allocates anew. Here these tensors are made once, in a `Place` of symmetric memory, and are what is gathered into: there
is nothing to copy out, and no buffer besides. Autograd keeps views of them from forward to backward, so a module's
tensors never move; but a place has many tenants, one after the other: as many places are needed as modules are whole or
on their way at the same time.

*Order.* A tenant leaves a place when FSDP2 frees its parameters; what is queued then on the current stream still reads
them. The next one waits for that, on the stream on which it copies its own shards in, and its peers write behind their
own waits: the call has a handshake.

*Homes.* Who may share a place follows from the order of the model (fsdp_sharing.py); a module lives where it was first
gathered, which is another place if the tenant before still computes in that one. If it finds a tenant there later
(modules are gathered in another order, or kept), it moves, unless autograd has views of its tensors: then its gather is
made when FSDP2 needs it, not before; and a tenant whose parameters are only kept for its next call has to be gathered
again then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.work import Work
from counterpoint.errors import Unsupported
from counterpoint.parallel.fsdp_modules import (
    Gathered,
    ShardedModule,
    adopt,
    gathered,
    give_back,
    is_done,
    leave_shards_alone,
    shards,
)
from counterpoint.parallel.fsdp_sharing import Stay, shared_places, spans

__all__ = ["Home", "Places"]

_ALIGNMENT = 512  # bytes: of a parameter's place, as of torch's allocator


class Place:
    """Symmetric memory for the whole parameters of one module at a time.

    Args:
        room: bytes of `Communicator.empty`.
    """

    def __init__(self, room: Tensor) -> None:
        self.room = room
        self.tenant: Home | None = None
        self.left: Any = None  # event: behind the last use by whoever lived here


class Places:
    """Those of one communicator: who shares one is planned, and kept to where modules run in the order of the model.

    Args:
        communicator: whose symmetric memory they are.
        modules: that will live here, in the order of the model.
        ahead: how many modules are gathered ahead of the one that computes.
    """

    def __init__(self, communicator: Communicator, modules: Sequence[ShardedModule], *, ahead: int) -> None:
        self.communicator, self._ahead = communicator, ahead
        needed = [sum(_aligned(one.num_bytes) for one in gathered(module)) for module in modules]
        shared = shared_places([Stay(*pair) for pair in zip(needed, spans(modules), strict=True)], ahead=ahead)
        self._planned = {module: number for number, module in zip(shared, modules, strict=True)}
        sizes: dict[int, int] = {}
        for number, num_bytes in zip(shared, needed, strict=True):
            sizes[number] = max(num_bytes, sizes.get(number, 0))
        self._sizes, self._made = sizes, dict[int, Place]()
        self._left: list[Place] = []  # all of them, the one that was left longest ago first

    def vacant(self, module: ShardedModule, num_bytes: int) -> Place:
        """One without a tenant, which was not left so lately that the tenant before still computes: the planned one, if
        it is such a place; or another one, or a new one."""
        number = self._planned[module]
        if number not in self._made:  # what was foreseen may have another dtype by now
            self._made[number] = self._new(max(self._sizes[number], num_bytes))
            return self._made[number]
        lately = self._left[len(self._left) - self._ahead :]
        found = [self._made[number], *self._left]
        fits = [one for one in found if one.tenant is None and one not in lately and one.room.nbytes >= num_bytes]
        return fits[0] if fits else self._new(num_bytes)

    def _new(self, num_bytes: int) -> Place:
        place = Place(self.communicator.empty(num_bytes, dtype=torch.uint8))
        self._left.insert(0, place)
        return place

    def left(self, place: Place) -> None:
        """Its tenant has gone."""
        self._left.remove(place)
        self._left.append(place)


class Home:
    """One module's parameters: their place, and the tensors there.

    Args:
        module: whose parameters they are.
        places: of its communicator.
    """

    def __init__(self, module: ShardedModule, places: Places) -> None:
        self._module, self._places = module, places
        self.ranks = places.communicator.world_size
        self._device = torch.get_device_module(module.device)
        self.parameters: tuple[Gathered, ...] = ()
        self._place: Place | None = None
        self._outputs: list[Tensor] = []  # what FSDP2 takes for its own
        self._own: list[Tensor] = []  # this rank's shares of them
        self._views = 0  # of their storages, where autograd has none
        self._reading = False  # FSDP2 has been told that they are here
        self._late = False  # the latest gather waits until the place is free
        self._sent: Any = None  # the latest gather: its work, or an event behind it

    def fill(self) -> None:
        """This rank's shards to their places, in the dtype in which they are gathered, on the current stream; later, if
        there is a tenant whom we cannot avoid."""
        self._late = not self._moved_in()
        if not self._late:
            torch._foreach_copy_(self._own, shards(self._module))

    def gather(self, *, channel: int, async_op: bool) -> Work | None:
        """Everyone's shards to where they belong, on the current stream, or with `async_op` behind it."""
        if self._late:
            return None
        call = self._places.communicator.all_gather_coalesced
        work = call(self._outputs, self._own, channel=channel, async_op=async_op)
        self._sent = self._event() if work is None else work
        return work

    def read(self, *, channel: int) -> None:
        """FSDP2 uses the parameters from here on, on the current stream, which has waited for the gather.

        Raises:
            Unsupported: another module is in use at the same place.
        """
        tenant = None if self._place is None else self._place.tenant
        if self._late or tenant is not self:
            self._move_in_now(tenant)
            self.gather(channel=channel, async_op=False)
        self._reading = True

    def free(self) -> None:
        """FSDP2 uses them no more, once what is queued on the current stream has run."""
        if self._reading and self._place is not None:
            self._reading = False
            self._place.left, self._place.tenant = self._event(), None
            self._places.left(self._place)

    def leave(self) -> None:
        """FSDP2 makes tensors of its own again. Between two steps."""
        self.free()
        leave_shards_alone(self._module, False)
        if self._outputs:
            give_back(self._module)
        if self._place is not None and self._place.tenant is self:
            self._place.tenant = None
        self._place, self._outputs, self._own = None, [], []

    def _moved_in(self) -> bool:
        """Whether the place is ours; from here on the current stream may write there."""
        place = self._place
        if place is not None and place.tenant not in (None, self):
            if self._is_seen():
                return False
            place = None
        if place is None:
            place = self._settle()
        self._take(place)
        return True

    def _move_in_now(self, tenant: Home | None) -> None:
        if tenant is not None and tenant is not self:
            if tenant._reading and is_done(tenant._module):
                tenant._module.module.reshard()  # kept for its next call: then it is gathered again
            if tenant._reading:
                raise Unsupported(
                    f"{self._module.name} and {tenant._module.name} are in use at the same time, and were not when "
                    "their parameters were given one place; use Options(direct=False), with which FSDP2 copies them"
                )
            tenant._wait_for_sent()  # gathered for nothing, or too early
            assert self._place is not None
            self._place.tenant = None
        self.fill()

    def _take(self, place: Place) -> None:
        if place.tenant is self:
            self._wait_for_sent()
        elif place.left is not None:
            self._device.current_stream().wait_event(place.left)
        place.tenant = self

    def _wait_for_sent(self) -> None:
        if isinstance(self._sent, Work):
            self._sent.wait()
        elif self._sent is not None:
            self._device.current_stream().wait_event(self._sent)

    def _event(self) -> Any:
        event = self._device.Event()
        event.record()
        return event

    def _settle(self) -> Place:
        """Tensors at a vacant place, and FSDP2 uses them from now on."""
        self.parameters, start = gathered(self._module), 0
        place = self._places.vacant(self._module, sum(_aligned(one.num_bytes) for one in self.parameters))
        rank, ranks = self._places.communicator.rank, self.ranks
        self._place, self._outputs, self._own = place, [], []
        with torch.inference_mode(False), torch.no_grad():
            for one in self.parameters:
                part, share = place.room[start : start + one.num_bytes], one.num_bytes // ranks
                self._outputs.append(_whole(part, one, self.free))
                self._own.append(part[rank * share : (rank + 1) * share].view(one.dtype))
                start += _aligned(one.num_bytes)
            adopt(self._module, self._outputs)
        leave_shards_alone(self._module)
        self._views = self._storages()
        return place

    def _is_seen(self) -> bool:
        """Whether autograd has views of them."""
        return self._storages() > self._views

    def _storages(self) -> int:
        """References to their storages."""
        return sum(torch._C._storage_Use_Count(Tensor.untyped_storage(one)._cdata) for one in self._outputs)


class _Whole(Tensor):
    """A gathered parameter, flat, as FSDP2 knows it: it frees and allocates the storage, which here stays."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _storage: _Lasting

    def untyped_storage(self) -> Any:
        return self._storage


class _Lasting:
    """A storage that is always there; to resize it to nothing says that nobody uses it."""

    def __init__(self, num_bytes: int, freed: Callable[[], None]) -> None:
        self._num_bytes, self._freed = num_bytes, freed

    def size(self) -> int:
        return self._num_bytes

    def resize_(self, num_bytes: int) -> None:
        if num_bytes == 0:
            self._freed()


def _whole(part: Tensor, parameter: Gathered, freed: Callable[[], None]) -> Tensor:
    """`part` with a storage of its own, which FSDP2 takes a parameter's to be."""
    alone: Tensor = from_dlpack(part.view(parameter.dtype))
    whole = alone.as_subclass(_Whole)
    whole._storage = _Lasting(parameter.num_bytes, freed)
    return whole


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
