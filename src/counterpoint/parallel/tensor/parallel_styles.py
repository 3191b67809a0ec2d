"""Recognise how a module was made tensor parallel: by a style of torch's `parallelize_module` or of `transformers`.

Neither style can be queried, but both leave hooks that are closures, which hold the style. This file is the only one
that looks inside them. A hook that is not exactly one of theirs is not taken: a text says what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

Hook = Callable[..., Any]
_STYLES = (ColwiseParallel, RowwiseParallel)
_DISTRIBUTED = ("torch.distributed.tensor._api", "distribute_module.<locals>.<lambda>")
_PREPARED = ("torch.distributed.tensor.parallel.style", "PrepareModuleInput._apply.<locals>.<lambda>")
_TRANSFORMERS = ("transformers.distributed.tensor_parallel", "TensorParallelLayer.install_forward.<locals>.tp_forward")


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearStyle:
    """Describes how a linear layer is divided among ranks.

    Args:
        name: name of the style.
        is_column: whether the weight is divided along the outputs, otherwise along the inputs.
        mesh: mesh of one dimension, with the ranks.
        input_layout: layout of an input that is no DTensor.
        output_layout: layout of the output.
        use_local_output: the output is no DTensor.
    """

    name: str
    is_column: bool
    mesh: DeviceMesh
    input_layout: Placement
    output_layout: Placement
    use_local_output: bool

    def __deepcopy__(self, _: Any) -> LinearStyle:  # a copied model keeps the same mesh, which cannot be copied
        return self

    @property
    def weight_dim(self) -> int:
        """Return the dimension of the weight that is divided among ranks."""
        return 0 if self.is_column else 1


def linear_style(module: nn.Module) -> LinearStyle | str | None:
    """Return a linear layer's style, or a text why it cannot be replaced; None if the layer is not tensor parallel."""
    forward = vars(module).get("forward")
    found: LinearStyle | str | None
    if is_function(forward, _TRANSFORMERS):
        found = _style_of_transformers(closure_of(forward))
        plain: Any = closure_of(forward)["original_forward"]
    else:
        found = _style_of_torch(module)
        plain = getattr(module, "forward", None)
    if not isinstance(found, LinearStyle):
        return found
    if getattr(plain, "__func__", None) is not nn.Linear.forward:
        return f"it is no nn.Linear, but {type(module).__name__}"
    return _unfit(module, found) or found


def own_hooks(module: nn.Module) -> Iterator[tuple[dict[int, Hook], int]]:
    """Yield where hooks of torch's `distribute_module` are stored: a dictionary of the module, and the key."""
    hooks: dict[int, Hook]
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        yield from ((hooks, key) for key, hook in hooks.items() if is_function(hook, _DISTRIBUTED))


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedInput:
    """Describes a module whose input torch's `PrepareModuleInput` gathers.

    Args:
        style: torch's style object.
        mesh: the ranks.
        key: key of the hook in the module's `_forward_pre_hooks`.
    """

    style: PrepareModuleInput
    mesh: DeviceMesh
    key: int

    def __deepcopy__(self, _: Any) -> PreparedInput:
        return self


def prepared_input(module: nn.Module) -> PreparedInput | str | None:
    """Return how a module's input is gathered, or a text why that cannot be replaced; None if nothing is gathered."""
    for key, hook in module._forward_pre_hooks.items():
        if not is_function(hook, _PREPARED):
            continue
        style, mesh = closure_of(hook)["self"], closure_of(hook)["device_mesh"]
        pairs = [*zip(style.input_layouts or (), style.desired_input_layouts or (), strict=True)]
        named = style.input_kwarg_layouts
        pairs += [(named[name], style.desired_input_kwarg_layouts.get(name)) for name in named]
        gathered = [pair for pair in pairs if is_gather(*pair)]
        if type(style) is not PrepareModuleInput:
            return f"its hook is of {type(style).__qualname__}"
        if len(gathered) > 1:
            return "it gathers several inputs"
        if gathered:
            return PreparedInput(style=style, mesh=mesh, key=key)
    return None


def is_gather(layout: Placement | None, desired: Placement | None) -> bool:
    """Return whether changing a DTensor from `layout` to `desired` is an all-gather."""
    return isinstance(layout, Shard) and isinstance(desired, Replicate)


def _style_of_torch(module: nn.Module) -> LinearStyle | str | None:
    hooks = [hook for hooks in (module._forward_pre_hooks, module._forward_hooks) for hook in hooks.values()]
    own = [closure_of(hook) for hook in hooks if is_function(hook, _DISTRIBUTED)]
    for kind in _STYLES:
        before = [one["input_fn"] for one in own if _calls(one.get("input_fn"), kind._prepare_input_fn)]
        after = [one["output_fn"] for one in own if _calls(one.get("output_fn"), kind._prepare_output_fn)]
        if len(before) == len(after) == 1 and len(own) == 2:
            strange = [hook for hook in hooks if not is_function(hook, _DISTRIBUTED) and not _is_of_fsdp(hook)]
            if strange:
                return f"it has a hook that is not torch's: {_named(strange[0])}"
            [input_layout], _ = before[0].args
            [output_layout], use_local_output = after[0].args
            return LinearStyle(
                name=kind.__name__,
                is_column=kind is ColwiseParallel,
                mesh=own[0]["device_mesh"],
                input_layout=input_layout,
                output_layout=output_layout,
                use_local_output=use_local_output,
            )
    if not isinstance(module, nn.Linear) or not isinstance(module.weight, DTensor):
        return None
    if own:
        functions = [one.get("input_fn") or one.get("output_fn") for one in own]
        return f"its style is not torch's: {', '.join(map(_named, functions))}"
    if isinstance(module, FSDPModule) or module.weight.device_mesh.ndim > 1 or not hooks:
        return None  # as far as can be seen, all hooks are FSDP2's
    return f"its style is not torch's: {', '.join(map(_named, hooks))}"


def _style_of_transformers(closure: dict[str, Any]) -> LinearStyle | str | None:
    style, module = closure["self"], closure["module"]
    kind = type(style).__name__
    if kind not in ("ColwiseParallel", "RowwiseParallel") or type(style).__module__ != _TRANSFORMERS[0]:
        return None if kind == "SequenceParallel" else f"its style is {kind}"
    if getattr(module, "_hf_quantized_needs_local_tp", False):
        return "it is quantised"
    return LinearStyle(
        name=kind,
        is_column=kind == "ColwiseParallel",
        mesh=closure["mesh"],
        input_layout=style.input_layouts,
        output_layout=style.output_layouts,
        use_local_output=style.use_local_output,
    )


def _unfit(module: nn.Module, style: LinearStyle) -> str:
    """Return why counterpoint's operations cannot run a linear layer; "" if they can."""
    weight: Any = module.weight
    if style.mesh.ndim != 1:
        return f"its mesh has {style.mesh.ndim} dimensions"
    if not isinstance(weight, DTensor):
        return "its weight is no DTensor"
    if weight.shape[style.weight_dim] % style.mesh.size():
        return f"{weight.shape[style.weight_dim]} features do not divide by {style.mesh.size()} ranks"
    layout = style.output_layout
    if not style.is_column and not isinstance(layout, Replicate) and (not isinstance(layout, Shard) or layout.dim < 0):
        return f"its output is {layout}"
    return ""


def is_function(function: Any, known: tuple[str, str]) -> bool:
    """Return whether a function has this module name and qualified name."""
    return (getattr(function, "__module__", ""), getattr(function, "__qualname__", "")) == known


def closure_of(function: Any) -> dict[str, Any]:
    """Return the variables in a function's closure, by name."""
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    return dict(zip(function.__code__.co_freevars, cells, strict=True))


def _calls(partial: Any, function: Hook) -> bool:
    """Return whether `partial` is a `functools.partial` of `function`."""
    return getattr(partial, "func", None) is function


def _is_of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


def _named(function: Any) -> str:
    function = getattr(function, "func", function)
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def local_part(x: Any) -> Tensor:
    """Return this rank's part of a DTensor; any other tensor as it is."""
    part: Tensor = x.to_local() if isinstance(x, DTensor) else x
    return part
