"""Set counterpoint's hooks on FSDP2 modules, if their size and a tuning allow it, and remove these hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from counterpoint.errors import Misconfigured
from counterpoint.parallel.follow_tuning import FollowedTuning, TunedCall
from counterpoint.parallel.fsdp.hooks import GatherHook, Prefetch, ScatterHook, ShardGroups
from counterpoint.parallel.fsdp.modules import (
    ShardedModule,
    calls_of,
    copied_why,
    discard_pass,
    is_unfinished,
    outermost,
    present_hooks,
    refuse_unfinished,
    set_hooks,
    unmanaged_bytes,
)
from counterpoint.parallel.fsdp.slots import ModuleParameters, ParameterSlots
from counterpoint.parallel.options import OverlapOptions
from counterpoint.parallel.report import ModuleRow, Report, Traffic


@dataclass(frozen=True, kw_only=True)
class ModuleChoice:
    """Holds a tuning's choices for the gather and the scatter of an FSDP2 module; None: built-in rules decide."""

    gather: TunedCall | None = None
    scatter: TunedCall | None = None

    @classmethod
    def of(cls, module: ShardedModule, tuning: FollowedTuning | None) -> ModuleChoice:
        """Return the tuning's choices for the all-gather and the reduce_scatter of a sharded module."""
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
        """Return whether counterpoint's all-gather replaces torch's."""
        return self.gather is None or not self.gather.stays

    @property
    def takes_scatter(self) -> bool:
        """Return whether counterpoint's reduce_scatter replaces torch's."""
        return self.scatter is None or not self.scatter.stays

    def reasons(self) -> dict[str, str]:
        """Return the reason for each of the tuning's choices, by name of the collective."""
        named = (("all_gather", self.gather), ("reduce_scatter", self.scatter))
        return {name: call.why for name, call in named if call is not None}

    def torch_why(self) -> str:
        """Return why both of torch's own collectives stay; "" if one of them is replaced."""
        if self.takes_gather or self.takes_scatter:
            return ""
        return "; ".join(dict.fromkeys(self.reasons().values()))


class HookedModule:
    """Sets hooks on one module for the collectives that `choice` replaces; `undo` restores the earlier hooks.

    Args:
        module: the module.
        groups: communicators of all modules' groups.
        choice: the tuning's choices for this module.
        parameters: memory where peers write its unsharded parameters; None: FSDP2 copies them out of a buffer.
        copied_why: says why FSDP2 copies them; empty: it does not.
        direct: gradients are sent from where autograd left them, not from a buffer.
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
        """Return the counts and sizes of the module's gathers and scatters so far."""
        named = (("all_gather", self._gather), ("reduce_scatter", self._scatter))
        gather, scatter = (
            Traffic(operation=name, torch_why="as tuned") if hook is None else hook.traffic() for name, hook in named
        )
        return gather, scatter

    def undo(self) -> None:
        """Restore the earlier hooks, and let FSDP2 allocate unsharded parameters again."""
        self._module.module.reshard()
        if self._gather is not None:
            self._gather.restore()
        set_hooks(self._module, *self._before)


class OverlappedShards:
    """Runs the collectives of a model's FSDP2 modules, reports them, and gives them back to torch by `restore`.

    Args:
        model: the model.
        modules: the model's FSDP2 modules; none: nothing is done.
        options: options that say which modules are taken, and how.
        tuning: chooses for the collectives of each module; None: nothing does.

    Raises:
        Unsupported: the ranks of a module cannot share memory.
        Misconfigured: other collectives were set before, or `prefetch` is given for modules with prefetch lists.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[ShardedModule],
        options: OverlapOptions,
        tuning: FollowedTuning | None,
    ) -> None:
        left = {module: why_not_taken(module, options.limit_bytes) for module in modules}
        self._choices = {module: ModuleChoice.of(module, None if why else tuning) for module, why in left.items()}
        self._torch_why = {module: why or self._choices[module].torch_why() for module, why in left.items()}
        self._hooked: dict[ShardedModule, HookedModule] = {}
        self._groups: ShardGroups | None = None
        self._prefetch: Prefetch | None = None
        self._outermost: list[nn.Module] = []
        self._unmanaged_bytes = 0
        taken = [module for module in modules if not self._torch_why[module]]
        for module in taken:
            check_unchanged(module)
        if not taken:
            return
        if options.prefetch is not None:
            self._prefetch = Prefetch(options.prefetch, [one for one in taken if self._choices[one].takes_gather])
        groups = [group for module in taken for group in module.groups]
        self._groups = ShardGroups(groups, device=taken[0].device, options=options.communicator)
        self._hook(taken, self._groups, direct=options.direct)
        self._outermost, self._unmanaged_bytes = outermost(model), unmanaged_bytes(model, modules)
        refuse = torch.compiler.disable(refuse_unfinished)
        self._refusals = [module.register_forward_pre_hook(refuse, prepend=True) for module in self._outermost]

    def _hook(self, modules: Sequence[ShardedModule], groups: ShardGroups, *, direct: bool) -> None:
        """Set hooks on these modules, for the collectives that their choices replace."""
        copied = {module: copied_why(module) if direct else "direct=False" for module in modules}
        in_place = [one for one, why in copied.items() if self._choices[one].takes_gather and not why]
        parameters = _whole_parameters(in_place, groups, ahead=self._prefetch.depth if self._prefetch else 1)
        for module in modules:
            self._hooked[module] = HookedModule(
                module,
                groups,
                choice=self._choices[module],
                parameters=parameters.get(module),
                copied_why=copied[module] if self._choices[module].takes_gather else "",
                direct=direct,
                prefetch=self._prefetch,
            )

    @property
    def is_empty(self) -> bool:
        """Return whether no module is sharded."""
        return not self._torch_why

    @property
    def has_effect(self) -> bool:
        """Return whether any collective was replaced, or left to torch because the tuning says so."""
        return bool(self._hooked) or any(choice.torch_why() for choice in self._choices.values())

    def first_left(self) -> str:
        """Return the name of a module whose collectives were not replaced, and why."""
        module, why = next(iter(self._torch_why.items()))
        return f"{module.name}: {why}"

    def report(self) -> Report:
        """Return a report of every module, with the traffic of its hooks."""
        return Report(modules=tuple(map(self._reported, self._torch_why)), notes=tuple(self._notes()))

    def check(self) -> None:
        """Raise the error that ended a communicator, if one has failed."""
        if self._groups is not None:
            self._groups.check()

    def reset_iter_state(self) -> None:
        """Discard an interrupted forward or backward pass, so that the step can begin anew."""
        for module in self._outermost:
            discard_pass(module)

    def restore(self) -> None:
        """Restore torch's own collectives, and leave the communicators. All ranks call this, once."""
        if self._groups is None:
            return
        if any(map(is_unfinished, self._outermost)):
            self.reset_iter_state()
        for refusal in self._refusals:
            refusal.remove()
        if self._prefetch is not None:
            self._prefetch.undo()
        for hooked in self._hooked.values():
            hooked.undo()
        self._groups.close()

    def _reported(self, module: ShardedModule) -> ModuleRow:
        hooked = self._hooked.get(module)
        return ModuleRow(
            name=module.name,
            kind="fsdp2",
            ranks=module.ranks,
            replicas=module.replicas,
            runs="" if hooked is None else "zero_sm",
            traffic=() if hooked is None else hooked.traffic(),
            torch_why=self._torch_why[module],
            choice="; ".join(f"{name}: {why}" for name, why in self._choices[module].reasons().items()),
            gather_bytes=module.gather_bytes,
        )

    def _notes(self) -> Iterator[str]:
        for module, hooked in self._hooked.items():
            if hooked.copied_why:
                yield f"{module.name}: FSDP2 copies: {hooked.copied_why}"
        if any(module.replicas > 1 for module in self._torch_why):
            yield "all_reduce between replicas: torch's"
        if self._prefetch is not None:
            yield f"prefetch: {self._prefetch}"
        if self._unmanaged_bytes:
            yield f"{self._unmanaged_bytes / 1e6:,.1f} MB of parameters are in no FSDP2 module"
        names: dict[tuple[str, str], list[str]] = {}
        for module, choice in self._choices.items():
            for reason in choice.reasons().items():
                names.setdefault(reason, []).append(module.name)
        for (operation, why), these in names.items():
            yield f"{operation} of {these[0]}{f' and {len(these) - 1} more' if these[1:] else ''}: {why}"


def _whole_parameters(
    modules: Sequence[ShardedModule], groups: ShardGroups, *, ahead: int
) -> dict[ShardedModule, ModuleParameters]:
    """Return each module's unsharded parameters; modules that shard over the same ranks share slots of memory.

    `ahead` is the number of modules that may be gathered before the module that runs has ended.
    """
    made: dict[ShardedModule, ModuleParameters] = {}
    for group in groups.all():
        sharing = [one for one in modules if groups.of(one.groups[0]) is group]
        slots = ParameterSlots(group, groups, sharing, ahead=ahead)
        made |= {module: ModuleParameters(module, slots) for module in sharing}
    return made


def why_not_taken(module: ShardedModule, limit_bytes: int | None) -> str:
    """Return why this module keeps torch's own collectives; "" if counterpoint's replace them."""
    if module.shard_group is None:
        return "it is replicated, not sharded"
    if not module.groups:
        return "one rank has nothing to gather"
    if limit_bytes is not None and module.gather_bytes > limit_bytes:
        return f"it gathers {module.gather_bytes} bytes, more than limit_bytes={limit_bytes}"
    return ""


def check_unchanged(module: ShardedModule) -> None:
    """Raise Misconfigured if the collectives of this module were replaced before."""
    for hook in present_hooks(module):
        if isinstance(hook, GatherHook | ScatterHook):
            raise Misconfigured(f"{module.name} is overlapped already: call restore() of the first overlap() before")
        if type(hook).__name__ not in ("DefaultAllGather", "DefaultReduceScatter"):
            raise Misconfigured(
                f"{module.name} communicates by {type(hook).__name__}; leave out set_custom_*, set_symm_mem_for_comm "
                "and set_allocate_memory_from_process_group_for_comm where overlap() is to act"
            )
