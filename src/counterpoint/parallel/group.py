"""Hold one communicator for each set of ranks, and decide whether it or torch runs a call.

Backend, FSDP2, DDP, tensor and expert parallelism each hold the `RankGroup` of their ranks. A call goes: hook, torch's
group, operation or dispatcher -> `RankGroup.route` -> `RankGroup.communicator` -> `Submitter` -> transport -> driver.

*One communicator.* It is opened at the first call that needs it, by all ranks together, and closed when the last user
has left, or with the process group. Each user has channels of its own, by name (`CHANNELS`), so that no user's call
waits for another user's calls. A group of backend `counterpoint` has a `RankGroup` of its own; all other process groups
of the same ranks share one.

*One order.* All ranks have to make symmetric memory in one order, on all channels together. So a user asks `RankGroup`
for the communicator at each call: calls that a background thread still has to start (`Background`) are started first.

*Equal on all ranks.* `route` depends on the operation, size, dtype and reduction of a call, on the tuning and on the
crossovers, which all ranks have compared; never on this rank's memory, layout, thread or clock.

*A tuning belongs to a model*, not to its ranks: two models of a process may follow two files. So `overlap` asks
`FollowedTuning.find` with the module's name and matmul; `route` asks only for a backend's calls, which have neither.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.host.group import gather_values
from counterpoint.collectives.multihost.hierarchical import AnyCommunicator, HierarchicalCommunicator
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.collectives.work import PartitionedWork
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.parallel.background import Background
from counterpoint.parallel.call_memory import CallMemory
from counterpoint.parallel.follow_tuning import FollowedTuning
from counterpoint.parallel.report import RoutedPath

CHANNELS: Mapping[str, tuple[int, ...]] = {
    "calls": (0,),  # calls of a process group: they run in order, and over several hosts on this channel only
    "gather": (1,),  # all-gathers of FSDP2
    "scatter": (2,),  # reduce_scatters of FSDP2
    "buckets": (1, 2),  # DDP's buckets; a DDP model has no FSDP2 modules, so they share channels
    "matmuls": (3, 4),  # gathered rows, scattered products
    "tokens": (5, 6, 7, 8, 9),  # two dispatches, two combines, and small messages
}
"""Names the channels of each user of a communicator."""
NUM_CHANNELS = 1 + max(map(max, CHANNELS.values()))
_MOST_ROUTES = 4096  # number of routes that are kept
Open: TypeAlias = Callable[[Any, Any, CommunicatorOptions], AnyCommunicator]
"""Opens a communicator, given the process group, the device and the options."""
Value = TypeVar("Value")


class Route(NamedTuple):
    """Says whether a communicator or the process group itself (path `torch`) runs calls of one kind, and why."""

    path: RoutedPath
    why: str

    @property
    def torch_why(self) -> str:
        """Return why the process group itself runs these calls; "" if it does not."""
        return self.why if self.path == "torch" else ""


def _open_on_one_host(group: Any, device: Any, options: CommunicatorOptions) -> AnyCommunicator:
    return Communicator(group, device=device, options=options)


class _User(NamedTuple):
    """Holds one user of a communicator, and the symmetric memory that stays allocated for this user."""

    alive: Callable[[], object]
    memory: list[Any]


class PartitionedCalls:
    """Alternates between two channels of a communicator, so that two partitioned calls can be under way at once."""

    def __init__(self) -> None:
        self._open: dict[int, PartitionedWork] = {}  # calls under way, by channel
        self._latest: dict[tuple[int, ...], int] = {}  # channel of the latest call, by pair

    def channel(self, pair: tuple[int, ...]) -> int:
        """Return the next call's channel, one of `pair`, after finishing any call still under way on that channel."""
        self._latest[pair] = 1 - self._latest.get(pair, 1)
        channel = pair[self._latest[pair]]
        if channel in self._open:
            self._open.pop(channel).finish()
        return channel

    def begin(self, channel: int, work: PartitionedWork) -> PartitionedWork:
        """Record that the call `work` is under way on `channel`, and return `work`."""
        self._open[channel] = work
        return work

    def finish(self, work: PartitionedWork) -> None:
        """Finish the call `work`, and free its channel."""
        work.finish()
        self._open = {channel: one for channel, one in self._open.items() if one is not work}


class RankGroup:
    """Holds the communicator of a process group's ranks, the users of the communicator, and the routes of calls.

    Args:
        group: process group of torch's own backends.
        ranks: the group's global ranks, in the order of the group.
        options: options of the communicator; None: as its users say.
        opened: opens the communicator.
    """

    def __init__(
        self,
        group: Any,
        ranks: tuple[int, ...],
        *,
        options: CommunicatorOptions | None = None,
        opened: Open = _open_on_one_host,
    ) -> None:
        self.group, self.ranks = group, ranks
        self.rank: int = group.rank()
        self.world_size = len(self.ranks)
        self.why_not = "one rank" if self.world_size == 1 else ""
        """Says why these ranks have no communicator; "" if they may have one."""
        self.has_ended = False
        self.tuning: FollowedTuning | None = None
        self._of_group, self._opened = options, opened
        self._options, self._is_given = options or CommunicatorOptions(), options is not None
        self._users: dict[int, _User] = {}
        self._joined = 0  # number of users so far: each user has a number that is equal on all ranks
        self._communicator: AnyCommunicator | None = None
        self._closed: AnyCommunicator | None = None  # the communicator that was closed last
        self._background: Background | None = None
        self._memory: CallMemory | None = None
        self.partitioned = PartitionedCalls()
        self._routes: dict[Any, Route] = {}
        self._opening = threading.RLock()  # held by the one thread that opens the communicator

    def join(self, user: object, options: CommunicatorOptions | None = None, **defaults: Any) -> None:
        """Register `user` as a user of the communicator until `leave`. All ranks call this together.

        Users that were dropped without `leave`, on all ranks, leave here.

        Args:
            user: an object.
            options: options of the communicator; None: as another user has given them, or the defaults.
            defaults: fields of `CommunicatorOptions` that this user sets where none gives options.

        Raises:
            Misconfigured: another user, or the backend, has given other options.
        """
        differ = options is not None and options != self._options
        if self._users:
            if differ:
                gc.collect()  # dropped users may be in reference cycles
            self._forget_dropped()
        if options is not None:
            if differ and (self._is_given or self._communicator is not None):
                raise Misconfigured(
                    f"the communicator of ranks {list(self.ranks)} has {self._options}, not {options}: give all its "
                    "users the same (a group of backend counterpoint has its pg_options), or end the others before"
                )
            self._options, self._is_given = options, True
        elif not self._is_given and self._communicator is None:
            self._options = replace(self._options, **defaults)
        self._users[self._joined] = _User(weakref.ref(user), [])
        self._joined += 1

    def hold(self, user: object, memory: Any) -> None:
        """Keep symmetric memory until `user` leaves, so that all ranks free it together, not when each drops it.

        Which memory is free has to follow from the same calls on all ranks, so it must not depend on when this rank's
        garbage is collected.
        """
        self._users[self._number_of(user)].memory.append(memory)

    def leave(self, user: object) -> None:
        """Unregister `user`; the last user to leave closes the communicator. All ranks call this."""
        number = self._number_of(user)
        if number >= 0:
            self._remove([number], "close")

    def _number_of(self, user: object) -> int:
        """Return the key of `user` in `_users`; -1 if `user` has left."""
        return next((number for number, one in self._users.items() if one.alive() is user), -1)

    def _forget_dropped(self) -> None:
        """Unregister users that are garbage-collected on all ranks: each rank collects at a time of its own."""
        dropped = [number for number, one in self._users.items() if one.alive() is None]
        everywhere = set(dropped).intersection(*gather_values(self.group, dropped))
        if everywhere:
            self._remove(sorted(everywhere), "abort")

    def _remove(self, numbers: Sequence[int], how: Literal["close", "abort"]) -> None:
        for number in numbers:
            self._users.pop(number)
        if not self._users:
            self._options, self._is_given = self._of_group or CommunicatorOptions(), self._of_group is not None
            if not self.has_ended and self.world_size > 1:
                self.why_not = ""  # the reason may come from the options of dropped users
            self.close(how)

    def open(self, device: Any = None) -> AnyCommunicator:
        """Return the communicator, which all ranks open together at the first call.

        Args:
            device: `torch.device` of the tensors; None: the current GPU if the group has NCCL, else the CPU.

        Raises:
            Unsupported: these ranks cannot share memory; later calls say the same until all users have left.
        """
        with self._opening:
            if self.why_not:
                raise Unsupported(self.why_not)
            if self._communicator is None:
                options = replace(self._options, channels=NUM_CHANNELS)
                try:
                    self._communicator = self._opened(self.group, device, options)
                    self._memory = None  # it belongs to a closed communicator
                except Unsupported as error:
                    self.why_not = str(error)
                    raise
            return self._communicator

    def open_one_host(self, device: Any = None) -> Communicator:
        """Return the communicator as `open` does, for users whose ranks must be on one host."""
        found = self.open(device)
        if isinstance(found, HierarchicalCommunicator):
            raise Unsupported(f"ranks {list(self.ranks)} are on several hosts")
        return found

    @property
    def options(self) -> CommunicatorOptions:
        """Return the present options of the communicator."""
        return self._options

    @property
    def is_open(self) -> bool:
        """Return whether the communicator is open."""
        return self._communicator is not None

    @property
    def communicator(self) -> Any:
        """Return the communicator after its thread has started all pending calls; None if none was opened yet.

        A closed communicator says so in its calls.
        """
        if self._background is not None:
            self._background.drain()
        return self._communicator or self._closed

    @property
    def memory(self) -> CallMemory:
        """Return the `CallMemory` of the communicator. Call this only while the communicator is open."""
        if self._memory is None:
            self._memory = CallMemory(self.communicator)
        return self._memory

    def background(self) -> Background:
        """Return the thread that starts the communicator's calls. The communicator must be open."""
        with self._opening:
            if self._background is None:
                assert self._communicator is not None
                self._background = Background(self._communicator)
            return self._background

    def drain(self) -> None:
        """Wait until all calls given to the background thread are queued (on a CPU: have ended)."""
        if self._background is not None:
            self._background.drain()

    def set_timeout(self, timeout_s: float) -> None:
        """Set how many seconds a rank waits for another, from now on."""
        self._options = replace(self._options, timeout_s=timeout_s)
        if self._communicator is not None:
            self._communicator.set_timeout(timeout_s)

    def check(self) -> None:
        """Raise the error that ended the communicator, if any; its text names the failed ranks."""
        if self._communicator is not None:
            self._communicator.check()

    def close(self, how: Literal["close", "abort"] = "close") -> None:
        """Close the communicator, or abort it; a later `open` makes another. All ranks call this."""
        background, self._background = self._background, None
        communicator, self._communicator = self._communicator, None
        self._closed = communicator or self._closed
        memory, self._memory = self._memory, None
        self._routes.clear()
        self.partitioned = PartitionedCalls()
        if memory is not None:
            memory.forget()
        ends: list[Any] = [one for one in (background, communicator) if one is not None]
        # on a CPU, or to abort, the communicator comes first: it makes the thread's calls fail
        waits = how == "close" and communicator is not None and communicator.device.type == "cuda"
        for one in ends if waits else ends[::-1]:
            getattr(one, how)()

    def end(self, how: Literal["close", "abort"] = "close", why: str = "the group was destroyed") -> None:
        """Close or abort the communicator for good: it cannot be opened again."""
        self.why_not, self.has_ended = why, True
        self.close(how)

    def follow(self, tuning: FollowedTuning | None) -> None:
        """Let a tuning choose how later calls run; None: built-in rules. All ranks call this between two steps."""
        self.tuning = tuning
        self.decide_anew()

    def decide_anew(self) -> None:
        """Forget cached routes, because reasons to use torch have changed. All ranks call this at the same point."""
        self._routes.clear()

    def route(
        self, operation: str, num_bytes: int, *of_call: Any, why_torch: Callable[..., str] | None = None
    ) -> Route:
        """Return the route of a call: as the tuning chose, else by the communicator unless `why_torch` gives a reason.

        Args:
            operation: PyTorch's name.
            num_bytes: size of the full array.
            of_call: other properties that decide, such as the dtype, equal on all ranks.
            why_torch: returns why torch makes a call, empty if it does not: asked once, with operation, size,
                `of_call`, and whether the tuning chose the communicator; None: torch makes none.
        """
        key = operation, num_bytes, of_call
        route = self._routes.get(key)
        if route is None:
            tuning = self.tuning
            choice = None if tuning is None else tuning.find(operation, ranks=self.world_size, num_bytes=num_bytes)
            if choice is not None and choice.stays:
                route = Route("torch", choice.why)
            else:
                why = "" if why_torch is None else why_torch(operation, num_bytes, *of_call, choice is not None)
                route = Route("torch", why) if why else Route("zero_sm", "" if choice is None else choice.why)
            if len(self._routes) >= _MOST_ROUTES:
                self._routes.clear()
            self._routes[key] = route
        return route


class Registry(Generic[Value]):
    """Keeps values by process group and key, and closes a group's values when torch destroys it.

    torch calls nobody when it destroys a group, but it drops the group's store, to which nothing else refers. If
    something else does hold the store, values are closed when the next group is made.
    """

    def __init__(self, close: Callable[[Value], None]) -> None:
        self._close = close
        self._made: dict[Any, dict[Hashable, Value]] = {}

    def get(self, group: Any, make: Callable[[], Value], key: Hashable = None) -> Value:
        """Return the value of a group and key, made at the first call; raise `Misconfigured` for an unknown group."""
        groups: dict[Any, tuple[str, Any]] = c10d._world.pg_map
        if group not in groups:
            raise Misconfigured(f"{group} was destroyed, or torch never made it: give a process group that there is")
        if group not in self._made:
            for ended in self._made.keys() - groups.keys():
                self.close(ended)
            self._made[group] = {}
            weakref.finalize(groups[group][1], self.close, group).atexit = False
        values = self._made[group]
        if key not in values:
            values[key] = make()
        return values[key]

    def close(self, group: Any) -> None:
        """Close all values of a group, the last one first, and forget them."""
        with ExitStack() as stack:
            for value in self._made.pop(group, {}).values():
                stack.callback(self._close, value)


_GROUPS: Registry[RankGroup] = Registry(RankGroup.end)
_BY_RANKS: weakref.WeakValueDictionary[tuple[int, ...], RankGroup] = weakref.WeakValueDictionary()


def rank_group(group: Any = None) -> RankGroup:
    """Return the `RankGroup` of a process group's ranks, until torch destroys the group.

    Args:
        group: process group; None: the default one. One of backend `counterpoint` has its own.

    Raises:
        Misconfigured: torch has no such group, or this process is not in it.
    """
    group = dist.group.WORLD if group is None else group
    own = getattr(group, "rank_group", None)
    if own is not None:
        found: RankGroup = own
        return found
    known = _BY_RANKS.get(ranks_of(group))
    if known is None or known.has_ended:
        known = _BY_RANKS[ranks_of(group)] = _GROUPS.get(group, lambda: RankGroup(group, ranks_of(group)))
    return known


def ranks_of(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a process group, in the order of the group."""
    return tuple(dist.get_process_group_ranks(group))


def torch_group(group: Any) -> Any:
    """Return `group`, or, for a group of backend `counterpoint`, its inner group of torch's own backends."""
    inner = getattr(group, "inner", None)
    if inner is None:
        return group
    inner.register()
    return inner.group
