"""Keep torch's compiler out of functions that communicate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def uncompiled(function: AnyFunction) -> AnyFunction:
    """Return a function at which a graph of torch.compile ends: what it does on the host is done at every call."""
    disabled: AnyFunction = torch.compiler.disable(function)
    return disabled
