"""Styles for a plan of `parallelize_module`: those of torch, run by counterpoint's operations.

    parallelize_module(block, mesh, {"ffn.up": Colwise(), "ffn.down": Rowwise()})

Layers share a gather only after `counterpoint.overlap(model)`, which finds those of torch's own styles as well.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from counterpoint.errors import Unsupported
from counterpoint.parallel.tensor.modules import overlapped_linear


class Colwise(ColwiseParallel):
    """Is torch's `ColwiseParallel` of a linear layer, whose gather comes with its matmul."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _overlapped(super()._apply(module, device_mesh), device_mesh, type(self).__name__)


class Rowwise(RowwiseParallel):
    """Is torch's `RowwiseParallel` of a linear layer, whose reduction comes with its matmul."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _overlapped(super()._apply(module, device_mesh), device_mesh, type(self).__name__)


def _overlapped(module: nn.Module, mesh: DeviceMesh, style: str) -> nn.Module:
    why = overlapped_linear(module) if mesh.size() > 1 else None
    if isinstance(why, str):
        raise Unsupported(f"{style}: {why}; use torch's {style}Parallel for this module")
    return module
