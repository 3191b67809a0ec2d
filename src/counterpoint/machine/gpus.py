"""Datasheet facts of GPUs by the name that the driver gives them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Gpu", "find_gpu", "peak_tflops"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """Dense peak without sparsity, from the vendor's datasheet; limits of one SM from the CUDA programming guide."""

    key: str
    bf16_tflops: float
    num_sms: int
    regs_per_sm: int = 65536
    smem_per_sm: int = 167936
    threads_per_sm: int = 2048
    blocks_per_sm: int = 32
    smem_reserved: int = 1024  # per block


_GPUS = (  # the first whose key is in the name
    Gpu(key="B300", bf16_tflops=2500.0, num_sms=148, smem_per_sm=233472),
    Gpu(key="B200", bf16_tflops=2250.0, num_sms=148, smem_per_sm=233472),
    Gpu(key="GH200", bf16_tflops=989.4, num_sms=132, smem_per_sm=233472),
    Gpu(key="H200", bf16_tflops=989.4, num_sms=132, smem_per_sm=233472),
    Gpu(key="H100 PCIe", bf16_tflops=756.5, num_sms=114, smem_per_sm=233472),
    Gpu(key="H100", bf16_tflops=989.4, num_sms=132, smem_per_sm=233472),
    Gpu(key="H800", bf16_tflops=989.4, num_sms=132, smem_per_sm=233472),
    Gpu(key="H20", bf16_tflops=148.0, num_sms=78, smem_per_sm=233472),
    Gpu(key="A100", bf16_tflops=312.0, num_sms=108),
    Gpu(key="A800", bf16_tflops=312.0, num_sms=108),
    Gpu(key="A40", bf16_tflops=149.7, num_sms=84, smem_per_sm=102400, threads_per_sm=1536, blocks_per_sm=16),
    Gpu(key="A10", bf16_tflops=125.0, num_sms=72, smem_per_sm=102400, threads_per_sm=1536, blocks_per_sm=16),
    Gpu(key="L40", bf16_tflops=362.0, num_sms=142, smem_per_sm=102400, threads_per_sm=1536, blocks_per_sm=24),
    Gpu(key="L4", bf16_tflops=121.0, num_sms=58, smem_per_sm=102400, threads_per_sm=1536, blocks_per_sm=24),
    Gpu(key="V100", bf16_tflops=125.0, num_sms=80, smem_per_sm=98304, smem_reserved=0),
    Gpu(key="MI325X", bf16_tflops=1307.4, num_sms=304, regs_per_sm=131072, smem_per_sm=65536),
    Gpu(key="MI300X", bf16_tflops=1307.4, num_sms=304, regs_per_sm=131072, smem_per_sm=65536),
    Gpu(key="MI250", bf16_tflops=191.5, num_sms=104, regs_per_sm=131072, smem_per_sm=65536),
)


def find_gpu(name: str | None) -> Gpu | None:
    """The entry for a driver's device name; None if it is not listed."""
    return next((gpu for gpu in _GPUS if name and gpu.key in name), None)


def peak_tflops(name: str | None) -> float | None:
    """Dense bf16 peak in TFLOP/s (fp16 on V100); None for an unknown device."""
    gpu = find_gpu(name)
    return gpu.bf16_tflops if gpu else None
