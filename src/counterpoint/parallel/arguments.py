"""Read the arguments that torch gives to its process groups and to FSDP2's hooks: options, reductions, sizes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_REDUCTIONS = tuple((getattr(dist.ReduceOp, name.upper()), name) for name in ("sum", "avg", "max", "min"))
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)


def num_bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor; a sparse one, which has no `nbytes`, counts as if it were dense."""
    return tensor.numel() * tensor.element_size()


def call_options(kind: Any, given: Any, name: str, value: Any, timeout: Any) -> Any:
    """Return the options of a call as an object of class `kind`; torch may give a single option instead."""
    if isinstance(given, kind):
        return given
    options = kind()
    for key, one in ((name, given if value is None else value), ("timeout", timeout)):
        if one is not None:
            setattr(options, key, one)
    return options


def op_and_factor(op: Any) -> tuple[str, float]:
    """Return a communicator's name for a reduction of torch, and the factor of a PREMUL_SUM (otherwise 1).

    A PREMUL_SUM by a tensor, which no communicator has, is called `premul_sum by a tensor`.
    """
    for known, name in _REDUCTIONS:
        if op == known:
            return name, 1.0
    if isinstance(op, dist.ReduceOp.RedOpType):
        return op.name.lower(), 1.0
    kind: Any
    factor: Any
    kind, factor = op.__getstate__()  # its pickled state: the only access to the factor in torch 2.11
    name = kind.name.lower()
    if name != "premul_sum" or isinstance(factor, float):
        return name, factor if isinstance(factor, float) else 1.0
    return f"{name} by a tensor", 1.0


def reduces(op: str, dtype: torch.dtype) -> bool:
    """Return whether a communicator can do the reduction `op`, a name of `op_and_factor`, in this dtype."""
    if op == "premul_sum":
        return dtype in _FLOATS
    known = any(op == one for _, one in _REDUCTIONS)
    return known and (dtype in _FLOATS or (dtype in _INTEGERS and op != "avg"))
