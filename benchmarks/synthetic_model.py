"""What one layer of a Llama-3-8B-shaped model runs, forward and backward: operations, what they call, their kernels."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Block", "Kernel", "Op", "backward_of", "forward_layer", "lay_out", "unshard_layer"]


class Kernel(NamedTuple):
    """One kind of kernel, as it runs alone."""

    name: str
    us: float
    grid: tuple[int, int, int] = (1024, 1, 1)
    block: tuple[int, int, int] = (256, 1, 1)
    regs: int = 32
    smem: int = 0


class Op(NamedTuple):
    """One dispatcher operation: what it calls, and the kernel it launches itself."""

    name: str
    dims: tuple[tuple[int, ...], ...] = ()
    calls: tuple[Op, ...] = ()
    kernel: Kernel | None = None


@dataclass(frozen=True, kw_only=True)
class Block:
    """A sequence of operations laid out once: host times relative to its start, in the order of their ends."""

    host_us: float
    ops: tuple[tuple[float, float, str, str], ...]  # start, duration, name, dims as JSON
    launches: tuple[tuple[float, Kernel], ...]


def lay_out(ops: Iterable[Op]) -> Block:
    """Host times for `ops`, one after another: 1.2 µs to enter, 0.6 µs to leave, 4.5 µs to launch."""
    placed: list[tuple[float, float, str, str]] = []
    launches: list[tuple[float, Kernel]] = []

    def place(op: Op, at: float) -> float:
        now = at + 1.2
        for called in op.calls:
            now = place(called, now)
        if op.kernel is not None:
            launches.append((now, op.kernel))
            now += 4.5
        now += 0.6
        placed.append((at, now - at, op.name, json.dumps(op.dims)))
        return now + 0.3

    now = 0.0
    for op in ops:
        now = place(op, now)
    return Block(host_us=now, ops=tuple(placed), launches=tuple(launches))


CLEAR_COUNTER = Op("aten::resolve_conj", ((1,),), kernel=Kernel("Memset (Device)", 1.8))


def matmul(m: int, n: int, k: int) -> Op:
    """`aten::mm` on cuBLAS' persistent Hopper kernel, at 750 TFLOP/s; it clears a counter first."""
    name = f"nvjet_tst_{128 if n < 8192 else 256}x{128 if m < 8192 else 256}_64x4_2x1_v_bz_coopA_TNT"
    kernel = Kernel(name, 2e-6 * m * n * k / 750, (66, 2, 1), (384, 1, 1), 168, 213_248)
    return Op("aten::mm", ((m, k), (k, n)), (Op("aten::resolve_conj", ((m, k),)), CLEAR_COUNTER), kernel)


def linear(m: int, n: int, k: int) -> Op:
    strided = Op("aten::as_strided", ((n, k), (), (), ()))
    transpose = Op("aten::t", ((n, k),), (Op("aten::transpose", ((n, k), (), ()), (strided,)),))
    flat = Op("aten::view", ((1, m, k), ()))
    back = Op("aten::_unsafe_view", ((m, n), ()))
    product = Op("aten::matmul", ((1, m, k), (k, n)), (flat, matmul(m, n, k), back))
    return Op("aten::linear", ((1, m, k), (n, k), ()), (transpose, product))


def pointwise(op: str, functor: str, *dims: tuple[int, ...], us: float = 18.0, allocates: bool = False) -> Op:
    """An elementwise operation; the kernel names are as long as PyTorch's are."""
    name = (
        f"void at::native::vectorized_elementwise_kernel<4, at::native::{functor}, std::array<char*, 3ul> >"
        f"(int, at::native::{functor}, std::array<char*, 3ul>)"
    )
    kernel = Kernel(name, us, (dims[0][-1] * 4, 1, 1), (128, 1, 1), 26)
    calls = (Op("aten::empty_strided", ((), (), (), (), (), ())),) if allocates else ()
    return Op(op, dims, calls, kernel)


def cast(*dims: tuple[int, ...]) -> Op:
    copy = pointwise("aten::copy_", "bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda(float)#1}", *dims)
    inner = Op("aten::_to_copy", dims, (Op("aten::empty_strided", ((), (), (), (), (), ())), copy))
    return Op("aten::to", dims, (inner,))


def rms_norm(m: int, k: int) -> tuple[Op, ...]:
    name = (
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, true>"
        "(int, float, c10::BFloat16 const*, c10::BFloat16 const*, c10::BFloat16 const*, float*, float*, c10::BFloat16*)"
    )
    empty = Op("aten::empty", ((), (), (), (), (), ()))
    kernel = Kernel(name, 29.0, (m, 1, 1), (32, 4, 1), 40, 24)
    fused = Op("aten::_fused_rms_norm", ((1, m, k), (), (k,), ()), (empty, empty), kernel)
    return (Op("aten::rms_norm", ((1, m, k), (), (k,), ()), (fused,)),)


def attention(tokens: int, *, backward: bool) -> Op:
    name = "flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel" if backward else "flash_fwd_kernel"
    traits = f"Flash_{'bwd' if backward else 'fwd'}_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t"
    kernel = Kernel(
        f"void pytorch_flash::{name}<pytorch_flash::{traits}, pytorch_flash::Flash_kernel_traits<128, 128, 64, 4, "
        "cutlass::bfloat16_t> >, false, true, false, false, true, true, false, false>(pytorch_flash::Flash_params)",
        1150.0 if backward else 420.0,
        (tokens // 128, 1, 32),
        (128, 1, 1),
        255,
        73_728,
    )
    heads = (1, 32, tokens, 128)
    tail = "_backward" if backward else ""
    flash = Op(f"aten::_flash_attention{tail[:9]}", (heads, heads, heads, (), (), ()), kernel=kernel)
    efficient = Op(f"aten::_scaled_dot_product_flash_attention{tail}", (heads, heads, heads, (), (), ()), (flash,))
    return efficient if backward else Op("aten::scaled_dot_product_attention", (heads, heads, heads), (efficient,))


def rotary(m: int) -> tuple[Op, ...]:
    q = (1, m, 32, 128)
    return (
        Op("aten::view", ((1, m, 4096), ())),
        pointwise("aten::mul", "BinaryFunctor<c10::BFloat16, c10::BFloat16, float, MulFunctor<float> >", q, q, us=24.0),
        pointwise("aten::neg", "neg_kernel_cuda(at::TensorIteratorBase&)::{lambda(c10::BFloat16)#1}", q, us=12.0),
        Op("aten::cat", (q, q), kernel=pointwise("", "CatArrayBatchedCopy_alignedK_contig<OpaqueType<2u> >", q).kernel),
        pointwise("aten::add", "CUDAFunctor_add<c10::BFloat16>", q, q, us=24.0),
    )


def forward_layer(m: int) -> tuple[Op, ...]:
    wide, inner = (1, m, 4096), (1, m, 14336)
    return (
        *rms_norm(m, 4096),
        *(linear(m, n, 4096) for n in (4096, 1024, 1024)),
        *rotary(m),
        *rotary(m),
        attention(m, backward=False),
        linear(m, 4096, 4096),
        pointwise("aten::add", "CUDAFunctor_add<c10::BFloat16>", wide, wide),
        *rms_norm(m, 4096),
        linear(m, 14336, 4096),
        pointwise("aten::silu", "silu_kernel(at::TensorIteratorBase&)::{lambda(c10::BFloat16)#1}", inner, us=61.0),
        linear(m, 14336, 4096),
        pointwise("aten::mul", "BinaryFunctor<c10::BFloat16, c10::BFloat16, float, MulFunctor<float> >", inner, inner),
        linear(m, 4096, 14336),
        pointwise("aten::add", "CUDAFunctor_add<c10::BFloat16>", wide, wide),
    )


def backward_of(op: Op) -> Op:
    """What autograd's engine runs for a forward operation."""
    calls: tuple[Op, ...]
    node = op.name.removeprefix("aten::").replace("_", " ").title().replace(" ", "") + "Backward0"
    if op.name == "aten::linear":
        (_, m, k), (n, _) = op.dims[0], op.dims[1]
        node, calls = "MmBackward0", (matmul(m, k, n), Op("aten::t", ((m, n),)), matmul(n, k, m))
    elif op.name == "aten::scaled_dot_product_attention":
        calls = (attention(op.dims[0][2], backward=True),)
    else:
        again = op._replace(calls=(), kernel=_kernel_of(op))
        calls = (again, again) if op.name == "aten::mul" else (again,)
    detach = Op("aten::detach", (op.dims[0],), (Op("detach", (op.dims[0],)),))
    inner = Op(node, op.dims[:1], calls)
    return Op(f"autograd::engine::evaluate_function: {node}", (), (inner, detach))


def _kernel_of(op: Op) -> Kernel | None:
    return op.kernel or next((found for call in op.calls if (found := _kernel_of(call)) is not None), None)


def unshard_layer() -> tuple[Op, ...]:
    """FSDP's bookkeeping around one gather: the views of nine parameters, before and after."""
    view = Op("aten::view", ((8, 2_097_152), ()), (Op("aten::as_strided", ((8, 2_097_152), (), (), ())),))
    narrow = Op("aten::narrow", ((27_264_000,), (), (), ()), (Op("aten::slice", ((27_264_000,), (), (), (), ())), view))
    split = Op("aten::split_with_sizes", ((27_264_000,), (), ()), (narrow,) * 9)
    return (Op("aten::empty", ((), (), (), (), (), ())), split, *(view,) * 9)
