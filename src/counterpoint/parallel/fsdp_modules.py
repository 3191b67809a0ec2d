"""What FSDP2 made of a model, read once: which modules gather together, over which ranks, and how many bytes.

torch's hooks (`set_custom_all_gather`, `set_custom_reduce_scatter`) are public, but a module cannot be asked for its
process groups, nor where its whole parameters are to lie. This is the only file that looks inside FSDP2, at names that
are the same in torch 2.11 and 2.13 but for one (`_fsdp_param_group`, then `_fsdp_param_groups`), and that changes
something there: the flat tensors of whole parameters, and one function. Where a name is missing it says so, whatever
the version.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from counterpoint.errors import Misconfigured, Unsupported

__all__ = [
    "HOOKS",
    "Gathered",
    "ShardedModule",
    "adopt",
    "copied_why",
    "gather_group",
    "gathered",
    "give_back",
    "is_done",
    "is_prefetching",
    "leave_shards_alone",
    "present_hooks",
    "sharded_modules",
    "shards",
    "unmanaged_bytes",
]

HOOKS = ("all_gather", "reduce_scatter")


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedModule:
    """An FSDP2 module (or several that were given to `fully_shard` together) with parameters of its own.

    Args:
        name: in the model, or names; `(root)` for the model itself.
        module: whose hooks are set.
        parameters: FSDP2's own record of them.
        device: torch.device on which they are gathered.
        shard_group: process group over which it gathers and scatters; None if it only replicates.
        post_forward_group: the smaller group over which it gathers again in the backward pass
            (`reshard_after_forward` is a number); None if there is none.
        gather_bytes: of the whole gathered parameters, in the dtype in which they are gathered.
        replicas: of the shards; their all-reduce (HSDP) is torch's.
        kept: its whole parameters stay after forward.
    """

    name: str
    module: Any
    parameters: Any
    device: Any
    shard_group: Any
    post_forward_group: Any = None
    gather_bytes: int = 0
    replicas: int = 1
    kept: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """Over which it is sharded, counted in the job."""
        import torch.distributed as dist

        return () if self.shard_group is None else tuple(dist.get_process_group_ranks(self.shard_group))

    @property
    def groups(self) -> tuple[Any, ...]:
        """Those of several ranks, in which there is something to communicate."""
        both = (self.shard_group, self.post_forward_group)
        return tuple(group for group in both if group is not None and group.size() > 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """One parameter as it is gathered.

    Args:
        num_bytes: of all ranks' shares, padded.
        dtype: torch.dtype of them.
    """

    num_bytes: int
    dtype: Any


def sharded_modules(model: Any) -> tuple[ShardedModule, ...]:
    """All of them in `model`, in the order of `named_modules`.

    Raises:
        Misconfigured: there is none, or FSDP1 wraps a part of the model.
        Unsupported: this torch has no such hooks; CPU offload; several meshes in one module.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    missing = [f"FSDPModule.set_custom_{hook}" for hook in HOOKS if not hasattr(FSDPModule, f"set_custom_{hook}")]
    if missing:
        raise Unsupported(f"{_torch()} has no {', '.join(missing)}; use torch 2.11 or newer")
    found: dict[int, ShardedModule] = {}
    names = {module: path or "(root)" for path, module in model.named_modules()}
    for module, name in names.items():
        if isinstance(module, FullyShardedDataParallel):
            raise Misconfigured(f"{name} is wrapped by FSDP1 (FullyShardedDataParallel); use fully_shard (FSDP2)")
        if isinstance(module, FSDPModule):
            for parameters in _parameter_groups(module, name):
                if id(parameters) not in found:
                    found[id(parameters)] = _described(module, parameters, names)
    if not found:
        raise Misconfigured(
            "no module of this model is sharded by FSDP2: call torch.distributed.fsdp.fully_shard on its blocks and on "
            "the model first, then overlap(model)"
        )
    return tuple(found.values())


def gather_group(module: ShardedModule) -> Any:
    """The group over which its next all-gather goes: another one while it is sharded for the backward pass."""
    if module.post_forward_group is None:
        return module.shard_group
    return _inside(module.parameters, "_all_gather_process_group")


def present_hooks(module: ShardedModule) -> tuple[Any, Any]:
    """The all-gather and the reduce-scatter that are in use now."""
    return _inside(module.parameters, "_all_gather_comm"), _inside(module.parameters, "_reduce_scatter_comm")


def is_prefetching(module: ShardedModule) -> bool:
    """Whether somebody has told FSDP2 which modules to gather ahead of this one."""
    state = _inside(module.module, "_get_fsdp_state")()
    return bool(_inside(state, "_states_to_forward_prefetch") or _inside(state, "_states_to_backward_prefetch"))


def unmanaged_bytes(model: Any, modules: Sequence[ShardedModule]) -> int:
    """Of parameters that are in no FSDP2 module: ignored ones, or parts of the model that were not sharded."""
    managed = {id(_inside(one, "sharded_param")) for module in modules for one in module.parameters.fsdp_params}
    return sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in managed)


def _parameter_groups(module: Any, name: str) -> tuple[Any, ...]:
    """FSDP2's groups of parameters of a module: one; none, if all its parameters belong to modules inside it."""
    state = _inside(module, "_get_fsdp_state")()
    if hasattr(state, "_fsdp_param_groups"):
        groups = tuple(state._fsdp_param_groups)
    else:
        only = _inside(state, "_fsdp_param_group")
        groups = () if only is None else (only,)
    if len(groups) > 1:
        raise Unsupported(
            f"{name} is sharded over {len(groups)} meshes (shard_placement_fn), for which torch takes no custom "
            "collectives; call fully_shard on the modules of each mesh instead"
        )
    return groups


def _described(module: Any, parameters: Any, names: Mapping[Any, str]) -> ShardedModule:
    from torch.distributed.fsdp import CPUOffloadPolicy

    if isinstance(_inside(parameters, "offload_policy"), CPUOffloadPolicy):
        raise Unsupported(
            f"{names[module]} offloads its parameters to the CPU, where no copy engine reaches them; leave out "
            "offload_policy"
        )
    mesh = _inside(parameters, "mesh_info")
    shard_group = getattr(mesh, "shard_process_group", None)  # replicate() has none
    smaller = getattr(_inside(parameters, "post_forward_mesh_info"), "shard_process_group", None)
    return ShardedModule(
        name=", ".join(names[one] for one in _inside(parameters, "modules") if one in names),
        module=module,
        parameters=parameters,
        device=_inside(parameters, "device"),
        shard_group=shard_group,
        post_forward_group=None if smaller is shard_group else smaller,
        gather_bytes=0 if shard_group is None else shard_group.size() * sum(size for size, _ in _shards(parameters)),
        replicas=getattr(mesh, "replicate_mesh_size", 1),
        kept=_inside(parameters, "post_forward_mesh_info") is None,
    )


def gathered(module: ShardedModule) -> tuple[Gathered, ...]:
    """Its parameters, in the order in which FSDP2 gathers them."""
    ranks = module.shard_group.size()
    return tuple(Gathered(num_bytes=ranks * num_bytes, dtype=dtype) for num_bytes, dtype in _shards(module.parameters))


def copied_why(module: ShardedModule) -> str:
    """Why FSDP2 has to copy what it gathers of this module to its place; empty if it can be sent there."""
    if module.post_forward_group is not None:
        return "its parameters are gathered again over fewer ranks"
    for parameter in _inside(module.parameters, "fsdp_params"):
        if _inside(parameter, "fsdp_placement").dim != 0:
            return f"a parameter is sharded along axis {parameter.fsdp_placement.dim}"
        if hasattr(_inside(parameter, "_sharded_local_tensor"), "fsdp_pre_all_gather"):
            return "a parameter has a way of its own to be gathered (fsdp_pre_all_gather)"
    return ""


def is_done(module: ShardedModule) -> bool:
    """Whether its backward pass is over and it was not called since: its whole parameters are kept for the next call,
    if they are, and not in use."""
    return bool(_inside(module.parameters, "_training_state").name == "POST_BACKWARD")


def adopt(module: ShardedModule, outputs: Sequence[Any]) -> None:
    """Whole parameters are from now on at `outputs`, flat tensors in the order of `gathered`. While it is sharded."""
    for parameter, output in zip(_inside(module.parameters, "fsdp_params"), outputs, strict=True):
        _made_anew(parameter, [output])


def give_back(module: ShardedModule) -> None:
    """FSDP2 makes the tensors of whole parameters by itself again. While it is sharded."""
    for parameter in _inside(module.parameters, "fsdp_params"):
        numel = _inside(parameter, "padded_sharded_param_size").numel()
        dtype = parameter.all_gather_outputs[0].dtype
        parameter.all_gather_outputs = []
        parameter.init_all_gather_outputs([numel], [dtype], module.shard_group.size(), module.device)
        _made_anew(parameter, parameter.all_gather_outputs)
        parameter.free_unsharded_param()


def shards(module: ShardedModule) -> list[Any]:
    """This rank's parts of its parameters as they are stored, flat and padded."""
    return [_inside(parameter, "_sharded_param_data") for parameter in _inside(module.parameters, "fsdp_params")]


def leave_shards_alone(module: ShardedModule, alone: bool = True) -> None:
    """FSDP2 makes no copy of its shards, in the dtype in which they are gathered, before it asks for a buffer.

    There is no hook for that, so a function of torch is replaced; for all other modules it does what it did.
    """
    _REPLACED.apply()
    parameters = _inside(module.parameters, "fsdp_params")
    (_REPLACED.alone.update if alone else _REPLACED.alone.difference_update)(parameters)


class _Replaced:
    """FSDP2's function that makes those copies."""

    name = "_get_param_all_gather_inputs"

    def __init__(self) -> None:
        self.alone: weakref.WeakSet[Any] = weakref.WeakSet()
        self._original: Callable[[list[Any]], list[list[Any]]] | None = None

    def apply(self) -> None:
        """Once for all modules."""
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives

        if self._original is None:
            self._original = _inside(_fsdp_collectives, self.name)
            setattr(_fsdp_collectives, self.name, self)

    def __call__(self, parameters: list[Any]) -> list[list[Any]]:
        assert self._original is not None
        if all(parameter in self.alone for parameter in parameters):
            return [[parameter._sharded_param_data] for parameter in parameters]
        return self._original(parameters)


_REPLACED = _Replaced()


def _made_anew(parameter: Any, outputs: list[Any]) -> None:
    """FSDP2's whole parameter, as views of `outputs`; its gradient of microbatches before stays."""
    before = getattr(parameter, "_unsharded_param", None)
    parameter.all_gather_outputs = outputs
    if before is not None:
        del parameter._unsharded_param
    _inside(parameter, "init_unsharded_param")()
    if before is not None:
        parameter._unsharded_param.grad = before.grad


def _shards(parameters: Any) -> Iterator[tuple[int, Any]]:
    """Bytes of this rank's part of each parameter, padded as it is sent, and the dtype."""
    policy = _inside(parameters, "mp_policy").param_dtype
    for parameter in _inside(parameters, "fsdp_params"):
        own = _inside(parameter, "sharded_param").dtype
        dtype = policy if policy is not None and own.is_floating_point else own
        yield _inside(parameter, "padded_sharded_param_size").numel() * dtype.itemsize, dtype


def _inside(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise Unsupported(
            f"FSDP2 of {_torch()} has no {type(owner).__name__}.{name}: this counterpoint knows torch 2.11 to 2.13; "
            "use one of these, or a newer counterpoint"
        )
    return getattr(owner, name)


def _torch() -> str:
    import torch

    return f"torch {torch.__version__}"
