"""A stand-in for torchtitan: as much of its configurations, overrides, dispatchers and layers as overrides touch.

What is replaced is missing here, so that a test cannot pass by torchtitan's own: between ranks these classes refuse.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

STATE: dict[str, Any] = {"tp": None, "sequence": False}


class Override(NamedTuple):
    target: type
    exact: bool
    factory: Callable[..., Any]


REGISTRY: dict[str, Override] = {}


def override(*, target: type, description: str = "", exact: bool = False) -> Callable[[Any], Any]:
    def decorate(factory: Any) -> Any:
        REGISTRY[f"{factory.__module__}.{factory.__name__}"] = Override(target, exact, factory)
        return factory

    return decorate


class Configurable:
    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[Any] = None

        def build(self) -> Any:
            return self._owner(replace(self))

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "Config" in vars(cls):
            cls.Config._owner = cls
            assert "__slots__" in vars(cls.Config)


class LocalTokenDispatcher(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        num_experts: int
        top_k: int
        score_before_experts: bool = False

    def __init__(self, config: Config) -> None:
        self.num_experts, self.top_k = config.num_experts, config.top_k

    def init_buffer(self) -> None:
        pass

    def dispatch(self, x: Tensor, scores: Tensor, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Any]:
        order = ids.flatten().argsort(stable=True)
        return x[order // self.top_k], counts, (order, scores.flatten()[order])

    def combine(self, rows: Tensor, metadata: Any, x: Tensor) -> Tensor:
        order, scores = metadata
        return torch.zeros_like(x).index_add(0, order // self.top_k, rows * scores[:, None])


class AllToAllTokenDispatcher(LocalTokenDispatcher):
    @dataclass(kw_only=True, slots=True)
    class Config(LocalTokenDispatcher.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.ep_mesh: Any = None

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        self.ep_mesh = ep_mesh
        self.init_buffer()

    def dispatch(self, x: Tensor, scores: Tensor, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Any]:
        assert self.ep_mesh is None, "this is not replaced"
        return super().dispatch(x, scores, ids, counts)


class TorchAOTokenDispatcher(AllToAllTokenDispatcher):
    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pad_multiple: int


class RoutedExperts(nn.Module):
    """Experts of one matrix each; rows past the last expert's come out as nan."""

    def __init__(self, config: Any, weight: Tensor) -> None:
        super().__init__()
        self.token_dispatcher, self.weight = config.build(), nn.Parameter(weight)

    def forward(self, x: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
        counts = ids.flatten().bincount(minlength=self.token_dispatcher.num_experts)
        rows, counts, metadata = self.token_dispatcher.dispatch(x, scores, ids, counts)
        parts, start = [], 0
        for expert, end in enumerate(counts.cumsum(0, dtype=torch.int32).tolist()):
            parts.append(rows[start:end] @ self.weight[expert])
            start = end
        made = torch.cat([*parts, rows.new_full((len(rows) - start, rows.shape[1]), torch.nan)])
        out: Tensor = self.token_dispatcher.combine(made, metadata, x)
        return out


class Linear(nn.Linear, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        in_features: int
        out_features: int
        num_linears: int = 1
        bias: bool = False

    def __init__(self, config: Config) -> None:
        super().__init__(config.in_features, config.num_linears * config.out_features, bias=config.bias)
        self.num_linears = config.num_linears
        if config.num_linears > 1:
            self.weight = nn.Parameter(self.weight.detach().unflatten(0, (config.num_linears, -1)))

    def _flatten_weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        return self.weight.flatten(0, -2), self.bias

    def _unflatten_output(self, output: Tensor) -> Tensor:
        return output if self.num_linears == 1 else output.unflatten(-1, self.weight.shape[:-1])

    def forward(self, input: Tensor) -> Tensor:
        assert STATE["tp"] is None, "this is not replaced"
        return self._unflatten_output(nn.functional.linear(input, *self._flatten_weight_and_bias()))


class ColumnParallelLinear(Linear):
    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass


class RowParallelLinear(Linear):
    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass


CONTENTS: dict[str, dict[str, Any]] = {
    "torchtitan": {},
    "torchtitan.config": {"override": override},
    "torchtitan.models": {},
    "torchtitan.models.common": {},
    "torchtitan.models.common.token_dispatcher": {"AllToAllTokenDispatcher": AllToAllTokenDispatcher},
    "torchtitan.models.common.linear": {
        "ColumnParallelLinear": ColumnParallelLinear, "RowParallelLinear": RowParallelLinear
    },
    "torchtitan.distributed": {},
    "torchtitan.distributed.spmd_types": {
        "spmd_mesh_group": lambda axis: STATE[axis], "spmd_dense_sp_enabled": lambda: STATE["sequence"]
    },
}  # fmt: skip


@contextmanager
def installed() -> Iterator[Any]:
    """Give `counterpoint.torchtitan` as it is where torchtitan is installed."""
    for name, content in CONTENTS.items():
        module = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        vars(module).update(content)
        sys.modules[name] = module
    sys.modules.pop("counterpoint.torchtitan", None)
    try:
        yield importlib.import_module("counterpoint.torchtitan")
    finally:
        for name in (*CONTENTS, "counterpoint.torchtitan"):
            sys.modules.pop(name, None)
        REGISTRY.clear()
