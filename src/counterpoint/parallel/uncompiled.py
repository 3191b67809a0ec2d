"""Keep torch's compiler out of functions and classes that communicate."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
AnyClass = TypeVar("AnyClass", bound=type)
# does what torch.compiler.disable does, without loading the compiler
_SKIP: Any = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def uncompiled(function: AnyFunction) -> AnyFunction:
    """Return a function at which a graph of torch.compile ends, so that its host code runs at every call."""
    disabled: AnyFunction = torch.compiler.disable(function)
    return disabled


def never_compiled(kind: AnyClass) -> AnyClass:
    """Make torch's compiler skip all methods of a class, even where compiled DDP calls them; return the class."""
    for member in vars(kind).values():
        if isinstance(member, FunctionType):
            eval_frame.set_code_exec_strategy(member.__code__, _SKIP)
    return kind
