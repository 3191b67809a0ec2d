"""Run FSDP2, DDP (`ddp.py`), tensor (`tensor/`) or expert parallelism (`expert/`) with collectives that overlap.

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    overlapped = overlap(model)

From then on every FSDP2 module gathers its parameters and scatters its gradients through a `Communicator`: by copy
engines and stream memory operations, which no resident kernel can hold up. Nothing else changes: not the values, not
the optimizer, not the checkpoints. `print(overlapped)` says what was done; `overlapped.restore()` takes it back.

`overlap(model, tuned="counterpoint.toml")` follows what `counterpoint tune` chose for each collective (`tuned.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, overload

from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.parallel.fsdp.modules import (
    ShardedModule,
    discard_pass,
    is_unfinished,
    outermost,
    refuse_unfinished,
    sharded_modules,
    unmanaged_bytes,
)
from counterpoint.parallel.fsdp.prefetch import Prefetch
from counterpoint.parallel.options import DdpOptions, OverlapOptions
from counterpoint.parallel.report import ModuleRow, Report, together
from counterpoint.records.tuning import Tuned

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from counterpoint.parallel.ddp import OverlappedDdp
    from counterpoint.parallel.fsdp.hooked import HookedModule, ModuleChoice
    from counterpoint.parallel.fsdp.hooks import ShardGroups
    from counterpoint.parallel.tuned import FollowedTuning


@overload
def overlap(  # type: ignore[overload-overlap]
    model: DistributedDataParallel, *, options: DdpOptions | None = None, tuned: Tuned | str | Path | None = None
) -> OverlappedDdp: ...


@overload
def overlap(
    model: nn.Module, *, options: OverlapOptions | None = None, tuned: Tuned | str | Path | None = None
) -> Overlap: ...


def overlap(
    model: nn.Module,
    *,
    options: OverlapOptions | DdpOptions | None = None,
    tuned: Tuned | str | Path | None = None,
) -> Overlap | OverlappedDdp:
    """Put collectives that overlap under a model of FSDP2, DDP, tensor or expert parallelism. All ranks call it.

    It takes every FSDP2 module of `model`, after the last `fully_shard`, or the buckets of a `DistributedDataParallel`,
    right after that was made; every linear layer of torch's `parallelize_module`, or of a `tp_plan` of `transformers`;
    and the experts of an `ep_plan` of `transformers`. A model of several kinds is taken as all of them.

    Parameters may still be on the meta device. HSDP's all-reduce between replicas stays with torch, as does everything
    of modules that have one rank or are larger than `options.limit_bytes`: the report says so.

    Args:
        model: `fully_shard` or `parallelize_module` was called on it, or on parts of it; or a
            `DistributedDataParallel`; or `transformers` has made it with a `tp_plan` or `ep_size`.
        options: of FSDP2; `DdpOptions` for DDP; None: the defaults.
        tuned: what `counterpoint tune` chose, or its file, equal on all ranks; calls for which it has no choice run by
            built-in rules. `off`: none; None: the file that the variable COUNTERPOINT_TUNED names.

    Returns:
        A handle that reports, and puts torch's collectives back: an `Overlap`, for DDP an `OverlappedDdp`. The model
        works without it: it need not be kept.

    Raises:
        Unsupported: one rank alone, or nothing that could be replaced. As well CPU offload, ranks that cannot share
            memory, or a torch without the hooks.
        Misconfigured: no module of FSDP2, tensor or expert parallelism, FSDP1, other collectives set before, a second
            call, options of another kind, or a tuning that cannot be read or is not the same on all ranks.
    """
    from torch.nn.parallel import DistributedDataParallel

    from counterpoint.parallel.ddp import OverlappedDdp

    if isinstance(model, DistributedDataParallel):
        if not isinstance(options, DdpOptions | None):
            raise Misconfigured(f"options of type {type(options).__name__} for DDP: give counterpoint.ddp.DdpOptions")
        return OverlappedDdp(model, options, tuned)
    if not isinstance(options, OverlapOptions | None):
        raise Misconfigured(f"options of type {type(options).__name__} for a model that is no DDP: give OverlapOptions")
    return _overlap_modules(model, options or OverlapOptions(), tuned)


def _overlap_modules(model: nn.Module, options: OverlapOptions, tuned: Tuned | str | Path | None) -> Overlap:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    is_sharded = any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules())
    modules = sharded_modules(model) if is_sharded else ()
    layers = _Layers(model, options, modules, tuned)
    try:
        if is_sharded or layers.is_empty:
            return _overlap_fsdp2(model, modules or sharded_modules(model), options, layers)
        if not layers.have_effect:
            raise Unsupported(f"nothing to overlap: {layers.first_left()}")
    except BaseException:
        layers.restore()
        raise
    return Overlap(layers=layers)


class _Layers:
    """Runs the layers that communicate for themselves, those of tensor and of expert parallelism, and has the tuning.

    `tuning` is None where none is followed.
    """

    def __init__(
        self,
        model: nn.Module,
        options: OverlapOptions,
        modules: Sequence[ShardedModule],
        tuned: Tuned | str | Path | None,
    ) -> None:
        from counterpoint.parallel.expert.modules import OverlappedExpertParallel, expert_groups
        from counterpoint.parallel.tensor.modules import OverlappedTensorParallel
        from counterpoint.parallel.tuned import follow_together

        self._undo = ExitStack()
        with ExitStack() as undo:
            self.tensor = OverlappedTensorParallel(model, options.tensor_parallel)
            undo.callback(self.tensor.restore)
            groups = [group for module in modules for group in (*module.groups, *module.replicating)]
            groups += [*self.tensor.groups, *expert_groups(model)]
            device_type = _device_type(model, modules)
            self.tuning: FollowedTuning | None = follow_together(tuned, groups, device_type=device_type)
            self.expert = OverlappedExpertParallel(model, options.expert_parallel, self.tuning)
            undo.callback(self.expert.restore)
            self.tensor.follow(self.tuning)
            if self.tuning is not None:
                self.tuning.limit_gemms(undo, device_type)
            self._undo = undo.pop_all()

    @property
    def is_empty(self) -> bool:
        return self.tensor.is_empty and self.expert.is_empty

    @property
    def have_effect(self) -> bool:
        return self.tensor.has_effect or self.expert.has_effect

    def first_left(self) -> str:
        return self.expert.first_left() if self.tensor.is_empty else self.tensor.first_left()

    def check(self) -> None:
        self.tensor.check()
        self.expert.check()

    def restore(self) -> None:
        self._undo.close()


def _overlap_fsdp2(
    model: nn.Module, modules: Sequence[ShardedModule], options: OverlapOptions, layers: _Layers
) -> Overlap:
    from counterpoint.parallel.fsdp.hooked import ModuleChoice, check_unchanged, hooked_modules, why_not_taken
    from counterpoint.parallel.fsdp.hooks import ShardGroups

    torch_why = {module: why_not_taken(module, options.limit_bytes) for module in modules}
    choices = {module: ModuleChoice.of(module, None if why else layers.tuning) for module, why in torch_why.items()}
    torch_why = {module: why or choices[module].torch_why() for module, why in torch_why.items()}
    taken = [module for module in modules if not torch_why[module]]
    if not taken:
        if layers.have_effect or any(choice.torch_why() for choice in choices.values()):
            return Overlap(torch_why=torch_why, choices=choices, layers=layers)
        raise Unsupported(f"nothing to overlap: {modules[0].name}: {torch_why[modules[0]]}")
    for module in taken:
        check_unchanged(module)
    gathering = [module for module in taken if choices[module].takes_gather]
    prefetch = None if options.prefetch is None else Prefetch(options.prefetch, gathering)
    groups = [group for module in taken for group in module.groups]
    shards = ShardGroups(groups, device=taken[0].device, options=options.communicator)
    hooked = {module: choices[module] for module in taken}
    return Overlap(
        hooked=hooked_modules(hooked, shards, direct=options.direct, prefetch=prefetch),
        torch_why=torch_why,
        choices=choices,
        groups=shards,
        prefetch=prefetch,
        outermost=outermost(model),
        unmanaged_bytes=unmanaged_bytes(model, modules),
        layers=layers,
    )


class Overlap:
    """Reports what was replaced, and puts torch's collectives back: by `restore`, or at the end of a `with` block."""

    def __init__(
        self,
        *,
        layers: _Layers,
        hooked: Mapping[ShardedModule, HookedModule] = MappingProxyType({}),
        torch_why: Mapping[ShardedModule, str] = MappingProxyType({}),
        choices: Mapping[ShardedModule, ModuleChoice] = MappingProxyType({}),
        groups: ShardGroups | None = None,
        prefetch: Prefetch | None = None,
        outermost: Sequence[nn.Module] = (),
        unmanaged_bytes: int = 0,
    ) -> None:
        import torch

        self._hooked, self._torch_why, self._choices, self._layers = hooked, torch_why, choices, layers
        self._groups, self._prefetch, self._unmanaged_bytes = groups, prefetch, unmanaged_bytes
        self._outermost = outermost
        refuse = torch.compiler.disable(refuse_unfinished)
        self._refusals = [module.register_forward_pre_hook(refuse, prepend=True) for module in outermost]
        self._is_on = True

    def __enter__(self) -> Overlap:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def __str__(self) -> str:
        return str(self.report())

    def report(self) -> Report:
        """Return what hooks of FSDP2 modules have moved so far, and the modules of tensor and expert parallelism."""
        layers = [self._layers.tensor.report(), self._layers.expert.report()]
        sharded = tuple(self._reported(module) for module in self._torch_why)
        return Report(
            modules=(*sharded, *(row for report in layers for row in report.modules)),
            calls=together(row for report in layers for row in report.calls),
            tuned="" if self._layers.tuning is None else str(self._layers.tuning),
            notes=tuple(self._notes()),
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
        names: dict[str, list[str]] = {}
        for module, choice in self._choices.items():
            for text in choice.texts():
                names.setdefault(text, []).append(module.name)
        for text, these in names.items():
            operation, _, why = text.partition(": ")
            yield f"{operation} of {these[0]}{f' and {len(these) - 1} more' if these[1:] else ''}: {why}"

    def check(self) -> None:
        """Raise the error that ended communication, if there was one; it names the ranks.

        The next step raises it, too. On GPUs the host runs ahead: call it after a wait for the GPU (`loss.item()`)
        where a step must not be trusted that a peer has left, such as before a checkpoint.
        """
        if self._groups is not None:
            self._groups.check()
        self._layers.check()

    def reset_iter_state(self) -> None:
        """Discard a forward or backward pass that an exception ended, so that the step can begin anew.

        All ranks call it, and set gradients to zero after it. Gradients that are not reduced yet are lost, those of
        microbatches before, too. After an exception in a backward pass the next forward pass raises until this was
        called.
        """
        for module in self._outermost:
            discard_pass(module)

    def restore(self) -> None:
        """Put torch's own collectives back, and close the communicators. All ranks call it, between two steps."""
        if not self._is_on:
            return
        self._is_on = False
        if any(map(is_unfinished, self._outermost)):
            self.reset_iter_state()
        for refusal in self._refusals:
            refusal.remove()
        if self._prefetch is not None:
            self._prefetch.undo()
        for hooked in self._hooked.values():
            hooked.undo()
        if self._groups is not None:
            self._groups.close()
        self._layers.restore()

    def _reported(self, module: ShardedModule) -> ModuleRow:
        hooked, choice = self._hooked.get(module), self._choices[module]
        return ModuleRow(
            name=module.name,
            kind="fsdp2",
            ranks=module.ranks,
            replicas=module.replicas,
            runs="" if hooked is None else "zero_sm",
            traffic=() if hooked is None else hooked.traffic(),
            torch_why=self._torch_why[module],
            choice="; ".join(choice.texts()),
            gather_bytes=module.gather_bytes,
        )


def _device_type(model: nn.Module, modules: Sequence[ShardedModule]) -> str:
    """Return where a model runs, cuda or cpu; its parameters may still be on the meta device."""
    import torch

    if modules:
        return modules[0].device.type
    first = next(model.parameters(), None)
    if first is None or first.device.type == "meta":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return first.device.type
