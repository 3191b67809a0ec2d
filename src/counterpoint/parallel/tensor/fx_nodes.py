"""Read nodes of inductor's graphs (after autograd): arguments by name, matmuls, and tensors split and joined again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten

RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
SAME_ROWS = (*RESHAPES, aten.unsqueeze.default, aten.squeeze.dim, aten.clone.default, aten.alias.default)
TRANSPOSES = (aten.permute.default, aten.t.default, aten.transpose.int)
CONVERT, REINTERPRET = torch.ops.prims.convert_element_type.default, aten.view.dtype
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
MATMULS: dict[Any, tuple[str, str, str]] = {  # names of rows, weight and bias
    aten.mm.default: ("self", "mat2", ""),
    aten.addmm.default: ("mat1", "mat2", "self"),
    aten.bmm.default: ("self", "mat2", ""),
    aten._scaled_mm.default: ("self", "mat2", "bias"),
}


class LeftToTorch(Exception):
    """Says why a collective is left to torch instead of being fused."""


@dataclass(frozen=True, eq=False)
class Matmul:
    """Holds the operands of a matmul whose right-hand side is one matrix, not a batch of several.

    Args:
        node: the matmul.
        given: the node's arguments by name.
        rows: `[m, k]`, or `[batch, m, k]`.
        matrix: `[k, n]`, or `[1, k, n]`.
        bias: `[n]`.
    """

    node: Node
    given: dict[str, Any]
    rows: Node
    matrix: Node
    bias: Node | None

    @classmethod
    def of(cls, node: Node) -> Matmul | None:
        """Return a node as a `Matmul`; None if the node is no matmul.

        Raises:
            LeftToTorch: the matmul cannot be fused.
        """
        if node.target not in MATMULS:
            return None
        given = arguments(node)
        operands: list[Any] = [given.get(operand) for operand in MATMULS[node.target]]
        rows, matrix, bias = operands
        while fake(matrix).dim() > 2 and _is_same_matrix_for_all(matrix):
            matrix = matrix.args[0]
        shape = fake(matrix).shape
        if len(shape) > 2 and not is_true(shape[0] == 1):
            raise LeftToTorch("its bmm has a weight for each batch")
        if given.get("beta", 1) != 1 or given.get("alpha", 1) != 1:
            raise LeftToTorch("its addmm has factors")
        if bias is not None and not (fake(bias).dim() == 1 and is_true(fake(bias).shape[0] == shape[-1])):
            raise LeftToTorch("its addmm adds a matrix, not a value for each column")
        return cls(node, given, rows, matrix, bias)

    @property
    def row_scale(self) -> Node | None:
        """Return the node of the scale of float8 rows, if the matmul has one."""
        return self.given.get("scale_a")

    @property
    def other_operands(self) -> list[Node]:
        """Return all operands of the matmul except the rows."""
        operands = [value for value in self.given.values() if isinstance(value, Node)]
        operands.remove(self.rows)
        return operands

    def weight(self) -> Node:
        """Return the right-hand matrix, with two dimensions."""
        if fake(self.matrix).dim() == 2:
            return self.matrix
        return call(self.node.graph, aten.reshape.default, self.matrix, [size(self.matrix, -2), size(self.matrix, -1)])


@dataclass(frozen=True, kw_only=True)
class SplitAndJoined:
    """Describes a join along `dim` of parts that `source` was split into along `split_dim`, and casts of the parts."""

    source: Node
    split_dim: int
    dim: int
    casts: list[Any]


def split_and_joined(node: Node, count: int) -> SplitAndJoined | None:
    """Return the tensor whose `count` equal parts `node` joins in order, and how; None if `node` joins none."""
    if node.target is not aten.cat.default:
        return None
    given = arguments(node)
    parts, casts = list(given["tensors"]), []
    if all(part.target is REINTERPRET for part in parts):
        casts, parts = parts[:1], [part.args[0] for part in parts]
    found = [_part(part) for part in parts]
    if found[0] is None or len(found) != count:
        return None
    source, split_dim, _ = found[0]
    whole = fake(source).shape[split_dim]
    for index, part in enumerate(parts):
        if found[index] != (source, split_dim, index) or not is_true(fake(part).shape[split_dim] * count == whole):
            return None
    return SplitAndJoined(source=source, split_dim=split_dim, dim=given["dim"] % fake(node).dim(), casts=casts)


def _part(node: Any) -> tuple[Node, int, int] | None:
    """Return the node of which `node` is a part, the split dimension, and the part's index; None for other nodes."""
    if node.target is operator.getitem and node.args[0].target in _SPLITS:
        given, index = arguments(node.args[0]), node.args[1]
    elif node.target is aten.slice.Tensor:
        given = arguments(node)
        length, start = fake(node).shape[given["dim"]], given["start"] or 0
        if given["step"] != 1 or not isinstance(length, int) or not isinstance(start, int) or start % max(length, 1):
            return None
        index = start // max(length, 1)
    else:
        return None
    return given["self"], given["dim"] % fake(given["self"]).dim(), index


def users_of_parts(whole: Node) -> set[Node]:
    """Return the users of a node, and the users of the parts into which it is split."""
    parts = dependants(whole, through=(*_SPLITS, aten.slice.Tensor, operator.getitem, REINTERPRET))
    return {user for part in (whole, *parts) for user in part.users} - parts


def dependants(start: Node, through: Collection[Any] | None = None) -> set[Node]:
    """Return all nodes that depend on `start`; with `through`, only by way of nodes that have these targets."""
    found: set[Node] = set()
    waiting = [start]
    while waiting:
        users = (user for user in waiting.pop().users if user not in found)
        new = [user for user in users if through is None or user.target in through]
        found.update(new)
        waiting += new
    return found


def writes_before(graph: Graph) -> dict[Node, int]:
    """Return, for each node, the number of earlier operations that write to their arguments."""
    found, count = {}, 0
    for node in graph.nodes:
        found[node] = count
        schema = getattr(node.target, "_schema", None)
        count += schema is not None and schema.is_mutable
    return found


def is_as_wide(node: Node, other: Node) -> bool:
    """Return whether two nodes have equally large last dimensions, so that reshapes between them keep rows whole."""
    shape, other_shape = fake(node).shape, fake(other).shape
    return len(shape) > 0 and len(other_shape) > 0 and is_true(shape[-1] == other_shape[-1])


def is_sum_of_equals(node: Node) -> bool:
    """Return whether a node adds two tensors that have the shape and dtype of the sum."""
    if node.target is not aten.add.Tensor or node.kwargs or not all(isinstance(term, Node) for term in node.args):
        return False
    total, terms = fake(node), [fake(term) for term in node.args]
    return all(
        term.dtype == total.dtype
        and term.dim() == total.dim()
        and all(is_true(one == other) for one, other in zip(term.shape, total.shape, strict=True))
        for term in terms
    )


def is_cast_to_no_more(node: Any) -> bool:
    """Return whether a node casts to a dtype of equal or smaller size."""
    return node.target is REINTERPRET or (node.target is CONVERT and fake(node).itemsize <= fake(node.args[0]).itemsize)


def _is_same_matrix_for_all(node: Any) -> bool:
    """Return whether a node only adds leading dimensions, for a batch, to a matrix."""
    if node.target not in (aten.expand.default, *SAME_ROWS):
        return False
    before, after = fake(node.args[0]).shape[-2:], fake(node).shape[-2:]
    return len(before) == 2 and all(is_true(a == b) for a, b in zip(before, after, strict=True))


def leading_sizes(node: Any) -> list[Any]:
    """Return all but the last dimension of a node that will be replaced, as arguments of a reshape."""
    while is_sum_of_equals(node):
        node = node.args[0]
    if node.target in RESHAPES:
        return list(node.args[1][:-1])
    sizes = list(fake(node).shape[:-1])
    if not all(isinstance(one, int) for one in sizes):
        raise LeftToTorch("its sizes are known only when it runs")
    return sizes


def size(node: Node, dim: int) -> Any:
    """Return a node's size in a dimension, as a graph argument: a number, or a node if only known at run time."""
    known = fake(node).shape[dim]
    return known if isinstance(known, int) else call(node.graph, aten.sym_size.int, node, dim)


def is_true(condition: Any) -> bool:
    """Return whether a condition on sizes is true for all values of the unknown sizes."""
    return bool(statically_known_true(condition))


def arguments(node: Any) -> dict[str, Any]:
    """Return the arguments of an operation by name, with defaults for arguments that were not given."""
    defaults = {argument.name: argument.default_value for argument in node.target._schema.arguments}
    given: dict[str, Any] = dict(zip(defaults, node.args, strict=False))
    return {**defaults, **given, **node.kwargs}


def call(graph: Graph, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """Add a call to the graph, with its fake result as metadata, and return the call's node."""
    node = graph.call_function(target, args, kwargs)
    fake_args, fake_kwargs = torch.fx.node.map_arg((args, kwargs), lambda argument: argument.meta["val"])
    node.meta["val"] = target(*fake_args, **fake_kwargs)
    return node


def fake(node: Any) -> torch.Tensor:
    """Return the fake tensor of a node: its shape and dtype."""
    value: torch.Tensor = node.meta["val"]
    return value


def name(node: Node) -> str:
    """Return the name of an operation without its namespace and overload."""
    return str(getattr(node.target, "__name__", node.target)).split(".")[0]
