"""Tokens made narrow for their way: what a GPU has to be for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from counterpoint.errors import Unsupported
from counterpoint.parallel.expert.permute import narrowed


def test_a_gpu_that_is_too_old_for_the_dtype_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the GPU and what to give instead, where Triton would fail to compile."""
    a100 = SimpleNamespace(name="NVIDIA A100-SXM4-80GB", major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: a100)
    x: Any = SimpleNamespace(is_cuda=True, device="cuda:0")
    with pytest.raises(Unsupported, match=r"A100.* capability 8\.0: it needs 8\.9.*give torch\.float8_e5m2"):
        narrowed(x, torch.float8_e4m3fn)
