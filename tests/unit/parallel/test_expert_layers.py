"""Grouped matmuls, their delayed weight gradients, and the order in which a layer in parts runs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from counterpoint.errors import Misconfigured
from counterpoint.parallel.expert.layers import (
    DelayedWeight,
    LocalExperts,
    delayed,
    grouped_matmul,
    overlapped_moe,
    swiglu,
)
from counterpoint.parallel.options import ExpertOptions

OFFSETS = torch.tensor([3, 3, 7], dtype=torch.int32)  # the second expert has no rows; rows past 7 are nobody's


def operands(rows: int = 9) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    made = (torch.randn(*shape, dtype=torch.float64, generator=draw) for shape in ((rows, 4), (3, 5, 4)))
    first, second = (one.requires_grad_() for one in made)
    return first, second


def reference(rows: Tensor, weight: Tensor) -> Tensor:
    """The same by einsum, each row with a copy of its expert's weight."""
    expert = torch.tensor([0, 0, 0, 2, 2, 2, 2])
    return torch.einsum("ri,roi->ro", rows[:7], weight[expert])


@pytest.mark.parametrize("later", [False, True])
def test_gradients_are_those_of_a_product_for_each_row(later: bool) -> None:
    rows, weight = operands()
    upstream = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = reference(rows, weight)
    wanted = torch.autograd.grad(expected, (rows, weight), upstream)
    out = grouped_matmul(rows, delayed(weight)[0] if later else weight, OFFSETS)[:7]
    found = torch.autograd.grad(out, (rows, weight), upstream)
    torch.testing.assert_close([out, *found], [expected, *wanted], rtol=1e-13, atol=1e-13)
    assert not found[1][1].any()


def test_delayed_gradients_of_several_calls_are_added_up() -> None:
    rows, weight = operands()
    more = rows.detach() + 1
    (reference(rows, weight).square().sum() + reference(more, weight).sum()).backward()
    assert weight.grad is not None
    wanted, weight.grad = weight.grad, None
    first, second, _ = delayed(weight, calls=3)
    one, other = grouped_matmul(rows, first, OFFSETS)[:7], grouped_matmul(more, second, OFFSETS)[:7]
    (one.square().sum() + other.sum()).backward()
    torch.testing.assert_close(weight.grad, wanted, rtol=1e-13, atol=1e-13)


def test_what_an_earlier_pass_left_is_not_added() -> None:
    """A pass for the rows alone computes no weight gradient; the next pass has only its own products."""
    rows, weight = operands()
    first, second = delayed(weight, calls=2)
    one, other = (grouped_matmul(rows, stand_in, OFFSETS)[:7].sum() for stand_in in (first, second))
    torch.autograd.grad(one + other, rows, retain_graph=True)
    other.backward(retain_graph=True)
    other.backward()
    [wanted] = torch.autograd.grad(reference(rows, weight).sum(), weight)
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, 2 * wanted, rtol=1e-13, atol=1e-13)


def test_a_frozen_weight_has_no_gradient() -> None:
    rows, weight = operands()
    frozen = weight.detach()
    grouped_matmul(rows, delayed(frozen)[0], OFFSETS).sum().backward()
    assert rows.grad is not None
    assert frozen.grad is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": torch.zeros(9, 3)}, r"rows \(9, 3\) and weight \(3, 5, 4\): give \[rows, in\]"),
        ({"offsets": OFFSETS.long()}, r"offsets torch.int64 \(3,\) of 3 experts: give int32 \[3\]"),
        ({"offsets": OFFSETS[:2]}, r"offsets torch.int32 \(2,\) of 3 experts"),
        ({"rows": torch.zeros(9, 4, dtype=torch.float16)}, "rows torch.float16 and weight torch.float32: give both"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    fitting = {"rows": torch.zeros(9, 4), "weight": torch.zeros(3, 5, 4), "offsets": OFFSETS}
    with pytest.raises(Misconfigured, match=message):
        grouped_matmul(**fitting | change)


class Here:
    """Is a dispatcher of one rank, which logs what is started and awaited, backward too."""

    def __init__(self, experts: int) -> None:
        self.experts, self.parts = experts, 0
        self.log: list[str] = []

    def start_dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> dict[str, Any]:
        part, self.parts = self.parts, self.parts + 1
        order = ids.flatten().argsort(stable=True)
        offsets = torch.bincount(ids.flatten(), minlength=self.experts).cumsum(0).int()
        return self._moved({"part": part, "order": order, "offsets": offsets, "weights": weights}, "dispatch", x)

    def finish_dispatch(self, handle: dict[str, Any]) -> tuple[Tensor, Tensor]:
        x = logged(handle["moved"], self.log, f"await dispatch {handle['part']}", f"start undispatch {handle['part']}")
        return x[handle["order"] // handle["weights"].shape[1]], handle["offsets"]

    def start_combine(self, rows: Tensor, handle: dict[str, Any]) -> dict[str, Any]:
        return self._moved(handle, "combine", rows)

    def finish_combine(self, handle: dict[str, Any]) -> Tensor:
        rows = logged(handle["moved"], self.log, f"await combine {handle['part']}", f"start uncombine {handle['part']}")
        back = torch.empty_like(rows).index_copy(0, handle["order"], rows)
        weights = handle["weights"]
        out: Tensor = (back.view(*weights.shape, rows.shape[1]) * weights[..., None]).sum(1)
        return out

    def _moved(self, handle: dict[str, Any], what: str, x: Tensor) -> dict[str, Any]:
        part = handle["part"]
        return handle | {"moved": logged(x, self.log, f"start {what} {part}", f"await un{what} {part}")}


def here() -> Any:
    """A dispatcher for four experts on one rank."""
    return Here(4)


def logged(x: Tensor, log: list[str], forward: str, backward: str) -> Tensor:
    """Return a tensor, and log that forward and backward came by."""
    out: Tensor = _Logged.apply(x, log, forward, backward)  # type: ignore[no-untyped-call]
    return out


class _Logged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[str], forward: str, backward: str) -> Tensor:
        ctx.log, ctx.backward_name = log, backward
        log.append(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.log.append(ctx.backward_name)
        return grads, None, None, None


class Layer(nn.Module):
    """Four experts, two for each token, and a shared one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.experts = LocalExperts(4, 6, 5, dtype=torch.float64)
        self.shared = nn.Linear(6, 6, dtype=torch.float64)


def inputs(tokens: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(tokens, 6, dtype=torch.float64, generator=draw).requires_grad_()
    ids = torch.rand(tokens, 4, generator=draw).argsort(1)[:, :2]
    weights = torch.rand(tokens, 2, dtype=torch.float64, generator=draw).requires_grad_()
    return x, ids, weights


def whole(layer: Layer, x: Tensor, ids: Tensor, weights: Tensor, *, shared: bool) -> Tensor:
    """The layer's definition: every expert for every token, times its weight."""
    gate, up = torch.einsum("th,efh->tef", x, layer.experts.gate_up).chunk(2, dim=-1)
    every = torch.einsum("tef,ehf->teh", torch.nn.functional.silu(gate) * up, layer.experts.down)
    chosen = every.gather(1, ids[..., None].expand(-1, -1, x.shape[1]))
    out = (chosen * weights[..., None]).sum(1)
    return out + layer.shared(x) if shared else out


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["experts", "weights", "a function", "checkpointed"])
def test_a_layer_in_parts_is_the_whole_layer(kind: str, parts: int, shared: bool) -> None:
    found = []
    for is_whole in (True, False):
        layer, (x, ids, weights) = Layer(), inputs()
        given: dict[str, Any] = {"weights": layer.experts.weights(), "a function": layer.experts.forward}
        experts = given.get(kind, layer.experts)

        def run(x: Tensor, ids: Tensor, weights: Tensor, layer: Layer = layer, experts: Any = experts) -> Tensor:
            beside = layer.shared if shared else None
            return overlapped_moe(x, ids, weights, experts, here(), parts=parts, shared=beside)

        if is_whole:
            out = whole(layer, x, ids, weights, shared=shared)
        elif kind == "checkpointed":
            out = checkpoint(run, x, ids, weights, use_reentrant=False)
        else:
            out = run(x, ids, weights)
        out.square().sum().backward()
        found.append([out, x.grad, weights.grad, *(one.grad for one in layer.experts.parameters())])
        found[-1] += [one.grad for one in layer.shared.parameters()] if shared else []
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


def test_tokens_fewer_than_parts() -> None:
    layer, (x, ids, weights) = Layer(), inputs(tokens=1)
    out = overlapped_moe(x, ids, weights, layer.experts, here(), parts=3, shared=layer.shared)
    torch.testing.assert_close(out, whole(layer, x, ids, weights, shared=True), rtol=1e-12, atol=1e-12)


def test_computation_lies_between_the_start_of_communication_and_its_end() -> None:
    """Forward and backward, with weight gradients between the last start and the awaiting of it."""
    layer, (x, ids, weights), dispatcher = Layer(), inputs(), here()
    layer.experts.gate = _named(lambda gate_up: swiglu(gate_up, OFFSETS), dispatcher.log, "experts")
    shared = _named(layer.shared, dispatcher.log, "shared")
    out = overlapped_moe(x, ids, weights, layer.experts, dispatcher, shared=shared)
    assert dispatcher.log == [
        "start dispatch 0", "start dispatch 1", "shared",
        "await dispatch 0", "experts", "start combine 0",
        "await dispatch 1", "experts", "start combine 1",
        "await combine 0", "shared", "await combine 1",
    ]  # fmt: skip
    dispatcher.log.clear()
    layer.experts.gate_up.register_hook(lambda _: dispatcher.log.append("weight gradients"))
    out.sum().backward()
    assert dispatcher.log == [
        "start uncombine 1", "shared backward", "start uncombine 0",
        "await uncombine 1", "experts backward", "start undispatch 1",
        "await uncombine 0", "experts backward", "start undispatch 0",
        "weight gradients", "shared backward", "await undispatch 1", "await undispatch 0",
    ]  # fmt: skip


def _named(function: Any, log: list[str], name: str) -> Any:
    return lambda *inputs: logged(function(*inputs), log, name, f"{name} backward")


def test_stands_in_are_for_one_weight() -> None:
    """Weights that are delayed already cannot be delayed again."""
    experts = LocalExperts(2, 4, 3)
    [once] = experts.weights().delayed(1)
    assert isinstance(once.gate_up, DelayedWeight)
    with pytest.raises(Misconfigured, match="delayed already"):
        once.delayed(1)


def test_parts_are_positive() -> None:
    with pytest.raises(Misconfigured, match="parts=0: give 1 or more"):
        ExpertOptions(parts=0)
    with pytest.raises(Misconfigured, match="max_tokens=0: give 1 or more"):
        ExpertOptions(max_tokens=0)
    with pytest.raises(Misconfigured, match="parts=0: give 1 or more"):
        overlapped_moe(*inputs(), Layer().experts, here(), parts=0)
