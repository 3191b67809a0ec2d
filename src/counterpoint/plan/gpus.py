"""GPUs by name, as their data sheets have them: dense peaks (without sparsity), memory, SMs."""

from __future__ import annotations

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.cluster import Gpu

__all__ = ["GPUS", "find_gpu"]


def _sheet(
    name: str, half: float, fp32: float, sms: int, memory: tuple[float, float], source: str, fp8: float | None = None
) -> Gpu:
    """`half`: TFLOP/s in bf16 and fp16; `fp32`: of matrix products in TF32; `memory`: GiB, GB/s."""
    tflops = {"bf16": half, "fp16": half, "fp32": fp32}
    if fp8 is not None:
        tflops["fp8"] = fp8
    gib, rate = memory
    return Gpu(name=name, tflops=tflops, sms=sms, memory_gib=gib, memory_gb_per_s=rate, source=source)


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _sheet("A100-40", 312.0, 156.0, 108, (40.0, 1555.0), "NVIDIA A100 data sheet, SXM4 40 GB"),
        _sheet("A100", 312.0, 156.0, 108, (80.0, 2039.0), "NVIDIA A100 data sheet, SXM4 80 GB"),
        _sheet("H100", 989.4, 494.7, 132, (80.0, 3350.0), "NVIDIA H100 data sheet, SXM5", 1978.9),
        _sheet("H200", 989.4, 494.7, 132, (141.0, 4800.0), "NVIDIA H200 data sheet, SXM", 1978.9),
        _sheet("B200", 2250.0, 1125.0, 148, (180.0, 7700.0), "NVIDIA HGX B200 data sheet, per GPU", 4500.0),
        _sheet("GB200", 2500.0, 1250.0, 148, (186.0, 8000.0), "NVIDIA GB200 NVL72 data sheet, per GPU", 5000.0),
    )
}


def find_gpu(name: str) -> Gpu:
    """By its name, in any case.

    Raises:
        Misconfigured: unknown.
    """
    found = {known.lower(): gpu for known, gpu in GPUS.items()}.get(name.lower())
    if found is None:
        raise Misconfigured(f"gpu = {printable(name)!r}: known are {', '.join(GPUS)}; give one, or a table of figures")
    return found
