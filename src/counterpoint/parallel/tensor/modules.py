"""Run the linear layers of a tensor-parallel model by `torch.ops.counterpoint`, after `parallelize_module`.

A layer whose style is one of torch's own, or of `transformers`, gets another `forward`, and its hooks are switched off.
Parameters stay where they are: each call takes this rank's part of the DTensor that the layer has at that time.
Column-wise layers of one module that get the same input share one gather of the input, or one all-reduce of its
derivative.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.parallel.follow_tuning import FollowedTuning
from counterpoint.parallel.group import ranks_of
from counterpoint.parallel.options import TensorOptions
from counterpoint.parallel.report import ModuleRow, Report, together
from counterpoint.parallel.tensor.group import TensorGroup, tensor_group
from counterpoint.parallel.tensor.linear import (
    all_gather_linear,
    autocast_dtype,
    linear_all_reduce,
    linear_reduce_scatter,
    replicated_linear,
    replicated_rows,
)
from counterpoint.parallel.tensor.parallel_styles import (
    LinearStyle,
    PreparedInput,
    is_gather,
    linear_style,
    local_part,
    own_hooks,
    prepared_input,
)


class OverlappedLinear:
    """Runs one linear layer of tensor parallelism, from its construction until `undo`."""

    def __init__(self, name: str, module: nn.Module, style: LinearStyle) -> None:
        self.name, self.module, self.style = name, module, style
        self.group: str = style.mesh.get_group().group_name
        self.inputs = SameInput([self])
        self.torch_why = ""
        self.is_held = False  # whether a handle of `overlap` can undo it
        self._stock: Callable[[Any], Any] | None = vars(module).get("forward")  # the one that transformers has set
        self._hooks = [(hooks, key, hooks[key]) for hooks, key in own_hooks(module)]  # before the layer, after it
        for hooks, key, _ in self._hooks:
            hooks[key] = _rest
        module.forward = self.forward

    def undo(self) -> None:
        """Restore the module's earlier hooks and `forward`."""
        for hooks, key, hook in self._hooks:
            hooks[key] = hook
        del self.module.forward
        if self._stock is not None:
            self.module.forward = self._stock

    def forward(self, x: Tensor) -> Any:
        """Return the layer's output, equal to the output of the module with torch's hooks."""
        if x.dim() < 2:
            return self._by_torch(x, "its input has one dimension")
        return self._column_wise(x) if self.style.is_column else self._row_wise(x)

    @property
    def weight(self) -> Any:
        """Return the weight as it is now: FSDP2 replaces shards by unsharded weights while the module runs."""
        return self.module.weight

    def parameters(self) -> tuple[Tensor, Tensor | None]:
        """Return this rank's parts of weight and bias."""
        bias: Any = self.module.bias
        return self.weight.to_local(), None if bias is None else bias.to_local()

    def report(self) -> ModuleRow:
        """Return this layer's row of the report: the mechanism that runs it, and why."""
        style, inputs = self.style, self.inputs
        if style.is_column:
            is_gathered = inputs.gathered_by or isinstance(style.input_layout, Shard)
            operation = "all_gather_matmul" if is_gathered else "matmul_all_reduce in backward"
        else:
            operation = "matmul_reduce_scatter" if isinstance(style.output_layout, Shard) else "matmul_all_reduce"
        return ModuleRow(
            name=self.name,
            kind="tensor",
            style=style.name,
            ranks=ranks_of(style.mesh.get_group()),
            runs=operation,
            shared_with=tuple(one.name for one in inputs.layers if one is not self),
            torch_why=self.torch_why,
        )

    def misplaced(self) -> str:
        """Return an error text if the weight's placement is not the one that the style set; "" if it is."""
        weight = self.weight
        if isinstance(weight, DTensor) and weight.placements == (Shard(self.style.weight_dim),):
            return ""
        return f"the weight of {self.name} is not where its style put it"

    def _column_wise(self, x: Tensor) -> Any:
        out = self.inputs.output(self, x)
        if out is None:
            self.inputs.part()
            layout, together = _layout(x, self.style.input_layout), self.inputs.layers
            why = _unfit(x, layout, together)
            if isinstance(x, DTensor) and not isinstance(layout, Shard):
                why = why or "its input is a replicated DTensor, which communicates elsewhere"
            if why:
                return self._by_torch(x, why)
            weights, biases = zip(*(layer.parameters() for layer in together), strict=True)
            if isinstance(layout, Shard):
                _, outs = all_gather_linear(local_part(x), weights, biases, layout.dim % x.dim(), self.group)
            else:
                outs = replicated_linear(x, weights, biases, self.group)
            self.inputs.computed(x, outs)
            out = self.inputs.output(self, x)
        assert out is not None
        return self._placed(out, Shard(out.dim() - 1))

    def _row_wise(self, x: Tensor) -> Any:
        layout, last = self.style.output_layout, Shard(x.dim() - 1)
        if why := self.misplaced() or _uncut(x, layout, self.style.mesh.size()):
            return self._by_torch(x, why)
        columns: Any = x
        if not isinstance(x, DTensor) and self.style.input_layout not in (Shard(-1), last):
            columns = DTensor.from_local(x, self.style.mesh, (self.style.input_layout,), run_check=False)
        if isinstance(columns, DTensor) and columns.placements != (last,):
            columns = columns.redistribute(placements=(last,))
        weight, bias = self.parameters()
        if isinstance(layout, Shard):
            out = linear_reduce_scatter(local_part(columns), weight, bias, layout.dim, self.group)
        else:
            out = linear_all_reduce(local_part(columns), weight, bias, self.group)
        return self._placed(out, layout)

    def _placed(self, out: Tensor, layout: Placement) -> Tensor:
        """Return an output of the given layout in the layout that the style asks for."""
        style = self.style
        wanted = layout if style.output_layout == Shard(-1) else style.output_layout
        if wanted == layout and style.use_local_output:
            return out
        placed = DTensor.from_local(out, style.mesh, (layout,), run_check=False)
        if wanted != layout:
            placed = placed.redistribute(placements=(wanted,), async_op=True)
        return placed.to_local() if style.use_local_output else placed

    def _by_torch(self, x: Tensor, why: str) -> Any:
        """Run the module with torch's own hooks and `forward`, and record the reason."""
        self.torch_why = why
        if self._stock is not None:
            return self._stock(x)
        (_, _, before), (_, _, after) = self._hooks
        x = before(self.module, (x,))
        return after(self.module, (x,), type(self.module).forward(self.module, x))


class SameInput:
    """Computes several column-wise layers of one module together, as long as they get the same input."""

    def __init__(self, layers: Sequence[OverlappedLinear], gathered_by: str = "") -> None:
        self.layers, self.gathered_by = list(layers), gathered_by
        for layer in layers:
            layer.inputs = self
        self._x: Any = None
        self._seen: tuple[bool, int] = (False, 0)
        self._outs: dict[str, Tensor] = {}

    def computed(self, x: Tensor, outs: Sequence[Tensor]) -> None:
        """Keep the outputs of all layers, computed from `x`, until each layer asks for its own."""
        self._x, self._seen = x, _state(x)
        self._outs = dict(zip([layer.name for layer in self.layers], outs, strict=True))

    def output(self, layer: OverlappedLinear, x: Tensor) -> Tensor | None:
        """Return and drop the kept output of a layer; None if no output was computed from this input."""
        if x is not self._x or _state(x) != self._seen:
            return None
        out = self._outs.pop(layer.name, None)
        if not self._outs:
            self._x = None
        return out

    def end(self, _: nn.Module, inputs: Any, result: Any) -> None:
        """Drop outputs that no layer asked for; this is a forward hook of the module to which the layers belong."""
        if result is None:  # an exception ended it, such as the one by which a recomputation stops early
            self._outs = {}
        self.part()

    def part(self) -> None:
        """Stop sharing with layers that did not ask for their output, since their input is another one, or none."""
        others = [layer for layer in self.layers if layer.name in self._outs]
        if others:
            self.layers = [layer for layer in self.layers if layer not in others]
            SameInput(others)
        self._x, self._outs = None, {}


class SharedGather(PrepareModuleInput):
    """Prepares a module's inputs as torch's `PrepareModuleInput` does, but overlaps gathers with children's matmuls."""

    def __init__(self, module: nn.Module, prepared: PreparedInput, inputs: SameInput) -> None:
        vars(self).update(vars(prepared.style))
        self.module, self.inputs = module, inputs
        self.ranks = ranks_of(prepared.mesh.get_group())
        self.torch_why = ""
        self._prepared, self._rank = prepared, prepared.mesh.get_local_rank()
        self._hook = module._forward_pre_hooks[prepared.key]
        module._forward_pre_hooks[prepared.key] = self.prepare

    def undo(self) -> None:
        """Restore torch's hook."""
        self.module._forward_pre_hooks[self._prepared.key] = self._hook

    def prepare(self, _: nn.Module, inputs: Any, keywords: Any = None) -> Any:
        """Return a module's input as torch's hook prepares it; a gather also computes the children's outputs."""
        mesh = self._prepared.mesh
        if self.with_kwargs:
            return super()._prepare_input_kwarg_fn(inputs, keywords, mesh)  # type: ignore[no-untyped-call]
        return super()._prepare_input_fn(inputs, mesh)  # type: ignore[no-untyped-call]

    def _prepare_input_arg(self, input: Any, mesh: Any, input_layout: Any, desired_layout: Any) -> Any:
        by_torch = super()._prepare_input_arg
        if not is_gather(input_layout, desired_layout):
            return by_torch(input, mesh, input_layout, desired_layout)
        self.inputs.part()
        layout: Any = _layout(input, input_layout)
        if why := self._unfit(input, layout):
            self.torch_why = why
            return by_torch(input, mesh, input_layout, desired_layout)
        layers, x = self.inputs.layers, local_part(input)
        weights, biases = zip(*(layer.parameters() for layer in layers), strict=True)
        dim, group = layout.dim % x.dim(), layers[0].group
        gathered, outs = all_gather_linear(x, weights, biases, dim, group, return_gathered=True)
        assert gathered is not None
        rows = replicated_rows(x, gathered, dim, self._rank)
        if not self.use_local_output:
            rows = DTensor.from_local(rows, mesh, (Replicate(),), run_check=False)
        self.inputs.computed(rows, outs)
        return rows

    def _unfit(self, x: Any, layout: Any) -> str:
        layers = self.inputs.layers
        if not layers:
            return "its layers have other inputs"
        if not isinstance(layout, Shard):
            return f"its input comes as {layout}"
        if why := _unfit(x, layout, layers):
            return why
        if any((one.weight.dtype, one.weight.shape[1]) != (x.dtype, x.shape[-1]) for one in layers):
            return "its input is not that of its layers"
        return "autocast, which gathers in another dtype" if autocast_dtype(x) != x.dtype else ""


class OverlappedTensorParallel:
    """Runs the linear layers of a tensor-parallel model, reports them, and gives them back to torch by `restore`.

    Args:
        model: `parallelize_module` was called on it or on parts of it, or `transformers` has made it with a `tp_plan`.
        options: options of the operations; None: the options that their process groups have.

    Raises:
        Misconfigured: the model is overlapped already.
    """

    def __init__(self, model: nn.Module, options: TensorOptions | None = None) -> None:
        self._names = {module: name or "(root)" for name, module in model.named_modules()}
        self._left: dict[nn.Module, str] = {}
        self._linears: dict[nn.Module, OverlappedLinear] = {}
        self._gathers: dict[nn.Module, SharedGather] = {}
        self._ends: list[Any] = []
        self._tuned: list[TensorGroup] = []
        self._refuse_overlapped()
        for module, name in self._names.items():
            made = overlapped_linear(module, name)
            if isinstance(made, str):
                self._left[module] = made
            elif made is not None:
                made.is_held = True
                self._linears[module] = made
        for module, name in self._names.items():
            self._share(module, name)
        self._groups = dict.fromkeys(linear.group for linear in self._linears.values())
        if options is not None:
            for group in self._groups:
                tensor_group(group, options)

    @property
    def is_empty(self) -> bool:
        """Return whether no module is tensor parallel."""
        return not (self._linears or self._left)

    @property
    def has_effect(self) -> bool:
        """Return whether counterpoint runs any layer."""
        return bool(self._linears)

    def first_left(self) -> str:
        """Return the name of a module that was not replaced, and why."""
        module, why = next(iter(self._left.items()))
        return f"{self._names[module]}: {why}"

    def report(self) -> Report:
        """Return a report of every tensor-parallel module, and of the mechanism that runs it."""
        rows = [self._reported(module, name) for module, name in self._names.items()]
        calls = together(row for group in self._groups for row in tensor_group(group).report().calls)
        return Report(modules=tuple(row for row in rows if row is not None), calls=calls)

    @property
    def groups(self) -> tuple[Any, ...]:
        """Return the process groups of all modules that were replaced."""
        return tuple(tensor_group(name).group for name in self._groups)

    def follow(self, tuning: FollowedTuning | None) -> None:
        """Let a tuning choose how these modules run until `restore`; None: built-in rules. All ranks call this."""
        self._tuned = [tensor_group(name) for name in self._groups]
        for group in self._tuned:
            group.follow(tuning)

    def check(self) -> None:
        """Raise the error that ended a communicator, if one has failed."""
        for name in self._groups:
            tensor_group(name).check()

    def restore(self) -> None:
        """Let torch run every module as before."""
        while self._tuned:
            self._tuned.pop().follow_variable()
        while self._ends:
            self._ends.pop().remove()
        while self._gathers:
            self._gathers.popitem()[1].undo()
        while self._linears:
            self._linears.popitem()[1].undo()

    def _refuse_overlapped(self) -> None:
        for module, name in self._names.items():
            made = _present(module)
            if made is not None and made.is_held:
                raise Misconfigured(f"{name} is overlapped already: call restore() of the first overlap() before")

    def _share(self, parent: nn.Module, name: str) -> None:
        """Let the column-wise layers of one module share a gather, or the all-reduce of a derivative."""
        children = [self._linears[child] for child in parent.children() if child in self._linears]
        columns = [one for one in children if one.style.is_column and not isinstance(one.module, FSDPModule)]
        prepared = prepared_input(parent)
        if isinstance(prepared, str):
            self._left[parent] = prepared
        elif prepared is not None:
            layers = [one for one in columns if isinstance(one.style.input_layout, Replicate)]
            columns = [one for one in columns if one not in layers]
            if layers and prepared.mesh.size() > 1:
                inputs = SameInput(layers, gathered_by=name)
                self._gathers[parent] = SharedGather(parent, prepared, inputs)
                self._ends.append(parent.register_forward_hook(inputs.end, always_call=True))
            else:
                self._left[parent] = "no column-wise layer takes what it gathers"
        alike = defaultdict(list)
        for one in columns:
            alike[one.style.mesh, one.style.input_layout, one.weight.shape[1], one.weight.dtype].append(one)
        for layers in alike.values():
            if len(layers) > 1:
                inputs = SameInput(layers)
                self._ends.append(parent.register_forward_hook(inputs.end, always_call=True))

    def _reported(self, module: nn.Module, name: str) -> ModuleRow | None:
        if module in self._left:
            style = "" if prepared_input(module) is None else "PrepareModuleInput"
            return ModuleRow(name=name, kind="tensor", style=style, torch_why=self._left[module])
        gather = self._gathers.get(module)
        if gather is not None:
            return ModuleRow(
                name=name,
                kind="tensor",
                style="PrepareModuleInput",
                ranks=gather.ranks,
                runs="all_gather_matmul",
                shared_with=tuple(one.name for one in gather.inputs.layers),
                torch_why=gather.torch_why,
            )
        linear = self._linears.get(module)
        return None if linear is None else linear.report()


def overlapped_linear(module: nn.Module, name: str = "") -> OverlappedLinear | str | None:
    """Let counterpoint run a layer, and return it, or a text why that is impossible; None if not tensor parallel."""
    made = _present(module)
    if made is not None:
        made.name = name
        return made
    style = linear_style(module)
    if not isinstance(style, LinearStyle):
        return style
    if style.mesh.size() == 1:
        return "one rank has nothing to communicate"
    return OverlappedLinear(name, module, style)


class Colwise(ColwiseParallel):
    """Is torch's `ColwiseParallel` of a linear layer, but with the gather fused with the layer's matmul.

    parallelize_module(block, mesh, {"ffn.up": Colwise(), "ffn.down": Rowwise()})

    Layers share a gather only after `counterpoint.overlap(model)`, which finds torch's own styles as well.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _overlapped(super()._apply(module, device_mesh), device_mesh, type(self).__name__)


class Rowwise(RowwiseParallel):
    """Is torch's `RowwiseParallel` of a linear layer, but with the reduction fused with the layer's matmul."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _overlapped(super()._apply(module, device_mesh), device_mesh, type(self).__name__)


def _overlapped(module: nn.Module, mesh: DeviceMesh, style: str) -> nn.Module:
    why = overlapped_linear(module) if mesh.size() > 1 else None
    if isinstance(why, str):
        raise Unsupported(f"{style}: {why}; use torch's {style}Parallel for this module")
    return module


def _present(module: nn.Module) -> OverlappedLinear | None:
    made = getattr(vars(module).get("forward"), "__self__", None)
    return made if isinstance(made, OverlappedLinear) else None


def _state(x: Tensor) -> tuple[bool, int]:
    """Return whether gradients are on, and the input's version counter; 0 in a compiler or for inference tensors."""
    has_version = not torch.compiler.is_compiling() and not x.is_inference()
    return torch.is_grad_enabled(), x._version if has_version else 0


def _rest(*_: object) -> None:
    """Do nothing; stands in place of a hook that is switched off."""


def _layout(x: Tensor, local: Placement) -> Placement:
    """Return the placement of an input: a DTensor's own, else `local`."""
    return x.placements[0] if isinstance(x, DTensor) else local


def _unfit(x: Tensor, layout: Placement, layers: Sequence[OverlappedLinear]) -> str:
    """Return why an input can neither be gathered for these layers nor be used as it is; "" if it can."""
    for layer in layers:
        if why := layer.misplaced():
            return why
    if isinstance(x, DTensor) and len(x.placements) > 1:
        return f"its input lies on a mesh of {len(x.placements)} dimensions"
    if isinstance(layout, Replicate):
        return ""
    if not isinstance(layout, Shard):
        return f"its input comes as {layout}"
    return _uncut(x, layout, layers[0].style.mesh.size() if isinstance(x, DTensor) else 1)


def _uncut(x: Tensor, layout: Placement, ranks: int) -> str:
    """Return why a sharded dimension cannot be divided into equal parts; "" if it can, or nothing is sharded."""
    if not isinstance(layout, Shard):
        return ""
    dim = layout.dim % x.dim()
    if dim == x.dim() - 1:
        return f"{layout} is no dimension of rows"
    return f"{x.shape[dim]} rows do not divide by {ranks} ranks" if x.shape[dim] % ranks else ""
