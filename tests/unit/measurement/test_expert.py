"""Exchanges of tokens: their names, how tokens are routed, and what counts as a wrong result."""

from typing import Any, cast

import pytest
import torch

from counterpoint.errors import Misconfigured
from counterpoint.measurement import expert
from counterpoint.measurement.expert import SampleTokens, expert_scales, routed
from counterpoint.measurement.open_mechanisms import Checked
from counterpoint.measurement.workloads import EXPERT_LAYERS, ROUTINGS, ExpertLayer, TokenExchange, find_exchange
from counterpoint.records.measurement import Launched

QWEN = EXPERT_LAYERS["qwen3-30b-a3b"]


class OneRank:
    """As much of a session as random tokens need."""

    rank, device, dtype = 0, torch.device("cpu"), torch.float32


def drawn(way: str, tokens: int = 4000, layer: ExpertLayer = QWEN, seed: int = 0) -> torch.Tensor:
    return routed(way, tokens, layer, torch.Generator().manual_seed(seed))


def test_an_exchange_is_read_from_its_name() -> None:
    """With the rows that may come to a rank: each token once for each of its choices, if all are of that rank."""
    exchange = find_exchange("exchange mixtral-8x7b 4096 zipf")
    assert exchange == TokenExchange(layer="mixtral-8x7b", tokens=4096, routing="zipf")
    assert [exchange.capacity(ranks) for ranks in (2, 8)] == [2 * 4096 * 2, 8 * 4096]
    assert exchange.size_bytes(2) == 4096 * 2 * 4096 * 2
    # weights 3 · 8 · 4 · 2 / 2, of 10 rows 3 · 4 inside, and 2 + 3 times 8 outside
    assert find_exchange("exchange 8x4x2x1 5 uniform").memory_bytes(2, 2, 1) == 2 * (96 + 10 * 12 + 5 * 10 * 8)
    of_any_model = ExpertLayer(hidden=1024, ffn=512, experts=64, top_k=4)
    assert find_exchange("exchange 1024x512x64x4 128 uniform").sizes == of_any_model


@pytest.mark.parametrize(
    "what",
    [
        "exchange", "exchange mixtral 4096 zipf", "exchange tiny 0 zipf", "exchange tiny 8 all",
        "exchange 64x32x2x4 8 zipf",
    ],
)  # fmt: skip
def test_a_wrong_name_is_refused_with_what_there_is(what: str) -> None:
    with pytest.raises(
        Misconfigured, match=r"write one of qwen3-30b-a3b, .* tokens of a rank, .*: exchange mixtral-8x7b"
    ):
        find_exchange(what)


@pytest.mark.parametrize("way", ROUTINGS)
def test_no_token_goes_to_an_expert_twice(way: str) -> None:
    ids = drawn(way)
    assert ids.shape == (4000, 8)
    assert (ids.sort(1).values.diff() > 0).all()
    assert ids.min() >= 0
    assert ids.max() < 128


def test_routings_differ_in_how_much_the_first_experts_get() -> None:
    """The most wanted expert gets about the mean, several times as much, and every token."""
    most = {way: drawn(way).flatten().bincount(minlength=128).max().item() / (4000 * 8 / 128) for way in ROUTINGS}
    assert 1.0 < most["uniform"] < 1.3
    assert 4.0 < most["zipf"] < 15.0
    assert most["one-hot"] == 16.0


def test_ranks_want_the_same_experts_most() -> None:
    """Otherwise routing would be even over all ranks: their tokens differ, the order of experts does not."""
    one, other = (drawn("zipf", seed=seed).flatten().bincount(minlength=128) for seed in (1, 2))
    assert not one.equal(other)
    assert one.argmax() == other.argmax()


@pytest.mark.parametrize("way", ROUTINGS)
def test_a_wrong_result_is_seen(way: str) -> None:
    """Right sums pass; a token at the neighbour of its expert, a choice that is lost, or NaN does not."""
    tokens = SampleTokens.random(cast(Any, OneRank()), TokenExchange(layer="tiny", tokens=32, routing=way), 0)

    def sums(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.stack([(weights[:, k] * expert_scales(ids[:, k]))[:, None] * tokens.x for k in range(2)]).sum(0)

    right, allowed = tokens.errors(sums(tokens.ids, tokens.weights))
    assert right <= allowed
    moved = tokens.ids.clone()
    moved[0, 0] += 1
    lost = tokens.weights.clone()
    lost[5, 1] = 0
    for wrong in (sums(moved, tokens.weights), sums(tokens.ids, lost), tokens.x * float("nan")):
        error, allowed = tokens.errors(wrong)
        assert not error <= allowed


class SeenSession(OneRank):
    """A session on a GPU at which a profiler looked."""

    is_cuda, world_size = True, 1

    def lanes(self, compute: Any, comm: Any) -> Any:
        return comm

    def raise_together(self, action: Any) -> Any:
        return action()


def test_transport_on_sms_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = Launched(kind="kernel", name="ncclDevKernel_SendRecv(ncclDevKernelArgs)", grid=(24, 1, 1))
    permuting = Launched(kind="kernel", name="_permute_kernel", grid=(4096, 1, 1))
    copy = Launched(kind="copy", name="Memcpy PtoP (Device -> Device)", bytes=1 << 20)
    ran = {"torch": (nccl, permuting), "gather": (permuting, copy), "slabs": (nccl, copy)}
    monkeypatch.setattr(expert, "sides_of_all", lambda lanes, device: [((), comm) for comm in ran.values()])
    mechanisms = [Checked(name=name, caller=cast(Any, None), wrong=None) for name in ran]
    found = expert._observed(cast(Any, SeenSession()), mechanisms, cast(Any, None))
    assert [one.usage and one.usage.comm_ctas for one in found] == [24, 0, 24]
    assert [one.marked for one in found] == [None, None, "its transport took SMs: a kernel of 24 blocks"]
