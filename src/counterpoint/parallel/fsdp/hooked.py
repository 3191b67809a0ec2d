"""Put our hooks on FSDP2 modules, where their size and a tuning allow it, and take them off again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from counterpoint.errors import Misconfigured
from counterpoint.parallel.fsdp.hooks import GatherHook, ScatterHook, ShardGroups
from counterpoint.parallel.fsdp.modules import ShardedModule, calls_of, copied_why, present_hooks, set_hooks
from counterpoint.parallel.fsdp.prefetch import Prefetch
from counterpoint.parallel.fsdp.slots import ModuleParameters, ParameterSlots
from counterpoint.parallel.report import Traffic
from counterpoint.parallel.tuned import FollowedTuning, TunedCall


@dataclass(frozen=True, kw_only=True)
class ModuleChoice:
    """Holds what the tuning chose for the two collectives of an FSDP2 module; None: built-in rules take them."""

    gather: TunedCall | None = None
    scatter: TunedCall | None = None

    @classmethod
    def of(cls, module: ShardedModule, tuning: FollowedTuning | None) -> ModuleChoice:
        """Return the choices of a module that is sharded."""
        if tuning is None:
            return cls()
        ranks, where = len(module.ranks), module.names
        gather, scatter = (
            tuning.find(call.operation, ranks=ranks, num_bytes=call.num_bytes, dtype=call.dtype, where=where)
            for call in calls_of(module)
        )
        return cls(gather=gather, scatter=scatter)

    @property
    def takes_gather(self) -> bool:
        """Return whether our gather takes the place of torch's."""
        return self.gather is None or not self.gather.stays

    @property
    def takes_scatter(self) -> bool:
        """Return whether our reduce_scatter takes the place of torch's."""
        return self.scatter is None or not self.scatter.stays

    def texts(self) -> tuple[str, ...]:
        """Return a text for each collective for which something was chosen: its name, and why."""
        named = (("all_gather", self.gather), ("reduce_scatter", self.scatter))
        return tuple(f"{name}: {call.why}" for name, call in named if call is not None)

    def torch_why(self) -> str:
        """Return why torch's own collectives both stay; empty if they do not."""
        if self.takes_gather or self.takes_scatter:
            return ""
        return "; ".join(dict.fromkeys(call.why for call in (self.gather, self.scatter) if call is not None))


class HookedModule:
    """Sets counterpoint's hooks on one module, as its choice takes them; `undo` puts back the ones of before.

    Args:
        module: the module.
        groups: of all modules.
        choice: of the tuning.
        parameters: where peers write its whole parameters; None: FSDP2 copies them out of a buffer.
        copied_why: says why it does; empty: it does not.
        direct: gradients are sent from where they are.
        prefetch: learns the order of modules; None: FSDP2 prefetches as it does by itself.
    """

    def __init__(
        self,
        module: ShardedModule,
        groups: ShardGroups,
        *,
        choice: ModuleChoice,
        parameters: ModuleParameters | None,
        copied_why: str,
        direct: bool,
        prefetch: Prefetch | None,
    ) -> None:
        self._module, self._before = module, present_hooks(module)
        self.copied_why = copied_why
        self._gather: GatherHook | None = None
        self._scatter: ScatterHook | None = None
        if choice.takes_gather:
            self._gather = GatherHook(module, groups, parameters=parameters, prefetch=prefetch)
        if choice.takes_scatter:
            self._scatter = ScatterHook(groups, ranks=len(module.ranks), direct=direct, prefetch=prefetch)
        set_hooks(module, self._gather or self._before[0], self._scatter or self._before[1])

    def traffic(self) -> tuple[Traffic, Traffic]:
        """Return what gathers and scatters have moved."""
        named = (("all_gather", self._gather), ("reduce_scatter", self._scatter))
        gather, scatter = (
            Traffic(operation=name, torch_why="as tuned") if hook is None else hook.traffic() for name, hook in named
        )
        return gather, scatter

    def undo(self) -> None:
        """Put back the hooks of before, and FSDP2's own memory for whole parameters."""
        self._module.module.reshard()
        if self._gather is not None:
            self._gather.restore()
        set_hooks(self._module, *self._before)


def hooked_modules(
    choices: Mapping[ShardedModule, ModuleChoice], groups: ShardGroups, *, direct: bool, prefetch: Prefetch | None
) -> dict[ShardedModule, HookedModule]:
    """Set the hooks that the choices take on these modules, and return what takes them off."""
    copied = {
        module: copied_why(module) if direct else "direct=False"
        for module, choice in choices.items()
        if choice.takes_gather
    }
    in_place = [module for module, why in copied.items() if not why]
    parameters = _whole_parameters(in_place, groups, ahead=prefetch.depth if prefetch else 1)
    return {
        module: HookedModule(
            module,
            groups,
            choice=choice,
            parameters=parameters.get(module),
            copied_why=copied.get(module, ""),
            direct=direct,
            prefetch=prefetch,
        )
        for module, choice in choices.items()
    }


def _whole_parameters(
    modules: Sequence[ShardedModule], groups: ShardGroups, *, ahead: int
) -> dict[ShardedModule, ModuleParameters]:
    """Return whole parameters for each module; the modules of one set of ranks share its slots.

    So many modules may be gathered `ahead` of the one that runs.
    """
    made: dict[ShardedModule, ModuleParameters] = {}
    for group in groups.all():
        sharing = [one for one in modules if groups.of(one.groups[0]) is group]
        slots = ParameterSlots(group, sharing, ahead=ahead)
        made |= {module: ModuleParameters(module, slots) for module in sharing}
    return made


def why_not_taken(module: ShardedModule, limit_bytes: int | None) -> str:
    """Return why torch's own collectives stay under this module; empty if ours take their place."""
    if module.shard_group is None:
        return "it is replicated, not sharded"
    if not module.groups:
        return "one rank has nothing to gather"
    if limit_bytes is not None and module.gather_bytes > limit_bytes:
        return f"it gathers {module.gather_bytes} bytes, more than limit_bytes={limit_bytes}"
    return ""


def check_unchanged(module: ShardedModule) -> None:
    """Raise Misconfigured if the collectives of this module were replaced already."""
    for hook in present_hooks(module):
        if isinstance(hook, GatherHook | ScatterHook):
            raise Misconfigured(f"{module.name} is overlapped already: call restore() of the first overlap() before")
        if type(hook).__name__ not in ("DefaultAllGather", "DefaultReduceScatter"):
            raise Misconfigured(
                f"{module.name} communicates by {type(hook).__name__}; leave out set_custom_*, set_symm_mem_for_comm "
                "and set_allocate_memory_from_process_group_for_comm where overlap() is to act"
            )
