"""Move rows between the order of tokens and the order of this rank's experts, without communication.

- `assign`: where each choice of a token goes, computed on the device: nothing waits for the host, shapes depend on
  sizes alone, and a CUDA graph can capture it.
- `permute`: copies of tokens in the order of experts; `combine`: weighted sums of an expert's rows for each token.
- `weight_grads`: the derivative of the weights of these sums.
- `narrowed`: tokens in float8, with a scale for each; `permute` makes them wide again.

These functions record no derivatives. The derivative of `permute` is `combine` of the rows' gradients; the derivatives
of `combine` are `permute` of the sums' gradients, with the same weights, and `weight_grads`.

On CUDA these are Triton kernels (`kernels.py`), elsewhere operations of torch, with the same results bit for bit but
for `weight_grads`, which adds in another order. Tokens are `[tokens, hidden]`, the elements of a token adjacent; rows
are `[capacity, hidden]`, contiguous; weights `[tokens, top_k]`, of any strides. `Misconfigured` is raised where a
tensor does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from counterpoint.errors import Misconfigured, Unsupported, needs_triton

CHOICES = 128  # choices that a program assigns: it compares each with all earlier ones
SCANNED = 1024  # counts that a program sums at a time
BLOCK_BYTES = 4096  # bytes of a token that a program of 128 threads has in flight: two 16-byte loads each
DOTS = 4096  # products of row elements and gradients that a program holds at a time
ZERO_ROWS, ZERO_COLUMNS = 32, 256  # size of the block that a program zeroes at a time
ELEMENTS = 8192  # elements of a token that 8 warps convert at once; longer tokens are read twice
E4M3 = (8, 9)  # compute capability from which Triton supports float8_e4m3fn; float8_e5m2 needs none


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Maps each expert choice of some tokens to a row of this rank's experts.

    Rows are ordered by expert, then token, then choice. Padding after the rows of an expert fills them up to a multiple
    of `pad_multiple`; an expert without rows has no padding. Choices for which no row is left get none: `missing` says
    how many rows are lacking.
    """

    offsets: Tensor  # int32 [experts]: the end of each expert's rows, as torch's grouped_mm takes it
    slots: Tensor  # int32 [tokens, top_k]: the row of each choice; -1: none here
    sources: Tensor  # int32 [capacity]: token * top_k + choice of each row; -1: padding, or past the end
    missing: Tensor  # int32 [1]: rows by which the capacity was too small
    pad_multiple: int = 1

    @property
    def capacity(self) -> int:
        """Return the number of rows, used or not."""
        return self.sources.shape[0]

    @property
    def top_k(self) -> int:
        """Return the number of experts that each token chooses."""
        return self.slots.shape[1]

    def of_tokens(self, begin: int, end: int, *, pads: bool = True) -> Assignment:
        """Return the assignment of only tokens `begin` to `end`, to the same rows as before.

        So tokens can be permuted as they arrive, `permute(x[begin:end], assignment.of_tokens(begin, end), out=rows)`,
        and sums computed for some tokens first. `sources` still counts all tokens. `pads`: whether this part also
        writes the padding; one part has to.
        """
        return replace(self, slots=self.slots[begin:end], pad_multiple=self.pad_multiple if pads else 1)


def bounded(ids: Tensor, experts: int) -> Tensor:
    """Return ids that fit int32: an int64 id that names no expert becomes -1 or `experts`."""
    return ids if ids.dtype == torch.int32 else ids.clamp(-1, experts)


def assign(ids: Tensor, *, first_expert: int, num_experts: int, capacity: int, pad_multiple: int = 1) -> Assignment:
    """Assign a row to each token's choice of an expert of this rank.

    Args:
        ids: the experts that tokens chose, int32 or int64 [tokens, top_k]; experts of other ranks, or none (-1), get
            no row here.
        first_expert: the first expert of this rank.
        num_experts: number of experts of this rank.
        capacity: how many rows there are, a multiple of `pad_multiple`; `len(ids) * min(top_k, num_experts)` is always
            enough if no token chooses an expert twice (and `num_experts * (pad_multiple - 1)` for the padding).
        pad_multiple: number that the rows of each expert, with padding, are a multiple of.

    Returns:
        The assignment; equal ids have equal assignments.

    Raises:
        Misconfigured: a number or the dtype is out of its range.
    """
    if ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64):
        raise Misconfigured(f"ids of {tuple(ids.shape)}, {ids.dtype}: give [tokens, top_k] of int32 or int64")
    if num_experts < 1 or pad_multiple < 1:
        raise Misconfigured(f"{num_experts} experts, rows in multiples of {pad_multiple}: give 1 or more of both")
    if capacity < 0 or capacity % pad_multiple:
        raise Misconfigured(f"capacity={capacity}: give a multiple of pad_multiple={pad_multiple}")
    function = _triton_assign if on_gpu(ids) else _torch_assign
    return function(ids, first_expert, num_experts, capacity, pad_multiple)


def permute(
    tokens: Tensor,
    assignment: Assignment,
    *,
    weights: Tensor | None = None,
    out: Tensor | None = None,
    zero_tail: bool = True,
) -> Tensor:
    """Copy tokens into rows in the order of experts; padding rows become 0.

    Args:
        tokens: tokens to copy.
        assignment: where each token goes.
        weights: factors of the copies, `[tokens, top_k]`; products are made in float32 and then rounded.
        out: rows of any floating dtype: written to and returned; None: new ones like `tokens`. Tokens in float8 are
            widened to the dtype of `out`; their scales, `[tokens, 1]` expanded, are weights.
        zero_tail: also write zeros past `offsets[-1]`. It takes as long as copying as many rows, so give False for
            operations that go by the offsets, as grouped matmuls do: these rows are then left as they are.

    Returns:
        The rows.
    """
    shape = assignment.sources.shape[0], tokens.shape[-1]
    rows = torch.empty(shape, dtype=tokens.dtype, device=tokens.device) if out is None else out
    _check(assignment, weights, ("tokens", tokens, False), ("out", rows, True))
    (_triton_permute if on_gpu(tokens) else _torch_permute)(tokens, assignment, weights, rows, zero_tail)
    return rows


def combine(
    rows: Tensor, assignment: Assignment, *, weights: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Add up the rows of each token, in the order of its choices, in float32; the sum is rounded once.

    Args:
        rows: rows to add up; rows without a choice are not read.
        assignment: where the rows of each token are.
        weights: factors of the rows, `[tokens, top_k]`, in float32.
        out: sums of any floating dtype: written to and returned; None: new ones like `rows`.

    Returns:
        The sums, `[tokens, hidden]`; 0 for a token that chose no expert of this rank.
    """
    shape = assignment.slots.shape[0], rows.shape[-1]
    sums = torch.empty(shape, dtype=rows.dtype, device=rows.device) if out is None else out
    _check(assignment, weights, ("rows", rows, True), ("out", sums, False))
    (_triton_combine if on_gpu(rows) else _torch_combine)(rows, assignment, weights, sums)
    return sums


def weight_grads(rows: Tensor, grads: Tensor, assignment: Assignment, *, out: Tensor | None = None) -> Tensor:
    """Return the gradients of `combine`'s weights: dot products of each choice's row and its token's gradient.

    Args:
        rows: rows that `combine` added up.
        grads: gradients of the sums, `[tokens, hidden]`.
        assignment: where the rows of each token are.
        out: contiguous, written to and returned; None: a new tensor.

    Returns:
        float32 (float64 of float64) `[tokens, top_k]`; 0 for a choice without a row.

    Raises:
        Misconfigured: shapes or strides do not fit.
    """
    _check(assignment, None, ("rows", rows, True), ("grads", grads, False))
    shape = assignment.slots.shape
    if out is None:
        out = torch.empty(shape, dtype=_wide(rows.dtype), device=rows.device)
    elif out.shape != shape or not out.is_contiguous():
        raise Misconfigured(f"out of {tuple(out.shape)}, strides {out.stride()}: give {tuple(shape)}, contiguous")
    (_triton_weight_grads if on_gpu(rows) else _torch_weight_grads)(rows, grads, assignment, out)
    return out


def narrowed(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return tokens in a float8 dtype, and the scales by which they have to be multiplied: float32 `[tokens, 1]`.

    Raises:
        Unsupported: the GPU is too old for the dtype.
    """
    if x.is_cuda and dtype is torch.float8_e4m3fn:
        _check_e4m3(x.device)
    return (_triton_narrowed if on_gpu(x) else _torch_narrowed)(x, dtype)


def on_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor is on a GPU, so that Triton kernels handle it."""
    return tensor.is_cuda


@cache
def triton_kernels() -> Any:
    """Return the module of Triton kernels, `kernels.py`.

    Raises:
        Unsupported: Triton is not installed.
    """
    with needs_triton("kernels of experts on a GPU"):
        from counterpoint.parallel.expert import kernels
    return kernels


def _check(assignment: Assignment, weights: Tensor | None, *tensors: tuple[str, Tensor, bool]) -> None:
    """Raise unless each `(name, tensor, is_rows)` has the shape of rows or tokens, and all have equal widths."""
    hidden = tensors[0][1].shape[-1]
    for what, tensor, is_rows in tensors:
        shape = (assignment.sources if is_rows else assignment.slots).shape[0], hidden
        adjacent = tensor.is_contiguous() if is_rows else tensor.dim() == 2 and 1 in (hidden, tensor.stride(1))
        if tensor.shape != shape or (tensor.numel() and not adjacent):
            raise Misconfigured(
                f"{what} of {tuple(tensor.shape)}, strides {tensor.stride()}: give {shape}, "
                f"{'contiguous' if is_rows else 'with the elements of a row adjacent'}"
            )
    if weights is not None and weights.shape != assignment.slots.shape:
        raise Misconfigured(
            f"weights of {tuple(weights.shape)}: give one for each choice, {tuple(assignment.slots.shape)}"
        )


@lru_cache(maxsize=64)  # cached, since every call asks
def _check_e4m3(device: torch.device) -> None:
    gpu = torch.cuda.get_device_properties(device)
    if (gpu.major, gpu.minor) < E4M3:
        raise Unsupported(
            f"wire_dtype={torch.float8_e4m3fn} on {gpu.name}, of compute capability {gpu.major}.{gpu.minor}: it needs "
            "8.9 or newer; give torch.float8_e5m2, or None"
        )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of this dtype are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _torch_assign(ids: Tensor, first_expert: int, num_experts: int, capacity: int, pad_multiple: int) -> Assignment:
    flat = ids.flatten().long() - first_expert
    here = (flat >= 0) & (flat < num_experts)
    experts, order = torch.where(here, flat, num_experts).sort(stable=True)
    counts = torch.bincount(experts, minlength=num_experts + 1)
    padded = (counts + pad_multiple - 1) // pad_multiple * pad_multiple
    before = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)  # padding of earlier experts
    rows = torch.arange(len(flat), device=ids.device) + before[experts]
    has_row = (experts < num_experts) & (rows < capacity)
    slots, sources = ids.new_full((len(flat),), -1, dtype=torch.int32), ids.new_full((capacity,), -1, dtype=torch.int32)
    slots[order] = torch.where(has_row, rows, -1).int()
    sources[rows[has_row]] = order[has_row].int()
    ends = padded[:num_experts].cumsum(0)
    return Assignment(
        offsets=ends.clamp(max=capacity).int(),
        slots=slots.view(ids.shape),
        sources=sources,
        missing=(ends[-1:] - capacity).clamp(min=0).int(),
        pad_multiple=pad_multiple,
    )


def _torch_permute(
    tokens: Tensor, assignment: Assignment, weights: Tensor | None, rows: Tensor, zero_tail: bool
) -> None:
    end = assignment.capacity if zero_tail else int(assignment.offsets[-1])
    unused = (assignment.sources[:end] < 0).nonzero().flatten()
    rows[unused] = 0
    for choice in range(assignment.slots.shape[1]):
        slots = assignment.slots[:, choice]
        here = slots >= 0
        copies = tokens[here]
        if weights is not None:
            wide = _wide(tokens.dtype)
            copies = copies.to(wide) * weights[here, choice, None].to(wide)
        rows[slots[here].long()] = copies.to(rows.dtype)


def _torch_combine(rows: Tensor, assignment: Assignment, weights: Tensor | None, sums: Tensor) -> None:
    wide = _wide(rows.dtype)
    total = torch.zeros(sums.shape, dtype=wide, device=rows.device)
    for choice in range(assignment.slots.shape[1]):
        slots = assignment.slots[:, choice]
        here = slots >= 0
        values = rows[slots[here].long()].to(wide)
        if weights is not None:
            values *= weights[here, choice, None].to(wide)
        total[here] += values
    sums.copy_(total)


def _torch_weight_grads(rows: Tensor, grads: Tensor, assignment: Assignment, out: Tensor) -> None:
    wide = _wide(rows.dtype)
    out.zero_()
    for choice in range(assignment.slots.shape[1]):
        slots = assignment.slots[:, choice]
        here = slots >= 0
        products = rows[slots[here].long()].to(wide) * grads[here].to(wide)
        out[here, choice] = products.sum(1).to(out.dtype)


def _torch_narrowed(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    largest = x.abs().amax(dim=-1, keepdim=True).float() if x.numel() else x.new_zeros(len(x), 1, dtype=torch.float32)
    scales = torch.where(largest > 0, largest / torch.finfo(dtype).max, 1.0)
    return (x / scales).to(dtype), scales


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()


def _block(hidden: int, itemsize: int) -> int:
    """Return how many elements of a token one Triton program handles: a power of two that pads `hidden` by little."""
    block = min(_power_of_two(hidden), BLOCK_BYTES // itemsize)
    while block > 256 and -hidden % block > hidden // 4:
        block //= 2
    return block


def _strides(weights: Tensor | None) -> tuple[int, int]:
    return (0, 0) if weights is None else (weights.stride(0), weights.stride(1))


def _triton_assign(ids: Tensor, first_expert: int, num_experts: int, capacity: int, pad_multiple: int) -> Assignment:
    kernels, choices = triton_kernels(), ids.numel()
    if ids.stride(1) != 1:
        ids = ids.contiguous()
    blocks = max(1, -(-choices // CHOICES))
    sizes = {"EXPERTS": num_experts, "BINS": max(32, _power_of_two(num_experts)), "TOP_K": max(1, ids.shape[1])}
    new = ids.new_empty
    slots, sources = new(ids.shape, dtype=torch.int32), new(capacity, dtype=torch.int32)
    offsets, missing = new(num_experts, dtype=torch.int32), new(1, dtype=torch.int32)
    counts, totals = new(num_experts * blocks, dtype=torch.int32), new(num_experts, dtype=torch.int32)
    kernels.count[(blocks,)](
        ids, ids.stride(0), first_expert, choices, counts, blocks, sources, capacity, BLOCK=CHOICES, **sizes
    )
    kernels.scan[(num_experts,)](counts, totals, blocks, WIDTH=SCANNED)
    kernels.place[(blocks,)](
        ids, ids.stride(0), first_expert, choices, counts, totals, blocks, slots, sources, offsets, missing, capacity,
        pad_multiple, BLOCK=CHOICES, **sizes,
    )  # fmt: skip
    return Assignment(offsets=offsets, slots=slots, sources=sources, missing=missing, pad_multiple=pad_multiple)


def _triton_permute(
    tokens: Tensor, assignment: Assignment, weights: Tensor | None, rows: Tensor, zero_tail: bool
) -> None:
    capacity, hidden = rows.shape
    block = _block(hidden, max(tokens.itemsize, rows.itemsize))
    token_programs = tokens.shape[0] * -(-hidden // block)
    zeroed = capacity if zero_tail or assignment.pad_multiple > 1 else 0
    programs = token_programs + -(-zeroed // ZERO_ROWS)
    if programs and hidden:
        triton_kernels().permute[(programs,)](
            tokens, tokens.stride(0), assignment.slots, weights, *_strides(weights), rows, assignment.sources,
            assignment.offsets, token_programs, assignment.offsets.shape[0], capacity,
            TOP_K=assignment.top_k, HIDDEN=hidden, BLOCK=block, ZERO_TAIL=zero_tail,
            ZERO_ROWS=ZERO_ROWS, ZERO_BLOCK=min(ZERO_COLUMNS, _power_of_two(hidden)), enable_fp_fusion=False,
        )  # fmt: skip


def _triton_combine(rows: Tensor, assignment: Assignment, weights: Tensor | None, sums: Tensor) -> None:
    tokens, hidden = sums.shape
    block = _block(hidden, max(rows.itemsize, 2))
    if tokens and hidden:
        triton_kernels().combine[(tokens * -(-hidden // block),)](
            rows, assignment.slots, weights, *_strides(weights), sums, sums.stride(0),
            TOP_K=assignment.top_k, HIDDEN=hidden, BLOCK=block, enable_fp_fusion=False,
        )  # fmt: skip


def _triton_weight_grads(rows: Tensor, grads: Tensor, assignment: Assignment, out: Tensor) -> None:
    top_k, hidden = assignment.top_k, rows.shape[1]
    choices = _power_of_two(top_k)
    if grads.shape[0]:
        triton_kernels().weight_grads[(grads.shape[0],)](
            rows, grads, grads.stride(0), assignment.slots, out,
            TOP_K=top_k, CHOICES=choices, HIDDEN=hidden, BLOCK=min(_power_of_two(hidden), max(64, DOTS // choices)),
        )  # fmt: skip


def _triton_narrowed(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    tokens, hidden = x.shape
    values, scales = torch.empty_like(x, dtype=dtype), x.new_empty(tokens, 1, dtype=torch.float32)
    block = min(ELEMENTS, _power_of_two(hidden))
    if tokens:
        triton_kernels().narrow[(tokens,)](
            x, values, scales, HIDDEN=hidden, BLOCK=block, LARGEST=torch.finfo(dtype).max,
            num_warps=4 if block < ELEMENTS else 8,
        )  # fmt: skip
    return values, scales
