"""Find collectives next to matmuls in graphs of torch.compile, and replace both by `torch.ops.counterpoint`.

An all_gather is fused with every matmul whose rows it gathers: q, k and v, or gate and up, become one operation, which
also returns the gathered rows if other nodes use them. A reduce_scatter or an all_reduce is fused with the matmul whose
product it reduces, or with several matmuls whose products are added up before it (the backward of q, k and v): their
rows and weights are concatenated along K, so that one matmul computes the sum. Products that are added up after an
all_reduce of each are added up first, and reduced once.

Between a collective and a matmul there may be nodes that keep rows in their order: reshapes and copies, the splitting
and joining by which torch gathers along another dimension than the first, and, after a gather, a cast to a dtype that
is not larger.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node

from counterpoint.parallel.tensor import operations as operations  # defines torch.ops.counterpoint
from counterpoint.parallel.tensor.fx_nodes import (
    CONVERT,
    MATMULS,
    SAME_ROWS,
    TRANSPOSES,
    LeftToTorch,
    Matmul,
    arguments,
    call,
    dependants,
    fake,
    is_as_wide,
    is_cast_to_no_more,
    is_sum_of_equals,
    leading_sizes,
    name,
    size,
    split_and_joined,
    users_of_parts,
    writes_before,
)

aten, c10d, ours = torch.ops.aten, torch.ops._c10d_functional, torch.ops.counterpoint

_GATHER = c10d.all_gather_into_tensor.default
_SCATTER = c10d.reduce_scatter_tensor.default
_ALL_REDUCE = c10d.all_reduce.default
_WAIT = c10d.wait_tensor.default


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCollective:
    """Describes a collective of a graph: how many matmuls were fused with it, or why none.

    Args:
        collective: `all_gather`, `reduce_scatter` or `all_reduce`.
        group: name of its process group.
        tensor: shape and dtype of the whole tensor: gathered, or before it is reduced.
        matmuls: number of matmuls that it was fused with; 0 if it was left to torch.
        why: why it was left to torch; empty if it was not.
    """

    collective: str
    group: str
    tensor: str
    matmuls: int
    why: str


def fuse(graph: Graph, groups: frozenset[str] | None = None) -> list[FoundCollective]:
    """Replace all matmuls and collectives of a graph that can be fused, in place.

    Args:
        graph: inductor's graph after autograd: functional, with fake tensors as `meta["val"]` of its nodes.
        groups: names of the process groups whose collectives may be fused; None: all.

    Returns:
        All collectives of these kinds, in their order.
    """
    for node in list(graph.nodes):
        _add_before_all_reduce(node, groups)
    writes = writes_before(graph)
    unused = {node for node in graph.nodes if not node.users}
    found = []
    for node in [node for node in graph.nodes if node.target in (_GATHER, _SCATTER, _ALL_REDUCE)]:
        given = arguments(node)
        whole = fake(node if node.target is _GATHER else given["input"])
        matmuls, why = 0, ""
        try:
            _check_group(given["group_name"], groups)
            fuse_one = _fuse_gather if node.target is _GATHER else _fuse_reduction
            matmuls = fuse_one(node, given, writes)
        except LeftToTorch as left:
            why = str(left)
        found.append(
            FoundCollective(
                collective=name(node).removesuffix("_into_tensor").removesuffix("_tensor"),
                group=str(given["group_name"]),
                tensor=f"{list(whole.shape)} {str(whole.dtype).removeprefix('torch.')}",
                matmuls=matmuls,
                why=why,
            )
        )
        for other in reversed(list(graph.nodes)):
            if not other.users and other not in unused and other.op == "call_function":
                graph.erase_node(other)
        stable_topological_sort(graph)
    return found


def _check_group(group: Any, groups: frozenset[str] | None) -> None:
    if not isinstance(group, str):
        raise LeftToTorch(f"its group is given as {type(group).__name__}, not by its name")
    if groups is not None and group not in groups:
        raise LeftToTorch("its group is not one of those to fuse")


def _wait_of(collective: Node) -> Node:
    """Return the only node that waits for a collective."""
    waits = [user for user in collective.users if user.target is _WAIT]
    if len(waits) != 1:
        raise LeftToTorch("it is waited for several times" if waits else "it is waited for in another graph")
    return waits[0]


def _check_no_write_between(first: Node, second: Node, writes: dict[Node, int]) -> None:
    if writes[first] != writes[second]:
        raise LeftToTorch("between it and its matmul an operation writes to one of its arguments")


# all_gather, then matmul


def _fuse_gather(gather: Node, given: dict[str, Any], writes: dict[Node, int]) -> int:
    """Fuse a gather with the matmuls of its rows, and return the number of these matmuls."""
    whole, dim, casts = _gathered_rows(gather, given["group_size"])
    if dim == fake(whole).dim() - 1:
        raise LeftToTorch("it gathers along the last dimension, over which a matmul sums")
    early = [user for user in gather.users if user.target is not _WAIT]
    if early and (dim or casts):
        raise LeftToTorch("it is used before it is waited for, too")
    matmuls, reasons = _matmuls_of_rows(gather, whole, writes)
    if not matmuls:
        raise LeftToTorch("; ".join(reasons) or "nothing uses it")

    graph = gather.graph
    is_needed = bool(reasons or early)
    with graph.inserting_before(gather):
        shard = given["input"]
        for cast in casts:
            shard = call(graph, cast.target, shard, *cast.args[1:])
        fused = _gather_and_multiply(shard, matmuls, dim, given["group_name"], is_needed=is_needed)
        products = call(graph, operator.getitem, fused, 1)
        for index, matmul in enumerate(matmuls):
            product = call(graph, operator.getitem, products, index)
            if matmul.bias is not None and matmul.bias not in fused.all_input_nodes:
                product = call(graph, aten.add.Tensor, product, matmul.bias)
            if matmul.rows is not whole:
                sizes = [*leading_sizes(matmul.rows), size(matmul.matrix, -1)]
                product = call(graph, aten.reshape.default, product, sizes)
            matmul.node.replace_all_uses_with(product)
        if is_needed:
            gathered = call(graph, operator.getitem, fused, 0)
            whole.replace_all_uses_with(gathered)
            for user in early:
                user.replace_input_with(gather, gathered)
    return len(matmuls)


def _gathered_rows(gather: Node, world_size: int) -> tuple[Node, int, list[Any]]:
    """Return the node of the gathered rows in rank order, the gathered dimension, and casts between gather and node."""
    whole, dim, casts = _wait_of(gather), 0, []
    ends = users_of_parts(whole)
    for end in ends:
        joined = split_and_joined(end, world_size)
        if joined is not None and joined.source is whole and joined.split_dim == 0:
            if len(ends) > 1:
                raise LeftToTorch("its rows are used in the order of ranks, too")
            whole, dim, casts = end, joined.dim, joined.casts
            break
    while len(whole.users) == 1 and is_cast_to_no_more(user := next(iter(whole.users))):
        casts.append(user)
        whole = user
    return whole, dim, casts


def _matmuls_of_rows(gather: Node, whole: Node, writes: dict[Node, int]) -> tuple[list[Matmul], list[str]]:
    """Return the matmuls of the gathered rows that can be fused, and a reason for each other use of the rows."""
    depends = dependants(gather)
    matmuls: list[Matmul] = []
    reasons: dict[str, None] = {}
    for rows, user in _users_of_rows(whole):
        try:
            matmul = _matmul_of_rows(rows, user)
            if not depends.isdisjoint(matmul.other_operands):
                raise LeftToTorch("the other side of its matmul depends on it, too")
            if rows is not whole and not depends.isdisjoint(leading_sizes(rows)):
                raise LeftToTorch("sizes of its rows are read from them")
            _check_no_write_between(gather, user, writes)
            if matmuls and matmul.row_scale is not matmuls[0].row_scale:
                raise LeftToTorch("its matmuls have several scales of the rows")
            matmuls.append(matmul)
        except LeftToTorch as left:
            reasons[str(left)] = None
    return matmuls, list(reasons)


def _users_of_rows(whole: Node) -> Iterator[tuple[Node, Node]]:
    """Yield pairs of nodes: the rows of `whole`, in any shape, and a node that uses these rows."""
    shaped = [whole]
    for rows in shaped:
        for user in rows.users:
            if user.target in SAME_ROWS and is_as_wide(user, rows):
                shaped.append(user)
            else:
                yield rows, user


def _matmul_of_rows(rows: Node, user: Node) -> Matmul:
    """Return `user` as a `Matmul` of these rows; raise `LeftToTorch` if it is not one."""
    matmul = Matmul.of(user)
    if matmul is not None and matmul.rows is rows:
        return matmul
    if user.op == "output":
        raise LeftToTorch("it is a result of the graph")
    of_transpose = [further for further in user.users if further.target in MATMULS and user.target in TRANSPOSES]
    if any(arguments(further)[MATMULS[further.target][0]] is user for further in of_transpose):
        raise LeftToTorch("its transpose is multiplied, which sums over its rows, as for the gradient of a weight")
    if matmul is not None or of_transpose:
        raise LeftToTorch("it is the right-hand side of a matmul, as a weight is")
    if user.target is CONVERT and not is_cast_to_no_more(user):
        raise LeftToTorch(f"a cast to {fake(user).dtype} follows, which would make it larger")
    raise LeftToTorch(f"it goes to {name(user)}, not to a matmul")


def _gather_and_multiply(shard: Node, matmuls: Sequence[Matmul], dim: int, group: str, *, is_needed: bool) -> Node:
    """Add a node that gathers and multiplies, returns gathered rows if `is_needed`, and adds biases if all have one."""
    graph = shard.graph
    weights = [matmul.weight() for matmul in matmuls]
    biases = [matmul.bias for matmul in matmuls]
    scale = matmuls[0].row_scale
    if scale is None and None in biases:
        operation = ours.all_gather_matmul.default
        return call(graph, operation, shard, weights, dim, group, return_gathered=is_needed)
    if scale is None:
        return call(graph, ours.all_gather_linear.default, shard, weights, biases, dim, group, is_needed)
    names = ("scale_b", "scale_result", "out_dtype", "use_fast_accum")
    scales, result_scales, dtypes, fast = ([matmul.given[key] for matmul in matmuls] for key in names)
    operation = ours.all_gather_scaled_matmul.default
    return call(graph, operation, shard, weights, scale, scales, dim, group, biases, result_scales, dtypes, fast)


# matmul, then reduce_scatter or all_reduce


def _fuse_reduction(reduction: Node, given: dict[str, Any], writes: dict[Node, int]) -> int:
    """Fuse a reduction with the matmuls whose products it reduces, and return the number of these matmuls."""
    operation, group = given["reduce_op"], given["group_name"]
    if operation not in ("sum", "avg"):
        raise LeftToTorch(f"it reduces by {operation}; sum and avg can be fused")
    wait = _wait_of(reduction)
    total, dim = _total_and_dim(given)
    matmuls = list(_summed_matmuls(total))
    for matmul in matmuls:
        _check_no_write_between(matmul.node, reduction, writes)
    biases = [matmul.bias for matmul in matmuls if matmul.bias is not None]

    graph = reduction.graph
    with graph.inserting_before(reduction):
        if matmuls[0].row_scale is not None:
            fused = _multiply_scaled_and_scatter(matmuls, total, operation, dim, group)
        else:
            rows, weight = _behind_one_another(matmuls, total)
            bias = biases[0] if biases else None
            for other in biases[1:]:
                bias = call(graph, aten.add.Tensor, bias, other)
            fused = _multiply_and_reduce(rows, weight, bias, operation, dim, group)
    wait.replace_all_uses_with(fused)
    reduction.replace_all_uses_with(fused, delete_user_cb=lambda user: user is not wait)
    return len(matmuls)


def _total_and_dim(given: dict[str, Any]) -> tuple[Node, int | None]:
    """Return the reduced tensor before torch put it in rank order, and the dimension to scatter, if there is one."""
    total = given["input"]
    _check_one_user(total, len(total.users))
    if "group_size" not in given:
        return total, None
    joined, dim = split_and_joined(total, given["group_size"]), 0
    if joined is not None and joined.dim == 0 and not joined.casts:
        total, dim = joined.source, joined.split_dim
        _check_one_user(total, len(users_of_parts(total)))
    if dim == fake(total).dim() - 1:
        raise LeftToTorch("it scatters the last dimension, that of a weight's columns")
    return total, dim


def _summed_matmuls(total: Any) -> Iterator[Matmul]:
    """Yield the matmuls whose sum is `total`; raise `LeftToTorch` if `total` is something else."""
    matmul = Matmul.of(total)
    terms: list[Any] = []
    if matmul is not None:
        yield matmul
    elif total.target in SAME_ROWS and is_as_wide(total, total.args[0]):
        terms = [total.args[0]]
    elif is_sum_of_equals(total):
        terms = list(total.args)
    elif total.target is operator.getitem and total.all_input_nodes[0].target is operator.getitem:
        raise LeftToTorch("its matmul is fused with an all_gather")
    elif total.target is CONVERT:
        raise LeftToTorch(f"the product is cast to {fake(total).dtype} before it is reduced")
    else:
        raise LeftToTorch(f"it reduces the result of {name(total)}, not of a matmul")
    for term in terms:
        _check_one_user(term, len(term.users))
        yield from _summed_matmuls(term)


def _check_one_user(node: Node, users: int) -> None:
    if users > 1:
        raise LeftToTorch(f"what it reduces, {name(node)}, is used elsewhere, too: it would be computed twice")


def _behind_one_another(matmuls: Sequence[Matmul], total: Node) -> tuple[Node, Node]:
    """Return all rows, shaped as `total`, and all weights, both concatenated along K: their product is the sum."""
    graph = total.graph
    rows, weights = [], []
    for matmul in matmuls:
        if matmul.node is not total and not dependants(matmul.node).isdisjoint(leading_sizes(total)):
            raise LeftToTorch("sizes of the product are read from it")
        shaped = matmul.rows
        if matmul.node is not total:
            shaped = call(graph, aten.reshape.default, matmul.rows, [*leading_sizes(total), size(matmul.rows, -1)])
        rows.append(shaped)
        weights.append(matmul.weight())
    if len(matmuls) == 1:
        return rows[0], weights[0]
    return call(graph, aten.cat.default, rows, -1), call(graph, aten.cat.default, weights, 0)


def _multiply_and_reduce(
    rows: Node, weight: Node, bias: Node | None, operation: str, dim: int | None, group: str
) -> Node:
    """Add a node that multiplies and reduces, and return the node."""
    operands = (rows, weight) if bias is None else (rows, weight, bias)
    if dim is None:
        target = ours.matmul_all_reduce.default if bias is None else ours.linear_all_reduce.default
        return call(rows.graph, target, *operands, operation, group)
    target = ours.matmul_reduce_scatter.default if bias is None else ours.linear_reduce_scatter.default
    return call(rows.graph, target, *operands, operation, dim, group)


def _multiply_scaled_and_scatter(
    matmuls: Sequence[Matmul], total: Node, operation: str, dim: int | None, group: str
) -> Node:
    """Add a node that multiplies in float8 and reduce-scatters, and return the node."""
    if dim is None:
        raise LeftToTorch("there is no float8 matmul with an all_reduce")
    if len(matmuls) > 1:
        raise LeftToTorch("it reduces a sum of several float8 matmuls")
    if matmuls[0].bias is not None:
        raise LeftToTorch("its float8 matmul has a bias")
    given = matmuls[0].given
    rows, weight = _behind_one_another(matmuls, total)
    names = ("scale_result", "out_dtype", "use_fast_accum")
    options = [operation, dim, dim, group, None, None, *(given[key] for key in names)]
    target = ours.scaled_matmul_reduce_scatter.default
    return call(total.graph, target, rows, weight, given["scale_a"], given["scale_b"], *options)


def _add_before_all_reduce(node: Node, groups: frozenset[str] | None) -> None:
    """If a node adds two all_reduces of products, add the products first and reduce their sum once."""
    if not is_sum_of_equals(node):
        return
    waits: list[Any] = list(node.args)
    reductions = [wait.args[0] for wait in waits if wait.target is _WAIT and wait.args[0].target is _ALL_REDUCE]
    if len(set(reductions)) < 2 or any(len(one.users) > 1 for one in (*waits, *reductions)):
        return
    first, second = map(arguments, reductions)
    how = first["reduce_op"], first["group_name"]
    if how != (second["reduce_op"], second["group_name"]):
        return
    try:
        _check_group(first["group_name"], groups)
        for given in (first, second):
            list(_summed_matmuls(given["input"]))
    except LeftToTorch:
        return
    graph = node.graph
    with graph.inserting_before(node):
        total = call(graph, aten.add.Tensor, first["input"], second["input"])
        node.replace_all_uses_with(call(graph, _WAIT, call(graph, _ALL_REDUCE, total, *how)))
    for unused in (node, *waits, *reductions):
        graph.erase_node(unused)
