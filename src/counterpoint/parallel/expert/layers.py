"""Run a rank's experts, and an MoE layer that overlaps dispatch and combine with matmuls.

Weight gradients may be delayed. Autograd runs nodes in the reverse order of their making, so `delayed` makes a node for
the weight before the rows arrive. The node of the matmul then returns only the gradient of its rows, and the weight's
gradient is computed after the backward communication of these rows has started.

There may be many times more rows past the last offset than before it, and the host does not know how many. So `swiglu`
is a kernel that reads the offset and skips those rows, as grouped matmuls do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from counterpoint.errors import Misconfigured
from counterpoint.parallel.expert.permute import on_gpu, triton_kernels
from counterpoint.parallel.torch_calls import uncompiled

if TYPE_CHECKING:
    from counterpoint.parallel.expert.dispatcher import Dispatcher

Experts = Callable[[Tensor, Tensor], Tensor]  # `[capacity, hidden]` of rows that lie by expert, and their offsets
ALIGNMENT = 16  # torch's grouped kernels take rows whose bytes are a multiple of this
ROWS, COLUMNS = 8, 256  # tile of `swiglu`: each of 128 threads has two 16-byte loads of gate and up in flight
PROGRAMS = 64  # programs for each SM, several times what it holds, so that a fast one takes more


@dataclass(frozen=True, kw_only=True, eq=False)
class DelayedWeight:
    """Replaces a weight in one call of `grouped_matmul`, so that backward computes the weight's gradient later.

    Args:
        weight: the weight, detached from autograd.
        place: an empty tensor whose autograd node will compute the gradient.
        products: operands for that node: rows, gradients of the outputs, and offsets.
    """

    weight: Tensor
    place: Tensor
    products: list[tuple[Tensor, Tensor, Tensor]]


def delayed(weight: Tensor, calls: int = 1) -> tuple[DelayedWeight, ...]:
    """Return a `DelayedWeight` in place of `weight` for each of `calls` calls of `grouped_matmul`.

    The gradient is computed where backward passes this call, after the derivatives of everything later in forward: so
    it overlaps with communication that was started there. The gradients of all calls are summed for the weight.

    Args:
        weight: `[experts, out, in]`.
        calls: number of stand-ins; an unused one costs nothing.
    """
    products: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in range(calls)]
    places = _DelayedGradient.apply(weight, products)  # type: ignore[no-untyped-call]
    pairs = zip(places, products, strict=True)
    return tuple(DelayedWeight(weight=weight.detach(), place=place, products=found) for place, found in pairs)


def grouped_matmul(rows: Tensor, weight: Tensor | DelayedWeight, offsets: Tensor) -> Tensor:
    """Multiply each expert's rows by the expert's weight: `rows[start:end] @ weight[expert].T`.

    On CUDA, bfloat16 goes through torch's `grouped_mm`, which waits for nothing; all else through a loop, for which the
    host reads the offsets.

    Args:
        rows: `[capacity, in]`, by expert. Rows past the last offset are ignored; what they become is undefined.
        weight: `[experts, out, in]`, or what `delayed` has returned for it.
        offsets: int32 `[experts]`, the end of each expert's rows.

    Returns:
        `[capacity, out]`.

    Raises:
        Misconfigured: shapes or dtypes do not fit.
    """
    whole = weight.weight if isinstance(weight, DelayedWeight) else weight
    _check(rows, whole, offsets)
    rows = rows.contiguous()
    if not torch.is_grad_enabled():
        return _forward(rows, whole, offsets)
    place, products = (weight.place, weight.products) if isinstance(weight, DelayedWeight) else (whole, None)
    out: Tensor = _GroupedMatmul.apply(rows, place, whole, offsets, products)  # type: ignore[no-untyped-call]
    return out


def swiglu(gate_up: Tensor, offsets: Tensor) -> Tensor:
    """Return `silu(gate) * up`, computed in float32 and rounded once.

    Args:
        gate_up: `[rows, 2 * width]`: gate and up of each row, one behind the other.
        offsets: int32 `[experts]`, the ends of the experts' rows. Rows past the last one are not read, and undefined in
            the result and in the derivative.

    Returns:
        `[rows, width]`.

    Raises:
        Misconfigured: the shape does not fit.
        Unsupported: Triton is not installed, for a tensor on a GPU.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise Misconfigured(f"gate_up of {tuple(gate_up.shape)}: give [rows, 2 * width]")
    if offsets.dtype != torch.int32 or offsets.dim() != 1 or not len(offsets):
        raise Misconfigured(f"offsets of {tuple(offsets.shape)}, {offsets.dtype}: give int32 [experts]")
    gate_up = gate_up.contiguous()
    if not torch.is_grad_enabled():
        return _activated(gate_up, offsets)
    result: Tensor = _Swiglu.apply(gate_up, offsets)  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertWeights:
    """Computes a rank's experts: `down(gate(gate_up(row)))` for each row, with the weights of the row's expert.

    Args:
        gate_up: `[experts, 2 * ffn, hidden]`, both behind one another.
        down: `[experts, hidden, ffn]`.
        gate: makes `[rows, ffn]` of `[rows, 2 * ffn]`, each row by itself; None: `swiglu`.
    """

    gate_up: Tensor | DelayedWeight
    down: Tensor | DelayedWeight
    gate: Callable[[Tensor], Tensor] | None = None

    def __call__(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Return the experts' outputs `[capacity, hidden]` for rows that are sorted by expert."""
        gate_up = grouped_matmul(rows, self.gate_up, offsets)
        inner = swiglu(gate_up, offsets) if self.gate is None else self.gate(gate_up)
        return grouped_matmul(inner, self.down, offsets)

    def delayed(self, calls: int) -> tuple[ExpertWeights, ...]:
        """Return these weights with delayed gradients for each of `calls` calls; see the function `delayed`."""
        if isinstance(self.gate_up, DelayedWeight) or isinstance(self.down, DelayedWeight):
            raise Misconfigured("these weights are delayed already: call delayed() of the weights that they stand for")
        pairs = zip(delayed(self.gate_up, calls), delayed(self.down, calls), strict=True)
        return tuple(ExpertWeights(gate_up=gate_up, down=down, gate=self.gate) for gate_up, down in pairs)


class LocalExperts(nn.Module):
    """Holds the experts of this rank: gated feed-forward layers, as three-dimensional weights.

    Args:
        experts: number of experts of this rank.
        hidden: width of the model.
        ffn: width inside an expert.
        gate: makes `[rows, ffn]` of `[rows, 2 * ffn]`, each row by itself; None: `swiglu`.
        dtype: dtype of the weights.
    """

    def __init__(
        self,
        experts: int,
        hidden: int,
        ffn: int,
        *,
        gate: Callable[[Tensor], Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gate = gate
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * ffn, hidden, dtype=dtype))
        self.down = nn.Parameter(torch.empty(experts, hidden, ffn, dtype=dtype))
        if not self.gate_up.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw random weights, as `nn.Linear` does."""
        for weight in (self.gate_up, self.down):
            nn.init.uniform_(weight, -(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)

    def weights(self) -> ExpertWeights:
        """Return the weights as they are now: FSDP2 replaces shards by unsharded weights while the module runs."""
        return ExpertWeights(gate_up=self.gate_up, down=self.down, gate=self.gate)

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Return the experts' outputs `[capacity, hidden]`; rows are sorted by expert, and `offsets` are their ends."""
        return self.weights()(rows, offsets)


@uncompiled
def overlapped_moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: LocalExperts | ExpertWeights | Experts,
    dispatcher: Dispatcher,
    *,
    parts: int = 2,
    shared: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Run an MoE layer on parts of the tokens, so that dispatch, combine and experts of different parts overlap.

    Half of the shared expert runs during the first dispatch, the other half during the last combine. Backward mirrors
    this, and the experts' weight gradients are computed during the communication of the rows' derivatives. All ranks of
    the dispatcher's group call this with the same `parts`.

    Args:
        x: this rank's tokens `[tokens, hidden]`.
        ids: experts of the tokens, `[tokens, top_k]`, -1 for none.
        weights: weights of these choices, `[tokens, top_k]`.
        experts: experts of this rank. Weight gradients are not delayed for another function of rows and offsets, nor
            for experts on which `fully_shard` was called: call `fully_shard` on the module that calls this.
        dispatcher: brings tokens to experts and back.
        parts: number of parts of the tokens; with 1, only the shared expert and weight gradients run beside
            communication.
        shared: an expert that every token visits, each row by itself; called twice. Its output is added.

    Returns:
        `[tokens, hidden]`.

    Raises:
        Misconfigured: `parts` is not positive.
    """
    if parts < 1:
        raise Misconfigured(f"parts={parts}: give 1 or more")
    sizes = _even(len(x), parts)
    inputs = list(zip(x.split(sizes), ids.split(sizes), weights.split(sizes), strict=True))
    halves = x.split(_even(len(x), 2)) if shared is not None else [x]
    outputs, beside = [], []
    arriving = deque(dispatcher.start_dispatch(*one) for one in inputs[:2])
    combining: deque[Any] = deque()
    if shared is not None:
        beside.append(shared(halves[0]))
    for part, call in enumerate(_calls(experts, parts)):
        if 0 < part < parts - 1:
            arriving.append(dispatcher.start_dispatch(*inputs[part + 1]))
        handle = arriving.popleft()
        rows, offsets = dispatcher.finish_dispatch(handle)
        combining.append(dispatcher.start_combine(call(rows, offsets), handle))
        if part > 0:
            outputs.append(dispatcher.finish_combine(combining.popleft()))
    if shared is not None:
        beside.append(shared(halves[-1]))
    outputs.append(dispatcher.finish_combine(combining.popleft()))
    out = torch.cat(outputs) if parts > 1 else outputs[0]
    return out + torch.cat(beside) if beside else out


def _calls(experts: LocalExperts | ExpertWeights | Experts, parts: int) -> Sequence[Experts]:
    """Return, for each part of the tokens, the function that runs the experts on that part."""
    if isinstance(experts, LocalExperts) and not isinstance(experts, FSDPModule):
        experts = experts.weights()
    if isinstance(experts, ExpertWeights) and torch.is_grad_enabled():
        return experts.delayed(parts)
    return [experts] * parts


def _even(total: int, parts: int) -> list[int]:
    """Return `parts` sizes that add up to `total` and differ by one at most."""
    return [total // parts + (part < total % parts) for part in range(parts)]


class _GroupedMatmul(torch.autograd.Function):
    """Does `grouped_matmul` with derivatives; for a delayed weight, backward puts the operands in `products`.

    `place` is what the weight's gradient goes to: the weight, or the empty tensor that stands for a delayed one.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, place: Tensor, weight: Tensor, offsets: Tensor, products: list[Any] | None
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, offsets)
        ctx.products = products
        return _forward(rows, weight, offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, offsets = ctx.saved_tensors
        grads, of_rows, of_place = grads.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            of_rows = _forward(grads, weight.transpose(1, 2), offsets)
        if ctx.needs_input_grad[1] and ctx.products is None:
            of_place = _of_weight(rows, grads, offsets)
        elif ctx.needs_input_grad[1]:
            ctx.products[:] = [(rows, grads, offsets)]
            of_place = grads.new_empty(0)
        return of_rows, of_place, None, None, None


class _DelayedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, products: list[list[Any]]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.products = products
        return tuple(weight.new_empty(0) for _ in products)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *places: Tensor | None) -> tuple[Tensor | None, None]:
        total = None
        for place, products in zip(places, ctx.products, strict=True):
            if place is not None:  # otherwise its products may be those of an earlier pass
                product = _of_weight(*products.pop())
                total = product if total is None else total.add_(product)
        return total, None


def _forward(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Return each expert's rows times `weight[expert].T`."""
    if _is_fast(rows, *weight.shape[1:]):
        return functional.grouped_mm(rows, weight.transpose(1, 2), offs=offsets)
    out = rows.new_zeros(len(rows), weight.shape[1])
    for expert, (start, end) in enumerate(_ranges(offsets)):
        torch.mm(rows[start:end], weight[expert].t(), out=out[start:end])
    return out


def _of_weight(rows: Tensor, grads: Tensor, offsets: Tensor) -> Tensor:
    """Return the gradient of a weight `[experts, out, in]`: for each expert `grads.T @ rows`."""
    if _is_fast(rows, grads.shape[1], rows.shape[1]):
        return functional.grouped_mm(grads.t(), rows, offs=offsets)
    out = rows.new_empty(len(offsets), grads.shape[1], rows.shape[1])
    for expert, (start, end) in enumerate(_ranges(offsets)):
        torch.mm(grads[start:end].t(), rows[start:end], out=out[expert])
    return out


def _is_fast(rows: Tensor, *widths: int) -> bool:
    """Return whether torch's grouped kernels support these rows, and weights of these widths."""
    is_aligned = all(width * rows.itemsize % ALIGNMENT == 0 for width in widths)
    return rows.is_cuda and rows.dtype == torch.bfloat16 and is_aligned and len(rows) > 0


def _ranges(offsets: Tensor) -> list[tuple[int, int]]:
    ends = offsets.tolist()
    return list(zip([0, *ends], ends, strict=False))


def _check(rows: Tensor, weight: Tensor, offsets: Tensor) -> None:
    if rows.dim() != 2 or weight.dim() != 3 or rows.shape[1] != weight.shape[2]:
        raise Misconfigured(
            f"rows {tuple(rows.shape)} and weight {tuple(weight.shape)}: give [rows, in] and [experts, out, in]"
        )
    if offsets.dtype != torch.int32 or offsets.shape != weight.shape[:1]:
        raise Misconfigured(
            f"offsets {offsets.dtype} {tuple(offsets.shape)} of {len(weight)} experts: give int32 [{len(weight)}]"
        )
    if rows.dtype != weight.dtype:
        raise Misconfigured(f"rows {rows.dtype} and weight {weight.dtype}: give both in one dtype")


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, offsets)
        return _activated(gate_up, offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None]:
        gate_up, offsets = ctx.saved_tensors
        grads = grads.contiguous()
        if on_gpu(gate_up):
            out = torch.empty_like(gate_up)
            _launch("swiglu_backward", gate_up, grads, out, like=grads, offsets=offsets)
            return out, None
        (gate, up), wide = _wide(gate_up).chunk(2, dim=1), _wide(grads)
        sigmoid = gate.sigmoid()
        of_gate = wide * up * sigmoid * (1 + gate * (1 - sigmoid))
        return torch.cat([of_gate, wide * gate * sigmoid], dim=1).to(gate_up.dtype), None


def _activated(gate_up: Tensor, offsets: Tensor) -> Tensor:
    if on_gpu(gate_up):
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        _launch("swiglu", gate_up, out, like=out, offsets=offsets)
        return out
    gate, up = _wide(gate_up).chunk(2, dim=1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def _launch(name: str, *tensors: Tensor, like: Tensor, offsets: Tensor) -> None:
    """Launch a Triton kernel over tiles of the rows of `like`, `[rows, width]`."""
    if not like.numel():
        return
    rows, width = like.shape
    columns = min(COLUMNS, 1 << (width - 1).bit_length())
    programs = min(-(-rows // ROWS) * -(-width // columns), PROGRAMS * _num_sms(like.device))
    kernel = getattr(triton_kernels(), name)
    kernel[(programs,)](*tensors, offsets, len(offsets), WIDTH=width, ROWS=ROWS, COLUMNS=columns)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


@cache
def _num_sms(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
