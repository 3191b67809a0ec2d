"""Compute what lies between the matmuls of an expert, for rows that are used alone.

Rows past the last offset may be many times those before, and the host does not know how many: a kernel that reads the
offset skips them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from counterpoint.errors import Misconfigured, needs_triton

ROWS, COLUMNS = 8, 256  # of a tile: each of 128 threads has two loads of 16 bytes of gate and of up in flight
PROGRAMS = 64  # for each SM, several times what it holds: whoever is done first takes more


def swiglu(gate_up: Tensor, offsets: Tensor) -> Tensor:
    """Return `silu(gate) * up`, computed in float32 and rounded once.

    Args:
        gate_up: [rows, 2 * width]: gate and up of each row, one behind the other.
        offsets: int32 [experts], the ends of the experts' rows. Rows past the last one are not read, and undefined in
            the result and in the derivative.

    Returns:
        [rows, width].

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
        return _forward(gate_up, offsets)
    result: Tensor = _Swiglu.apply(gate_up, offsets)  # type: ignore[no-untyped-call]
    return result


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, offsets)
        return _forward(gate_up, offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None]:
        gate_up, offsets = ctx.saved_tensors
        function = _triton_backward if _on_gpu(gate_up) else _torch_backward
        return function(gate_up, grads.contiguous(), offsets), None


def _forward(gate_up: Tensor, offsets: Tensor) -> Tensor:
    return (_triton_forward if _on_gpu(gate_up) else _torch_forward)(gate_up, offsets)


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _torch_forward(gate_up: Tensor, offsets: Tensor) -> Tensor:
    gate, up = _wide(gate_up).chunk(2, dim=1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def _torch_backward(gate_up: Tensor, grads: Tensor, offsets: Tensor) -> Tensor:
    (gate, up), wide = _wide(gate_up).chunk(2, dim=1), _wide(grads)
    sigmoid = gate.sigmoid()
    of_gate = wide * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([of_gate, wide * gate * sigmoid], dim=1).to(gate_up.dtype)


def _triton_forward(gate_up: Tensor, offsets: Tensor) -> Tensor:
    rows, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if out.numel():
        grid, sizes = _launch(out)
        _kernels().forward[grid](gate_up, out, offsets, len(offsets), **sizes)
    return out


def _triton_backward(gate_up: Tensor, grads: Tensor, offsets: Tensor) -> Tensor:
    out = torch.empty_like(gate_up)
    if grads.numel():
        grid, sizes = _launch(grads)
        _kernels().backward[grid](gate_up, grads, out, offsets, len(offsets), **sizes)
    return out


def _launch(like: Tensor) -> tuple[tuple[int], dict[str, int]]:
    """Return the grid and the constants for rows of such a width."""
    rows, width = like.shape
    columns = min(COLUMNS, 1 << (width - 1).bit_length())
    tiles = -(-rows // ROWS) * -(-width // columns)
    return (min(tiles, PROGRAMS * _num_sms(like.device)),), {"WIDTH": width, "ROWS": ROWS, "COLUMNS": columns}


@cache
def _num_sms(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@cache
def _kernels() -> Any:
    with needs_triton("activations of experts on a GPU"):
        from counterpoint.parallel.expert import activation_kernels
    return activation_kernels
