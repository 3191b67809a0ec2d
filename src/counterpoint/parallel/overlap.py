"""Run FSDP2, DDP (`ddp.py`), tensor (`tensor/`) or expert parallelism (`expert/`) with collectives that overlap.

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    overlapped = overlap(model)

From then on every FSDP2 module gathers its parameters and scatters its gradients through a `Communicator`: by copy
engines and stream memory operations, which no resident kernel can hold up. Nothing else changes: not the values, not
the optimizer, not the checkpoints. `print(overlapped)` says what was done; `overlapped.restore()` takes it back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, overload

from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.parallel.fsdp.modules import (
    ShardedModule,
    copied_why,
    discard_pass,
    is_unfinished,
    outermost,
    present_hooks,
    refuse_unfinished,
    set_hooks,
    sharded_modules,
    unmanaged_bytes,
)
from counterpoint.parallel.fsdp.prefetch import Prefetch
from counterpoint.parallel.report import OverlappedModule, OverlapReport

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from counterpoint.parallel.ddp import DdpOptions, OverlappedDdp
    from counterpoint.parallel.expert.layers import ExpertLayerOptions
    from counterpoint.parallel.fsdp.hooks import Communicators
    from counterpoint.parallel.fsdp.slots import ModuleParameters
    from counterpoint.parallel.tensor.plans import TensorOptions


STAGING_BYTES = 1 << 27  # a smaller slice costs a round trip, some 30 us of a call that computation hides


@dataclass(frozen=True, kw_only=True)
class OverlapOptions(CommunicatorOptions):
    """Holds options of `overlap`, and of the communicators that it opens, one for each set of ranks.

    Args:
        prefetch: modules to gather ahead, in the order in which they are seen to run; None: as FSDP2 does by itself,
            or by the lists that it has. Each costs the memory of one module.
        direct: gather parameters to where they are used, and scatter gradients from where autograd left them, so that
            FSDP2 copies neither; False: it does, and only what it has copied is sent.
        gather_channel: channel of gathers.
        scatter_channel: channel of scatters; on one channel they run one after the other, on two at the same time.
        limit_bytes: modules that gather more keep torch's collectives; None: no limit. Buffers as large as the largest
            module stay in symmetric memory for good.
        staging_bytes: most memory into which peers send gradients before they are added up; what needs more comes in
            slices. None: as much as the largest module needs, kept for good.
        tensor_parallel: options of the operations that run layers of tensor parallelism; None: those that the process
            groups have.
        expert_parallel: options of layers of experts and their dispatchers; None: the defaults on CPUs, and on GPUs,
            where nothing was measured yet, these layers are left. All other options are of FSDP2.
        channels: follows from the two channels; not to be given.

    Raises:
        Misconfigured: an option has a value that is not allowed.
    """

    prefetch: int | None = None
    direct: bool = True
    gather_channel: int = 0
    scatter_channel: int = 1
    limit_bytes: int | None = None
    staging_bytes: int | None = STAGING_BYTES
    tensor_parallel: TensorOptions | None = None
    expert_parallel: ExpertLayerOptions | None = None
    channels: int = field(init=False, default=2)

    def __post_init__(self) -> None:
        if min(self.gather_channel, self.scatter_channel) < 0:
            raise Misconfigured(
                f"gather_channel={self.gather_channel}, scatter_channel={self.scatter_channel}: channels count from 0"
            )
        if self.prefetch is not None and self.prefetch < 1:
            raise Misconfigured(f"prefetch={self.prefetch}: give 1 or more, or None for what FSDP2 does by itself")
        object.__setattr__(self, "channels", 1 + max(self.gather_channel, self.scatter_channel))
        super().__post_init__()


Options = OverlapOptions
"""The short name, for a call: `overlap(model, options=Options(prefetch=2))`."""


@overload
def overlap(  # type: ignore[overload-overlap]
    model: DistributedDataParallel, *, options: DdpOptions | None = None
) -> OverlappedDdp: ...


@overload
def overlap(model: nn.Module, *, options: OverlapOptions | None = None) -> Overlap: ...


def overlap(model: nn.Module, *, options: OverlapOptions | DdpOptions | None = None) -> Overlap | OverlappedDdp:
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

    Returns:
        A handle that reports, and puts torch's collectives back: an `Overlap`, for DDP an `OverlappedDdp`. The model
        works without it: it need not be kept.

    Raises:
        Unsupported: one rank alone, or nothing that could be replaced. As well CPU offload, ranks that cannot share
            memory, or a torch without the hooks.
        Misconfigured: no module of FSDP2, tensor or expert parallelism, FSDP1, other collectives set before, a second
            call, or options of another kind.
    """
    from torch.nn.parallel import DistributedDataParallel

    from counterpoint.parallel.ddp import DdpOptions, OverlappedDdp

    if isinstance(model, DistributedDataParallel):
        if not isinstance(options, DdpOptions | None):
            raise Misconfigured(f"options of type {type(options).__name__} for DDP: give counterpoint.ddp.DdpOptions")
        return OverlappedDdp(model, options)
    if not isinstance(options, OverlapOptions | None):
        raise Misconfigured(f"options of type {type(options).__name__} for a model that is no DDP: give OverlapOptions")
    return _overlap_modules(model, options or OverlapOptions())


def _overlap_modules(model: nn.Module, options: OverlapOptions) -> Overlap:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    layers = _Layers(model, options)
    is_sharded = any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules())
    try:
        if is_sharded or layers.is_empty:
            return _overlap_fsdp2(model, options, layers)
        if not layers.have_effect:
            raise Unsupported(f"nothing to overlap: {layers.first_left()}")
    except BaseException:
        layers.restore()
        raise
    return Overlap(layers=layers)


class _Layers:
    """Runs the layers that communicate for themselves: those of tensor and of expert parallelism."""

    def __init__(self, model: nn.Module, options: OverlapOptions) -> None:
        from counterpoint.parallel.expert.modules import OverlappedExpertParallel
        from counterpoint.parallel.tensor.modules import OverlappedTensorParallel

        self.tensor = OverlappedTensorParallel(model, options.tensor_parallel)
        try:
            self.expert = OverlappedExpertParallel(model, options.expert_parallel)
        except BaseException:
            self.tensor.restore()
            raise

    @property
    def is_empty(self) -> bool:
        return self.tensor.is_empty and self.expert.is_empty

    @property
    def have_effect(self) -> bool:
        return self.tensor.has_effect or self.expert.has_effect

    def first_left(self) -> str:
        return self.expert.first_left() if self.tensor.is_empty else self.tensor.first_left()

    def restore(self) -> None:
        self.expert.restore()
        self.tensor.restore()


def _overlap_fsdp2(model: nn.Module, options: OverlapOptions, layers: _Layers) -> Overlap:
    from counterpoint.parallel.fsdp.hooks import Communicators

    modules = sharded_modules(model)
    torch_why = {module: _torch_why(module, options.limit_bytes) for module in modules}
    taken = [module for module in modules if not torch_why[module]]
    if not taken:
        if layers.have_effect:
            return Overlap(torch_why=torch_why, layers=layers)
        raise Unsupported(f"nothing to overlap: {modules[0].name}: {torch_why[modules[0]]}")
    for module in taken:
        _check_unchanged(module)
    prefetch = None if options.prefetch is None else Prefetch(options.prefetch, taken)
    groups = [group for module in taken for group in module.groups]
    communicators = Communicators(groups, device=taken[0].device, options=options)
    copied = {module: copied_why(module) if options.direct else "direct=False" for module in taken}
    parameters = _parameters([module for module in taken if not copied[module]], communicators, options)
    return Overlap(
        hooked={
            module: _HookedModule(
                module, communicators, parameters.get(module), options, prefetch, copied_why=copied[module]
            )
            for module in taken
        },
        torch_why=torch_why,
        communicators=communicators,
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
        hooked: Mapping[ShardedModule, _HookedModule] = MappingProxyType({}),
        torch_why: Mapping[ShardedModule, str] = MappingProxyType({}),
        communicators: Communicators | None = None,
        prefetch: Prefetch | None = None,
        outermost: Sequence[nn.Module] = (),
        unmanaged_bytes: int = 0,
    ) -> None:
        import torch

        self._hooked, self._torch_why, self._layers = hooked, torch_why, layers
        self._communicators, self._prefetch, self._unmanaged_bytes = communicators, prefetch, unmanaged_bytes
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

    def report(self) -> OverlapReport:
        """Return what hooks of FSDP2 modules have moved so far, and the modules of tensor and expert parallelism."""
        tensor, expert = self._layers.tensor, self._layers.expert
        return OverlapReport(
            modules=tuple(self._reported(module) for module in self._torch_why),
            prefetch="" if self._prefetch is None else str(self._prefetch),
            unmanaged_bytes=self._unmanaged_bytes,
            tensor_parallel=None if tensor.is_empty else tensor.report(),
            expert_parallel=None if expert.is_empty else expert.report(),
        )

    def check(self) -> None:
        """Raise the error that ended communication, if there was one; it names the ranks.

        The next step raises it, too. On GPUs the host runs ahead: call it after a wait for the GPU (`loss.item()`)
        where a step must not be trusted that a peer has left, such as before a checkpoint.
        """
        if self._communicators is not None:
            self._communicators.check()

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
        if self._communicators is not None:
            self._communicators.close()
        self._layers.restore()

    def _reported(self, module: ShardedModule) -> OverlappedModule:
        hooked = self._hooked.get(module)
        return OverlappedModule(
            name=module.name,
            ranks=module.ranks,
            gather_bytes=module.gather_bytes,
            replicas=module.replicas,
            all_gather=None if hooked is None else hooked.gather.traffic(),
            reduce_scatter=None if hooked is None else hooked.scatter.traffic(),
            torch_why=self._torch_why[module],
            copied_why="" if hooked is None else hooked.copied_why,
        )


class _HookedModule:
    """Sets counterpoint's hooks on one module; `undo` puts back those that it had before."""

    def __init__(
        self,
        module: ShardedModule,
        communicators: Communicators,
        parameters: ModuleParameters | None,
        options: OverlapOptions,
        prefetch: Prefetch | None,
        *,
        copied_why: str,
    ) -> None:
        from counterpoint.parallel.fsdp.hooks import GatherHook, ScatterHook

        self._module, self._before = module, present_hooks(module)
        self.copied_why = copied_why
        self.gather = GatherHook(
            module, communicators, parameters=parameters, channel=options.gather_channel, prefetch=prefetch
        )
        self.scatter = ScatterHook(
            communicators,
            ranks=len(module.ranks),
            direct=options.direct,
            channel=options.scatter_channel,
            prefetch=prefetch,
        )
        set_hooks(module, self.gather, self.scatter)

    def undo(self) -> None:
        """Put back the hooks of before, and FSDP2's own memory for whole parameters."""
        self._module.module.reshard()
        self.gather.restore()
        set_hooks(self._module, *self._before)


def _parameters(
    modules: Sequence[ShardedModule], communicators: Communicators, options: OverlapOptions
) -> dict[ShardedModule, ModuleParameters]:
    """Return whole parameters for each module; the modules of one communicator share its slots."""
    from counterpoint.parallel.fsdp.slots import ModuleParameters, ParameterSlots

    made: dict[ShardedModule, ModuleParameters] = {}
    for communicator in communicators.all():
        sharing = [one for one in modules if communicators.of(one.groups[0]) is communicator]
        slots = ParameterSlots(communicator, sharing, ahead=options.prefetch or 1)
        made |= {module: ModuleParameters(module, slots) for module in sharing}
    return made


def _torch_why(module: ShardedModule, limit_bytes: int | None) -> str:
    """Return why torch's own collectives stay under this module; empty if ours take their place."""
    if module.shard_group is None:
        return "it is replicated, not sharded"
    if not module.groups:
        return "one rank has nothing to gather"
    if limit_bytes is not None and module.gather_bytes > limit_bytes:
        return f"it gathers {module.gather_bytes} bytes, more than limit_bytes={limit_bytes}"
    return ""


def _check_unchanged(module: ShardedModule) -> None:
    """Raise Misconfigured if the collectives of this module were replaced already."""
    from counterpoint.parallel.fsdp.hooks import GatherHook, ScatterHook

    for hook in present_hooks(module):
        if isinstance(hook, GatherHook | ScatterHook):
            raise Misconfigured(f"{module.name} is overlapped already: call restore() of the first overlap() before")
        if type(hook).__name__ not in ("DefaultAllGather", "DefaultReduceScatter"):
            raise Misconfigured(
                f"{module.name} communicates by {type(hook).__name__}; leave out set_custom_*, set_symm_mem_for_comm "
                "and set_allocate_memory_from_process_group_for_comm where overlap() is to act"
            )
