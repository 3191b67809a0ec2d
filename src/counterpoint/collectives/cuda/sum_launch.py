"""Choose how many SMs the sum kernel of a reduction gets, and launch it; `Reduction` says how values are combined."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from counterpoint.collectives.cuda.lower import ReduceLaunch
from counterpoint.collectives.program.reductions import DTYPES, Reduction
from counterpoint.errors import Misconfigured, needs_triton

VECTOR_BYTES = 16
THREAD_VECTORS = 2  # 16-byte loads of each source that a thread has in flight
RESIDENT = 3  # blocks on each SM, if the kernel may use the whole GPU


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Holds the addresses of a sum's sources: `own` may be anywhere, others (in staging) are `stride` bytes apart."""

    own: int
    own_index: int
    staged: int
    stride: int

    @classmethod
    def of(cls, sources: Sequence[int]) -> Layout:
        """Return the layout of `sources`, one address per rank; raise unless all but one are evenly spaced."""
        for index, own in enumerate(sources):
            slots = [*sources[:index], *sources[index + 1 :]]
            stride = slots[1] - slots[0] if len(slots) > 1 else 0
            if all(address == slots[0] + slot * stride for slot, address in enumerate(slots)):
                return cls(own=own, own_index=index, staged=slots[0] if slots else own, stride=stride)
        raise Misconfigured(f"{len(sources)} sources at {list(map(hex, sources))}: all but one must be evenly spaced")


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Describes one launch of the sum kernel: its arguments, compile-time constants by name, and grid."""

    arguments: tuple[int, ...]
    constants: dict[str, Any]
    num_programs: int
    num_warps: int


def launch_of(call: ReduceLaunch, reduction: Reduction, *, device_sms: int) -> Launch:
    """Return the kernel launch for `call`, as data, on a GPU of `device_sms` SMs.

    A thread loads `THREAD_VECTORS` times 16 bytes of every source before it adds. On the whole GPU, 3 blocks of 256
    threads run on each SM, as many as the registers of 8 sources allow (68 to 85 a thread), so that all run in one
    wave: 192 KiB per SM are in flight, where memory needs about 30 (4.8 TB/s × 0.8 µs over 132 SMs). With `num_sms`,
    one block of 512 threads runs per SM, so that it takes at most `num_sms` SMs; 128 KiB per SM are in flight.

    Cost: `(len(sources) + 1) * num_bytes` of device memory traffic, `len(sources) - 1` operations per element.

    Raises:
        Misconfigured: addresses or size are no multiple of an element, or sources are not spaced as in `Layout`.
    """
    item, layout = reduction.item_bytes, Layout.of(call.sources)
    result_bytes = DTYPES[reduction.result_dtype][0]
    elements = [(what, item) for what in (*call.sources, call.num_bytes)]
    for what, element in (*elements, (call.target, result_bytes)):
        if what % element:
            raise Misconfigured(
                f"a reduction of {reduction.dtype} at or over {what:#x} bytes cuts an element; align it"
            )
    num_warps = 8 if reduction.num_sms is None else 16
    vectors = THREAD_VECTORS if item > 1 else 1  # 16 elements of a byte each fill the registers already
    block = num_warps * 32 * vectors * (VECTOR_BYTES // item)
    numel = call.num_bytes // item
    blocks = max(1, -(-numel // block))
    most = RESIDENT * device_sms if reduction.num_sms is None else min(reduction.num_sms, device_sms)
    (bits,) = struct.unpack("<q", struct.pack("<d", reduction.factor))
    return Launch(
        arguments=(layout.own, layout.staged, layout.stride, call.target, numel, bits),
        constants={
            "OP": reduction.op,
            "DTYPE": reduction.dtype,
            "ACC": reduction.accumulator,
            "ITEM_BYTES": item,
            "RESULT": reduction.result_dtype,
            "RESULT_BYTES": result_bytes,
            "SOURCES": len(call.sources),
            "OWN": layout.own_index,
            "OWN_ALIGNED": layout.own % VECTOR_BYTES == 0,
            "STAGED_ALIGNED": layout.staged % VECTOR_BYTES == 0 and layout.stride % VECTOR_BYTES == 0,
            "TARGET_ALIGNED": call.target % VECTOR_BYTES == 0,
            "BLOCK": block,
        },
        num_programs=min(blocks, most),
        num_warps=num_warps,
    )


def with_types(constants: dict[str, Any]) -> dict[str, Any]:
    """Return `constants` with the names of dtypes replaced by Triton's types."""
    import triton.language as tl

    names = {"bfloat16": tl.bfloat16, "float16": tl.float16, "float32": tl.float32, "float64": tl.float64}
    types = names | {name: getattr(tl, name) for name in DTYPES if "int" in name}
    return constants | {name: types[constants[name]] for name in ("DTYPE", "ACC", "RESULT")}


def bind(call: ReduceLaunch, reduction: Reduction, *, stream: int, device_sms: int) -> Callable[[], None]:
    """Return a function that launches the kernel for `call` on the stream with the handle `stream`.

    The kernel is compiled now, which takes a second the first time; `Unsupported` is raised without Triton.
    """
    with needs_triton("reductions on a GPU"):
        from counterpoint.collectives.cuda.sum_kernel import combine
    launch = launch_of(call, reduction, device_sms=device_sms)
    constants, grid = with_types(launch.constants), (launch.num_programs, 1, 1)
    options = {"num_warps": launch.num_warps, "enable_fp_fusion": False}  # a fused premul_sum would round differently
    compiled = combine.warmup(*launch.arguments, **constants, grid=grid, **options)
    arguments = (*launch.arguments, *(constants[name] for name in combine.arg_names[len(launch.arguments) :]))
    return partial(compiled[grid], *arguments, stream=stream)
