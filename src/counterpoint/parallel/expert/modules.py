"""Run the experts of a model of `transformers` by a `Dispatcher`, after the model's `ep_plan` was applied.

A module whose style is exactly one of `transformers` gets another `forward`. A style cannot be queried, but it leaves a
closure that holds what the plan said: `expert_style` looks inside it, and returns a text for anything that it does not
know exactly. Parameters stay where they are: each call takes this rank's part of the DTensors that the module has at
that time. Layers of one shape share a dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from counterpoint.collectives.submit.tensors import dtype_name
from counterpoint.errors import Misconfigured
from counterpoint.parallel.expert.dispatcher import Dispatcher, most_tokens
from counterpoint.parallel.expert.layers import ExpertWeights, overlapped_moe
from counterpoint.parallel.follow_tuning import FollowedTuning
from counterpoint.parallel.group import ranks_of
from counterpoint.parallel.options import ExpertChoice, ExpertOptions
from counterpoint.parallel.report import ModuleRow, Report, together
from counterpoint.parallel.tensor.parallel_styles import closure_of, is_function, local_part
from counterpoint.parallel.torch_calls import uncompiled
from counterpoint.records.tuning import LEAVE
from counterpoint.tuned.choices import EXCHANGE

_PARTS = 2  # number of parts into which a rank's tokens are cut

_MODULE = "transformers.distributed.expert_parallel"
_FORWARD = (_MODULE, "EpDispatchExpertsParallel.install_forward.<locals>.ep_forward")
_GATE = ("transformers.integrations.moe", "_default_apply_gate")
_IMPLEMENTATIONS = ("AutoEP", "AllToAllEP")  # the implementations that exchange tokens
_MATMULS = (None, "eager", "grouped_mm", "batched_mm")  # ways to compute experts; others are kernels that a user chose
_WEIGHTS = ("gate_up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertStyle:
    """Describes how the experts of one module are divided among ranks.

    Args:
        name: name, in `transformers`, of the code that brings the tokens.
        mesh: mesh of one dimension: the ranks among which the experts are divided.
        batch_mesh: mesh of one dimension: ranks that have the same tokens.
        experts: number of experts of all ranks.
        has_swiglu: whether the gate is `silu(gate) * up`; otherwise it is the module's `_apply_gate`.
        is_summed_in_evaluation: without derivatives nothing is exchanged: each rank runs its experts on all tokens.
    """

    name: str
    mesh: DeviceMesh
    batch_mesh: DeviceMesh
    experts: int
    has_swiglu: bool
    is_summed_in_evaluation: bool

    def __deepcopy__(self, _: Any) -> ExpertStyle:  # a copied model keeps the same meshes, which cannot be copied
        return self


class Dispatchers:
    """Makes one `Dispatcher` for each layer shape and process group, and closes all of them."""

    def __init__(self, options: ExpertOptions) -> None:
        self.options, self.parts = options, options.parts or _PARTS
        self._made: dict[Any, Dispatcher] = {}
        self._most: dict[Any, int] = {}  # most tokens of any rank, by shape and group

    def __deepcopy__(self, _: Any) -> Dispatchers:  # a copied layer keeps the same dispatchers
        return self

    def all(self) -> tuple[Dispatcher, ...]:
        """Return the dispatchers that were made so far."""
        return tuple(self._made.values())

    def most_tokens(self, style: ExpertStyle, x: Tensor, top_k: int) -> int:
        """Return the most tokens that any rank has in a call of layers of this shape; all ranks make the first call."""
        key = style.mesh.get_group().group_name, style.experts, top_k, x.shape[1]
        if key not in self._most:
            self._most[key] = self.options.max_tokens or most_tokens(x, style.mesh.get_group())
        return self._most[key]

    def of(self, style: ExpertStyle, x: Tensor, top_k: int, mechanism: ExpertChoice) -> Dispatcher:
        """Return the dispatcher for tokens of this shape; all ranks make the first call together."""
        key = style.mesh.get_group().group_name, style.experts, top_k, x.shape[1], mechanism
        if key not in self._made:
            self._made[key] = Dispatcher(
                style.mesh.get_group(),
                experts=style.experts,
                top_k=top_k,
                max_tokens=-(-self.most_tokens(style, x, top_k) // self.parts),
                hidden=x.shape[1],
                options=replace(self.options, mechanism=mechanism, parts=None, max_tokens=None),
            )
        return self._made[key]

    def close(self) -> None:
        """Close all dispatchers; all ranks call this."""
        with ExitStack() as each:  # closes the others if one raises
            while self._made:
                each.callback(self._made.popitem()[1].close)


class OverlappedExperts:
    """Runs the experts of one module by a dispatcher, from its construction until `undo`."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        style: ExpertStyle,
        dispatchers: Dispatchers,
        tuning: FollowedTuning | None = None,
        left_why: str = "",
    ) -> None:
        self.name, self.module, self.style, self.dispatchers = name, module, style, dispatchers
        self.torch_why = self.choice = ""
        self._tuning, self._left_why = tuning, left_why
        self._stock: Callable[..., Tensor] = vars(module)["forward"]
        module.forward = self.forward

    def undo(self) -> None:
        """Restore the module's own `forward`."""
        self.module.forward = self._stock

    @uncompiled
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run all ranks' experts on this rank's tokens; return the weighted sums, as the module's `forward` does."""
        x, ids, weights = local_part(hidden_states), local_part(top_k_index), local_part(top_k_weights)
        if why := self._unfit(x):
            self.torch_why = why
            return self._stock(hidden_states, top_k_index, top_k_weights)
        mechanism = self._mechanism(x, ids.shape[1])
        if mechanism is None:
            return self._stock(hidden_states, top_k_index, top_k_weights)
        tokens, batch = len(x), self.style.batch_mesh
        if batch.size() > 1:  # ranks of this mesh have the same tokens, so each sends a part
            x, ids, weights = (
                DTensor.from_local(one, batch, [Replicate()], run_check=False)
                .redistribute(placements=[Shard(0)])
                .to_local()
                for one in (x, ids, weights)
            )
        module: Any = self.module
        gate = None if self.style.has_swiglu else module._apply_gate
        experts = ExpertWeights(gate_up=local_part(module.gate_up_proj), down=local_part(module.down_proj), gate=gate)
        dispatcher = self.dispatchers.of(self.style, x, ids.shape[1], mechanism)
        out = overlapped_moe(x, ids, weights, experts, dispatcher, parts=self.dispatchers.parts)
        if batch.size() > 1:
            shape = torch.Size((tokens, out.shape[1]))
            parts = DTensor.from_local(out, batch, [Shard(0)], run_check=False, shape=shape, stride=(out.shape[1], 1))
            out = parts.full_tensor()
        return out

    def report(self) -> ModuleRow:
        """Return this module's row of the report: the mechanism that runs its experts, and why."""
        return ModuleRow(
            name=self.name,
            kind="expert",
            style=f"{self.style.name}, {self.style.experts} experts",
            ranks=ranks_of(self.style.mesh.get_group()),
            runs=f"in {self.dispatchers.parts} parts",
            choice=self.choice,
            torch_why=self.torch_why,
        )

    def _mechanism(self, x: Tensor, top_k: int) -> ExpertChoice | None:
        """Return the mechanism that the options, or else the tuning, name; None: `transformers` runs the experts.

        A tuning is asked with the size of the largest call of any rank, so that all ranks choose alike.
        """
        asked, choice, ranks = self.dispatchers.options.mechanism, None, self.style.mesh.size()
        if self._tuning is not None and asked == "auto":
            most = self.dispatchers.most_tokens(self.style, x, top_k)
            choice = self._tuning.find(
                EXCHANGE,
                ranks=ranks,
                num_bytes=ranks * most * top_k * x.shape[1] * x.element_size(),
                dtype=dtype_name(x.dtype),
                where=(self.name,),
            )
        if choice is None:
            self.torch_why = self._left_why or self.torch_why
            return None if self._left_why else asked
        self.choice = choice.why
        if choice.mechanism == LEAVE:
            self.torch_why = choice.why
            return None
        return cast("ExpertChoice", choice.mechanism)

    def _unfit(self, x: Tensor) -> str:
        """Return why `transformers` runs this call, the same text on all ranks; "" if it does not."""
        module: Any = self.module
        if self.style.is_summed_in_evaluation and not (torch.is_grad_enabled() and x.requires_grad):
            return "without derivatives nothing is exchanged"
        if torch.is_autocast_enabled(x.device.type):
            return "autocast, which computes experts in another dtype"
        if x.dtype != module.gate_up_proj.dtype:
            return f"tokens are {x.dtype}, weights {module.gate_up_proj.dtype}"
        return ""


class OverlappedExpertParallel:
    """Runs the experts of a model by dispatchers, reports them, and gives them back to `transformers` by `restore`.

    Args:
        model: a model that `transformers` has made with `ep_size`.
        options: None: the defaults, and `transformers` runs experts on GPUs, as nothing was measured on GPUs yet.
        tuning: chooses the mechanism of each module where the options name none; None: nothing does.

    Raises:
        Misconfigured: the model is overlapped already.
    """

    def __init__(
        self, model: nn.Module, options: ExpertOptions | None = None, tuning: FollowedTuning | None = None
    ) -> None:
        self._dispatchers = Dispatchers(options or ExpertOptions())
        self._left: dict[str, str] = {}
        self._experts: dict[str, OverlappedExperts] = {}
        names = {module: name or "(root)" for name, module in model.named_modules()}
        for module, name in names.items():
            if isinstance(getattr(vars(module).get("forward"), "__self__", None), OverlappedExperts):
                raise Misconfigured(f"{name} is overlapped already: call restore() of the first overlap() before")
        for module, name in names.items():
            style = expert_style(module)
            left_why = ""
            if isinstance(style, ExpertStyle):
                left_why = _left_why(style, is_asked=options is not None)
                is_tuned = style.mesh.size() > 1 and tuning is not None and tuning.names(EXCHANGE)
                style = style if is_tuned else left_why or style
            if isinstance(style, ExpertStyle):
                self._experts[name] = OverlappedExperts(name, module, style, self._dispatchers, tuning, left_why)
            elif style is not None:
                self._left[name] = style

    @property
    def is_empty(self) -> bool:
        """Return whether no module is expert parallel."""
        return not (self._experts or self._left)

    @property
    def has_effect(self) -> bool:
        """Return whether a dispatcher runs the experts of any module."""
        return bool(self._experts)

    def first_left(self) -> str:
        """Return the name of a module whose experts stay with `transformers`, and why."""
        name, why = next(iter(self._left.items()))
        return f"{name}: {why}"

    def report(self) -> Report:
        """Return a report of the modules with expert parallelism, and of the mechanism that runs each."""
        left = (ModuleRow(name=name, kind="expert", torch_why=why) for name, why in self._left.items())
        calls = together(row for one in self._dispatchers.all() for row in one.report().calls)
        return Report(modules=(*(one.report() for one in self._experts.values()), *left), calls=calls)

    def check(self) -> None:
        """Raise an error if a dispatcher's communication has failed or choices exceeded capacity."""
        for dispatcher in self._dispatchers.all():
            dispatcher.check()

    def restore(self) -> None:
        """Let `transformers` run every module as before. All ranks call this."""
        while self._experts:
            self._experts.popitem()[1].undo()
        self._dispatchers.close()


def expert_style(module: nn.Module) -> ExpertStyle | str | None:
    """Return how a module's experts are divided among ranks, why they cannot be replaced, or None if not divided."""
    forward = vars(module).get("forward")
    if not is_function(forward, _FORWARD):
        return None
    closure: dict[str, Any] = closure_of(forward)
    implementation = closure["implementation"]
    kind = type(implementation).__name__
    if type(implementation).__module__ != _MODULE or kind not in _IMPLEMENTATIONS:
        return f"its tokens are brought by {kind}"
    if getattr(implementation, "megamoe", None) is not None:
        return "its tokens are brought by MegaMoeEP"
    if why := _unfit(module):
        return why
    return ExpertStyle(
        name=kind,
        mesh=implementation.ep_mesh,
        batch_mesh=implementation.tp_mesh,
        experts=implementation.num_local_experts * implementation.ep_mesh.size(),
        has_swiglu=_has_swiglu(module),
        is_summed_in_evaluation=getattr(implementation, "all_reduce", None) is not None,
    )


def _has_swiglu(module: nn.Module) -> bool:
    gate = getattr(type(module), "_apply_gate", None)
    return is_function(gate, _GATE) and type(getattr(module, "act_fn", None)) is nn.SiLU


def _unfit(module: nn.Module) -> str:
    """Return why two grouped matmuls with a gate between them cannot compute the experts; "" if they can."""
    kind: Any = module
    odd = {"a bias": kind.has_bias, "transposed weights": kind.is_transposed, "a norm": kind.has_post_expert_norm}
    for name, is_there in odd.items():
        if is_there:
            return f"its experts have {name}"
    if not kind.has_gate:
        return "its experts have no gate"
    if kind.config._experts_implementation not in _MATMULS:
        return f"its experts are computed by {kind.config._experts_implementation}"
    for name in _WEIGHTS:
        weight = getattr(module, name, None)
        if not isinstance(weight, DTensor) or weight.dim() != 3 or not weight.is_floating_point():
            return f"its {name} is no DTensor of three dimensions"
        if weight.placements[-1] != Shard(0):
            return f"its {name} is not divided by experts"
    return ""


def expert_groups(model: nn.Module) -> list[Any]:
    """Return the process groups over which a model's experts are divided."""
    styles = map(expert_style, model.modules())
    return [style.mesh.get_group() for style in styles if isinstance(style, ExpertStyle) and style.mesh.size() > 1]


def _left_why(style: ExpertStyle, *, is_asked: bool) -> str:
    """Return why the experts are left to `transformers`; "" if they are not."""
    if style.mesh.size() == 1:
        return "one rank has nothing to communicate"
    if style.mesh.device_type != "cpu" and not is_asked:
        return "not measured on GPUs yet: there give OverlapOptions(expert_parallel=ExpertOptions())"
    return ""
