"""Which layers of tensor parallelism `overlap` takes, as far as no process group is needed to tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from counterpoint.parallel.tensor import modules
from counterpoint.parallel.tensor.recognised import LinearStyle


def test_layers_on_gpus_are_taken_only_where_options_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch runs them, and the reason says what to give."""
    mesh: Any = SimpleNamespace(device_type="cuda", size=lambda: 2, get_group=lambda: SimpleNamespace(group_name="0"))
    style = LinearStyle(
        name="ColwiseParallel", mesh=mesh, is_column=True, input_layout=Replicate(), output_layout=Shard(-1),
        use_local_output=True,
    )  # fmt: skip
    monkeypatch.setattr(modules, "linear_style", lambda module: style)
    monkeypatch.setattr(modules, "own_hooks", lambda module: ())
    layer = nn.Linear(8, 8)
    assert "OverlapOptions(tensor_parallel=TensorOptions())" in str(modules.overlapped_linear(layer, is_asked=False))
    assert isinstance(modules.overlapped_linear(layer, is_asked=True), modules.OverlappedLinear)
