"""Calls of the CUDA driver through cuda-bindings, which return an error code first."""

from __future__ import annotations

from typing import Any

from counterpoint.errors import Unsupported

__all__ = ["call"]


def call(name: str, *arguments: Any) -> Any:
    """What the driver's function `name` returns after its error code: nothing, one value, or a tuple.

    Raises:
        Unsupported: the driver refused.
    """
    from cuda.bindings import driver

    error, *values = getattr(driver, name)(*arguments)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise Unsupported(f"{name} failed: {error.name}; the driver or GPU does not allow it")
    return values[0] if len(values) == 1 else tuple(values) or None
