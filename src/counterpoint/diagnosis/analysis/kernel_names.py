"""Read from a kernel's name what it does: its kind, the precision of its products, and the size of its tiles."""

from __future__ import annotations

import re
from enum import IntEnum
from functools import lru_cache

from counterpoint.trace.classify import is_gemm_kernel, is_multi_tensor


class KernelKind(IntEnum):
    """Names the kinds of compute kernels that the analysis of operators tells apart."""

    OTHER = 0
    GEMM = 1
    SOFTMAX = 2  # of attention; not log_softmax
    ELEMENTWISE = 3
    COPY = 4  # casts, contiguous copies, concatenations
    TRANSPOSE = 5  # between channels first and channels last


_OTHER = re.compile(r"^triton_|^__omni_triton|ReduceAdd")  # torch.compile has fused the first
_LOG_SOFTMAX = re.compile(r"LogSoftMax|log_softmax|softmax_warp_\w+<[^<>]*, \d+, true")
_SOFTMAX = re.compile(r"softmax_warp_(for|back)ward|SoftMax(For|Back)ward|\bsoftmax_(for|back)ward", re.I)
_TRANSPOSE = re.compile(r"batched_transpose|nchw_?To_?nhwc|nhwc_?To_?nchw|nchwToFoldedNhwc|foldedNhwcToNchw", re.I)
_COPY = re.compile(r"direct_copy_kernel|float\w*_copy_kernel|\bcopy_kernel|CatArrayBatchedCopy|copy_device_to_device")
_ELEMENTWISE = re.compile(
    r"elementwise_kernel|_elementwise_|fused_dropout|masked_(fill|scale)_kernel|dropout_kernel", re.I
)
_FUNCTOR = re.compile(r"\w+Functor\w*|\w+_kernel_cuda|CatArrayBatchedCopy\w*|\w+_copy_kernel")
_HALF = re.compile(r"f16|fp16|half|bf16|hgemm|_h\d+gemm|HHS|BBS|HBS|_BS[HS]?_|bfloat", re.I)
_TF32 = re.compile(r"tf32|xf32|s1688(?!\d)|_S_MX_")
_FP32 = re.compile(
    r"(?<![a-z])sgemm|simt_s|scudnn|f32f32_f32f32_f32|gemv\w*<.*\bfloat, float, float|Cijk_\w+_SB?_(?!MX)MT", re.I
)
_TILE = re.compile(r"(?<![\dx])(\d{2,3})x(\d{2,3})(?=[x_\b]|$)")
_SPLIT = re.compile(r"split_?k|stream_?k|_SK\d|_GSU(?!1\b|0\b)\d|segment_k", re.I)


@lru_cache(maxsize=1 << 13)
def kind_of(name: str) -> KernelKind:
    """Return the kind of a compute kernel."""
    if _OTHER.search(name) or is_multi_tensor(name):
        return KernelKind.OTHER
    if _SOFTMAX.search(name):
        return KernelKind.OTHER if _LOG_SOFTMAX.search(name) else KernelKind.SOFTMAX
    if _TRANSPOSE.search(name):
        return KernelKind.TRANSPOSE
    if _COPY.search(name):
        return KernelKind.COPY
    if _ELEMENTWISE.search(name):
        return KernelKind.ELEMENTWISE
    return KernelKind.GEMM if is_gemm_kernel(name) or _FP32.search(name) else KernelKind.OTHER


def label_of(name: str) -> str:
    """Return what an element-wise kernel of PyTorch computes, as `AddFunctor`; the name of any other kernel."""
    found = _FUNCTOR.search(name) if kind_of(name) in (KernelKind.ELEMENTWISE, KernelKind.COPY) else None
    return found.group() if found else name


@lru_cache(maxsize=1 << 13)
def precision_of(name: str) -> str | None:
    """Return the precision of the products of a kernel: fp16 (or bf16), tf32 or fp32 without tensor cores, or None."""
    if _HALF.search(name):
        return "fp16"
    if _TF32.search(name):
        return "tf32"
    return "fp32" if _FP32.search(name) else None


@lru_cache(maxsize=1 << 13)
def tile_of(name: str) -> tuple[int, int] | None:
    """Return rows and columns of a GEMM kernel's tile; None if the name has none, or the kernel splits k as well."""
    found = _TILE.search(name)
    if found is None or _SPLIT.search(name):
        return None
    rows, columns = int(found.group(1)), int(found.group(2))
    return (rows, columns) if min(rows, columns) >= 16 and max(rows, columns) <= 512 else None
