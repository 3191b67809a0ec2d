"""Small graphs of collectives beside matmuls, as inductor has them, with what is to become of each."""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from counterpoint.parallel.tensor.fx_fusion import FoundCollective, fuse

c10d, aten = torch.ops._c10d_functional, torch.ops.aten
GROUP = "0"  # the default group's name
WORLD = 2
F8 = torch.float8_e4m3fn


def gathered(x: Tensor) -> Tensor:
    out: Tensor = c10d.wait_tensor(c10d.all_gather_into_tensor(x, WORLD, GROUP))
    return out


def gathered_along(x: Tensor, dim: int) -> Tensor:
    return torch.cat(torch.split(gathered(x), x.shape[0]), dim=dim)


def scattered(x: Tensor, op: str = "sum") -> Tensor:
    out: Tensor = c10d.wait_tensor(c10d.reduce_scatter_tensor(x, op, WORLD, GROUP))
    return out


def scattered_along(x: Tensor, dim: int) -> Tensor:
    return scattered(torch.cat(torch.split(x, x.shape[dim] // WORLD, dim=dim)))


def reduced(x: Tensor, op: str = "sum") -> Tensor:
    out: Tensor = c10d.wait_tensor(c10d.all_reduce(x, op, GROUP))
    return out


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    out: Tensor = torch.ops.prims.convert_element_type(x, dtype)
    return out


def as_bytes(x: Tensor) -> Tensor:
    return reinterpreted(x, torch.uint8)


def reinterpreted(x: Tensor, dtype: torch.dtype) -> Tensor:
    out: Tensor = aten.view.dtype(x, dtype)
    return out


def linear(x: Tensor, w: Tensor) -> Tensor:
    return (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], w.shape[-1])


def float8_linear(x: Tensor, w: Tensor, scale: Tensor, **options: Any) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    one = torch.ones((), device=x.device)
    given: dict[str, Any] = {"scale_b": one, "out_dtype": torch.float32, **options}
    return torch._scaled_mm(rows, w.t(), scale, **given)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A graph, by the function of which it is the trace, and its inputs' shapes; `w` are weights.

    `found` is what `fuse` is to say: the collective, with how many matmuls, and a part of the reason.
    """

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...] = ((2, 4, 8), (8, 16))
    found: tuple[tuple[str, int, str], ...]
    dtypes: tuple[torch.dtype, ...] = ()
    runs: bool = True  # on gloo
    symbolic: bool = False
    groups: frozenset[str] | None = None

    def inputs(self, rank: int) -> list[Tensor]:
        """Whole numbers, so that every order of a sum gives the same."""
        generator = torch.Generator().manual_seed(rank)
        dtypes = self.dtypes or (torch.float32,) * len(self.shapes)
        return [
            torch.randint(-3, 4, shape, generator=generator).to(dtype)
            for shape, dtype in zip(self.shapes, dtypes, strict=True)
        ]


def _weight_gradient_too(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    rows = gathered_along(x, 1).reshape(-1, 8)
    return rows.t() @ y, rows @ w


def _later_weight(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    rows = gathered(x).reshape(-1, 8)
    total = rows.sum()
    return rows @ (w * 2), (rows @ (v + 1)) * total


def _written(x: Tensor, w: Tensor) -> Tensor:
    rows = gathered(x).reshape(-1, 8)
    w.add_(1)
    return rows @ w


def _written_before_scatter(x: Tensor, w: Tensor) -> Tensor:
    product = linear(x, w)
    w.add_(1)
    return scattered(product)


def _in_slices(x: Tensor, w: Tensor) -> Tensor:
    rows = gathered(x)
    return linear(torch.cat([rows[:2], rows[2:]], dim=1), w)


def _order_of_ranks(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    rows = gathered(x)
    return linear(torch.cat(torch.split(rows, 2), dim=1), w), rows * 2


def _swapped(x: Tensor, w: Tensor) -> Tensor:
    first, second = torch.split(gathered(x), 2)
    return linear(torch.cat([second, first], dim=1), w)


def _in_batches(x: Tensor, w: Tensor) -> Tensor:
    return torch.bmm(gathered_along(x, 1), w.unsqueeze(0).expand(2, 8, 16))


def _two_products(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    product = linear(x, w)
    return scattered(product), product * 2


def _sum_of_three(x: Tensor, w: Tensor, y: Tensor, v: Tensor) -> Tensor:
    return scattered_along(linear(x, w) + linear(y, v) + linear(x * 2, w), 1)


def _saved_early(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    early = c10d.reduce_scatter_tensor(linear(x, w), "sum", WORLD, GROUP)
    return early, c10d.wait_tensor(early) * 2


def _gathered_early(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    early = c10d.all_gather_into_tensor(x, WORLD, GROUP)
    return early, linear(c10d.wait_tensor(early), w)


def _never_waited(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return c10d.all_gather_into_tensor(x, WORLD, GROUP), x.reshape(-1, 8) @ w


def _float8_sent_as_bytes(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return float8_linear(reinterpreted(gathered(as_bytes(x)), F8), w, scale.sum().abs() + 1)


def _float8_parts(x: Tensor, w: Tensor) -> Tensor:
    parts = torch.split(gathered(as_bytes(x)), 2)
    rows = reinterpreted(torch.cat([reinterpreted(part, torch.int8) for part in parts], dim=1), F8)
    return float8_linear(rows, w, torch.ones(()))


def _float8_two_scales(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    rows = reinterpreted(gathered(as_bytes(x)), F8)
    return float8_linear(rows, w, torch.ones(())), float8_linear(rows, w, torch.full((), 2.0))


ROWS_AND_WEIGHTS = ((2, 4, 8), (8, 16), (8, 16), (8, 4))
FLOAT8 = ((2, 16, 16), (32, 16))
GATHER, SCATTER, REDUCE = "all_gather", "reduce_scatter", "all_reduce"

CASES = {
    "rows": Case(function=lambda x, w: linear(gathered(x), w), found=((GATHER, 1, ""),)),
    "matrix": Case(function=lambda x, w: gathered(x) @ w, shapes=((4, 8), (8, 16)), found=((GATHER, 1, ""),)),
    "three weights": Case(
        function=lambda x, q, k, v: [linear(rows, w) for rows in [gathered_along(x, 1)] for w in (q, k, v)],
        shapes=ROWS_AND_WEIGHTS, found=((GATHER, 3, ""),),
    ),
    "slices": Case(function=_in_slices, found=((GATHER, 1, ""),)),
    "a batch of one": Case(
        function=lambda x, w: linear(gathered(x).reshape(1, 8, 8), w), shapes=((1, 4, 8), (8, 16)),
        found=((GATHER, 1, ""),),
    ),
    "bmm": Case(function=_in_batches, found=((GATHER, 1, ""),)),
    "bmm of one": Case(
        function=lambda x, w: torch.bmm(gathered(x).reshape(1, 8, 8), w), shapes=((1, 4, 8), (1, 8, 16)),
        found=((GATHER, 1, ""),),
    ),
    "biases": Case(
        function=lambda x, w, a, v, b: [
            torch.addmm(bias, rows, matrix)
            for rows in [gathered_along(x, 1).reshape(-1, 8)] for bias, matrix in ((a, w), (b, v))
        ],
        shapes=((2, 4, 8), (8, 16), (16,), (8, 4), (4,)), found=((GATHER, 2, ""),),
    ),
    "one bias of two": Case(
        function=lambda x, w, a, v: [
            product
            for rows in [gathered(x).reshape(-1, 8)] for product in (torch.addmm(a, rows, w), rows @ v)
        ],
        shapes=((2, 4, 8), (8, 16), (16,), (8, 4)), found=((GATHER, 2, ""),),
    ),
    "a bias added after": Case(
        function=lambda x, w, a: linear(gathered(x), w) + a, shapes=((2, 4, 8), (8, 16), (16,)),
        found=((GATHER, 1, ""),),
    ),
    "transposed weight": Case(
        function=lambda x, w: linear(gathered(x), w.t()), shapes=((2, 4, 8), (16, 8)), found=((GATHER, 1, ""),)
    ),
    "rows are used elsewhere": Case(
        function=lambda x, w: [out for rows in [gathered_along(x, 1)] for out in (linear(rows, w), rows * 2)],
        found=((GATHER, 1, ""),),
    ),
    "rows are a result": Case(
        function=lambda x, w: [out for rows in [gathered_along(x, 1)] for out in (linear(rows, w), rows)],
        found=((GATHER, 1, ""),),
    ),
    "a weight's gradient, too": Case(
        function=_weight_gradient_too, shapes=((2, 4, 8), (8, 16), (16, 3)), found=((GATHER, 1, ""),)
    ),
    "a cast to less": Case(
        function=lambda x, w: linear(cast(gathered_along(x, 1), torch.float32), w),
        dtypes=(torch.float64, torch.float32), found=((GATHER, 1, ""),),
    ),
    "weights made later": Case(
        function=_later_weight, shapes=((2, 4, 8), (8, 16), (8, 16)), found=((GATHER, 2, ""),)
    ),
    "sizes known late": Case(
        function=lambda x, w: linear(gathered(x), w), symbolic=True, found=((GATHER, 1, ""),)
    ),
    "used before it is waited for": Case(function=_gathered_early, runs=False, found=((GATHER, 1, ""),)),
    "float8": Case(
        function=_float8_sent_as_bytes, shapes=(*FLOAT8, (1,)), dtypes=(F8, F8, torch.float32),
        found=((GATHER, 1, ""),),
    ),
    "float8, parts as bytes": Case(function=_float8_parts, shapes=FLOAT8, dtypes=(F8, F8), found=((GATHER, 1, ""),)),
    "float8, scales of rows": Case(
        function=lambda x, w, s, t: float8_linear(
            reinterpreted(gathered(as_bytes(x)), F8), w, s.abs() + 1, scale_b=t.abs() + 1, out_dtype=torch.bfloat16
        ),
        shapes=(*FLOAT8, (64, 1), (1, 32)), dtypes=(F8, F8, torch.float32, torch.float32), runs=False,
        found=((GATHER, 1, ""),),
    ),
    "float8, two scales": Case(function=_float8_two_scales, shapes=FLOAT8, dtypes=(F8, F8), found=((GATHER, 1, ""),)),
    "left: a cast to more": Case(
        function=lambda x, w: linear(cast(gathered(x), torch.float64), w), dtypes=(torch.float32, torch.float64),
        found=((GATHER, 0, "a cast to torch.float64 follows"),),
    ),
    "left: a weight's gradient": Case(
        function=lambda x, y: gathered(x).reshape(-1, 8).t() @ y, shapes=((2, 4, 8), (16, 3)),
        found=((GATHER, 0, "its transpose is multiplied"),),
    ),
    "left: a weight": Case(
        function=lambda w, x: x @ gathered(w), shapes=((4, 8), (3, 8)), found=((GATHER, 0, "right-hand side"),)
    ),
    "left: a transposed weight": Case(
        function=lambda w, x: x @ gathered(w).t(), shapes=((4, 8), (3, 8)), found=((GATHER, 0, "right-hand side"),)
    ),
    "left: both sides": Case(
        function=lambda x: [rows @ rows for rows in [gathered(x)]], shapes=((4, 8),),
        found=((GATHER, 0, "the other side of its matmul depends on it, too"),),
    ),
    "left: the last dimension": Case(
        function=lambda x, w: linear(gathered_along(x, 2), w), shapes=((2, 4, 8), (16, 3)),
        found=((GATHER, 0, "along the last dimension"),),
    ),
    "left: the order of ranks": Case(function=_order_of_ranks, found=((GATHER, 0, "in the order of ranks"),)),
    "left: another order": Case(function=_swapped, found=((GATHER, 0, "it goes to split"),)),
    "left: written": Case(function=_written, found=((GATHER, 0, "writes to one of its arguments"),)),
    "left: no matmul": Case(
        function=lambda x, w: linear(gathered(x).relu(), w), found=((GATHER, 0, "it goes to relu, not to a matmul"),)
    ),
    "left: only a result": Case(function=lambda x, w: gathered(x), found=((GATHER, 0, "a result of the graph"),)),
    "left: waited for elsewhere": Case(function=_never_waited, runs=False, found=((GATHER, 0, "in another graph"),)),
    "left: a weight for each batch": Case(
        function=lambda x, w: torch.bmm(gathered_along(x, 1), w), shapes=((2, 4, 8), (2, 8, 16)),
        found=((GATHER, 0, "a weight for each batch"),),
    ),
    "left: another group": Case(
        function=lambda x, w: scattered(linear(gathered(x), w)), groups=frozenset({"7"}),
        found=((GATHER, 0, "not one of those to fuse"), (SCATTER, 0, "not one of those to fuse")),
    ),
    "scatter": Case(function=lambda x, w: scattered(linear(x, w)), found=((SCATTER, 1, ""),)),
    "scatter another dimension": Case(
        function=lambda x, w: scattered_along(linear(x, w), 1), found=((SCATTER, 1, ""),)
    ),
    "scatter with a bias": Case(
        function=lambda x, w, b: scattered_along(torch.addmm(b, x.reshape(-1, 8), w).reshape(2, 4, 16), 1),
        shapes=((2, 4, 8), (8, 16), (16,)), found=((SCATTER, 1, ""),),
    ),
    "scatter a sum": Case(
        function=_sum_of_three, shapes=((2, 4, 8), (8, 16), (2, 4, 6), (6, 16)), found=((SCATTER, 3, ""),)
    ),
    "scatter a sum with biases": Case(
        function=lambda x, w, a, b: scattered(torch.addmm(a, x, w) + torch.addmm(b, x * 2, w)),
        shapes=((4, 8), (8, 16), (16,), (16,)), found=((SCATTER, 2, ""),),
    ),
    "scatter of bmm": Case(
        function=lambda x, w: scattered_along(torch.bmm(x, w.unsqueeze(0).expand(2, 8, 16)), 1),
        found=((SCATTER, 1, ""),),
    ),
    "scatter the mean": Case(
        function=lambda x, w: scattered(linear(x, w), "avg"), runs=False, found=((SCATTER, 1, ""),)
    ),
    "scatter, sizes known late": Case(
        function=lambda x, w: scattered(linear(x, w)), symbolic=True, found=((SCATTER, 1, ""),)
    ),
    "scatter a sum, sizes known late": Case(
        function=lambda x, w: scattered(linear(x, w) + linear(x * 2, w)), symbolic=True, found=((SCATTER, 2, ""),)
    ),
    "left: sizes known late": Case(
        function=lambda x, w: scattered(torch.bmm(x, w) + torch.bmm(x * 2, w)), shapes=((1, 4, 8), (1, 8, 16)),
        symbolic=True, runs=False, found=((SCATTER, 0, "its sizes are known only when it runs"),),
    ),
    "scatter, used before it is waited for": Case(function=_saved_early, runs=False, found=((SCATTER, 1, ""),)),
    "scatter float8": Case(
        function=lambda x, w: scattered_along(float8_linear(x, w, torch.ones(())).reshape(2, 16, 32), 1),
        shapes=FLOAT8, dtypes=(F8, F8), found=((SCATTER, 1, ""),),
    ),
    "left: float8 with a bias": Case(
        function=lambda x, w, b: scattered(float8_linear(x, w, torch.ones(()), bias=b, out_dtype=torch.bfloat16)),
        shapes=(*FLOAT8, (32,)), dtypes=(F8, F8, torch.bfloat16), runs=False,
        found=((SCATTER, 0, "its float8 matmul has a bias"),),
    ),
    "left: a product with another user": Case(
        function=_two_products, found=((SCATTER, 0, "is used elsewhere, too: it would be computed twice"),)
    ),
    "left: scatter the last dimension": Case(
        function=lambda x, w: scattered_along(linear(x, w), 2), found=((SCATTER, 0, "scatters the last dimension"),)
    ),
    "left: a scaled product": Case(
        function=lambda x, w: scattered(linear(x, w) * 2), found=((SCATTER, 0, "the result of mul, not of a matmul"),)
    ),
    "left: a product and something else": Case(
        function=lambda x, w, y: scattered(linear(x, w) + y), shapes=((2, 4, 8), (8, 16), (2, 4, 16)),
        found=((SCATTER, 0, "not of a matmul"),),
    ),
    "left: a cast product": Case(
        function=lambda x, w: scattered(cast(linear(x, w), torch.float64)),
        found=((SCATTER, 0, "cast to torch.float64 before it is reduced"),),
    ),
    "left: another reduction": Case(
        function=lambda x, w: scattered(linear(x, w), "max"), found=((SCATTER, 0, "sum and avg can be fused"),)
    ),
    "left: written before the scatter": Case(
        function=_written_before_scatter, found=((SCATTER, 0, "writes to one of its arguments"),)
    ),
    "gather and scatter of one matmul": Case(
        function=lambda x, w: scattered(linear(gathered(x), w)),
        found=((GATHER, 1, ""), (SCATTER, 0, "its matmul is fused with an all_gather")),
    ),
    "reduce": Case(function=lambda x, w: reduced(linear(x, w)), found=((REDUCE, 1, ""),)),
    "reduce with a bias": Case(
        function=lambda x, w, b: reduced(torch.addmm(b, x, w)), shapes=((4, 8), (8, 16), (16,)),
        found=((REDUCE, 1, ""),),
    ),
    "a sum of three reductions": Case(
        function=lambda x, w, y, v: reduced(linear(x, w)) + reduced(linear(y, v)) + reduced(linear(x * 2, w)),
        shapes=((2, 4, 8), (8, 16), (2, 4, 6), (6, 16)), found=((REDUCE, 3, ""),),
    ),
    "a sum of a reduction with itself": Case(
        function=lambda x, w: [total + total for total in [reduced(linear(x, w))]], found=((REDUCE, 1, ""),)
    ),
    "a sum of two kinds of reductions": Case(
        function=lambda x, w: reduced(linear(x, w)) + reduced(linear(x * 2, w), "max"),
        found=((REDUCE, 1, ""), (REDUCE, 0, "sum and avg can be fused")),
    ),
    "left: reduce float8": Case(
        function=lambda x, w: reduced(float8_linear(x, w, torch.ones(()))), shapes=FLOAT8, dtypes=(F8, F8),
        found=((REDUCE, 0, "no float8 matmul with an all_reduce"),),
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Fused:
    before: GraphModule
    after: GraphModule
    found: list[FoundCollective]
    counts: Counter[str] = field(default_factory=Counter)


def fused(case: Case, rank: int) -> Fused:
    mode: Literal["fake", "symbolic"] = "symbolic" if case.symbolic else "fake"
    before = make_fx(case.function, tracing_mode=mode)(*case.inputs(rank))
    for detach in before.graph.find_nodes(op="call_function", target=aten.detach.default):  # inductor has none
        detach.replace_all_uses_with(detach.args[0])
        before.graph.erase_node(detach)
    before.recompile()
    after = copy.deepcopy(before)
    found = fuse(after.graph, case.groups)
    after.graph.lint()
    after.recompile()
    return Fused(before=before, after=after, found=found, counts=operations_of(after.graph))


def operations_of(graph: Graph) -> Counter[str]:
    names = (str(node.target).partition(".") for node in graph.nodes if node.op == "call_function")
    return Counter(
        f"{space}::{rest.partition('.')[0]}"
        for space, _, rest in names
        if space in ("counterpoint", "_c10d_functional")
    )
