"""A step of kernels with the operations that launched them, back to back on one stream, and its diagnosis."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from counterpoint.diagnosis.api import Result, diagnose
from tests.support import kineto_trace as kt

BF16, FP32 = "c10::BFloat16", "float"
GEMM = "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NNT"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3> >"
SOFTMAX = "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>(float*, int)"


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of an operation and its kernels: (name, µs) each; `sequence` is autograd's number."""

    operator: str | None
    kernels: Sequence[tuple[str, float]]
    shapes: Sequence[Any] = ()
    dtype: str = BF16
    values: Sequence[str] = ()
    grid: Any = (132, 1, 1)


def call(operator: str | None, kernel: str, us: float, *shapes: Any, **more: Any) -> Call:
    return Call(operator=operator, kernels=[(kernel, us)], shapes=shapes, **more)


def events(calls: Sequence[Call], steps: int = 3) -> list[kt.Event]:
    """The events of steps of the same calls: the host launches one kernel each µs, then waits for the GPU."""
    made, number, begin = [], 0, 1000.0
    for step in range(steps):
        host, at = begin + 1.0, begin + 10.0
        for each in calls:
            number += 1
            if each.operator is not None:
                types = [each.dtype if shape else "Scalar" for shape in each.shapes]
                made.append(kt.op(each.operator, host, 0.9 * len(each.kernels), external=number,
                                  dims=list(each.shapes), types=types, values=list(each.values) or None))  # fmt: skip
            for part, (kernel, us) in enumerate(each.kernels):
                correlation = 100 * number + part
                made.append(kt.runtime("cudaLaunchKernel", host + 0.9 * part, 0.4, correlation=correlation,
                                       external=number))  # fmt: skip
                made.append(kt.kernel(kernel, at, us, correlation=correlation, external=number, grid=each.grid))
                at += us
            host += 1.0 * len(each.kernels)
        made.append(kt.runtime("cudaDeviceSynchronize", host + 1.0, at - host - 1.0, correlation=100 * number + 99))
        made.append(kt.annotation(f"ProfilerStep#{step}", begin, at - begin))
        begin = at
    return made


def diagnosed(folder: Path, calls: Sequence[Call], *, gpu: str = "NVIDIA H200") -> Result:
    head = kt.header(world_size=1, devices=[kt.H200 | {"name": gpu}])
    return diagnose(kt.write(folder / "rank0.json", events(calls), head))
