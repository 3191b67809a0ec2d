"""What needs no second rank: options, the names of torch that are looked for, the room's imports."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _make_nccl_premul_sum

from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.parallel.fsdp.hooks import GatherHook
from counterpoint.parallel.fsdp.modules import sharded_modules
from counterpoint.parallel.options import OverlapOptions
from counterpoint.parallel.torch_calls import op_and_factor


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prefetch": 0}, "prefetch=0: give 1 or more, or None"),
        ({"communicator": CommunicatorOptions(channels=3)}, "channels=3: it has no effect here; leave it out"),
        ({"communicator": CommunicatorOptions(mailbox_bytes=4096)}, "mailbox_bytes=4096: it has no effect"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        OverlapOptions(**options)


class Sharded(nn.Linear):
    """A module that says of itself what FSDP2 says of its own."""

    state: Any = None

    def _get_fsdp_state(self) -> Any:
        return self.state


def pretended(monkeypatch: pytest.MonkeyPatch, **state: Any) -> nn.Module:
    """A model that passes for one of FSDP2, with that state."""
    monkeypatch.setattr("torch.distributed.fsdp.FSDPModule", Sharded)
    model = Sharded(2, 2)
    model.state = SimpleNamespace(**state)
    return model


def test_a_torch_that_looks_different_inside_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pretended(monkeypatch, _fsdp_param_groups=[SimpleNamespace()])
    with pytest.raises(Unsupported, match=r"has no SimpleNamespace.offload_policy: .* knows torch 2.11 to 2.13"):
        sharded_modules(model)


def test_gathers_are_into_memory_that_is_released_early() -> None:
    asked: list[dict[str, Any]] = []

    def empty(*size: int, **options: Any) -> torch.Tensor:
        asked.append(options)
        return torch.empty(*size)

    communicator = SimpleNamespace(empty=empty)
    groups: Any = SimpleNamespace(of=lambda group: SimpleNamespace(communicator=communicator))
    module: Any = SimpleNamespace(shard_group="group", post_forward_group=None)
    hook = GatherHook(module, groups)
    hook.allocate((4,), dtype=torch.bfloat16, device=torch.device("cpu"))
    assert asked == [{"dtype": torch.bfloat16, "early_release": True}]


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.SUM, ("sum", 1.0)),
        (dist.ReduceOp.AVG, ("avg", 1.0)),
        (dist.ReduceOp(dist.ReduceOp.AVG), ("avg", 1.0)),
        (_make_nccl_premul_sum(0.125), ("premul_sum", 0.125)),
    ],
    ids=["sum", "average", "average as an object", "factor"],
)
def test_operations_are_those_of_torch(op: Any, expected: tuple[str, float]) -> None:
    assert op_and_factor(op) == expected
