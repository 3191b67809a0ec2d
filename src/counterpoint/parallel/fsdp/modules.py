"""Read FSDP2's private state: which modules gather together, over which ranks, how many bytes, into which tensors.

torch's hooks (`set_custom_all_gather`, `set_custom_reduce_scatter`) are public, but not for modules whose parameters
lie on several meshes (from torch 2.12 on, with a parameter group for each mesh), and a module has no public way to tell
its process groups, or to be told where its unsharded parameters lie. This file is the only one that looks inside FSDP2.
It uses names that are the same in torch 2.11 and 2.13, except one (`_fsdp_param_group`, then `_fsdp_param_groups`). It
changes the hooks of each group, the flat tensors of unsharded parameters, one function, and the state that an
interrupted pass has left. If a name is missing it says so, whatever the version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from counterpoint.errors import Misconfigured, Unsupported

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedModule:
    """Describes an FSDP2 module with parameters of its own, or several modules given to `fully_shard` together.

    If its parameters lie on several meshes, there is a `ShardedModule` for each mesh.
    """

    name: str  # in the model, or names; `(root)`: the model itself; with the number of the group, if there are several
    module: FSDPModule  # the FSDP2 module; of several, the first
    parameters: FSDPParamGroup  # FSDP2's own record of its parameters
    device: torch.device  # where its parameters are gathered
    shard_group: ProcessGroup | None  # ranks over which it gathers and scatters; None if it only replicates
    post_forward_group: ProcessGroup | None = None
    """Holds the smaller group that gathers again in the backward pass, where `reshard_after_forward` is a number."""
    replicate_group: ProcessGroup | None = None  # ranks that have copies of the shards
    gather_bytes: int = 0  # bytes of its unsharded parameters, in the dtype in which they are gathered
    replicas: int = 1  # how many copies of the shards there are; their all-reduce (HSDP) is torch's
    kept: bool = False  # its unsharded parameters stay after forward

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the modules that were given to `fully_shard` together."""
        return tuple(self.name.partition(" (group ")[0].split(", "))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the global ranks over which the module is sharded."""
        import torch.distributed as dist

        return () if self.shard_group is None else tuple(dist.get_process_group_ranks(self.shard_group))

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """Return the module, followed by all modules inside the module."""
        return tuple(cast("nn.Module", self.module).modules())

    @property
    def groups(self) -> tuple[ProcessGroup, ...]:
        """Return the process groups of more than one rank in which this module communicates."""
        both = (self.shard_group, self.post_forward_group)
        return tuple(group for group in both if group is not None and group.size() > 1)

    @property
    def replicating(self) -> tuple[ProcessGroup, ...]:
        """Return the process group of the ranks that have this rank's shards; () if no other rank has them."""
        group = self.replicate_group
        return () if group is None or group.size() == 1 else (group,)


class GatheredParameter(NamedTuple):
    """Describes one parameter as FSDP2 gathers it: padded bytes of all ranks' shards, and dtype."""

    num_bytes: int  # size of all ranks' shares, padded
    dtype: torch.dtype  # in which it is gathered


class ModuleCall(NamedTuple):
    """Describes one collective of a module by PyTorch's name for it, its size and its dtype."""

    operation: str  # PyTorch's name
    num_bytes: int  # of the whole array
    dtype: str  # torch's name


def sharded_modules(model: nn.Module) -> tuple[ShardedModule, ...]:
    """Return all sharded modules in `model`, in the order of `named_modules`.

    Raises:
        Misconfigured: no module is sharded, or FSDP1 wraps a part of the model.
        Unsupported: this torch looks different inside; CPU offload.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    found: dict[int, ShardedModule] = {}
    names = {module: path or "(root)" for path, module in model.named_modules()}
    for module, name in names.items():
        if isinstance(module, FullyShardedDataParallel):
            raise Misconfigured(f"{name} is wrapped by FSDP1 (FullyShardedDataParallel); use fully_shard (FSDP2)")
        if isinstance(module, FSDPModule):
            groups = parameter_groups(inside(module, "_get_fsdp_state")())
            for number, parameters in enumerate(groups, 1):
                if id(parameters) not in found:
                    which = f" (group {number} of {len(groups)})" if len(groups) > 1 else ""
                    found[id(parameters)] = _described(module, parameters, names, which)
    if not found:
        raise Misconfigured(
            "no module of this model is sharded by FSDP2: call torch.distributed.fsdp.fully_shard on its blocks and on "
            "the model first, then overlap(model)"
        )
    return tuple(found.values())


def gather_group(module: ShardedModule) -> ProcessGroup | None:
    """Return the process group of the next all-gather, which differs between forward and backward pass."""
    if module.post_forward_group is None:
        return module.shard_group
    group: ProcessGroup = inside(module.parameters, "_all_gather_process_group")
    return group


def present_hooks(module: ShardedModule) -> tuple[AllGather, ReduceScatter]:
    """Return the all-gather and the reduce-scatter objects that FSDP2 uses for a module now."""
    return inside(module.parameters, "_all_gather_comm"), inside(module.parameters, "_reduce_scatter_comm")


def set_hooks(module: ShardedModule, all_gather: AllGather, reduce_scatter: ReduceScatter) -> None:
    """Set a module's two hooks directly: torch's `set_custom_*` raise for a module with several parameter groups."""
    module.parameters._all_gather_comm, module.parameters._reduce_scatter_comm = all_gather, reduce_scatter


def is_prefetching(module: ShardedModule) -> bool:
    """Return whether the user gave FSDP2 a list of modules to prefetch while this module runs."""
    state = inside(module.module, "_get_fsdp_state")()
    return bool(inside(state, "_states_to_forward_prefetch") or inside(state, "_states_to_backward_prefetch"))


def unmanaged_bytes(model: nn.Module, modules: Sequence[ShardedModule]) -> int:
    """Return the bytes of parameters that no FSDP2 module manages: ignored ones, or outside `fully_shard`."""
    managed = {id(inside(one, "sharded_param")) for module in modules for one in module.parameters.fsdp_params}
    return sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in managed)


def parameter_groups(state: Any) -> tuple[FSDPParamGroup, ...]:
    """Return FSDP2's parameter groups of a module, one for each mesh; () if all parameters belong to inner modules."""
    if hasattr(state, "_fsdp_param_groups"):
        return tuple(state._fsdp_param_groups)
    only = inside(state, "_fsdp_param_group")
    return () if only is None else (only,)


def _described(
    module: FSDPModule, parameters: FSDPParamGroup, names: Mapping[nn.Module, str], which: str
) -> ShardedModule:
    from torch.distributed.fsdp import CPUOffloadPolicy

    if isinstance(inside(parameters, "offload_policy"), CPUOffloadPolicy):
        raise Unsupported(
            f"{_name(parameters, names)} offloads its parameters to the CPU, where no copy engine reaches them; leave "
            "out offload_policy"
        )
    mesh = inside(parameters, "mesh_info")
    shard_group = getattr(mesh, "shard_process_group", None)  # `replicate()` makes a mesh without this attribute
    smaller = getattr(inside(parameters, "post_forward_mesh_info"), "shard_process_group", None)
    return ShardedModule(
        name=_name(parameters, names) + which,
        module=module,
        parameters=parameters,
        device=inside(parameters, "device"),
        shard_group=shard_group,
        replicate_group=getattr(mesh, "replicate_process_group", None),
        post_forward_group=None if smaller is shard_group else smaller,
        gather_bytes=0 if shard_group is None else shard_group.size() * sum(size for size, _ in _sizes(parameters)),
        replicas=getattr(mesh, "replicate_mesh_size", 1),
        kept=inside(parameters, "post_forward_mesh_info") is None,
    )


def _name(parameters: FSDPParamGroup, names: Mapping[nn.Module, str]) -> str:
    return ", ".join(names[one] for one in inside(parameters, "modules") if one in names)


def gathered_parameters(module: ShardedModule) -> tuple[GatheredParameter, ...]:
    """Return the unsharded bytes and dtype of each parameter of a module, in the order in which FSDP2 gathers them."""
    assert module.shard_group is not None
    ranks = module.shard_group.size()
    return tuple(GatheredParameter(ranks * size, dtype) for size, dtype in _sizes(module.parameters))


def calls_of(module: ShardedModule) -> tuple[ModuleCall, ModuleCall]:
    """Return the size and dtype of a sharded module's parameter all-gather and gradient reduce_scatter."""
    from counterpoint.collectives.submit.tensors import dtype_name

    gathered = gathered_parameters(module)
    dtype = gathered[0].dtype
    reduced = inside(module.parameters, "mp_policy").reduce_dtype or dtype
    num_bytes = sum(one.num_bytes for one in gathered)
    scattered_bytes = sum(one.num_bytes // one.dtype.itemsize for one in gathered) * reduced.itemsize
    return (
        ModuleCall("all_gather", num_bytes, dtype_name(dtype)),
        ModuleCall("reduce_scatter", scattered_bytes, dtype_name(reduced)),
    )


def copied_why(module: ShardedModule) -> str:
    """Return why FSDP2 must copy gathered parameters out of a buffer; "" if peers can write them in place."""
    if module.post_forward_group is not None:
        return "its parameters are gathered again over fewer ranks"
    for parameter in inside(module.parameters, "fsdp_params"):
        if inside(parameter, "fsdp_placement").dim != 0:
            return f"a parameter is sharded along axis {parameter.fsdp_placement.dim}"
        if hasattr(inside(parameter, "_sharded_local_tensor"), "fsdp_pre_all_gather"):
            return "a parameter has a way of its own to be gathered (fsdp_pre_all_gather)"
    return ""


def is_done(module: ShardedModule) -> bool:
    """Return whether the module's backward pass is over, and no later call of the module has begun.

    Then the module's unsharded parameters, if kept, are kept for the next call and not in use.
    """
    return bool(inside(module.parameters, "_training_state").name == "POST_BACKWARD")


def install_parameters(module: ShardedModule, outputs: Sequence[Tensor]) -> None:
    """Make FSDP2 use `outputs` as the module's unsharded parameters; call this only while the module is sharded.

    `outputs` are flat tensors, in the order of `gathered_parameters`.
    """
    for parameter, output in zip(inside(module.parameters, "fsdp_params"), outputs, strict=True):
        _replace_unsharded(parameter, [output])


def restore_parameters(module: ShardedModule) -> None:
    """Let FSDP2 allocate unsharded parameters again; call this only while the module is sharded."""
    assert module.shard_group is not None
    for parameter in inside(module.parameters, "fsdp_params"):
        numel = inside(parameter, "padded_sharded_param_size").numel()
        dtype = parameter.all_gather_outputs[0].dtype
        parameter.all_gather_outputs = []
        parameter.init_all_gather_outputs([numel], [dtype], module.shard_group.size(), module.device)
        _replace_unsharded(parameter, parameter.all_gather_outputs)
        parameter.free_unsharded_param()


def shards(module: ShardedModule) -> list[Tensor]:
    """Return this rank's stored shards of the parameters, flat and padded."""
    return [parameter._sharded_param_data for parameter in module.parameters.fsdp_params]


def skip_shard_cast(module: ShardedModule, skip: bool = True) -> None:
    """Stop FSDP2 from casting and copying shards before it asks for a buffer; `skip=False` lets it do so again.

    FSDP2 has no hook for that, so a function of torch is replaced; for all other modules the new one calls the old.
    """
    _AllGatherInputs.install()
    inside(module.parameters, "fsdp_params")[0]._counterpoint_skips_cast = skip


class _AllGatherInputs:
    """Replaces the function by which FSDP2 casts one module's shards to the gathered dtype."""

    NAME = "_get_param_all_gather_inputs"

    def __init__(self, original: Callable[[list[FSDPParam]], list[list[Tensor]]]) -> None:
        self._original = original

    @classmethod
    def install(cls) -> None:
        """Replace FSDP2's function that casts shards, once for all modules."""
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives

        present = inside(_fsdp_collectives, cls.NAME)
        if not isinstance(present, cls):
            setattr(_fsdp_collectives, cls.NAME, cls(present))

    def __call__(self, parameters: list[FSDPParam]) -> list[list[Tensor]]:
        if getattr(parameters[0], "_counterpoint_skips_cast", False):
            return [[parameter._sharded_param_data] for parameter in parameters]
        return self._original(parameters)


def _replace_unsharded(parameter: FSDPParam, outputs: list[Tensor]) -> None:
    """Make FSDP2's unsharded parameter a view of `outputs`, but keep the parameter's tensor object.

    The object stays since an autograd graph may refer to it: the gradient is accumulated there, and what is saved
    for backward without a view is read there.
    """
    before = getattr(parameter, "_unsharded_param", None)
    parameter.all_gather_outputs = outputs
    if before is not None:
        del parameter._unsharded_param
    inside(parameter, "init_unsharded_param")()
    if before is not None:
        _local(before).data = _local(parameter._unsharded_param)
        parameter._unsharded_param = before


def _local(parameter: Any) -> Any:
    """Return the local tensor of a DTensor on this rank; return any other parameter as it is."""
    return getattr(parameter, "_local_tensor", parameter)


def _sizes(parameters: FSDPParamGroup) -> Iterator[tuple[int, torch.dtype]]:
    """Yield, for each parameter, the bytes of this rank's padded shard, and the dtype in which the shard is sent."""
    policy = inside(parameters, "mp_policy").param_dtype
    for parameter in inside(parameters, "fsdp_params"):
        own = inside(parameter, "sharded_param").dtype
        dtype = policy if policy is not None and own.is_floating_point else own
        yield inside(parameter, "padded_sharded_param_size").numel() * dtype.itemsize, dtype


def inside(owner: Any, name: str) -> Any:
    """Return a private attribute of an FSDP2 object; raise `Unsupported` if this torch lacks the attribute."""
    if not hasattr(owner, name):
        import torch

        raise Unsupported(
            f"FSDP2 of torch {torch.__version__} has no {type(owner).__name__}.{name}: this counterpoint knows "
            "torch 2.11 to 2.13; use one of these, or a newer counterpoint"
        )
    return getattr(owner, name)


# FSDP2 cannot go on by itself after a pass that an exception ended: it would lose gradients in silence.


def outermost(model: nn.Module) -> list[nn.Module]:
    """Return `model`'s FSDP2 modules that are inside no other FSDP2 module: a forward pass begins with one of them."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        return [model]
    return list(dict.fromkeys(one for child in model.children() for one in outermost(child)))


def is_unfinished(module: nn.Module) -> bool:
    """Return whether a backward pass over this FSDP2 module was interrupted: it began, and neither runs nor ended."""
    import torch

    context = inside(inside(module, "_get_fsdp_state")(), "_state_ctx")
    return bool(inside(context, "post_backward_final_callback_queued")) and torch._C._current_graph_task_id() == -1


def refuse_unfinished(module: nn.Module, *_: object) -> None:
    """Raise in a forward pass that follows an interrupted backward pass.

    FSDP2 would believe that its modules are still in that pass: it neither gathers them nor reduces their gradients.

    Raises:
        Misconfigured: the backward pass before did not end.
    """
    if is_unfinished(module):
        raise Misconfigured(
            "the backward pass before this forward pass did not end (an exception was caught?), and FSDP2 would lose "
            "gradients; to start again, call reset_iter_state() of what overlap() returned, on all ranks, then "
            "zero_grad(), and begin the step anew"
        )


def discard_pass(module: nn.Module) -> None:
    """Discard what an interrupted pass has left in an outermost FSDP2 module, without communication.

    That is: gradients that are not reduced yet, unsharded parameters, and modules gathered ahead. torch 2.13 has
    `reset_iter_state`; but it keeps gradients of unsharded parameters, to which the next pass would add.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    state = inside(module, "_get_fsdp_state")()
    context = inside(state, "_state_ctx")
    groups = [group for one in context.all_states for group in parameter_groups(one)]
    if not groups:
        return  # no pass has begun
    for group in groups:
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        group._partial_reduce_output = None
        group._training_state = TrainingState.POST_BACKWARD  # so that FSDP2 reduces nothing
    for one in context.all_states:
        inside(one, "_modules_to_run_forward").clear()
    context.iter_forward_root = None
    is_last, context.is_last_backward = inside(context, "is_last_backward"), True
    inside(state, "_root_post_backward_final_callback")()
    context.is_last_backward = is_last
    for group in groups:
        group.reshard()
