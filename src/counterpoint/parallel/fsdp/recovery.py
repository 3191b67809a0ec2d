"""Passes that an exception ended: FSDP2 cannot go on after one by itself, and would lose gradients in silence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterpoint.errors import Misconfigured
from counterpoint.parallel.fsdp.modules import inside, parameter_groups

if TYPE_CHECKING:
    from torch import nn

__all__ = ["discard_pass", "is_unfinished", "outermost", "refuse_unfinished"]


def outermost(model: nn.Module) -> list[nn.Module]:
    """Return the FSDP2 modules of `model` that are inside no other: its forward pass begins with one of them."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        return [model]
    return list(dict.fromkeys(one for child in model.children() for one in outermost(child)))


def is_unfinished(module: nn.Module) -> bool:
    """Return whether a backward pass over this FSDP2 module has begun, does not run any more and never ended."""
    import torch

    context = inside(inside(module, "_get_fsdp_state")(), "_state_ctx")
    return bool(inside(context, "post_backward_final_callback_queued")) and torch._C._current_graph_task_id() == -1


def refuse_unfinished(module: nn.Module, *_: object) -> None:
    """Refuse a forward pass after a backward pass that did not end.

    FSDP2 would take its modules to be in that pass still: it neither gathers them nor reduces their gradients.

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
    """Discard what a pass that did not end has left in FSDP2, without communication.

    That is: gradients that are not reduced yet, whole parameters, and modules gathered ahead. torch 2.13 has
    `reset_iter_state`; but it keeps gradients of whole parameters, to which the next pass would add.

    Args:
        module: an outermost FSDP2 module.
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
        group._training_state = TrainingState.POST_BACKWARD  # nothing is left to reduce
    for one in context.all_states:
        inside(one, "_modules_to_run_forward").clear()
    context.iter_forward_root = None
    is_last, context.is_last_backward = inside(context, "is_last_backward"), True
    inside(state, "_root_post_backward_final_callback")()
    context.is_last_backward = is_last
    for group in groups:
        group.reshard()
