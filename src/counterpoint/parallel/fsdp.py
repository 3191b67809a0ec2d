"""FSDP2 with zero-SM collectives, in one line after `fully_shard`:

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    overlapped = overlap(model)

From then on every FSDP2 module gathers its parameters and scatters its gradients through a `Communicator`: by copy
engines and stream memory operations, which no resident kernel can hold up. Nothing else changes: not the values, not
the optimizer, not the checkpoints. `overlapped` says what was done (`print(overlapped)`) and takes it back.

The hooks, streams and lifetimes of buffers are in fsdp_hooks.py, what is read from FSDP2 in fsdp_modules.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.parallel.fsdp_modules import (
    ShardedModule,
    copied_why,
    gather_group,
    present_hooks,
    sharded_modules,
    unmanaged_bytes,
)
from counterpoint.parallel.fsdp_prefetch import Prefetch
from counterpoint.parallel.fsdp_report import ModuleReport, Report

if TYPE_CHECKING:
    from counterpoint.collectives.communicator import Communicator
    from counterpoint.parallel.fsdp_hooks import Communicators
    from counterpoint.parallel.fsdp_places import Places

__all__ = ["Options", "Overlap", "overlap"]

STAGING_BYTES = 1 << 27  # a slice less costs a round trip, some 30 us of a call that computation hides


@dataclass(frozen=True, kw_only=True)
class Options:
    """How `overlap` communicates.

    Args:
        prefetch: modules to gather ahead, in the order in which they are seen to run; None: as FSDP2 does by itself,
            or as it was told. Each costs the memory of one module.
        direct: gather parameters to where they are used, and scatter gradients from where autograd left them, so that
            FSDP2 copies neither; False: it does, and only what it has copied is sent.
        gather_channel: of the communicators, for gathers.
        scatter_channel: for scatters; on one channel they run one after the other, on two at the same time.
        chunk_bytes: smallest piece in which gradients are sent and reduced; None: the communicator's own choice.
        staging_bytes: most memory into which peers send gradients before they are added up; what needs more comes in
            slices. None: as much as the largest module needs, kept for good.
        max_bytes: symmetric memory that this rank may take for each group; None: the communicator's own choice.
        limit_bytes: modules that gather more keep torch's collectives; None: no limit. Buffers as large as the largest
            module stay in symmetric memory for good.
        timeout_s: seconds that a rank waits for another before all are told who is missing.
        debug: compare the calls of all ranks before each starts.

    Raises:
        Misconfigured: an option that cannot mean anything.
    """

    prefetch: int | None = None
    direct: bool = True
    gather_channel: int = 0
    scatter_channel: int = 1
    chunk_bytes: int | None = None
    staging_bytes: int | None = STAGING_BYTES
    max_bytes: int | None = None
    limit_bytes: int | None = None
    timeout_s: float = 600.0
    debug: bool = False

    def __post_init__(self) -> None:
        if min(self.gather_channel, self.scatter_channel) < 0:
            raise Misconfigured(
                f"gather_channel={self.gather_channel}, scatter_channel={self.scatter_channel}: channels count from 0"
            )
        if self.prefetch is not None and self.prefetch < 1:
            raise Misconfigured(f"prefetch={self.prefetch}: give 1 or more, or None for what FSDP2 does by itself")

    def for_communicator(self) -> dict[str, Any]:
        """What a `Communicator` is told; what is None it chooses."""
        return {
            "channels": 1 + max(self.gather_channel, self.scatter_channel),
            "timeout_s": self.timeout_s,
            "debug": self.debug,
            "max_bytes": self.max_bytes,
            "chunk_bytes": self.chunk_bytes,
            "staging_bytes": self.staging_bytes,
        }


def overlap(model: Any, *, options: Options | None = None) -> Overlap:
    """Puts zero-SM collectives under every FSDP2 module of `model`. All ranks call it, after the last `fully_shard`.

    Parameters may still be on the meta device. HSDP's all-reduce between replicas stays with torch, as does everything
    of modules that have one rank or are larger than `options.limit_bytes`: the report says so.

    Args:
        model: `fully_shard` was called on it, or on parts of it.
        options: None: the defaults.

    Returns: a handle: the report, and the way back. The model keeps what it needs; the handle need not be kept.

    Raises:
        Misconfigured: no FSDP2 module in it, FSDP1 in it, other collectives set before, or called twice.
        Unsupported: CPU offload, one rank alone, ranks that cannot share memory, or a torch without the hooks.
    """
    from counterpoint.parallel.fsdp_hooks import Communicators
    from counterpoint.parallel.fsdp_places import Places

    options = options or Options()
    modules = sharded_modules(model)
    torch_why = {module: _torch_why(module, options.limit_bytes) for module in modules}
    taken = [module for module in modules if not torch_why[module]]
    if not taken:
        raise Unsupported(f"nothing to overlap: {modules[0].name}: {torch_why[modules[0]]}")
    for module in taken:
        _check_unchanged(module)
    prefetch = None if options.prefetch is None else Prefetch(options.prefetch, taken)
    groups = [group for module in taken for group in module.groups]
    communicators = Communicators(groups, partial(_communicator, device=taken[0].device, options=options))
    copied = {module: copied_why(module) if options.direct else "direct=False" for module in taken}
    places = {
        one: Places(
            one,
            [module for module in taken if not copied[module] and communicators.of(module.shard_group) is one],
            ahead=options.prefetch or 1,
        )
        for one in communicators.all()
    }
    return Overlap(
        hooked={
            module: _Hooked(module, communicators, places, options, prefetch, copied_why=copied[module])
            for module in taken
        },
        torch_why=torch_why,
        communicators=communicators,
        prefetch=prefetch,
        unmanaged_bytes=unmanaged_bytes(model, modules),
    )


class Overlap:
    """What `overlap` returns: the report, and the way back, by `restore` or at the end of a `with` block."""

    def __init__(
        self,
        *,
        hooked: dict[ShardedModule, _Hooked],
        torch_why: dict[ShardedModule, str],
        communicators: Communicators,
        prefetch: Prefetch | None,
        unmanaged_bytes: int,
    ) -> None:
        self._hooked, self._torch_why = hooked, torch_why
        self._communicators, self._prefetch, self._unmanaged_bytes = communicators, prefetch, unmanaged_bytes
        self._is_on = True

    def __enter__(self) -> Overlap:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def __str__(self) -> str:
        return str(self.report())

    def report(self) -> Report:
        """Every FSDP2 module of the model, and what its hooks have moved so far."""
        return Report(
            modules=tuple(self._reported(module) for module in self._torch_why),
            prefetch="" if self._prefetch is None else str(self._prefetch),
            unmanaged_bytes=self._unmanaged_bytes,
        )

    def check(self) -> None:
        """Raises what ended communication, if something did, and names the ranks.

        The next step raises it, too. On GPUs the host runs ahead: call it after a wait for the GPU (`loss.item()`)
        where a step must not be trusted that a peer has left, such as before a checkpoint.
        """
        self._communicators.check()

    def restore(self) -> None:
        """torch's own collectives again. All ranks call it, between two steps; the communicators are closed."""
        if not self._is_on:
            return
        self._is_on = False
        if self._prefetch is not None:
            self._prefetch.undo()
        for hooked in self._hooked.values():
            hooked.undo()
        self._communicators.close()

    def _reported(self, module: ShardedModule) -> ModuleReport:
        hooked = self._hooked.get(module)
        return ModuleReport(
            name=module.name,
            ranks=module.ranks,
            gather_bytes=module.gather_bytes,
            replicas=module.replicas,
            all_gather=None if hooked is None else hooked.gather.traffic(),
            reduce_scatter=None if hooked is None else hooked.scatter.traffic(),
            torch_why=self._torch_why[module],
            copied_why="" if hooked is None else hooked.copied_why,
        )


class _Hooked:
    """One module with our hooks, and those that it had before."""

    def __init__(
        self,
        module: ShardedModule,
        communicators: Communicators,
        places: Mapping[Communicator, Places],
        options: Options,
        prefetch: Prefetch | None,
        *,
        copied_why: str,
    ) -> None:
        from counterpoint.parallel.fsdp_hooks import GatherHook, ScatterHook
        from counterpoint.parallel.fsdp_places import Home

        self._module, self._before = module, present_hooks(module)
        self.copied_why = copied_why
        home = None if self.copied_why else Home(module, places[communicators.of(module.shard_group)])
        self.gather = GatherHook(
            communicators,
            next_group=partial(gather_group, module),
            home=home,
            channel=options.gather_channel,
            seen=_nothing if prefetch is None else partial(prefetch.gathered, module),
        )
        self.scatter = ScatterHook(
            communicators,
            ranks=module.shard_group.size(),
            direct=options.direct,
            channel=options.scatter_channel,
            seen=_nothing if prefetch is None else prefetch.scattered,
        )
        self._set(self.gather, self.scatter)

    def undo(self) -> None:
        """The hooks of before, and FSDP2's own memory for whole parameters."""
        self._module.module.reshard()
        self.gather.leave()
        self._set(*self._before)

    def _set(self, gather: Any, scatter: Any) -> None:
        self._module.module.set_custom_all_gather(gather)
        self._module.module.set_custom_reduce_scatter(scatter)


def _nothing() -> None:
    """Nobody wants to know the order."""


def _torch_why(module: ShardedModule, limit_bytes: int | None) -> str:
    """Why torch's own collectives stay under this module; empty if ours take their place."""
    if module.shard_group is None:
        return "it is replicated, not sharded"
    if not module.groups:
        return "one rank has nothing to gather"
    if limit_bytes is not None and module.gather_bytes > limit_bytes:
        return f"it gathers {module.gather_bytes} bytes, more than limit_bytes={limit_bytes}"
    return ""


def _check_unchanged(module: ShardedModule) -> None:
    """Raises Misconfigured if somebody has replaced the collectives of this module already."""
    from counterpoint.parallel.fsdp_hooks import GatherHook, ScatterHook

    for hook in present_hooks(module):
        if isinstance(hook, GatherHook | ScatterHook):
            raise Misconfigured(f"{module.name} is overlapped already: call restore() of the first overlap() before")
        if type(hook).__name__ not in ("DefaultAllGather", "DefaultReduceScatter"):
            raise Misconfigured(
                f"{module.name} communicates by {type(hook).__name__}; leave out set_custom_*, set_symm_mem_for_comm "
                "and set_allocate_memory_from_process_group_for_comm where overlap() is to act"
            )


def _communicator(group: Any, *, device: Any, options: Options) -> Communicator:
    import torch.distributed as dist

    from counterpoint.collectives.communicator import Communicator

    try:
        return Communicator(group, device=device, **options.for_communicator())
    except Unsupported as error:
        raise Unsupported(
            f"FSDP2's group of ranks {dist.get_process_group_ranks(group)}: {error} (ranks of several hosts: a mesh of "
            "two axes, replicated between hosts and sharded within)"
        ) from error
