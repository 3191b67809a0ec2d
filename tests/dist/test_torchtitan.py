"""Overrides of torchtitan between processes: results and derivatives are those of one process with all of it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from counterpoint.measurement.session import Session
from counterpoint.parallel.expert import titan_dispatcher as dispatching
from tests.support import toy_torchtitan as toy
from tests.support.ranks import Ranks

HIDDEN, EXPERTS, TOP_K = 16, 8, 3


def of_all_ranks(own: Tensor) -> list[Tensor]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own.detach())
    return found


def made_of(mesh: Any) -> list[Any]:
    return list(dispatching._DISPATCHERS._made.get(mesh.get_group(), {}).values())


def routed(session: Session, tokens: list[int], options: dict[str, Any], kind: str, scores_first: bool) -> Any:
    """Run two layers with one dispatcher, forward and backward; return what carried the tokens, and how many served."""
    torch.manual_seed(session.rank)
    count = tokens[session.rank]
    x = torch.randn(count, HIDDEN, requires_grad=True)
    ids = [torch.rand(count, EXPERTS).topk(TOP_K).indices for _ in range(2)]
    scores = [torch.rand(count, TOP_K).requires_grad_() for _ in range(2)]
    local = EXPERTS // session.world_size
    weights = [torch.randn(local, HIDDEN, HIDDEN) / 4 for _ in range(2)]
    more = {"pad_multiple": 8} if kind == "TorchAOTokenDispatcher" else {}
    cfg = getattr(toy, kind).Config(num_experts=EXPERTS, top_k=TOP_K, score_before_experts=scores_first, **more)
    dispatching._DISPATCHERS.close(dist.group.WORLD)
    with toy.installed() as ours:
        layers = [toy.RoutedExperts(ours.token_dispatcher(cfg, **options), weight) for weight in weights]
    mesh = init_device_mesh("cpu", (session.world_size,), mesh_dim_names=("ep",))
    for layer in layers:
        layer.token_dispatcher.wire_meshes(ep_mesh=mesh)
    made_early = len(made_of(mesh))
    out = x
    for layer, score, chosen in zip(layers, scores, ids, strict=True):
        out = out + layer(out, score, chosen)
    out.square().sum().backward()
    _beside_one_process(session, x, scores, ids, layers, out)
    found = made_of(mesh)
    paths = {row.path for each in found for row in each.report().calls}
    dispatching._DISPATCHERS.close(mesh.get_group())
    return made_early, len(found), paths


def ended(session: Session) -> tuple[bool, bool]:
    """Whether the dispatcher of a group is open before the group is destroyed, and after that."""
    group = dist.new_group()
    mesh = DeviceMesh.from_group(group, "cpu")
    cfg = toy.AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=1)
    with toy.installed() as ours:
        weight = torch.randn(EXPERTS // session.world_size, HIDDEN, HIDDEN)
        layer = toy.RoutedExperts(ours.token_dispatcher(cfg, mechanism="gather"), weight)
    layer.token_dispatcher.wire_meshes(ep_mesh=mesh)
    layer(torch.randn(4, HIDDEN), torch.ones(4, 1), torch.zeros(4, 1, dtype=torch.long))
    (made,) = made_of(mesh)
    is_open = made._mechanism is not None
    dist.destroy_process_group(group)
    return is_open, made._mechanism is not None


def _beside_one_process(session: Session, x: Any, scores: Any, ids: Any, layers: Any, out: Tensor) -> None:
    """Compare results and all derivatives with one process that has all tokens and experts."""
    everything: list[Any] = [part.double().requires_grad_() for part in of_all_ranks(x)]
    whole = torch.cat(everything)
    all_scores: list[Any] = [torch.cat(of_all_ranks(each)).double().requires_grad_() for each in scores]
    experts: list[Any] = [torch.cat(of_all_ranks(layer.weight)).double().requires_grad_() for layer in layers]
    for score, own, weight in zip(all_scores, ids, experts, strict=True):
        chosen = torch.cat(of_all_ranks(own))
        made = torch.einsum("td,tkdf->tkf", whole, weight[chosen])
        whole = whole + (score[:, :, None] * made).sum(1)
    whole.square().sum().backward()
    start = sum(len(each) for each in everything[: session.rank])
    mine, local = slice(start, start + len(x)), len(layers[0].weight)
    torch.testing.assert_close(out.double(), whole[mine], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), everything[session.rank].grad, rtol=1e-4, atol=1e-3)
    for index, layer in enumerate(layers):
        torch.testing.assert_close(scores[index].grad.double(), all_scores[index].grad[mine], rtol=1e-4, atol=1e-3)
        wanted = experts[index].grad[session.rank * local : (session.rank + 1) * local]
        torch.testing.assert_close(layer.weight.grad.double(), wanted, rtol=1e-4, atol=1e-3)


def linears(session: Session, sequence: bool, bias: bool) -> None:
    """Run a column- and a row-parallel layer, forward and backward, beside the whole layers in float64."""
    torch.manual_seed(0)
    ranks, rank, tokens = session.world_size, session.rank, 4 * session.world_size
    x, up, down = torch.randn(tokens, 8), torch.randn(2, 6 * ranks, 8), torch.randn(8, 6 * ranks)
    biases = torch.randn(2, 6 * ranks), torch.randn(8)
    columns = slice(6 * rank, 6 * rank + 6)
    own_rows = slice(4 * rank, 4 * rank + 4) if sequence else slice(None)
    with toy.installed() as ours:
        first, last = (
            getattr(ours, f"{kind}_parallel_linear")(getattr(toy, name).Config(bias=bias, **sizes)).build()
            for kind, name, sizes in (
                ("column", "ColumnParallelLinear", {"in_features": 8, "out_features": 6, "num_linears": 2}),
                ("row", "RowParallelLinear", {"in_features": 6, "out_features": 8}),
            )
        )
        first.weight.data, last.weight.data = up[:, columns].clone(), down[:, columns].clone()
        if bias:
            first.bias.data, last.bias.data = biases[0][:, columns].flatten(), biases[1].clone()
        part: Any = x[own_rows].clone().requires_grad_()
        toy.STATE.update(tp=dist.group.WORLD, sequence=sequence)
        try:
            gate, value = first(part).unbind(-2)
            out = last(gate * value)
            out.square().sum().backward()
        finally:
            toy.STATE.update(tp=None, sequence=False)
    wide: list[Any] = [each.double().requires_grad_() for each in (x, up, down, *biases)]
    both = torch.einsum("td,nfd->tnf", wide[0], wide[1]) + (wide[3] if bias else 0)
    wanted = (both[:, 0] * both[:, 1]) @ wide[2].T + (wide[4] if bias else 0)
    wanted.square().sum().backward()
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-3}
    torch.testing.assert_close(out.double(), wanted[own_rows], **close)
    torch.testing.assert_close(part.grad.double(), wide[0].grad[own_rows], **close)
    torch.testing.assert_close(first.weight.grad.double(), wide[1].grad[:, columns], **close)
    torch.testing.assert_close(last.weight.grad.double(), wide[2].grad[:, columns], **close)
    if bias:
        torch.testing.assert_close(first.bias.grad.double(), wide[3].grad[:, columns].flatten(), **close)
        torch.testing.assert_close(last.bias.grad.double(), wide[4].grad, **close)


STOCK = "AllToAllTokenDispatcher"


@pytest.mark.parametrize("mechanism", ["torch", "gather", "slabs", "auto"])
def test_tokens_reach_their_experts(two_ranks: Ranks, mechanism: str) -> None:
    """Two layers share a dispatcher, which the first dispatch makes for the rank with most tokens."""
    for early, made, paths in two_ranks.run(routed, [5, 12], {"mechanism": mechanism}, STOCK, False):
        assert (early, made) == (0, 1)
        assert mechanism in ("auto", *paths)


@pytest.mark.parametrize("mechanism", ["torch", "gather", "slabs"])
def test_scores_before_experts(two_ranks: Ranks, mechanism: str) -> None:
    """They travel beside the tokens, which takes a second dispatcher."""
    for _, made, _ in two_ranks.run(routed, [9, 4], {"mechanism": mechanism}, STOCK, True):
        assert made == 2


def test_buffers_are_made_when_meshes_are_wired(two_ranks: Ranks) -> None:
    """Where the override says how large a token is, and how many there are."""
    options: dict[str, Any] = {"mechanism": "gather", "hidden": HIDDEN, "max_tokens": 16}
    for early, made, _ in two_ranks.run(routed, [7, 7], options, STOCK, False):
        assert (early, made) == (1, 1)


def test_dispatchers_end_with_their_group(two_ranks: Ranks) -> None:
    assert two_ranks.run(ended) == [(True, False)] * 2


@pytest.mark.parametrize("scores_first", [False, True])
def test_rows_are_padded_for_quantized_experts(two_ranks: Ranks, scores_first: bool) -> None:
    two_ranks.run(routed, [6, 10], {"mechanism": "gather"}, "TorchAOTokenDispatcher", scores_first)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
def test_linear_layers(two_ranks: Ranks, sequence: bool, bias: bool) -> None:
    two_ranks.run(linears, sequence, bias)
