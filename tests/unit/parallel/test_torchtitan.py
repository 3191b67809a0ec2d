"""Overrides of torchtitan: what they replace, by a stand-in of it, on one rank."""

import importlib
import sys
from typing import Any

import pytest
import torch

from counterpoint.errors import Misconfigured
from tests.support import toy_torchtitan as toy


def test_without_torchtitan_nothing_is_registered() -> None:
    sys.modules.pop("counterpoint.torchtitan", None)
    ours = importlib.import_module("counterpoint.torchtitan")
    assert ours.token_dispatcher.__module__ == "counterpoint.torchtitan"
    assert (toy.REGISTRY, "torchtitan" in sys.modules) == ({}, False)


def test_torchtitan_is_told_by_the_names_that_its_flag_takes() -> None:
    with toy.installed():
        found = {name: (each.target, each.exact) for name, each in toy.REGISTRY.items()}
    assert found == {
        "counterpoint.torchtitan.token_dispatcher": (toy.AllToAllTokenDispatcher.Config, False),
        "counterpoint.torchtitan.column_parallel_linear": (toy.ColumnParallelLinear.Config, True),
        "counterpoint.torchtitan.row_parallel_linear": (toy.RowParallelLinear.Config, True),
    }


def test_an_older_torchtitan_has_no_parallel_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(toy.CONTENTS, "torchtitan.models.common.linear", {})
    with toy.installed():
        assert list(toy.REGISTRY) == ["counterpoint.torchtitan.token_dispatcher"]


def test_a_configuration_keeps_what_it_says() -> None:
    """Fields of the replaced one, options by their names, and rows padded as before."""
    with toy.installed() as ours:
        cfg = toy.TorchAOTokenDispatcher.Config(num_experts=8, top_k=2, score_before_experts=True, pad_multiple=16)
        found = ours.token_dispatcher(cfg, max_tokens=64, mechanism="gather", wire_dtype="float8_e4m3fn")
        again = ours.token_dispatcher(cfg, pad_multiple=32)
    assert (found.num_experts, found.top_k, found.score_before_experts, found.max_tokens) == (8, 2, True, 64)
    assert (found.options.mechanism, found.options.wire_dtype) == ("gather", torch.float8_e4m3fn)
    assert (found.options.pad_multiple, again.options.pad_multiple) == (16, 32)
    assert found.options.zero_tail
    assert isinstance(found, toy.TorchAOTokenDispatcher.Config)
    assert isinstance(found.build(), toy.TorchAOTokenDispatcher)
    assert type(found) is type(again)


@pytest.mark.parametrize("options", [{"mechanism": "magic"}, {"wire_dtype": "int3"}])
def test_a_wrong_option_is_refused_at_once(options: dict[str, Any]) -> None:
    cfg = toy.AllToAllTokenDispatcher.Config(num_experts=8, top_k=2)
    with toy.installed() as ours, pytest.raises(Misconfigured, match="allowed are"):
        ours.token_dispatcher(cfg, **options)
    with toy.installed() as ours, pytest.raises(TypeError, match="speed"):
        ours.token_dispatcher(cfg, speed=1)


def test_experts_of_one_rank_stay_torchtitans() -> None:
    torch.manual_seed(0)
    cfg = toy.AllToAllTokenDispatcher.Config(num_experts=4, top_k=2)
    x, scores = torch.randn(6, 8), torch.rand(6, 2)
    ids, weight = torch.rand(6, 4).topk(2).indices, torch.randn(4, 8, 8)
    with toy.installed() as ours:
        replaced = toy.RoutedExperts(ours.token_dispatcher(cfg, hidden=8, max_tokens=6), weight)
        replaced.token_dispatcher.wire_meshes(ep_mesh=None)
        found = replaced(x, scores, ids)
    assert torch.equal(found, toy.RoutedExperts(cfg, weight)(x, scores, ids))


@pytest.mark.parametrize("name", ["column_parallel_linear", "row_parallel_linear"])
def test_layers_of_one_rank_stay_torchtitans(name: str) -> None:
    torch.manual_seed(0)
    with toy.installed() as ours:
        target = toy.REGISTRY[f"counterpoint.torchtitan.{name}"].target
        cfg = target(in_features=4, out_features=6, num_linears=2, bias=True)
        stock, replaced = cfg.build(), getattr(ours, name)(cfg).build()
        replaced.load_state_dict(stock.state_dict())
        x = torch.randn(3, 4)
        assert torch.equal(replaced(x), stock(x))
