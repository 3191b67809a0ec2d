"""Compute the FLOPs and the bytes of one call of a host operation from the shapes, dtypes and values of its inputs.

FLOPs are those of the mathematical product, as `torch.utils.flop_counter` counts them: two per multiplication and
addition. Attention with a causal mask counts only the pairs of a query and a key that the mask lets through, since
fused kernels skip the others. Bytes are what the call must move at least: every input once, and its output once.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from counterpoint.trace.classify import dtype_bytes, torch_dtype
from counterpoint.trace.timeline import OperatorInputs

Shape = list[int]
_DIMS = 8  # most dimensions of a tensor
_LONGEST = 1 << 16  # characters of a list of inputs that is read; lists of an optimizer's tensors may be longer

_PRODUCTS = {  # positions of the two factors
    "mm": (0, 1), "bmm": (0, 1), "matmul": (0, 1), "linear": (0, 1), "_scaled_mm": (0, 1), "_int_mm": (0, 1),
    "addmm": (1, 2), "addmm_": (1, 2), "baddbmm": (1, 2), "baddbmm_": (1, 2), "_addmm_activation": (1, 2),
}  # fmt: skip
_CONVOLUTIONS = {  # positions of stride, padding, dilation, and of the flag `transposed`
    **dict.fromkeys(("convolution", "_convolution", "convolution_overrideable"), (3, 4, 5, 6)),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "cudnn_convolution_relu"), (3, 4, 5, None)),
    **dict.fromkeys(("miopen_convolution", "miopen_depthwise_convolution", "mkldnn_convolution"), (4, 3, 5, None)),
    "cudnn_convolution": (3, 2, 4, None), "_conv_depthwise2d": (4, 5, 6, None),
}  # fmt: skip
# of q among the inputs, of the flag is_causal, and of the lengths of packed sequences; whether heads come before rows
_ATTENTION = {
    "scaled_dot_product_attention": (0, 5, None, True), "_flash_attn_forward": (0, 5, None, False),
    "_scaled_dot_product_flash_attention": (0, 4, None, True),
    "_scaled_dot_product_flash_attention_for_cpu": (0, 4, None, True),
    "_scaled_dot_product_efficient_attention": (0, 6, None, True),
    "_scaled_dot_product_cudnn_attention": (0, 6, None, True), "_cudnn_attention_forward": (0, 10, 4, True),
    "_flash_attention_forward": (0, 8, 3, False), "_efficient_attention_forward": (0, 9, 4, False),
    "_scaled_dot_product_flash_attention_backward": (1, 11, 6, True),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (1, 7, None, True),
    "_scaled_dot_product_efficient_attention_backward": (1, 11, None, True),
    "_scaled_dot_product_cudnn_attention_backward": (1, 14, 9, True), "_cudnn_attention_backward": (1, 14, 9, True),
    "_flash_attention_backward": (1, 11, 6, False), "_efficient_attention_backward": (1, 14, 6, False),
    "_flash_attn_backward": (1, 11, None, False),
}  # fmt: skip
_TRUE = ("True", "true", "1", "2")  # 1 and 2: kinds of causal masks of memory-efficient attention
_READ_ONLY = re.compile(r"^_?(sum|mean|norm|linalg_vector_norm|amax|amin|argmax|max|min|all|any|var|std)$")
_SAME_SIZE = re.compile(  # the output has the size of the largest input
    r"^_?(add|sub|rsub|mul|div|neg|exp|log|sqrt|rsqrt|pow|relu|gelu|silu|sigmoid|tanh|threshold|clamp|clamp_min|clamp_max"
    r"|where|masked_fill|dropout|native_dropout|softmax|log_softmax|softmax_backward_data|log_softmax_backward_data"
    r"|native_layer_norm|native_group_norm|native_batch_norm|cudnn_batch_norm|fused_rms_norm|rms_norm|abs|sin|cos"
    r"|reciprocal|leaky_relu|hardtanh|elu|softplus|clone|to_copy|bitwise_not|logical_not|eq|ne|gt|lt|ge|le|tril|triu"
    r"|(gelu|silu|sigmoid|tanh|threshold|native_dropout|leaky_relu|hardtanh|elu|softplus)_backward"
    r"|native_(layer|batch)_norm_backward|cudnn_batch_norm_backward)$"
)
_WRITES_FIRST = re.compile(  # in place: the first input is the output
    r"^(copy|fill|zero|add|sub|mul|div|relu|clamp|clamp_min|masked_fill|sqrt|neg|exp|addcmul|addcdiv|lerp|sigmoid|silu"
    r"|threshold)$"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorWork:
    """Holds the work of one call; None: not known from its inputs."""

    flops: float | None = None
    bytes: float | None = None
    dtype: str | None = None  # torch's name of the first tensor's dtype


WorkOf: TypeAlias = Callable[[str, OperatorInputs], OperatorWork]
"""Types `operator_work`, which one job calls again and again for the same inputs, so that `Analysis` caches it."""


def operator_work(name: str, inputs: OperatorInputs) -> OperatorWork:
    """Return the FLOPs and bytes of one call of the operation `name`, such as `aten::addmm`."""
    short = name.rpartition("::")[2]
    shapes, dtypes, values = (_listed(text) for text in (inputs.shapes, inputs.dtypes, inputs.values))
    sizes = [_size(dtype) for dtype in dtypes]
    first = next((torch_dtype(d) for d in dtypes if isinstance(d, str) and _size(d)), None)
    tensors = [shape if _is_shape(shape) else None for shape in shapes]
    flops, out = _product(short, tensors, values)
    if flops is None:
        return OperatorWork(bytes=_streamed(short, tensors, sizes), dtype=first)
    read = sum(math.prod(t) * size for t, size in zip(tensors, sizes, strict=False) if t and size)
    return OperatorWork(flops=flops, bytes=read + out * sizes[0] if out and sizes and sizes[0] else None, dtype=first)


def matrix_product(shapes: str) -> tuple[int, int, int, int] | None:
    """Return M, N, K and batch size of the matrix product of inputs with these shapes; None if shapes do not fit.

    The factors are the first two adjacent inputs that fit, since `aten::addmm` puts its bias first; `aten::linear`
    transposes its weight. Rows of several sequences times one matrix count as rows of one product.

    Args:
        shapes: as in the trace, "[[4096,1024],[1024,512]]".
    """
    tensors = [d for d in _listed(shapes) if _is_shape(d) and len(d) >= 2 and all(d)]
    for a, b in itertools.pairwise(tensors):
        if product := _factors(a, b):
            return product
    return None


def _factors(a: Shape, b: Shape) -> tuple[int, int, int, int] | None:
    """Return M, N, K and batch size of `a @ b`, or of `a @ b.T` if only that fits; None if neither does."""
    if len(b) == 2 and a[-1] in b:
        return math.prod(a[:-1]), b[1] if a[-1] == b[0] else b[0], a[-1], 1
    if a[-1] == b[-2] and b[:-2] == a[:-2]:
        return a[-2], b[-1], a[-1], math.prod(a[:-2])
    return None


def _product(name: str, tensors: Sequence[Shape | None], values: Sequence[Any]) -> tuple[float | None, int]:
    """Return the FLOPs of a matmul, convolution or attention, and the elements of its output; None: it is neither."""
    if name in _PRODUCTS:
        a, b = (tensors[at] if at < len(tensors) else None for at in _PRODUCTS[name])
        if a is None or b is None or min(len(a), len(b)) < 2 or 0 in (*a, *b):
            return None, 0
        found = _factors(a, b)
        return (2.0 * math.prod(map(float, found)), found[0] * found[1] * found[3]) if found else (None, 0)
    if name == "convolution_backward":
        return _convolution_backward(tensors, values), 0
    if name in _CONVOLUTIONS:
        return _convolution(name, tensors, values)
    return _attention(name, tensors, values) if name in _ATTENTION else (None, 0)


def _convolution(name: str, tensors: Sequence[Shape | None], values: Sequence[Any]) -> tuple[float | None, int]:
    """Return FLOPs and output elements: each element sums over the kernel and the input channels of its group."""
    x, weight = (tensors[at] if at < len(tensors) else None for at in (0, 1))
    if x is None or weight is None or len(x) != len(weight) or len(x) < 3 or 0 in weight:
        return None, 0
    strided, padded, dilated, turned = _CONVOLUTIONS[name]
    if turned is not None and _is_true(values, turned):
        return 2.0 * math.prod(x) * math.prod(weight[1:]), 0
    spatial = len(x) - 2
    stride, padding = (_integers(values, at, spatial) for at in (strided, padded))
    dilation = _integers(values, dilated, spatial)
    if stride is None or padding is None or dilation is None or 0 in stride:
        return None, 0
    out = [
        (size + 2 * pad - far * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, far in zip(x[2:], weight[2:], stride, padding, dilation, strict=True)
    ]
    elements = x[0] * weight[0] * math.prod(max(size, 0) for size in out)
    return 2.0 * elements * math.prod(weight[1:]), elements


def _convolution_backward(tensors: Sequence[Shape | None], values: Sequence[Any]) -> float | None:
    """Return the FLOPs of the gradients that are asked for: of the input and of the weight, each as many as forward."""
    out, x, weight = (tensors[at] if at < len(tensors) else None for at in (0, 1, 2))
    if out is None or x is None or weight is None or 0 in weight:
        return None
    asked = str(values[10] if len(values) > 10 else "").strip("[] ").split(",")
    count = sum(flag.strip() in _TRUE for flag in asked[:2])
    source = x if _is_true(values, 7) else out  # a transposed convolution is the gradient of an ordinary one
    return 2.0 * count * math.prod(source) * math.prod(weight[1:]) if count else None


def _attention(name: str, tensors: Sequence[Shape | None], values: Sequence[Any]) -> tuple[float | None, int]:
    """Return FLOPs and output elements: two products forward; five backward, where scores are computed again."""
    first, causal, packed, heads_first = _ATTENTION[name]
    q, k, v = (tensors[at] if at < len(tensors) else None for at in range(first, first + 3))
    if q is None or k is None or v is None or {len(q), len(k), len(v)} != {4} or not values:
        return None, 0
    if packed is not None and packed < len(tensors) and tensors[packed]:
        return None, 0  # several sequences in a row: the trace does not state their lengths
    rows, heads = (2, 1) if heads_first else (1, 2)
    queries, keys = q[rows], k[rows]
    pairs = queries * keys
    if _is_true(values, causal):
        seen = min(queries, keys)
        pairs = seen * (seen + 1) // 2 + max(queries - keys, 0) * keys
    narrow, wide = (2, 3) if first else (1, 1)  # products over the elements of a value's head, and of a query's
    per_pair = narrow * v[3] + wide * q[3]
    return 2.0 * q[0] * q[heads] * pairs * per_pair, q[0] * q[heads] * queries * v[3]


def _streamed(name: str, tensors: Sequence[Shape | None], sizes: Sequence[int | None]) -> float | None:
    """Return the least bytes that a memory-bound operation moves; None if its output's size is not known."""
    known = [(math.prod(t), size) for t, size in zip(tensors, sizes, strict=False) if t and size]
    if not known or any(isinstance(t, list) and not size for t, size in zip(tensors, sizes, strict=False) if t):
        return None
    bare = name.rstrip("_")
    if bare != name and _WRITES_FIRST.match(bare):
        first = known[0][0] * known[0][1]
        reads = bare not in ("copy", "fill", "zero")
        return float(first * (1 + reads) + sum(count * size for count, size in known[1:]))
    every = float(sum(count * size for count, size in known))
    if _READ_ONLY.match(name):
        return every
    if _SAME_SIZE.match(bare):
        count, size = max(known)
        return every + count * size
    return None


def _listed(text: str) -> list[Any]:
    """Return a JSON list; an empty one for other and for very long text."""
    try:
        return msgspec.json.decode(text, type=list[Any]) if 0 < len(text) <= _LONGEST else []
    except msgspec.DecodeError:
        return []


def _is_shape(value: object) -> bool:
    return (
        isinstance(value, list) and 0 < len(value) <= _DIMS and all(type(n) is int and 0 <= n < 1 << 40 for n in value)
    )


def _size(dtype: object) -> int | None:
    return dtype_bytes(dtype) if isinstance(dtype, str) else None


def _is_true(values: Sequence[Any], at: int) -> bool:
    return at < len(values) and str(values[at]) in _TRUE


def _integers(values: Sequence[Any], at: int, count: int) -> list[int] | None:
    """Return the list of integers that the text at a position holds, as `"[2, 2]"`; one number stands for `count`."""
    text = str(values[at]).strip("[] ") if at < len(values) else ""
    if not re.fullmatch(r"\d{1,9}(\s*,\s*\d{1,9})*", text):
        return None
    found = [int(part) for part in text.split(",")]
    return found * count if len(found) == 1 else found if len(found) == count else None


def inputs_in_words(inputs: OperatorInputs, limit: int = 160) -> tuple[str | None, str | None]:
    """Return an operation's shapes as "4096x1024, 1024x512", about `limit` characters, and its dtypes; None: none."""
    shapes, dtypes = _listed(inputs.shapes), _listed(inputs.dtypes)
    words = ", ".join(_in_words(shape) for shape in shapes if shape)
    tensors = (d for d, shape in zip(dtypes, shapes, strict=False) if shape and isinstance(d, str) and _size(d))
    named = dict.fromkeys(map(torch_dtype, tensors))
    return shapes_cut(words, limit) or None, ", ".join(name for name in named if name) or None


def shapes_cut(shapes: str, limit: int) -> str:
    """Return the first shapes of a list in words, in about `limit` characters."""
    return shapes if len(shapes) <= limit else shapes[:limit].rpartition(", ")[0] + ", …"


def _in_words(shape: object) -> str:
    if _is_shape(shape):
        return "x".join(map(str, shape))  # type: ignore[call-overload]
    return f"{len(shape)} tensors" if isinstance(shape, list) else "?"


def tensor_sizes(inputs: OperatorInputs) -> list[int]:
    """Return the number of elements of each tensor among an operation's inputs."""
    return [math.prod(shape) for shape in _listed(inputs.shapes) if _is_shape(shape)]
