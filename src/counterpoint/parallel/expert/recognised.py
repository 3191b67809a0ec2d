"""Recognise experts of `transformers` under expert parallelism, by the `forward` that its plan has given them.

Its style cannot be asked, but leaves a closure that holds what the plan said. This file is the only one that looks
inside. What is not exactly as known is not taken: a text says what it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from counterpoint.parallel.tensor.parallel_styles import closure_of, is_function

_MODULE = "transformers.distributed.expert_parallel"
_FORWARD = (_MODULE, "EpDispatchExpertsParallel.install_forward.<locals>.ep_forward")
_GATE = ("transformers.integrations.moe", "_default_apply_gate")
_IMPLEMENTATIONS = ("AutoEP", "AllToAllEP")  # those that exchange tokens
_MATMULS = (None, "eager", "grouped_mm", "batched_mm")  # ways to compute experts; others are kernels that a user chose
_WEIGHTS = ("gate_up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertStyle:
    """Describes how the experts of a module are spread over ranks.

    Args:
        name: of what brings the tokens, in `transformers`.
        mesh: of one dimension, the ranks among which the experts are divided.
        batch_mesh: of one dimension, ranks that have the same tokens.
        experts: of all ranks.
        has_swiglu: between the matmuls is `silu(gate) * up`; otherwise what the module's `_apply_gate` does.
        is_summed_in_evaluation: without derivatives nothing is exchanged: each rank runs its experts on all tokens.
    """

    name: str
    mesh: DeviceMesh
    batch_mesh: DeviceMesh
    experts: int
    has_swiglu: bool
    is_summed_in_evaluation: bool

    def __deepcopy__(self, _: Any) -> ExpertStyle:  # a copy of the model lies on the same meshes, which have no copies
        return self


def expert_style(module: nn.Module) -> ExpertStyle | str | None:
    """Return how a module's experts are spread; a text if they cannot be taken; None if they are not spread."""
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
    """Return why experts cannot be computed by two grouped matmuls with a gate between; empty if they can."""
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
