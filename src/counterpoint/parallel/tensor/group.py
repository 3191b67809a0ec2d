"""Run fused matmuls and collectives of one process group, and count which mechanism ran each call.

A call runs as planned for its shape (`plans.py`): in pieces beside copy engines (`overlapped.py`), or by torch's own
collective and one matmul. If the ranks cannot share memory, torch runs all calls, and the report says so.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.host.group import check_agreement, torch_function
from counterpoint.collectives.submit.tensors import dtype_name, flat_bytes
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.machine.profile import default_profile
from counterpoint.pair.arrivals import ShardedRows, TensorOperation
from counterpoint.pair.matmul_choice import MatmulPlan
from counterpoint.parallel.follow_tuning import FollowedTuning, follow_together
from counterpoint.parallel.group import RankGroup, Registry, rank_group, torch_group
from counterpoint.parallel.options import TensorOptions
from counterpoint.parallel.report import CallCounts, Report, RoutedPath
from counterpoint.parallel.tensor.overlapped import RowGather, RowScatter, Steps, Weight, grad_of_weight
from counterpoint.parallel.tensor.plans import MatmulShape, Plans, asked_mechanism

ReturnRows = Literal["no", "copy", "symmetric"]  # memory in which gathered rows are returned
_c10d: Any = distributed_c10d
_MAX_ROUTES = 1024  # number of shapes whose plans are kept
_ALIGNMENT = 16  # rows whose bytes are a multiple of this can be sent as whole rows, without cutting an element


class _Route(NamedTuple):
    """Holds the plan for all calls of one shape, and the size and path under which reports count them."""

    plan: MatmulPlan | None
    steps: Steps | None
    path: RoutedPath
    num_bytes: int
    why: str


class TensorGroup:
    """Runs fused matmuls and collectives of one process group, by a communicator opened when first needed.

    Args:
        group: the process group.
        options: options of the operations and of the communicator; None: the defaults.
    """

    def __init__(self, group: Any, options: TensorOptions | None = None) -> None:
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.options = options or TensorOptions()
        self._counts = CallCounts()
        self._ranks: RankGroup | None = None  # set while the communicator is open
        self._plans: Plans | None = None
        self._tuning: FollowedTuning | None = None
        self._is_told = False  # whether `follow` has named the tuning
        self._is_agreed = False  # whether all ranks have compared their options
        self._routes: dict[Hashable, _Route] = {}
        self._why_not = "one rank" if self.world_size == 1 else None

    @property
    def _communicator(self) -> Communicator | None:
        """Return the process group's communicator; None before the first call that may use a communicator."""
        found: Communicator | None = None if self._ranks is None else self._ranks.communicator
        return found

    def report(self) -> Report:
        """Return a report: how many matmul operations each mechanism ran, and why."""
        return Report(calls=self._counts.rows(), tuned=str(self._tuning or ""))

    def follow(self, tuning: FollowedTuning | None) -> None:
        """Let a tuning choose how later calls run; None: built-in rules. All ranks call this between two steps.

        Before the first call of this method, the tuning that the variable COUNTERPOINT_TUNED names chooses.
        """
        self._tuning, self._is_told = tuning, True
        self._routes.clear()
        if self._communicator is not None:
            self._plans = self._new_plans(self._communicator)

    def follow_variable(self) -> None:
        """Let the tuning that COUNTERPOINT_TUNED names choose how later calls run, as if `follow` was never called."""
        self.follow(None)
        self._is_told = False

    def check(self) -> None:
        """Raise the error that ended the communicator, if any."""
        if self._ranks is not None:
            self._ranks.check()

    def close(self) -> None:
        """Leave the communicator (the last user closes it), so that later calls go to torch. All ranks call this."""
        ranks, self._ranks = self._ranks, None
        self._why_not = "the group is closed"
        self._routes.clear()
        if ranks is not None:
            ranks.leave(self)

    # the operations

    def all_gather_matmul(
        self,
        a_shard: Tensor,
        weights: Sequence[Weight],
        gather_dim: int,
        *,
        return_rows: ReturnRows = "no",
        a_scale: Tensor | None = None,
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Do `torch.ops.counterpoint.all_gather_matmul`, or, if `a_scale` is given, its float8 variant.

        Callers get a copy of the gathered rows, because all ranks have to drop symmetric memory in the same order,
        which only the operations themselves can promise.

        Returns:
            The gathered rows, in the memory that `return_rows` names, and the products.
        """
        _check(a_shard, gather_dim, weights)
        if a_scale is not None and a_scale.numel() == a_shard.numel() // a_shard.shape[-1] > 1:
            a_scale = self._gathered(a_scale, gather_dim)
        scale = None if a_scale is None else _flat_scale(a_scale)
        columns = tuple([weight.matrix.shape[1] for weight in weights])
        planned = self._planned("all_gather_matmul", a_shard, gather_dim, columns)
        if planned is None:
            gathered = self._gathered(a_shard, gather_dim)
            return None if return_rows == "no" else gathered, [_product(gathered, weight, scale) for weight in weights]
        communicator, steps = planned
        layout, width = steps.layout, a_shard.shape[-1]
        shape = _resized(a_shard, gather_dim, self.world_size)
        outs = [
            a_shard.new_empty(*shape[:-1], weight.columns, dtype=weight.product_dtype(a_shard)) for weight in weights
        ]
        flat = [_flat(out) for out in outs]
        shard = a_shard.contiguous().view(layout.batch, -1, width)
        whole = self._empty("gathered", layout.batch, sum(layout.rows), width, dtype=a_shard.dtype)
        returned = torch.empty_like(whole) if return_rows == "copy" else whole if return_rows == "symmetric" else None

        def multiply(place: slice, rows: Tensor) -> None:
            for weight, out in zip(weights, flat, strict=True):
                weight.multiply(rows, out[place], None if scale is None else _part(scale, place))

        with RowGather(communicator, shard, whole, layout) as gather:
            gather.multiply(steps, multiply)
            if returned is not None:
                gather.copy_to(returned)
        return None if returned is None else returned.view(shape), outs

    def all_gather_matmul_backward(
        self,
        a_shard: Tensor,
        weights: Sequence[Tensor],
        grads: Sequence[Tensor],
        grad_gathered: Tensor | None,
        gather_dim: int,
        *,
        needs_a: bool,
        needs_weights: bool,
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Return the derivatives of an `all_gather_matmul` with respect to `a_shard` and the weights.

        Rows are gathered during the matmuls for `a_shard`; peers' parts of its sums arrive during the others.
        """
        flat = [_flat(grad) for grad in grads]
        planned = None
        if needs_a and weights:
            k = sum(weight.shape[1] for weight in weights)
            planned = self._planned("matmul_reduce_scatter", grads[0], gather_dim, a_shard.shape[-1:], k=k)
        if planned is None:
            return (
                self._grad_of_rows(weights, grads, grad_gathered, gather_dim) if needs_a else None,
                _grads_of_weights(self._gathered(a_shard, gather_dim), flat, weights) if needs_weights else [],
            )
        communicator, steps = planned
        layout, extra = steps.layout, None if grad_gathered is None else _flat(grad_gathered)
        shard = a_shard.contiguous().view(layout.batch, -1, a_shard.shape[-1])
        transposed = [weight.t() for weight in weights]
        grad_a, grad_weights = torch.empty_like(shard), []

        def multiply(place: slice, out: Tensor) -> None:
            torch.mm(flat[0][place], transposed[0], out=out)
            for grad, weight in zip(flat[1:], transposed[1:], strict=True):
                out.addmm_(grad[place], weight)
            if extra is not None:
                out.add_(extra[place])

        gathering: AbstractContextManager[RowGather | None] = nullcontext()
        if needs_weights:
            rows = self._empty("gathered", layout.batch, sum(layout.rows), shard.shape[-1], dtype=shard.dtype)
            gathering = RowGather(communicator, shard, rows, layout, chunk_rows=layout.shard(layout.rank))
        with gathering as gather, self._scatter(communicator, grad_a, layout, "sum") as scatter:

            def multiply_rows() -> None:
                if gather is not None:
                    gather.copy_to(gather.gathered)
                    grad_weights.extend(_grads_of_weights(gather.gathered, flat, weights))

            scatter.multiply(steps, multiply, between=multiply_rows)
        return grad_a.view(a_shard.shape), grad_weights

    def _grad_of_rows(
        self, weights: Sequence[Tensor], grads: Sequence[Tensor], grad_gathered: Tensor | None, dim: int
    ) -> Tensor:
        """Return the derivative of this rank's rows, computed by torch."""
        total = grad_gathered
        for grad, weight in zip(grads, weights, strict=True):
            total = grad @ weight.t() if total is None else total + grad @ weight.t()
        assert total is not None, "one of the results has a derivative"
        return self._scattered(total, "sum", dim)

    def matmul_reduce_scatter(
        self, a: Tensor, weight: Weight, reduce_op: str, scatter_dim: int, *, a_scale: Tensor | None = None
    ) -> Tensor:
        """Do `torch.ops.counterpoint.matmul_reduce_scatter`, or, if `a_scale` is given, its float8 variant."""
        _check(a, scatter_dim, [weight], reduce_op)
        if a.shape[scatter_dim] % self.world_size:
            raise Misconfigured(
                f"matmul_reduce_scatter of {a.shape[scatter_dim]} rows over {self.world_size} ranks: give a multiple"
            )
        dtype, columns = weight.product_dtype(a), weight.columns
        scale = None if a_scale is None else _flat_scale(a_scale)
        planned = self._planned("matmul_reduce_scatter", a, scatter_dim, (columns,), product_dtype=dtype)
        if planned is None:
            return self._scattered(_product(a, weight, scale), reduce_op, scatter_dim)
        communicator, steps = planned
        layout, flat = steps.layout, _flat(a)

        def multiply(place: slice, out: Tensor) -> None:
            weight.multiply(flat[place], out, None if scale is None else _part(scale, place))

        out = a.new_empty(*_resized(a, scatter_dim, 1 / self.world_size)[:-1], columns, dtype=dtype)
        sums = out.view(layout.batch, -1, columns)
        with self._scatter(communicator, sums, layout, reduce_op) as scatter:
            scatter.multiply(steps, multiply)
        return out

    def _scatter(self, communicator: Communicator, sums: Tensor, layout: ShardedRows, reduce_op: str) -> RowScatter:
        staging = self._empty("staging", self.world_size, *sums.shape, dtype=sums.dtype)
        return RowScatter(communicator, staging, sums, layout, reduce_op)

    def matmul_reduce_scatter_backward(
        self, grad: Tensor, a: Tensor, b: Tensor, reduce_op: str, scatter_dim: int, *, needs_a: bool, needs_b: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the derivatives of `a` and `b` of a `matmul_reduce_scatter`, given the gradient of its result."""
        if reduce_op == "avg":
            grad = grad / self.world_size
        weights = [Weight(matrix=b.t())] if needs_a else []
        gathered, products = self.all_gather_matmul(
            grad, weights, scatter_dim, return_rows="symmetric" if needs_b else "no"
        )
        grad_b = None if gathered is None else grad_of_weight(a, gathered, b)
        return products[0] if needs_a else None, grad_b

    def matmul_all_reduce(self, a: Tensor, weight: Weight, reduce_op: str) -> Tensor:
        """Do `torch.ops.counterpoint.matmul_all_reduce`, and return the sum on every rank."""
        _check(a, 0, [weight], reduce_op)
        flat, columns = _flat(a), weight.columns
        planned = None
        if flat.shape[0] % self.world_size:
            num_bytes = flat.shape[0] * columns * a.element_size()
            self._counts.add("matmul_all_reduce", num_bytes, "torch", "rows that ranks cannot share evenly")
        else:
            planned = self._planned("matmul_reduce_scatter", flat, 0, (columns,), name="matmul_all_reduce")
        if planned is None:
            product = _product(a, weight, None)
            torch_function("all_reduce")(product, group=self.group)
            return self._averaged(product, reduce_op)
        communicator, steps = planned
        layout, rows = steps.layout, steps.layout.shard(steps.layout.rank)
        whole = self._empty("gathered", 1, self.world_size * rows, columns, dtype=a.dtype)
        out = a.new_empty(1, self.world_size * rows, columns)
        own = out[:, layout.rank * rows : (layout.rank + 1) * rows]

        def multiply(place: slice, out: Tensor) -> None:
            weight.multiply(flat[place], out)

        with RowGather(communicator, own, whole, layout, supplied=False) as gather:

            def summed(count: int) -> None:
                chunks = -(-count // layout.most_sent) if count == rows else count // layout.most_sent
                gather.work.ready(chunks * (self.world_size - 1))

            with self._scatter(communicator, own, layout, reduce_op) as scatter:
                scatter.multiply(steps, multiply, summed=summed)
            gather.copy_to(out)
        return out.view(*a.shape[:-1], columns)

    # which mechanism runs a call

    def _planned(
        self,
        operation: TensorOperation,
        rows: Tensor,
        dim: int,
        columns: tuple[int, ...],
        *,
        product_dtype: torch.dtype | None = None,
        k: int | None = None,
        name: str | None = None,
    ) -> tuple[Communicator, Steps] | None:
        """Return a call's communicator and steps, and count the call in the report; None if torch runs it.

        Args:
            operation: operation that is planned.
            rows: left-hand side of the matmul: this rank's rows for an all_gather, all ranks' rows for a
                reduce_scatter.
            dim: dimension of `rows` that is gathered or scattered.
            columns: number of columns of each product.
            product_dtype: dtype of a product that is scattered; None: the dtype of `rows`.
            k: inner dimension of the matmul; None: the last dimension of `rows`.
            name: name of the operation in the report; None: `operation`.
        """
        if self._plans is not None and self._plans.estimated and self._plans.catch_up():
            self._routes.clear()
        key = operation, rows.shape, rows.dtype, dim, columns, product_dtype, k
        found = self._routes.get(key)
        if found is None:
            gathers, product_bytes = operation == "all_gather_matmul", (product_dtype or rows.dtype).itemsize
            shape = MatmulShape(
                operation=operation,
                layout=ShardedRows(
                    rows=(math.prod(rows.shape[dim:-1]) // (1 if gathers else self.world_size),) * self.world_size,
                    rank=self.rank,
                    batch=math.prod(rows.shape[:dim]) or 1,  # 1 for an empty batch, in which nothing is multiplied
                ),
                k=k or rows.shape[-1],
                columns=columns,
                dtype=dtype_name(rows.dtype),
                num_bytes=rows.nbytes * self.world_size
                if gathers
                else math.prod(rows.shape[:-1]) * columns[0] * product_bytes,
            )
            found = self._route(shape, rows)
            if found.plan is not None:
                if len(self._routes) == _MAX_ROUTES:
                    del self._routes[next(iter(self._routes))]
                self._routes[key] = found
        plan, steps, path, num_bytes, why = found
        self._counts.add(name or operation, num_bytes, path, why)
        if path == "torch" or plan is None or steps is None:
            return None
        communicator = self._communicator
        assert communicator is not None
        return communicator, steps

    def _route(self, shape: MatmulShape, rows: Tensor) -> _Route:
        """Return the `_Route` of calls of this shape; the route's plan is None if torch runs these calls."""
        why = self._why_not or self._why_torch(rows, shape)
        if why is None:
            try:
                self._opened(rows.device)
                assert self._plans is not None
                plan, steps = self._plans.get(shape, rows.device)
                is_whole = plan.mechanism == "cuts" and len(plan.pieces) == 1
                return _Route(plan, steps, "serial" if is_whole else plan.mechanism, shape.num_bytes, plan.why)
            except Unsupported as error:
                why = str(error)
        return _Route(None, None, "torch", shape.num_bytes, why)

    def _why_torch(self, rows: Tensor, shape: MatmulShape) -> str | None:
        if not self._is_agreed:
            chosen_by = {"mechanism": self.options.mechanism, "measure": self.options.measure}
            check_agreement(torch_group(self.group), chosen_by)
            self._is_agreed = True
        if self.options.mechanism == "torch":
            return "asked for torch"
        if not shape.columns or not rows.numel() or not shape.num_bytes:
            return "nothing to multiply"
        row_bytes = shape.num_bytes // shape.layout.total
        if row_bytes % _ALIGNMENT:
            return f"rows of {row_bytes} bytes, which is no multiple of {_ALIGNMENT}"
        if not self._is_told and self.options.mechanism == "auto":
            self.follow(follow_together(None, [torch_group(self.group)], device_type=rows.device.type))
        asked, why = asked_mechanism(shape, self.options, self._tuning)
        return why if asked == "torch" else None

    def _opened(self, device: torch.device) -> Communicator:
        """Return the communicator, which all ranks open together at the first call; raise if none is possible."""
        if self._ranks is None:
            ranks = rank_group(self.group)
            ranks.join(self, self.options.communicator)
            try:
                communicator = ranks.open_one_host(device)
            except Unsupported as error:
                ranks.leave(self)
                self._why_not = str(error)
                raise
            self._ranks = ranks
            self._plans = self._new_plans(communicator)
        return self._ranks.open_one_host(device)

    def _new_plans(self, communicator: Communicator) -> Plans:
        profile = communicator.profile if communicator.device.type == "cuda" else default_profile()  # CPUs rehearse
        return Plans(torch_group(self.group), profile, self.options, self._tuning)

    def _empty(self, role: Literal["gathered", "staging"], *shape: int, dtype: torch.dtype) -> Tensor:
        """Return symmetric memory for one operation's gathered rows or staging, as `role` says."""
        assert self._ranks is not None
        return self._ranks.memory.shared(role, *shape, dtype=dtype)

    # by torch's own collectives

    def _gathered(self, shard: Tensor, dim: int) -> Tensor:
        """Return all ranks' shards, concatenated along `dim`, by torch's all_gather."""
        shard = shard.contiguous()
        stacked = shard.new_empty(self.world_size, *shard.shape)
        torch_function("all_gather")(flat_bytes(stacked), flat_bytes(shard), group=self.group)
        return stacked.movedim(0, dim).flatten(dim, dim + 1)

    def _scattered(self, whole: Tensor, reduce_op: str, dim: int) -> Tensor:
        """Return this rank's part along `dim` of the sum or average of all ranks' tensors, by torch's collective."""
        parts = whole.unflatten(dim, (self.world_size, -1)).movedim(dim, 0).contiguous()
        out = torch.empty_like(parts[0])
        torch_function("reduce_scatter")(out.view(-1), parts.view(-1), group=self.group)
        return self._averaged(out, reduce_op)

    def _averaged(self, total: Tensor, reduce_op: str) -> Tensor:
        """Return the sum or average that `reduce_op` names, given the sum over ranks: gloo computes sums only."""
        return total if reduce_op == "sum" else total.div_(self.world_size)


def _grads_of_weights(rows: Tensor, grads: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the derivative of each weight, given the gradients of the products `rows @ weight`."""
    return [grad_of_weight(rows, grad, weight) for grad, weight in zip(grads, weights, strict=True)]


def _product(rows: Tensor, weight: Weight, row_scale: Tensor | None) -> Tensor:
    """Return `rows @ weight`, scaled by `row_scale` and the weight's scale if they are float8."""
    out = rows.new_empty(*rows.shape[:-1], weight.columns, dtype=weight.product_dtype(rows))
    weight.multiply(rows.flatten(0, -2), out.view(-1, weight.columns), row_scale)
    return out


def _resized(tensor: Tensor, dim: int, factor: float) -> tuple[int, ...]:
    shape = list(tensor.shape)
    shape[dim] = round(shape[dim] * factor)
    return tuple(shape)


def _flat(tensor: Tensor) -> Tensor:
    """Return a tensor as a matrix, with all leading dimensions flattened into rows."""
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _flat_scale(scale: Tensor) -> Tensor:
    """Return a single scale as it is, or the scales of all rows as a column."""
    return scale if scale.numel() == 1 else scale.reshape(-1, 1)


def _part(scale: Tensor, place: slice) -> Tensor:
    """Return the scales of some rows in memory that is aligned to 16 bytes, which cuBLAS needs."""
    if scale.numel() == 1:
        return scale
    part = scale[place]
    return part if part.data_ptr() % 16 == 0 else part.clone()


def _check(rows: Tensor, dim: int, weights: Sequence[Weight], reduce_op: str = "sum") -> None:
    """Raise if the rows do not fit `dim` and the weights, or if the reduction is unknown."""
    if rows.dim() < 2:
        raise Misconfigured(f"a tensor of shape {tuple(rows.shape)}: give rows of two dimensions or more")
    if not 0 <= dim < rows.dim() - 1:
        raise Misconfigured(f"dimension {dim} of a tensor of shape {tuple(rows.shape)}: give 0 to {rows.dim() - 2}")
    for weight in weights:
        matrix = weight.matrix
        if matrix.dim() != 2 or rows.shape[-1] != matrix.shape[0]:
            raise Misconfigured(
                f"rows {tuple(rows.shape)} times {tuple(matrix.shape)}: give a matrix [k, n] for [..., k]"
            )
        for dtype in (rows.dtype, matrix.dtype):
            if not (dtype.is_floating_point or dtype.is_complex):
                raise Misconfigured(f"a matmul of {dtype}: give floating-point numbers")
    if reduce_op not in ("sum", "avg"):
        raise Misconfigured(f"reduce_op={reduce_op!r}: allowed are 'sum' and 'avg'")


_GROUPS: Registry[TensorGroup] = Registry(TensorGroup.close)


def tensor_group(name: str, options: TensorOptions | None = None) -> TensorGroup:
    """Return the `TensorGroup` of the process group of this name, until the process group is destroyed.

    Args:
        name: name of the process group.
        options: options of a new `TensorGroup`, which replaces the old one; None: the existing one, or the defaults.

    Raises:
        Misconfigured: this process has no group of this name.
    """
    try:
        group = _c10d._resolve_process_group(name)
    except (RuntimeError, ValueError, KeyError) as error:
        raise Misconfigured(f"no process group {name!r}: give group.group_name of one of this process") from error
    if options is not None:
        _GROUPS.close(group)
    return _GROUPS.get(group, lambda: TensorGroup(group, options))
