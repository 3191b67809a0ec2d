"""Make tokens narrow for their way, with a scale for each; `permute` makes them wide again."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from counterpoint.errors import Unsupported, needs_triton

E4M3 = (8, 9)  # compute capability from which Triton has float8_e4m3fn; float8_e5m2 it has for all
ELEMENTS = 8192  # of a token that 8 warps have at once; beyond, a program reads its token twice


def narrowed(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return tokens in a float8 dtype, and what each has to be multiplied by: float32 `[tokens, 1]`.

    Raises:
        Unsupported: the GPU is too old for the dtype.
    """
    if x.is_cuda and dtype is torch.float8_e4m3fn:
        _check_e4m3(x.device)
    return (_triton_narrowed if _on_gpu(x) else _torch_narrowed)(x, dtype)


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


@lru_cache(maxsize=64)  # it is asked for at every call
def _check_e4m3(device: torch.device) -> None:
    gpu = torch.cuda.get_device_properties(device)
    if (gpu.major, gpu.minor) < E4M3:
        raise Unsupported(
            f"wire_dtype={torch.float8_e4m3fn} on {gpu.name}, of compute capability {gpu.major}.{gpu.minor}: it needs "
            "8.9 or newer; give torch.float8_e5m2, or None"
        )


def _torch_narrowed(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    largest = x.abs().amax(dim=-1, keepdim=True).float() if x.numel() else x.new_zeros(len(x), 1, dtype=torch.float32)
    scales = torch.where(largest > 0, largest / torch.finfo(dtype).max, 1.0)
    return (x / scales).to(dtype), scales


def _triton_narrowed(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    with needs_triton("narrow tokens on a GPU"):
        from counterpoint.parallel.expert import wire_kernels
    x = x.contiguous()
    tokens, hidden = x.shape
    values, scales = torch.empty_like(x, dtype=dtype), x.new_empty(tokens, 1, dtype=torch.float32)
    block = min(ELEMENTS, 1 << max(0, hidden - 1).bit_length())
    if tokens:
        wire_kernels.narrow[(tokens,)](
            x, values, scales, HIDDEN=hidden, BLOCK=block, LARGEST=torch.finfo(dtype).max,
            num_warps=4 if block < ELEMENTS else 8,
        )  # fmt: skip
    return values, scales
