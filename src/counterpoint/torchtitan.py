"""Run torchtitan's token dispatcher and parallel linear layers by counterpoint, through torchtitan's overrides.

This module can be imported where torchtitan is not installed. torchtitan takes it by these options:

--override.imports counterpoint.torchtitan.token_dispatcher
--override.imports 'counterpoint.torchtitan.token_dispatcher={"mechanism": "gather", "max_tokens": 8192}'
--override.imports counterpoint.torchtitan.column_parallel_linear
--override.imports counterpoint.torchtitan.row_parallel_linear
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import field, fields, make_dataclass
from functools import cache
from typing import Any

import torch

from counterpoint.parallel.expert.titan_dispatcher import TokenDispatching
from counterpoint.parallel.options import ExpertOptions
from counterpoint.parallel.tensor.linear import ColumnLinear, RowLinear

__all__ = ["column_parallel_linear", "row_parallel_linear", "token_dispatcher"]
_MODELS = "torchtitan.models.common"


def token_dispatcher(cfg: Any, *, hidden: int | None = None, max_tokens: int | None = None, **options: Any) -> Any:
    """Return the configuration of a token dispatcher that sends tokens by `counterpoint.expert_parallel`.

    Args:
        cfg: configuration of torchtitan's `AllToAllTokenDispatcher`, or of a subclass, such as the float8 one.
        hidden: elements of a token; with `max_tokens`, buffers are made when the model is parallelized.
        max_tokens: most tokens that a rank dispatches at once, else all ranks raise; None: as many as any rank has at
            the first dispatch.
        options: fields of `ExpertOptions`; `wire_dtype` by its name, as "float8_e4m3fn".
    """
    if isinstance(name := options.get("wire_dtype"), str):
        options["wire_dtype"] = getattr(torch, name, name)
    if hasattr(cfg, "pad_multiple"):  # for quantized experts, whose scales may be of all rows
        options = {"pad_multiple": cfg.pad_multiple, "zero_tail": True} | options
    more = {"hidden": hidden, "max_tokens": max_tokens, "options": ExpertOptions(**options)}
    return _replaced(cfg, TokenDispatching, more)


def column_parallel_linear(cfg: Any) -> Any:
    """Return the configuration of a column-parallel linear layer that gathers rows while its matmul runs."""
    return _replaced(cfg, ColumnLinear, {})


def row_parallel_linear(cfg: Any) -> Any:
    """Return the configuration of a row-parallel linear layer that sums products over ranks while its matmul runs."""
    return _replaced(cfg, RowLinear, {})


def _replaced(cfg: Any, mixin: type, more: dict[str, Any]) -> Any:
    same = {each.name: getattr(cfg, each.name) for each in fields(cfg) if each.init}
    return _class_of(type(cfg)._owner, mixin, tuple(more)).Config(**same, **more)


@cache
def _class_of(base: Any, mixin: type, names: tuple[str, ...]) -> Any:
    """Return a subclass of `mixin` and of torchtitan's class `base`, whose `Config` also has the fields `names`.

    torchtitan lets `Config.build` make the class in which the `Config` was defined.
    """
    name = f"Counterpoint{base.__name__}"
    config: Any = make_dataclass(
        "Config", [(each, Any, field(default=None)) for each in names], bases=(base.Config,), kw_only=True, slots=True
    )
    config.__module__, config.__qualname__ = __name__, f"{name}.Config"
    return type(name, (mixin, base), {"__module__": __name__, "Config": config})


def _register() -> None:
    """Register each function as torchtitan's override of a class; old versions lack the parallel linear layers."""
    override = importlib.import_module("torchtitan.config").override
    for module, name, factory, what, exact in (
        ("token_dispatcher", "AllToAllTokenDispatcher", token_dispatcher, "Tokens travel by copy engines.", False),
        ("linear", "ColumnParallelLinear", column_parallel_linear, "Rows are gathered beside matmuls.", True),
        ("linear", "RowParallelLinear", row_parallel_linear, "Sums travel beside matmuls.", True),
    ):
        target = getattr(importlib.import_module(f"{_MODELS}.{module}"), name, None)
        if target is not None:
            override(target=target.Config, description=f"counterpoint: {what}", exact=exact)(factory)


if importlib.util.find_spec("torchtitan") is not None:
    _register()
