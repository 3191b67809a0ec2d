"""Rows of this rank's experts, beside a loop over tokens and choices; the kernels: tests/process/parallel."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.parallel.expert.permute import Assignment, assign, combine, narrowed, permute, weight_grads
from tests.support.routing import ROUTINGS, routing

HIDDEN = 24


def expected(ids: Tensor, first: int, experts: int, capacity: int, pad: int) -> dict[str, list[Any]]:
    """What `assign` has to give, by a loop."""
    rows: list[int] = []
    offsets = []
    for expert in range(first, first + experts):
        rows += [place for place, chosen in enumerate(ids.flatten().tolist()) if chosen == expert]
        rows += [-1] * (-len(rows) % pad)
        offsets.append(min(len(rows), capacity))
    missing = max(0, len(rows) - capacity)
    rows = (rows + [-1] * capacity)[:capacity]
    slots = [rows.index(place) if place in rows else -1 for place in range(ids.numel())]
    return {"offsets": offsets, "slots": slots, "sources": rows, "missing": [missing]}


def values(assignment: Assignment) -> dict[str, list[Any]]:
    return {name: getattr(assignment, name).flatten().tolist() for name in ("offsets", "slots", "sources", "missing")}


def case(dtype: torch.dtype = torch.float32, *, tokens: int = 37, pad: int = 4, kind: str = "random",
         capacity: int | None = None, top_k: int = 3) -> tuple[Tensor, Assignment, Tensor]:  # fmt: skip
    """Tokens, the assignment to experts 2 to 6 of 10, weights."""
    dice = torch.Generator().manual_seed(tokens + pad)
    ids = routing(kind, tokens, top_k, 10)
    room = tokens * top_k + 5 * pad if capacity is None else capacity
    found = assign(ids, first_expert=2, num_experts=5, capacity=room // pad * pad, pad_multiple=pad)
    x = torch.randn(tokens, HIDDEN, generator=dice, dtype=torch.float64)
    return x.to(dtype), found, torch.rand(tokens, top_k, generator=dice)


@given(
    kind=st.sampled_from(ROUTINGS), tokens=st.integers(0, 40), top_k=st.integers(1, 8), experts=st.integers(1, 12),
    ranks=st.sampled_from([1, 2, 3]), rank=st.integers(0, 2), pad=st.sampled_from([1, 3, 16]), room=st.floats(0, 1.2),
    dtype=st.sampled_from([torch.int32, torch.int64]), seed=st.integers(0, 1000),
)  # fmt: skip
def test_an_assignment_is_that_of_a_loop(
    kind: str, tokens: int, top_k: int, experts: int, ranks: int, rank: int, pad: int, room: float,
    dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    ids = routing(kind, tokens, top_k, experts * ranks, seed).to(dtype)
    capacity = int(room * (tokens * top_k + experts * (pad - 1))) // pad * pad
    first = rank % ranks * experts
    found = assign(ids, first_expert=first, num_experts=experts, capacity=capacity, pad_multiple=pad)
    assert values(found) == expected(ids, first, experts, capacity, pad)
    assert {getattr(found, name).dtype for name in ("offsets", "slots", "sources", "missing")} == {torch.int32}
    assert (found.slots.shape, found.capacity, found.top_k) == (ids.shape, capacity, top_k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("capacity", [None, 32])
def test_rows_and_sums_are_those_of_a_loop(dtype: torch.dtype, weighted: bool, kind: str, capacity: int | None) -> None:
    """Bit by bit: a product and a sum of float32 (float64 of float64) each round once, in the order of choices."""
    x, found, weights = case(dtype, kind=kind, capacity=capacity)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    factors = weights.to(wide) if weighted else torch.ones_like(weights, dtype=wide)
    rows, sums = torch.zeros(found.capacity, HIDDEN, dtype=dtype), torch.zeros(x.shape, dtype=wide)
    for row, source in enumerate(found.sources.tolist()):
        if source >= 0:
            rows[row] = (x[source // 3].to(wide) * factors[source // 3, source % 3]).to(dtype)
    for token, slots in enumerate(found.slots.tolist()):
        for choice, slot in enumerate(slots):
            if slot >= 0:
                sums[token] += rows[slot].to(wide) * factors[token, choice]
    given_weights = weights if weighted else None
    assert torch.equal(permute(x, found, weights=given_weights), rows)
    assert torch.equal(combine(rows, found, weights=given_weights), sums.to(dtype))
    dots = torch.zeros(weights.shape, dtype=wide)
    for token, slots in enumerate(found.slots.tolist()):
        for choice, slot in enumerate(slots):
            if slot >= 0:
                dots[token, choice] = (rows[slot].to(wide) * x[token].to(wide)).sum()
    torch.testing.assert_close(weight_grads(rows, x, found), dots)
    given = torch.full_like(dots, float("nan"))
    assert torch.equal(weight_grads(rows, x, found, out=given), weight_grads(rows, x, found))
    assert not given.isnan().any()


def test_padding_is_zero_and_the_tail_is_left_alone_if_asked() -> None:
    """Nothing past the last offset is written without `zero_tail`, and everything before it is."""
    x, found, _ = case(pad=16)
    out = torch.full((found.capacity, HIDDEN), float("nan"))
    assert permute(x, found, out=out, zero_tail=False) is out
    end = int(found.offsets[-1])
    assert 0 < end < found.capacity
    assert torch.equal(out[:end], permute(x, found)[:end])
    assert out[end:].isnan().all()
    assert not permute(x, found)[found.sources < 0].any()


def test_tokens_can_come_in_parts() -> None:
    """As those of each rank arrive, in any order; their sums, too."""
    x, found, weights = case(pad=4)
    whole = permute(x, found)
    rows, sums = torch.full_like(whole, float("nan")), torch.full_like(x, float("nan"))
    for begin, end in ((20, 37), (0, 11), (11, 20), (5, 5)):
        part = found.of_tokens(begin, end)
        permute(x[begin:end], part, out=rows)
    assert torch.equal(rows, whole)
    for begin, end in ((20, 37), (0, 11), (11, 20)):
        part = found.of_tokens(begin, end)
        combine(rows, part, weights=weights[begin:end], out=sums[begin:end])
    assert torch.equal(sums, combine(whole, found, weights=weights))


def test_narrow_tokens_come_out_wide() -> None:
    """Float8 tokens with a scale for each: as if they had been made wide first."""
    x, found, _ = case(torch.bfloat16)
    scales = x.abs().amax(1, keepdim=True).float() / 448
    narrow = (x / scales).to(torch.float8_e4m3fn)
    wide = (narrow.float() * scales).to(torch.bfloat16)
    out = torch.empty(found.capacity, HIDDEN, dtype=torch.bfloat16)
    assert torch.equal(permute(narrow, found, weights=scales.expand(-1, 3), out=out), permute(wide, found))
    same = permute(narrow, found)
    assert same.dtype == torch.float8_e4m3fn
    assert torch.equal(same.float(), permute(narrow.float(), found))


def test_sums_can_stay_in_float32() -> None:
    """`out` says what they are rounded to; rows of tokens that lie apart are fine."""
    x, found, weights = case(torch.bfloat16)
    rows = permute(x, found)
    out = torch.empty(x.shape[0], 2 * HIDDEN)[:, HIDDEN:]
    combine(rows, found, weights=weights, out=out)
    assert torch.equal(out, combine(rows.float(), found, weights=weights))
    assert torch.equal(permute(torch.cat([x, x], 1)[:, HIDDEN:], found), rows)


def test_what_is_nowhere_is_not_read() -> None:
    """NaN in rows without a choice, and in weights of choices without a row, change nothing."""
    x, found, weights = case(pad=16, capacity=48)
    assert (found.slots < 0).any()
    assert (found.sources < 0).any()
    rows = permute(x, found)
    poisoned = torch.where((found.sources < 0)[:, None], float("nan"), rows)
    spoiled = torch.where(found.slots < 0, float("nan"), weights)
    assert torch.equal(combine(poisoned, found, weights=spoiled), combine(rows, found, weights=weights))
    assert torch.equal(permute(x, found, weights=spoiled), permute(x, found, weights=weights))
    assert torch.equal(weight_grads(poisoned, x, found), weight_grads(rows, x, found))


class Permute(torch.autograd.Function):
    """As the docstring says: the derivative of permute is combine."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: Assignment) -> Tensor:
        ctx.found = found
        return permute(x, found)

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> Any:
        return combine(grads.contiguous(), ctx.found), None


class Combine(torch.autograd.Function):
    """That of combine is permute, and weight_grads."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, found: Assignment) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.found = found
        return combine(rows, found, weights=weights)

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> Any:
        rows, weights = ctx.saved_tensors
        return permute(grads, ctx.found, weights=weights), weight_grads(rows, grads, ctx.found), None


@pytest.mark.parametrize("kind", ["random", "one-hot", "nobody"])
@pytest.mark.parametrize("capacity", [None, 8])
def test_derivatives_are_each_other(kind: str, capacity: int | None) -> None:
    """Of tokens, rows and weights, through something that is not linear, against differences."""
    x, found, weights = case(torch.float64, tokens=7, kind=kind, capacity=capacity)
    inputs = (x[:, :5].clone().requires_grad_(), weights.double().requires_grad_())

    def sums(x: Tensor, weights: Tensor) -> Any:
        rows: Any = Permute.apply(x, found)  # type: ignore[no-untyped-call]
        return Combine.apply(rows.sin(), weights, found)  # type: ignore[no-untyped-call]

    assert torch.autograd.gradcheck(sums, inputs)


GOOD = routing("random", 6, 2, 4)


@pytest.mark.parametrize(
    ("ids", "what"),
    [
        (GOOD[0], {}),
        (GOOD.float(), {}),
        (GOOD, {"num_experts": 0}),
        (GOOD, {"pad_multiple": 0}),
        (GOOD, {"capacity": -16}),
        (GOOD, {"capacity": 10, "pad_multiple": 16}),
    ],
)
def test_assignments_that_cannot_be(ids: Tensor, what: dict[str, int]) -> None:
    with pytest.raises(Misconfigured, match="give"):
        assign(ids, **{"first_expert": 0, "num_experts": 4, "capacity": 16, **what})


def test_tensors_that_do_not_fit() -> None:
    x, found, weights = case()
    rows, apart = permute(x, found), x.t().contiguous().t()
    wrong: list[tuple[str, Callable[[], object]]] = [
        (r"tokens of \(", lambda: permute(x[1:], found)),
        (r"weights of \(", lambda: permute(x, found, weights=weights[:, 1:])),
        (r"out of \(", lambda: permute(x, found, out=rows[1:])),
        (r"rows of \(", lambda: combine(rows[1:], found)),
        (r"grads of \(", lambda: weight_grads(rows, x[:, 1:], found)),
        ("tokens of .*strides", lambda: permute(apart, found)),
        ("out of .*strides", lambda: combine(rows, found, out=apart)),
        ("rows of .*strides", lambda: combine(torch.cat([rows, rows], 1)[:, :HIDDEN], found)),
    ]
    for said, call in wrong:
        with pytest.raises(Misconfigured, match=f"^{said}.*give"):
            call()


def test_a_gpu_that_is_too_old_for_the_dtype_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    a100 = SimpleNamespace(name="NVIDIA A100-SXM4-80GB", major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: a100)
    x: Any = SimpleNamespace(is_cuda=True, device="cuda:0")
    with pytest.raises(Unsupported, match=r"A100.* capability 8\.0: it needs 8\.9.*give torch\.float8_e5m2"):
        narrowed(x, torch.float8_e4m3fn)
